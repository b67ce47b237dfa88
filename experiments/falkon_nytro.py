"""NYTRO: early-stopped gradient descent on few centers, without a penalty. FALKON slides.

Camoriano, Angles, Rudi and Rosasco (AISTATS 2016). The iterate after t steps on M Nystrom centers
regularises as a ridge of about 1 / (eta t) does: the path of t is compared with the path of lambda,
both by the error on the test rows. A path of T steps costs T products with K_nM, where each ridge
costs a factor of its own. In the basis of the Nystrom features both are closed forms, in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np

from experiments.data import Data, Split
from experiments.exact import gaussian
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Measurement, Results, clearly, shown

STRENGTHS = np.geomspace(1, 1e8, 25)
NYTRO, RIDGE = "NYTRO: t steps, strength t", "ridge: strength 1 / lambda"
NOISE = 0.3
"""Share of the training labels that are drawn at random; without noise no ridge is needed."""


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error along both paths."""

    def run(split: Split) -> Iterator[Measurement]:
        X, X_test = split.scaled
        n, rng = len(X), np.random.default_rng(split.seed)
        M, Y = n // 4, split.targets.copy()
        drawn = rng.uniform(size=n) < NOISE
        Y[drawn] = Y[rng.permutation(n)][drawn]
        values, U = np.linalg.eigh(gaussian(X[:M], X[:M]))
        root = U / np.sqrt(np.maximum(values, 1e-12 * values[-1]))
        F, F_test = gaussian(X, X[:M]) @ root, gaussian(X_test, X[:M]) @ root
        V, s, W = np.linalg.svd(F / np.sqrt(n), full_matrices=False)
        inside = V.T @ Y / np.sqrt(n)
        rates = np.minimum((s / s[0]) ** 2, 1)
        for strength in STRENGTHS:
            early = -np.expm1(strength * np.log1p(-np.minimum(rates, 1 - 1e-16)))
            ridged = s**2 / (s**2 + s[0] ** 2 / strength)
            for label, factors in ((NYTRO, early), (RIDGE, ridged)):
                weights = W.T @ ((factors / s)[:, None] * inside)
                error = split.error(F_test @ weights)
                yield Measurement(data.measured, label, float(strength), error)

    for split in data.splits(options):
        yield Point(f"repetition {split.seed}", 10.0 * len(split.X) ** 3, partial(run, split))


def judge(results: Results) -> Verdict:
    """Judge the least errors of both paths, and the ends of the paths."""
    (figure,) = results.values
    paths = {
        label: np.array([results.at(label, x, figure) for x in results.places(label, figure)])
        for label in (NYTRO, RIDGE)
    }
    best = {label: path[path.mean(axis=1).argmin()] for label, path in paths.items()}
    late = paths[NYTRO][-1] - best[NYTRO]
    difference = best[NYTRO] - best[RIDGE]
    return Verdict(
        "the least error of NYTRO is not clearly above that of the ridge, and going on is clearly "
        "worse than stopping",
        not clearly(difference) and clearly(late),
        f"{shown(best[NYTRO])} against {shown(best[RIDGE])}; at the end of NYTRO's path "
        f"{shown(paths[NYTRO][-1])}",
    )


EXPERIMENT = Experiment(
    source="FALKON slides, NYTRO",
    claim="stopping early regularises a model of few centers as well as a ridge does",
    x="strength of the fit: steps t, or 1 / lambda",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=5, epochs=1),
    paper=Sizes(rows=10_000, repetitions=3, epochs=1),
    stand_in_is="scikit-learn's digits, 30 % of the training labels drawn anew",
)
