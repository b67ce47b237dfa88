"""A kernel on strings, given as a matrix, through its root. The lecture: structured data.

streamkern takes rows of numbers. A kernel matrix K of any objects becomes such rows: K = F F^T with
F = U sqrt(values), new objects are K_test U / sqrt(values), and kernel="linear" on them, with all
rows as centers, is the model of K. The kernel counts common subsequences of three letters, and
multiplies them by a factor for each gap (Lodhi and others 2002). The strings are generated; their
class is the order of three letters that are not adjacent. References are scikit-learn's
KernelRidge(kernel="precomputed") on K, and the same model on counts of letters.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np

import streamkern as sk
from experiments.exact import ridge_weights
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Array, Measurement, Results, clearly, shown

WRONG, GAP = "test error, %", "largest difference of predictions"
OURS, THEIRS, LETTERS = "root of the matrix, streamkern", "(KernelRidge on it)", "counts of letters"
LETTERS_USED, LENGTH, DECAY, RIDGE, TEST = 6, 16, 0.7, 1e-3, 200
SIZES = (50, 100, 200, 400)


def strings(n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return letters (n, LENGTH) and classes (n,): 0, 1, 2 stand in this order, or reversed."""
    letters = rng.integers(3, LETTERS_USED, (n, LENGTH))
    classes = rng.integers(0, 2, n)
    places = np.sort(rng.permuted(np.tile(np.arange(LENGTH), (n, 1)), axis=1)[:, :3], axis=1)
    motif = np.where(classes[:, None] == 0, [0, 1, 2], [2, 1, 0])
    np.put_along_axis(letters, places, motif, axis=1)
    return letters, classes


def subsequences(A: Array, B: Array) -> Array:
    """Return the (m, n) sums over common subsequences of three letters, normalised.

    Each counts DECAY to the power of the spans that it takes in both strings.
    """
    own = [_subsequences(S, S) for S in (A, B)]
    raw = np.stack([_subsequences(string, B) for string in A])
    return np.asarray(raw / np.sqrt(own[0][:, None] * own[1]))


def _subsequences(A: Array, B: Array) -> Array:
    """Return the sums of strings (..., LENGTH) that are broadcast, by dynamic programming."""
    same = (A[..., :, None] == B[..., None, :]).astype(np.float64)
    ends = same  # ends[i, j]: subsequences that end at i and j, less the decay of that letter
    steps = np.tril(DECAY ** np.maximum(np.subtract.outer(*2 * [np.arange(LENGTH)]), 0), -1)
    for _ in range(2):
        ends = same * (steps @ ends @ steps.T)
    return np.asarray(ends.sum(axis=(-2, -1)))


def points(data: object, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error against n, and the difference to scikit-learn's predictions."""

    def run(n: int, seed: int) -> Iterator[Measurement]:
        from sklearn.kernel_ridge import KernelRidge

        rng = np.random.default_rng(seed)
        A, classes = strings(n + TEST, rng)
        K, K_test = subsequences(A[:n], A[:n]), subsequences(A[n:], A[:n])
        y, truth = 2.0 * classes[:n] - 1, 2 * classes[n:] - 1
        theirs = KernelRidge(alpha=n * RIDGE, kernel="precomputed").fit(K, y).predict(K_test)
        counts = (A[:, :, None] == np.arange(LETTERS_USED)).sum(axis=1).astype(np.float64)
        ours = predictions(*root(K, K_test), y, options.device)
        plain = counts[n:] @ counts[:n].T @ ridge_weights(counts[:n] @ counts[:n].T, y, RIDGE)
        for label, outputs in ((OURS, ours), (THEIRS, theirs), (LETTERS, plain)):
            wrong = float((np.sign(outputs) != truth).mean())
            yield Measurement(WRONG, label, n, round(100 * wrong, 9))
        yield Measurement(GAP, OURS, n, float(np.abs(ours - theirs).max()))

    for seed in range(options.repetitions):
        for n in SIZES[: 2 if options.quick else None]:
            yield Point(f"n {n}, repetition {seed}", 1e5 * n**2, partial(run, n, seed))


def root(K: Array, K_test: Array) -> tuple[Array, Array]:
    """Return rows whose products are K (n, n), and rows of new objects for K_test (m, n)."""
    values, U = np.linalg.eigh(K)
    kept = values > 1e-10 * values[-1]
    scale = np.sqrt(values[kept])
    return U[:, kept] * scale, K_test @ U[:, kept] / scale


def predictions(X: Array, X_test: Array, y: Array, device: str) -> Array:
    """Return the outputs of ridge regression on rows, with the kernel of their products."""
    model = sk.KernelRegressor(
        "linear", centers="all", solver="direct", ridge=RIDGE, scale="none", metric="none",
        fit_intercept=False, precision="float64", device=device,
    )  # fmt: skip
    return np.asarray(model.fit(X, y).predict(X_test))


def judge(results: Results) -> Verdict:
    """Judge the predictions against scikit-learn's, and the errors at the largest n."""
    gap = max(float(results.at(OURS, n, GAP).max()) for n in results.places(OURS, GAP))
    n = results.places(OURS, WRONG)[-1]
    ours, plain = (results.at(label, n, WRONG) for label in (OURS, LETTERS))
    return Verdict(
        "all predictions are within 1e-4 of KernelRidge's on the matrix (targets are -1 and 1), "
        "and at the largest n the error is clearly below that of counts of letters",
        gap < 1e-4 and clearly(plain - ours),
        f"largest difference {gap:.1e}; n = {n:g}: {shown(ours)} against {shown(plain)}",
    )


EXPERIMENT = Experiment(
    source="Lecture, kernels on structured data",
    claim="a kernel of strings, given as a matrix, is a linear kernel on the rows of its root",
    x="training strings n",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=5, epochs=1),
    paper=Sizes(repetitions=5, epochs=1),
    needs="nothing",
)
