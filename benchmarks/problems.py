"""The three problems on which solvers are compared, and the exact model of each.

    digits   scikit-learn's digits with fresh noise of standard deviation 0.5 in every row, one-hot
             targets, Laplace kernel of bandwidth 8; centers are noisy digits, too; the test rows
             are 20 noisy copies of each of 360 other digits
    smooth   20 features, a Gaussian kernel; the true function is a combination of 300 kernel
             functions at points that are no centers, so it lies in the kernel's space; noise in the
             targets
    rough    16 features, a Laplace kernel; the true function is a wave too steep to be smooth for
             the kernel; half as much noise as signal

Smooth and rough are tested on the true function without noise, so that the loss is the error of
the model. The exact model is least squares on the same training rows and centers in float64, with
the one of several ridges that is best on the test rows: no choice from the training data is
better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve
from scipy.linalg.blas import dsyrk
from scipy.spatial.distance import cdist

from examples.digits import BANDWIDTH, NOISE, TEST_COPIES, make_task

N_TEST = 4000
RIDGES = (1e-12, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


@dataclass(frozen=True)
class KernelProblem:
    """Rows to train on, centers, and rows to test on.

    X : (n, d), Y : (n, c), Z : (p, d), X_test, Y_test : the same for the test, all float32.
    """

    name: str
    kernel: str
    bandwidth: float
    X: np.ndarray
    Y: np.ndarray
    Z: np.ndarray
    X_test: np.ndarray
    Y_test: np.ndarray


def digits(n: int, p: int, seed: int = 0) -> KernelProblem:
    """See above. Y is one-hot."""
    task, rng = make_task(), np.random.default_rng([seed, 31])
    clean = task.scaled(task.X)

    def noisy(count: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.concatenate([rng.permutation(len(clean)) for _ in range(-(-count // len(clean)))])
        rows = rows[:count]
        return clean[rows] + NOISE * rng.standard_normal((count, clean.shape[1])), task.y[rows]

    one_hot = np.eye(10)
    X, y = noisy(n)
    Z, _ = noisy(p)
    assert len(task.X_test) == 360 * TEST_COPIES
    return _single("digits", "laplace", BANDWIDTH, X, one_hot[y], Z, task.scaled(task.X_test),
                   one_hot[task.y_test])  # fmt: skip


def smooth(n: int, p: int, seed: int = 0) -> KernelProblem:
    """See above. One output of variance 1, noise of deviation 0.3."""
    rng = np.random.default_rng([seed, 32])
    d, bandwidth, hidden = 20, 4.0, 300
    points, weights = rng.standard_normal((hidden, d)), rng.standard_normal((hidden, 1))

    def truth(X: np.ndarray) -> np.ndarray:
        return np.exp(cdist(X, points, "sqeuclidean") / (-2 * bandwidth**2)) @ weights

    return _synthetic("smooth", "gaussian", bandwidth, rng, n, p, d, truth, 0.3)


def rough(n: int, p: int, seed: int = 0) -> KernelProblem:
    """See above. One output of variance 1, noise of deviation 0.5."""
    rng = np.random.default_rng([seed, 33])
    d = 16
    directions = rng.standard_normal((d, 3)) / np.sqrt(d)

    def truth(X: np.ndarray) -> np.ndarray:
        return np.sin(1.5 * X @ directions).sum(axis=1, keepdims=True)

    return _synthetic("rough", "laplace", 6.0, rng, n, p, d, truth, 0.5)


PROBLEMS: dict[str, Callable[[int, int], KernelProblem]] = {
    "digits": digits, "smooth": smooth, "rough": rough
}  # fmt: skip


def _synthetic(
    name: str, kernel: str, bandwidth: float, rng: np.random.Generator, n: int, p: int, d: int,
    truth: Callable[[np.ndarray], np.ndarray], noise: float,
) -> KernelProblem:  # fmt: skip
    X, Z, X_test = (rng.standard_normal((rows, d)) for rows in (n, p, N_TEST))
    Y, Y_test = truth(X), truth(X_test)
    mean, deviation = Y_test.mean(), Y_test.std()
    Y, Y_test = (Y - mean) / deviation, (Y_test - mean) / deviation
    Y = Y + noise * rng.standard_normal(Y.shape)
    return _single(name, kernel, bandwidth, X, Y, Z, X_test, Y_test)


def _single(name: str, kernel: str, bandwidth: float, *arrays: np.ndarray) -> KernelProblem:
    return KernelProblem(name, kernel, bandwidth, *(a.astype(np.float32) for a in arrays))


def exact_loss(problem: KernelProblem, block_rows: int = 8192) -> tuple[float, float]:
    """Return the mean squared test error of the exact model, and its ridge. The cost is n p^2 FLOPs
    in float64."""
    p, c = len(problem.Z), problem.Y.shape[1]
    Z, n = problem.Z.astype(np.float64), len(problem.X)
    G, B = np.zeros((p, p), order="F"), np.zeros((p, c))
    for start in range(0, n, block_rows):
        rows = slice(start, start + block_rows)
        K = _kernel(problem, problem.X[rows], Z)
        G = dsyrk(1.0, K.T, beta=1.0, c=G, lower=1, overwrite_c=1)  # K.T is Fortran-ordered
        B += K.T @ problem.Y[rows].astype(np.float64)
    G /= n
    B /= n
    K_ZZ, K_test = _kernel(problem, Z, Z), _kernel(problem, problem.X_test, Z)
    losses = {}
    for ridge in RIDGES:
        A = G + ridge * K_ZZ
        A[np.diag_indices(p)] += 1e-14
        try:
            alpha = cho_solve(cho_factor(A, lower=True, overwrite_a=True), B)
        except LinAlgError:
            continue
        losses[ridge] = float(((K_test @ alpha - problem.Y_test) ** 2).mean())
    best = min(losses, key=lambda ridge: losses[ridge])
    return losses[best], best


def _kernel(problem: KernelProblem, X: np.ndarray, Z: np.ndarray) -> np.ndarray:
    """Return the kernel matrix in float64. Distances come from products, with an error of at most
    1e-8."""
    X = X.astype(np.float64)
    sq = (Z * Z).sum(axis=1) - 2 * X @ Z.T
    sq += (X * X).sum(axis=1)[:, None]
    np.maximum(sq, 0, out=sq)
    if problem.kernel == "gaussian":
        sq *= -0.5 / problem.bandwidth**2
        return np.exp(sq, out=sq)
    np.sqrt(sq, out=sq)
    sq *= -1 / problem.bandwidth
    return np.exp(sq, out=sq)
