"""Error of Nystrom's approximation of a kernel matrix, against columns and rank. The lecture.

G is approximated by C W_k^+ C^T with c columns C of G, their rows W and its best approximation of
rank k. The columns are uniform, those of rows next to k-means means, drawn by RPCholesky (Chen,
Epperly, Tropp and Webber 2022) or by ridge leverage scores. The reference is the best approximation
of rank k, from the eigenvalues of G. The theorem of the lecture (Drineas and Mahoney 2005): in the
Frobenius norm, the error exceeds the error of the best rank k by O(c^-1/2), for fixed k. With a
large eigengap the excess is O(1/c) (Yang and others 2012), which is tested on generated rows in ten
clusters, with k = 10. For the lecture's "uniform sampling tends to work best in practice" (Kumar,
Mohri and Talwalkar 2009), there is no verdict: the experiment counts how often each other method is
clearly better or worse. It uses NumPy in float64; streamkern's `centers` are "random", "kmeans",
"rpcholesky".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from experiments.data import Data, Split
from experiments.exact import gaussian, squared_distances
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Array, Measurement, Results, clearly, exponent

FULL, LOW = "relative error, trace norm, rank k = c", "relative error, trace norm, rank k = c / 4"
FIXED = "relative Frobenius error less that of best rank 10"
RANK, GAP = 10, "uniform, ten clusters"
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


def approximation(G: Array, chosen: Array, rank: int) -> Array:
    """Return F of G_nys = F F^T, (n, rank) or less where the rank is lower."""
    values, U = np.linalg.eigh(G[np.ix_(chosen, chosen)])
    values, U = values[::-1][:rank], U[:, ::-1][:, :rank]
    kept = values > 1e-10 * values[0]
    return np.asarray(G[:, chosen] @ U[:, kept] / np.sqrt(values[kept]))


def clustered(n: int, rng: np.random.Generator) -> Array:
    """Return n rows in ten clusters, whose kernel matrix has a gap after ten eigenvalues."""
    return 2 * rng.standard_normal((10, 20))[rng.integers(0, 10, n)] + 0.3 * rng.standard_normal(
        (n, 20)
    )


def nystrom_trace(G: Array, chosen: Array, rank: int) -> float:
    """Return the trace of G minus its approximation, divided by the trace of G."""
    return float(1 - (approximation(G, chosen, rank) ** 2).sum() / np.trace(G))


def excess(G: Array, chosen: Array, values: Array) -> float:
    """Return the excess of the error over the best rank in the Frobenius norm, relative to G.

    values : the eigenvalues of G, largest first.
    """
    F = approximation(G, chosen, RANK)
    least = np.sqrt((values[RANK:] ** 2).sum())
    return float((np.linalg.norm(G - F @ F.T) - least) / np.linalg.norm(G))


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the errors against c, for four ways, and for rows in clusters."""

    def gap(n: int, seed: int) -> Iterator[Measurement]:
        rng = np.random.default_rng([seed, n])
        X = clustered(n, rng)
        G = gaussian(X, X)
        values = np.linalg.eigvalsh(G)[::-1]
        for c in [c for c in COLUMNS if RANK < c < n // 2]:
            found = [excess(G, uniform(X, G, c, rng), values) for _ in range(4)]
            yield Measurement(FIXED, GAP, c, float(np.mean(found)))

    def run(split: Split) -> Iterator[Measurement]:
        X = split.scaled[0]
        G, rng = gaussian(X, X), np.random.default_rng(split.seed)
        values = np.linalg.eigvalsh(G)[::-1]
        for c in [c for c in COLUMNS if c < len(X) // 2]:
            for label, choose in WAYS.items():
                chosen = choose(X, G, c, rng)
                yield Measurement(FULL, label, c, nystrom_trace(G, chosen, c))
                yield Measurement(LOW, label, c, nystrom_trace(G, chosen, c // 4))
                if c > RANK:
                    yield Measurement(FIXED, label, c, excess(G, chosen, values))
            for figure, k in ((FULL, c), (LOW, c // 4)):
                yield Measurement(figure, BEST, c, float(values[k:].sum() / values.sum()))

    for split in data.splits(options):
        n = len(split.X)
        yield Point(f"repetition {split.seed}", 60.0 * n**3, partial(run, split))
        yield Point(f"clusters, repetition {split.seed}", 20.0 * n**3, partial(gap, n, split.seed))


def slope(results: Results, figure: str, label: str) -> float:
    """Return the fitted exponent of c."""
    places = results.places(label, figure)
    return exponent(places, [float(results.at(label, c, figure).mean()) for c in places])


def judge(results: Results) -> Verdict:
    """Judge the exponents in c, and count how the other ways compare with uniform columns."""
    last = results.places("uniform", FULL)[-1]
    slopes = {label: slope(results, FULL, label) for label in WAYS}
    fixed = {label: slope(results, FIXED, label) for label in (*WAYS, GAP)}
    places = results.places("uniform", FULL)
    against = []
    for label in list(WAYS)[1:]:
        gains = [results.at("uniform", c, FULL) - results.at(label, c, FULL) for c in places]
        better, worse = sum(map(clearly, gains)), sum(clearly(-gain) for gain in gains)
        against.append(f"{label} clearly better at {better} and worse at {worse}")
    return Verdict(
        "all errors fall at least as c^-0.5 and that of the clusters as c^-1, within 0.1",
        all(value <= -0.4 for value in (*slopes.values(), *fixed.values())) and fixed[GAP] <= -0.9,
        f"exponents {', '.join(f'{k} {v:.2f}' for k, v in slopes.items())}; of rank {RANK} "
        f"{', '.join(f'{k} {v:.2f}' for k, v in fixed.items())}; at c = {last:g}: "
        + ", ".join(f"{k} {results.at(k, last, FULL).mean():.4f}" for k in (*WAYS, BEST))
        + f"; against uniform columns at {len(places)} c: {', '.join(against)}",
    )


EXPERIMENT = Experiment(
    source="Lecture, Nystrom's approximation",
    claim="the error of Nystrom's approximation falls at least as O(c^-1/2), and as O(1/c) under "
    "an eigengap",
    x="columns c",
    points=points,
    judge=judge,
    stand_in=Sizes(rows=1000, repetitions=3, epochs=1),
    paper=Sizes(rows=4000, repetitions=3, epochs=1),
)
