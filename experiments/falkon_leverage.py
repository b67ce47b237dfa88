"""Centers drawn by leverage scores against uniform ones. FALKON slides, "adaptive sampling".

The ridge leverage score of row i is (K (K + lambda n I)^-1)_ii. Rows of rare regions have high
scores, and uniform centers miss them. The scores are approximated in two passes, as BLESS does
(Rudi, Calandriello, Carratino and Rosasco 2018): scores for a larger lambda are computed with
uniform centers, centers are drawn by these, and give the scores for the wanted lambda. The made
problem has rows in clusters of very different sizes. The verdict uses the error that
counts all clusters equally; the mean over rows, in which large clusters count most, is printed as
well. By the theory, centers drawn by leverage scores need about as many centers as the sum of the
scores, here 190, and uniform centers n times the largest score, 1650.

The ridge is the power of ten with the lowest error of all rows as centers; with smaller ridges that
model overfits, so few centers cost nothing. streamkern's `centers="rpcholesky"`, pivots among 8 M
random rows, is shown for comparison. The rest is NumPy in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np
import scipy.linalg

from experiments.exact import gaussian, nystrom_weights, ridge_weights
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.lecture_nystrom_error import rpcholesky
from experiments.results import Array, Measurement, Results, clearly, shown

ERROR_OF_CLUSTERS, DEGREES = "mean squared error, mean over clusters", "correlation with exact"
ERROR_OF_ROWS = "mean squared error, mean over rows"
ALL_ROWS = "(all rows as centers)"
UNIFORM, LEVERAGE, EXACT = "uniform", "approximate leverage scores", "exact leverage scores"
PIVOTS = "RPCholesky of 8 M rows"
ROWS, CLUSTERS, D, RIDGE = 2000, 16, 2, 1e-4
SIZES = (25, 50, 100, 200, 400)


def problem(rng: np.random.Generator, n: int) -> tuple[Array, Array, Array]:
    """Return rows (n, D), values (n, 1) and clusters (n,), of sizes that fall geometrically."""
    centers = 6 * rng.standard_normal((CLUSTERS, D))
    directions = rng.standard_normal((CLUSTERS, D))
    share = 0.75 ** np.arange(CLUSTERS)
    labels = rng.choice(CLUSTERS, n, p=share / share.sum())
    offsets = rng.standard_normal((n, D))
    y = np.sin((offsets * directions[labels]).sum(axis=1)) + 0.05 * rng.standard_normal(n)
    return centers[labels] + offsets, y[:, None], labels


def approximate_scores(X: Array, Z: Array, weights: Array, ridge: float) -> Array:
    """Return the ridge leverage scores of rows X by centers Z, (n,).

    weights : (M,) probabilities of the centers times M, by which they stand for all rows.
    """
    n, K_xz = len(X), gaussian(X, Z)
    A = gaussian(Z, Z) + ridge * n * np.diag(weights)
    solved = scipy.linalg.solve(A, K_xz.T, assume_a="pos")
    return np.asarray(np.clip((1 - (K_xz.T * solved).sum(axis=0)) / (ridge * n), 0, 1))


def two_passes(X: Array, M: int, rng: np.random.Generator) -> Array:
    """Return approximate scores (n,) from M uniform centers, and then from M drawn by scores."""
    n = len(X)
    chosen, weights = rng.choice(n, M, replace=False), np.full(M, M / n)
    for ridge in (100 * RIDGE, RIDGE):
        scores = approximate_scores(X, X[chosen], weights, ridge)
        share = scores / scores.sum()
        chosen = np.unique(rng.choice(n, M, p=share))
        weights = np.minimum(share[chosen] * M, 1)
    return scores


def errors_of(residuals: Array, clusters: Array) -> dict[str, float]:
    """Return both errors of residuals (m, 1) on rows of clusters (m,)."""
    squares = residuals[:, 0] ** 2
    of_each = [squares[clusters == k].mean() for k in np.unique(clusters)]
    return {ERROR_OF_CLUSTERS: float(np.mean(of_each)), ERROR_OF_ROWS: float(squares.mean())}


def points(data: object, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the errors against M for both ways, and for exact scores."""
    n = ROWS // 4 if options.quick else ROWS

    def run(seed: int) -> Iterator[Measurement]:
        rng = np.random.default_rng(seed)
        X, y, labels = problem(rng, 2 * n)
        X_test, y_test, of = X[n:], y[n:], labels[n:]
        X, y = X[:n], y[:n]
        K = gaussian(X, X)
        exact = 1 - RIDGE * n * np.diag(np.linalg.inv(K + RIDGE * n * np.eye(n)))
        weights = ridge_weights(K, y, RIDGE)
        whole = errors_of(gaussian(X_test, X) @ weights - y_test, of)
        for M in SIZES:
            near = two_passes(X, M, rng)
            few = rng.choice(n, min(n, 8 * M), replace=False)
            ways = {
                label: rng.choice(n, M, replace=False, p=scores / scores.sum())
                for label, scores in ((UNIFORM, np.ones(n)), (LEVERAGE, near), (EXACT, exact))
            } | {PIVOTS: few[rpcholesky(X, K[np.ix_(few, few)], M, rng)]}
            for label, chosen in ways.items():
                Z = X[chosen]
                alpha = nystrom_weights(K[:, chosen], K[np.ix_(chosen, chosen)], y, RIDGE)
                found = errors_of(gaussian(X_test, Z) @ alpha - y_test, of)
                for figure, value in found.items():
                    yield Measurement(figure, label, M, value)
            for figure, value in whole.items():
                yield Measurement(figure, ALL_ROWS, M, value)
            yield Measurement(DEGREES, LEVERAGE, M, float(np.corrcoef(near, exact)[0, 1]))

    for seed in range(options.repetitions):
        yield Point(f"repetition {seed}", 6.0 * n**3, partial(run, seed))


def judge(results: Results) -> Verdict:
    """Judge leverage scores against uniform centers at every M."""
    clear = [
        M for M in SIZES
        if clearly(
            results.at(UNIFORM, M, ERROR_OF_CLUSTERS) - results.at(LEVERAGE, M, ERROR_OF_CLUSTERS)
        )
    ]  # fmt: skip
    whole = results.at(ALL_ROWS, SIZES[-1], ERROR_OF_CLUSTERS)
    pivots = results.at(PIVOTS, SIZES[-2], ERROR_OF_CLUSTERS)
    texts = [
        f"M = {M}: {shown(results.at(LEVERAGE, M, ERROR_OF_CLUSTERS))} against "
        f"{shown(results.at(UNIFORM, M, ERROR_OF_CLUSTERS))}"
        for M in SIZES
    ]
    return Verdict(
        "clearly lower error with leverage scores than with uniform centers at most M",
        2 * len(clear) > len(SIZES),
        f"{'; '.join(texts)}; RPCholesky {shown(pivots)} at M = {SIZES[-2]}; all rows as centers "
        f"{shown(whole)}",
    )


EXPERIMENT = Experiment(
    source="FALKON slides, adaptive sampling",
    claim="centers drawn by leverage scores need fewer of them where the rows are unevenly spread",
    x="centers M",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=10, epochs=1),
    paper=Sizes(repetitions=10, epochs=1),
    needs="nothing",
)
