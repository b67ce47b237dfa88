"""Kernel k-means by Nystrom features against kernel k-means of the whole matrix. The lecture.

Kernel k-means minimises the squared distances of phi(x) to the means of their clusters; phi is
known by K alone, an n x n matrix. With Nystrom features of c rows it is plain k-means of (n, c)
features. Its clusters are judged by the objective of the whole kernel, divided by the objective of
Lloyd's algorithm on K from the same random starts; the adjusted Rand index compares them with the
classes. float64, NumPy and scikit-learn's KMeans.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np

import streamkern as sk
from experiments.data import Data, Split
from experiments.exact import gaussian
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.lecture_kernel_pca import Nystrom
from experiments.results import Array, Measurement, Results, shown

OBJECTIVE, RAND = "objective / that of all rows", "1 - adjusted Rand index with the classes"
FEATURES, WHOLE, LINEAR = "Nystrom features", "(kernel of all rows)", "k-means of the rows"
COLUMNS, STARTS, ROUNDS = (8, 16, 32, 64, 128, 256), 10, 100


def objective(K: Array, labels: Array) -> float:
    """Return the mean squared distance of phi(x) to the mean of its cluster."""
    members = [np.flatnonzero(labels == k) for k in np.unique(labels)]
    inside = sum(float(K[np.ix_(rows, rows)].sum()) / len(rows) for rows in members)
    return (float(np.trace(K)) - inside) / len(K)


def lloyd(K: Array, labels: Array, k: int) -> Array:
    """Return the clusters (n,) of Lloyd's algorithm on a kernel matrix, from given ones."""
    for _ in range(ROUNDS):
        H = np.eye(k)[labels]
        H /= np.maximum(H.sum(axis=0), 1)
        KH = K @ H
        distances = (H * KH).sum(axis=0) - 2 * KH
        distances[:, H.sum(axis=0) == 0] = np.inf
        after = distances.argmin(axis=1)
        if (after == labels).all():
            break
        labels = after
    return labels


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the objective and Rand index against c."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score

    def run(split: Split) -> Iterator[Measurement]:
        X, k = split.scaled[0], len(split.classes or ())
        K, rng = gaussian(X, X), np.random.default_rng(split.seed)
        means = KMeans(k, n_init=STARTS, random_state=split.seed)
        starts = [rng.integers(0, k, len(X)) for _ in range(STARTS)]
        starts.append(means.fit_predict(Nystrom(X[: len(X) // 2])(X)))
        tried = [lloyd(K, start, k) for start in starts]
        whole = min(tried, key=lambda labels: objective(K, labels))
        plain = means.fit_predict(X)
        for c in [c for c in COLUMNS if c <= len(X) // 2]:
            found = means.fit_predict(Nystrom(X[:c])(X))
            for label, labels in ((FEATURES, found), (WHOLE, whole), (LINEAR, plain)):
                ratio = objective(K, labels) / objective(K, whole)
                yield Measurement(OBJECTIVE, label, c, ratio)
                yield Measurement(RAND, label, c, 1 - adjusted_rand_score(split.y, labels))

    for split in data.splits(options):
        if split.classes is None:
            raise sk.DataError(f"{options.data} has values, and lecture_kmeans needs classes")
        yield Point(f"repetition {split.seed}", 200.0 * len(split.X) ** 2, partial(run, split))


def judge(results: Results) -> Verdict:
    """Judge the objective at the largest c."""
    places = results.places(FEATURES, OBJECTIVE)
    ratios = {c: results.at(FEATURES, c, OBJECTIVE) for c in (places[0], places[-1])}
    c = places[-1]
    rand = {label: 1 - results.at(label, c, RAND).mean() for label in (FEATURES, WHOLE, LINEAR)}
    return Verdict(
        "at the largest c the objective is within 1 % of that of all rows",
        bool(ratios[c].mean() < 1.01),
        "; ".join(f"c = {c:g}: {shown(ratio)} of it" for c, ratio in ratios.items())
        + "; Rand index "
        + ", ".join(f"{label.strip('()')} {value:.2f}" for label, value in rand.items()),
    )


EXPERIMENT = Experiment(
    source="Lecture, kernel k-means",
    claim="k-means of Nystrom features finds clusters as good as kernel k-means",
    x="rows c of the features",
    points=points,
    judge=judge,
    stand_in=Sizes(rows=1000, repetitions=3, epochs=1),
    paper=Sizes(rows=4000, repetitions=3, epochs=1),
)
