"""Error of Nystrom's approximation of a kernel matrix, against columns and rank. The lecture.

G is approximated by C W_k^+ C^T with c columns C of G, their rows W and its best approximation of
rank k. The columns are uniform, those of rows next to k-means means, drawn by RPCholesky (Chen,
Epperly, Tropp and Webber 2022) or by ridge leverage scores. The reference is the best approximation
of rank c, from the eigenvalues of G. Under an eigengap the error falls faster than O(c^-1/2) (Yang
and others 2012). float64 and NumPy; streamkern's `centers` are "random", "kmeans", "rpcholesky".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from experiments.data import Data, Split
from experiments.exact import gaussian, squared_distances
from experiments.results import (
    Array,
    Experiment,
    Measurement,
    Point,
    Results,
    Sizes,
    Verdict,
    clearly,
    exponent,
)

FULL, LOW = "relative error, trace norm, rank k = c", "relative error, trace norm, rank k = c / 4"
COLUMNS = (8, 16, 32, 64, 128, 256)
BEST = "(best of that rank)"
Choose = Callable[[Array, Array, int, np.random.Generator], Array]


def uniform(X: Array, G: Array, c: int, rng: np.random.Generator) -> Array:
    """Return c of the rows."""
    return rng.choice(len(X), c, replace=False)


def kmeans(X: Array, G: Array, c: int, rng: np.random.Generator) -> Array:
    """Return the rows next to the means of k-means."""
    from sklearn.cluster import KMeans

    means = KMeans(c, n_init=1, random_state=int(rng.integers(1 << 30))).fit(X).cluster_centers_
    return np.unique(squared_distances(means, X).argmin(axis=1))


def rpcholesky(X: Array, G: Array, c: int, rng: np.random.Generator) -> Array:
    """Return rows drawn in proportion to the diagonal of the residual matrix."""
    rest, F, chosen = np.diag(G).copy(), np.zeros((len(G), c)), []
    for i in range(c):
        row = int(rng.choice(len(G), p=np.maximum(rest, 0) / np.maximum(rest, 0).sum()))
        column = G[:, row] - F[:, :i] @ F[row, :i]
        F[:, i] = column / np.sqrt(max(column[row], 1e-12))
        rest = np.maximum(rest - F[:, i] ** 2, 0)
        chosen.append(row)
    return np.unique(chosen)


def leverage(X: Array, G: Array, c: int, rng: np.random.Generator) -> Array:
    """Return rows drawn by their exact ridge leverage scores, with about c degrees of freedom."""
    values, U = np.linalg.eigh(G)
    ridge = np.sort(values)[::-1][c]
    scores = (U**2) @ (np.maximum(values, 0) / (np.maximum(values, 0) + ridge))
    return rng.choice(len(X), c, replace=False, p=scores / scores.sum())


WAYS: dict[str, Choose] = {
    "uniform": uniform, "k-means": kmeans, "RPCholesky": rpcholesky, "leverage scores": leverage,
}  # fmt: skip


def nystrom_trace(G: Array, chosen: Array, rank: int) -> float:
    """Return the trace of G less its approximation, over the trace of G."""
    C, W = G[:, chosen], G[np.ix_(chosen, chosen)]
    values, U = np.linalg.eigh(W)
    values, U = values[::-1][:rank], U[:, ::-1][:, :rank]
    kept = values > 1e-10 * values[0]
    F = C @ U[:, kept] / np.sqrt(values[kept])
    return float(1 - (F**2).sum() / np.trace(G))


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Errors against c, for four ways."""

    def run(split: Split) -> Iterator[Measurement]:
        X = split.scaled[0]
        G, rng = gaussian(X, X), np.random.default_rng(split.seed)
        values = np.linalg.eigvalsh(G)[::-1]
        for c in [c for c in COLUMNS if c < len(X) // 2]:
            for label, choose in WAYS.items():
                chosen = choose(X, G, c, rng)
                yield Measurement(FULL, label, c, nystrom_trace(G, chosen, c))
                yield Measurement(LOW, label, c, nystrom_trace(G, chosen, c // 4))
            for figure, k in ((FULL, c), (LOW, c // 4)):
                yield Measurement(figure, BEST, c, float(values[k:].sum() / values.sum()))

    for split in data.splits(options):
        yield Point(f"repetition {split.seed}", 60.0 * len(split.X) ** 3, partial(run, split))


def judge(results: Results) -> Verdict:
    """Exponents in c, and the other ways against uniform columns."""
    places = results.places("uniform", FULL)
    last = places[-1]
    slopes = {
        label: exponent(places, [float(results.at(label, c, FULL).mean()) for c in places])
        for label in WAYS
    }
    base = results.at("uniform", last, FULL)
    better = [k for k in WAYS if clearly(base - results.at(k, last, FULL))]
    return Verdict(
        "the error falls at least as c^-0.5, and k-means, RPCholesky and leverage scores are "
        "clearly better than uniform columns at the largest c",
        all(slope <= -0.5 for slope in slopes.values()) and len(better) == len(WAYS) - 1,
        f"exponents {', '.join(f'{k} {v:.2f}' for k, v in slopes.items())}; at c = {last:g}: "
        + ", ".join(f"{k} {results.at(k, last, FULL).mean():.4f}" for k in (*WAYS, BEST)),
    )


EXPERIMENT = Experiment(
    source="Lecture, Nystrom's approximation",
    claim="the error of Nystrom's approximation falls at least as O(c^-1/2), and columns that are "
    "chosen with care need fewer of them",
    x="columns c",
    points=points,
    judge=judge,
    stand_in=Sizes(rows=1000, repetitions=3, epochs=1),
    paper=Sizes(rows=4000, repetitions=3, epochs=1),
)
