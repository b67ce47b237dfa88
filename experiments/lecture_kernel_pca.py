"""Kernel PCA and kernel CCA by Nystrom features, in one pass over blocks of rows. The lecture.

Nystrom features of c rows turn kernel PCA into PCA of a c x c covariance, which is summed block by
block: rows are never held together. Its reference is scikit-learn's KernelPCA of all rows; the
figure is the share of kernel variance of the test rows that k components explain. Kernel CCA of two
views, the left and the right half of an image or of a row, is CCA of two such feature sets; its
figure is the correlation of the first pair on the test rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np
import scipy.linalg

from experiments.data import Data, Split
from experiments.exact import gaussian, squared_distances
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Array, Measurement, Results, clearly, shown

EXPLAINED, CORRELATION = "variance explained by 10 components, %", "first correlation, test rows"
STREAMED, WHOLE = "Nystrom, streamed", "(all rows at once)"
KERNEL, LINEAR = "kernel CCA", "linear CCA"
COMPONENTS, BLOCK, DAMPING = 10, 256, 1e-2
COLUMNS = (16, 32, 64, 128, 256)


class Nystrom:
    """Nystrom features of the rows Z for the Gaussian kernel."""

    def __init__(self, Z: Array) -> None:
        """Compute the root of the inverse kernel matrix of Z."""
        values, U = np.linalg.eigh(gaussian(Z, Z))
        kept = values > 1e-10 * values[-1]
        self.Z, self.root = Z, U[:, kept] / np.sqrt(values[kept])

    def __call__(self, X: Array) -> Array:
        """Return the features of rows (n, d)."""
        return np.asarray(gaussian(X, self.Z) @ self.root)


def streamed_moments(X: Array, *maps: Nystrom) -> tuple[Array, Array]:
    """Return mean and covariance of stacked features, summed over blocks of rows."""
    n = len(X)
    total, products = np.zeros(()), np.zeros(())
    for start in range(0, n, BLOCK):
        F = np.concatenate([each(X[start : start + BLOCK]) for each in maps], axis=1)
        total, products = total + F.sum(axis=0), products + F.T @ F
    mean = np.asarray(total / n)
    return mean, np.asarray(products / n - np.outer(mean, mean))


def explained(K_test: Array, scores: Array) -> float:
    """Return the share of centred kernel variance in the scores, in percent."""
    centred = np.diag(K_test).mean() - K_test.mean()
    return float(100 * ((scores - scores.mean(axis=0)) ** 2).sum(axis=1).mean() / centred)


def pca(split: Split, c: int) -> Iterator[Measurement]:
    """Yield the share explained by streamed components and by scikit-learn's."""
    from sklearn.decomposition import KernelPCA

    X, X_test = split.scaled
    K_test, features = gaussian(X_test, X_test), Nystrom(X[:c])
    mean, covariance = streamed_moments(X, features)
    components = np.linalg.eigh(covariance)[1][:, ::-1][:, :COMPONENTS]
    scores = (features(X_test) - mean) @ components
    yield Measurement(EXPLAINED, STREAMED, c, explained(K_test, scores))
    whole = KernelPCA(COMPONENTS, kernel="precomputed").fit(gaussian(X, X))
    scores = whole.transform(gaussian(X_test, X))
    yield Measurement(EXPLAINED, WHOLE, c, explained(K_test, scores))


def first_correlation(A: Array, B: Array, moments: Array, a: int) -> float:
    """Return the test correlation of the first canonical pair.

    A, B : (m, a), (m, b) centred test features. moments : covariance of both, training rows.
    """
    C_aa, C_bb, C_ab = moments[:a, :a], moments[a:, a:], moments[:a, a:]
    C_aa = C_aa + DAMPING * np.trace(C_aa) / len(C_aa) * np.eye(len(C_aa))
    C_bb = C_bb + DAMPING * np.trace(C_bb) / len(C_bb) * np.eye(len(C_bb))
    left, right = np.linalg.cholesky(C_aa), np.linalg.cholesky(C_bb)
    inner = scipy.linalg.solve_triangular(left, C_ab, lower=True)
    U, _, V = np.linalg.svd(scipy.linalg.solve_triangular(right, inner.T, lower=True).T)
    u = A @ scipy.linalg.solve_triangular(left.T, U[:, 0])
    v = B @ scipy.linalg.solve_triangular(right.T, V[0])
    return float(np.corrcoef(u, v)[0, 1])


def cca(split: Split, c: int) -> Iterator[Measurement]:
    """Yield the first correlation of the halves of a row, of kernel and of linear CCA."""
    X, X_test = split.scaled
    shape = split.X.shape[1:]
    left = np.zeros(shape, bool)
    across = left if len(shape) == 1 else left.swapaxes(0, 1)
    across[: len(across) // 2] = True
    halves = left.reshape(-1), ~left.reshape(-1)
    for label in (KERNEL, LINEAR):
        views = [(X[:, half], X_test[:, half]) for half in halves]
        if label == KERNEL:
            widths = [np.sqrt(np.median(squared_distances(V[:200], V[:200]))) for V, _ in views]
            maps = [Nystrom(V[:c] / w) for (V, _), w in zip(views, widths, strict=True)]
            views = [
                (each(V / w), each(T / w))
                for each, (V, T), w in zip(maps, views, widths, strict=True)
            ]
        both = np.concatenate([V for V, _ in views], axis=1)
        A, B = (T - V.mean(axis=0) for V, T in views)
        value = first_correlation(A, B, np.cov(both.T, bias=True), A.shape[1])
        yield Measurement(CORRELATION, label, c, value)


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of both figures against c."""
    for split in data.splits(options):
        n = len(split.X)
        for c in [c for c in COLUMNS if c <= n // 2]:
            for name, figure in (("PCA", pca), ("CCA", cca)):
                key = f"{name}, c {c}, repetition {split.seed}"
                yield Point(key, 1.0 * n**3, partial(figure, split, c))


def judge(results: Results) -> Verdict:
    """Judge streamed PCA at the largest c against all rows, and kernel CCA against linear CCA."""
    c = results.places(STREAMED, EXPLAINED)[-1]
    streamed, whole = (results.at(label, c, EXPLAINED) for label in (STREAMED, WHOLE))
    kernel, linear = (results.at(label, c, CORRELATION) for label in (KERNEL, LINEAR))
    return Verdict(
        "streamed components explain within 1 % as much as those of all rows, and the kernel's "
        "first correlation on test rows is clearly above the linear one",
        bool(streamed.mean() >= 0.99 * whole.mean()) and clearly(kernel - linear),
        f"c = {c:g}: {shown(streamed)} % against {shown(whole)} %; correlations {shown(kernel)} "
        f"against {shown(linear)}",
    )


EXPERIMENT = Experiment(
    source="Lecture, kernel PCA and CCA",
    claim="Nystrom features make kernel PCA and CCA streams of sums",
    x="rows c of the features",
    points=points,
    judge=judge,
    stand_in=Sizes(rows=1000, repetitions=3, epochs=1),
    paper=Sizes(rows=4000, repetitions=3, epochs=1),
)
