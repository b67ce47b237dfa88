"""Divide and conquer: the average of ridge models of parts. FALKON slides.

Zhang, Duchi and Wainwright (2015): m machines each solve kernel ridge regression on n / m rows with
the lambda of all n rows, and the predictions are averaged; `lecture_averaging` is the same for
random features. It costs n^3 / m^2 in all. The error is compared with one model of all rows, and
with Nystrom's model of as many centers as a part has rows, which sees all rows and costs about as
much as all parts together: n (n / m)^2.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np

from experiments.data import Data, Split
from experiments.exact import gaussian, nystrom_weights, ridge_weights
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Array, Measurement, Results, clearly, shown

PARTS = (1, 2, 4, 8, 16, 32)
AVERAGE, ONE_PART, NYSTROM = ("average of m parts", "one part of n / m rows", "Nystrom of n / m")
RIDGE = 1e-4


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error against the number of parts."""

    def run(split: Split, m: int) -> Iterator[Measurement]:
        X, X_test = split.scaled
        Y, n = split.targets, len(X)
        K_test, total = gaussian(X_test, X), np.zeros((len(X_test), split.targets.shape[1]))
        for part in np.array_split(np.arange(n), m):
            outputs = alone(X[part], Y[part], K_test[:, part])
            if part[0] == 0:
                yield Measurement(data.measured, ONE_PART, m, split.error(outputs))
            total += outputs / m
        yield Measurement(data.measured, AVERAGE, m, split.error(total))
        M = n // m
        alpha = nystrom_weights(gaussian(X, X[:M]), gaussian(X[:M], X[:M]), Y, RIDGE)
        yield Measurement(data.measured, NYSTROM, m, split.error(K_test[:, :M] @ alpha))

    for split in data.splits(options):
        for m in PARTS:
            work = 2.0 * len(split.X) ** 3
            yield Point(f"m {m}, repetition {split.seed}", work, partial(run, split, m))


def alone(X: Array, Y: Array, K_test: Array) -> Array:
    """Return the test outputs of ridge regression on some rows."""
    return np.asarray(K_test @ ridge_weights(gaussian(X, X), Y, RIDGE))


def judge(results: Results) -> Verdict:
    """Judge the average against one part, and against Nystrom."""
    (figure,) = results.values
    seen, lead, numbers = True, 0, []
    for m in PARTS[2:]:
        average, part, nystrom = (
            results.at(label, m, figure) for label in (AVERAGE, ONE_PART, NYSTROM)
        )
        seen &= clearly(part - average)
        lead += clearly(average - nystrom) - clearly(nystrom - average)
        numbers.append(
            f"m = {m}: {shown(average)}, one part {shown(part)}, Nystrom {shown(nystrom)}"
        )
    whole = results.at(AVERAGE, 1, figure)
    return Verdict(
        "for 4 parts and more the average is clearly better than one of its parts, and not more "
        "often clearly better than Nystrom's model of the same cost than clearly worse",
        seen and lead >= 0,
        f"all rows {shown(whole)}; {'; '.join(numbers)}",
    )


EXPERIMENT = Experiment(
    source="FALKON slides, divide and conquer",
    claim="the average of models of parts is better than a part, at a fraction of the cost of all "
    "rows, and FALKON's kind of model is as good at the same cost",
    x="number of parts m",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=5, epochs=1),
    paper=Sizes(rows=10_000, repetitions=3, epochs=1),
)
