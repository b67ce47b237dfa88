"""Averages of models that shards train on random features, without exchange. Beyond the lecture.

m shards hold n / m rows each. Each solves ridge regression on D Fourier features of its rows, with
the ridge of all n rows, and the models are averaged. Shards with the same frequencies send D
weights, which are averaged. Shards with different frequencies send weights and seed, and their
predictions are averaged; with m D features in all, the error of the features is lower, too. The
references are one model of all rows, and the model of one shard. The computation is NumPy in
float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np
import scipy.linalg

from experiments.data import Data, Split
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.lecture_feature_error import features, independent
from experiments.results import Array, Measurement, Results, clearly, shown

SHARED, OWN = "average, shared frequencies", "average, own frequencies"
SHARD, WHOLE = "one shard", "(all rows together)"
SHARDS, RIDGE, D = (1, 2, 4, 8, 16, 32), 1e-4, 400


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error against the number of shards."""

    size = D // 4 if options.quick else D

    def run(split: Split, m: int) -> Iterator[Measurement]:
        X, X_test = split.scaled
        Y = split.targets
        rng = np.random.default_rng([split.seed, m])
        drawn = [independent(size // 2, X.shape[1], rng) for _ in range(m)]
        shards = np.array_split(np.arange(len(X)), m)
        test = features(X_test @ drawn[0].T)
        shared = [weights(features(X[rows] @ drawn[0].T), Y[rows]) for rows in shards]
        own = [
            features(X_test @ W.T) @ weights(features(X[rows] @ W.T), Y[rows])
            for W, rows in zip(drawn, shards, strict=True)
        ]
        for label, outputs in (
            (SHARED, test @ np.mean(shared, axis=0)),
            (OWN, np.mean(own, axis=0)),
            (SHARD, own[0]),
            (WHOLE, test @ weights(features(X @ drawn[0].T), Y)),
        ):
            yield Measurement(data.measured, label, m, split.error(outputs))

    for split in data.splits(options):
        for m in SHARDS:
            work = 6.0 * len(split.X) * D**2 + 2.0 * m * D**3
            yield Point(f"m {m}, repetition {split.seed}", work, partial(run, split, m))


def weights(F: Array, Y: Array) -> Array:
    """Return the ridge weights of features (n, D), (D, c)."""
    A = F.T @ F + RIDGE * len(F) * np.eye(F.shape[1])
    return np.asarray(scipy.linalg.solve(A, F.T @ Y, assume_a="pos"))


def judge(results: Results) -> Verdict:
    """Judge both averages against one shard."""
    (figure,) = results.values
    seen, numbers = True, []
    for m in SHARDS[2:]:
        shared, own, shard, whole = (
            results.at(label, m, figure) for label in (SHARED, OWN, SHARD, WHOLE)
        )
        seen &= clearly(shard - shared) and clearly(shard - own)
        numbers.append(
            f"m = {m}: shared {shown(shared)}, own {shown(own)}, one shard {shown(shard)}, "
            f"all rows {shown(whole)}"
        )
    return Verdict(
        "for 4 shards and more both averages are clearly better than one shard",
        seen,
        "; ".join(numbers),
    )


EXPERIMENT = Experiment(
    source="Lecture, continued: distributed averaging",
    claim="models of shards are averaged without exchange, and are better than one shard",
    x="number of shards m",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=5, epochs=1),
    paper=Sizes(rows=60_000, repetitions=3, epochs=1),
)
