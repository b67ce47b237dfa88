"""Centers that suffice: about sqrt(n) log n. FALKON slides, and Rudi, Camoriano and Rosasco (2015).

The theorem: with lambda = 1 / sqrt(n), Nystrom's kernel ridge regression on M of about
sqrt(n) log n random centers has the error of kernel ridge regression on all n rows. Both are exact
here, in float64, with the same lambda, for growing n.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np

from experiments.data import Data, Split
from experiments.exact import gaussian, nystrom_weights, ridge_weights
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Measurement, Results, doubled

GAP = "mean squared error / that of all centers"
LEAST = "least M within 5 % of all centers"
WITHIN = 1.05


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error against M for growing n, and the least M that is enough."""

    def run(split: Split, n: int) -> Iterator[Measurement]:
        X, X_test = split.scaled
        X, Y, ridge = X[:n], split.targets[:n], 1 / np.sqrt(n)
        truth = split.test_targets
        K, K_test = gaussian(X, X), gaussian(X_test, X)
        whole = float(((K_test @ ridge_weights(K, Y, ridge) - truth) ** 2).mean())
        enough = float(n)
        for M in np.unique(np.geomspace(4, n, 4 * int(np.log2(n / 4)) + 1).astype(int))[::-1]:
            alpha = nystrom_weights(K[:, :M], K[:M, :M], Y, ridge)
            error = float(((K_test[:, :M] @ alpha - truth) ** 2).mean())
            yield Measurement(GAP, f"n = {n}", M, error / whole)
            if error > WITHIN * whole:
                break
            enough = float(M)
        yield Measurement(LEAST, "measured", n, enough)
        yield Measurement(LEAST, "(sqrt(n) log n)", n, float(np.sqrt(n) * np.log(n)))

    for split in data.splits(options):
        for n in doubled(len(split.X) // 8, len(split.X), options.quick):
            yield Point(f"n {n}, repetition {split.seed}", 3.0 * n**3, partial(run, split, n))


def judge(results: Results) -> Verdict:
    """Judge the least M against sqrt(n) log n."""
    places = results.places("measured", LEAST)
    least = [float(results.at("measured", n, LEAST).mean()) for n in places]
    bounds = [float(np.sqrt(n) * np.log(n)) for n in places]
    return Verdict(
        "at every n, sqrt(n) log n centers or fewer are within 5 % of the error of all",
        all(bound >= M for M, bound in zip(least, bounds, strict=True)),
        "; ".join(
            f"n = {n:g}: M = {M:.0f}, sqrt(n) log n = {bound:.0f}"
            for n, M, bound in zip(places, least, bounds, strict=True)
        ),
    )


EXPERIMENT = Experiment(
    source="FALKON slides, number of centers",
    claim="about sqrt(n) log n centers give the error of all n rows as centers",
    x="centers M",
    x_of={LEAST: "training samples n"},
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=3, epochs=1),
    paper=Sizes(rows=10_000, repetitions=1, epochs=1),
)
