"""EigenPro as kernel learning: the kernel k_EP of section 3 of EP1, in plain NumPy and float64.

With the top eigensystem K v_i = lambda_i v_i of the kernel matrix of the n rows,

    k_EP(x, z) = k(x, z) - sum_{i <= q} c_i k(x, X) v_i v_i^T k(X, z),
    c_i = (lambda_i - lambda_q+1) / lambda_i^2,

is a kernel again (`PreconditionedKernel`), and `features` maps rows to vectors whose inner products
are k_EP. Plain Richardson iteration on k_EP, and gradient descent for a linear model of these
features, must then make the same predictions as EigenPro's iteration on k, step by step, and the
matrix of k_EP must have the eigenvalues of K with the first q lowered to lambda_q+1.

The iterations are run, with steps of 1 / lambda_q+1, and 1 / lambda_1 for gradient descent on k.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np
import scipy.linalg

from experiments.data import Data, Split
from experiments.exact import Kernel, gaussian
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Array, Measurement, Results, shown

DIFFERENCE, SPECTRUM = "largest difference from EigenPro's predictions", "eigenvalue / n"
EIGENPRO, LEARNED, DESCENT = "EigenPro on k", "Richardson on k_EP", "Richardson on k"
LINEAR = "gradient descent on the features"
IDENTITY, LEVEL_WITHIN = 1e-10, 1e-6


class PreconditionedKernel:
    """k_EP, as a function of two sets of rows.

    X : (n, d) rows that the eigensystem is of. q : directions that are lowered.
    values, V : the first q + 1 eigenvalues and q eigenvectors of k(X, X), descending.
    """

    def __init__(self, kernel: Kernel, X: Array, q: int) -> None:
        """Compute the top eigensystem."""
        n = len(X)
        values, V = scipy.linalg.eigh(kernel(X, X), subset_by_index=(n - q - 1, n - 1))
        self.kernel, self.X, self.q = kernel, X, q
        self.values, self.V = values[::-1], V[:, :0:-1]

    def __call__(self, A: Array, B: Array) -> Array:
        """Return k_EP(A, B)."""
        top = self.values[: self.q]
        factors = (top - self.values[self.q]) / top**2
        left, right = (self.kernel(rows, self.X) @ self.V for rows in (A, B))
        return np.asarray(self.kernel(A, B) - (left * factors) @ right.T)

    def damping(self, a: Array) -> Array:
        """Return P a = a - V (1 - lambda_q+1 / Lambda) V^T a: EigenPro's preconditioner."""
        factors = 1 - self.values[self.q] / self.values[: self.q]
        return np.asarray(a - self.V @ (factors[:, None] * (self.V.T @ a)))


def features(kernel: Kernel, X: Array, rows: Array) -> Array:
    """Return (m, n) features of rows, whose inner products are kernel(., .) on the span of X.

    They are kernel(rows, X) L^-T with the Cholesky factor L of kernel(X, X).
    """
    K = kernel(X, X)
    K[np.diag_indices_from(K)] += 1e-14 * np.trace(K)
    L = np.linalg.cholesky(K)
    return np.asarray(scipy.linalg.solve_triangular(L, kernel(rows, X).T, lower=True).T)


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the spectra, predictions and errors of a repetition."""

    def run(split: Split) -> Iterator[Measurement]:
        X, X_test = split.scaled
        n, q = len(X), min(160, len(X) // 8)
        learned, Y = PreconditionedKernel(gaussian, X, q), split.targets
        grams = {"k": gaussian(X, X), f"k_EP, q = {q}": learned(X, X)}
        for label, K in grams.items():
            values = np.maximum(scipy.linalg.eigvalsh(K)[::-1], 0) / n
            for i in sorted({round(n ** (k / 40)) for k in range(41)}):
                if values[i - 1] > 1e-13:
                    yield Measurement(SPECTRUM, label, i, float(values[i - 1]))
        K, K_ep = grams.values()
        outer, outer_ep = gaussian(X_test, X), learned(X_test, X)
        Phi, Phi_test = features(learned, X, X), features(learned, X, X_test)
        alpha, beta, w, plain = np.zeros((4, *Y.shape))
        scale = 1 / learned.values
        for t in range(1, options.epochs + 1):
            alpha -= scale[q] * learned.damping(K @ alpha - Y)
            beta -= scale[q] * (K_ep @ beta - Y)
            w -= scale[q] * (Phi.T @ (Phi @ w - Y))
            plain -= scale[0] * (K @ plain - Y)
            if t & (t - 1) == 0 or t == options.epochs:
                f, g = outer @ alpha, outer_ep @ beta
                for label, h in ((LEARNED, g), (LINEAR, Phi_test @ w)):
                    yield Measurement(DIFFERENCE, label, t, float(abs(f - h).max()))
                for label, h in ((EIGENPRO, f), (LEARNED, g), (DESCENT, outer @ plain)):
                    yield Measurement(data.measured, label, t, split.error(h))

    for split in data.splits(options):
        n, c = len(split.X), split.targets.shape[1]
        work = 60 * n**3 + 6 * n * n * c * options.epochs
        yield Point(f"repetition {split.seed}", work, partial(run, split))


def judge(results: Results) -> Verdict:
    """Judge the largest difference of all iterations, and the top of the spectrum."""
    curves = results.values[DIFFERENCE]
    worst = {
        label: max(max(values) for values in curve.values()) for label, curve in curves.items()
    }
    kernel, learned = results.labels(SPECTRUM)
    top, flat = (results.at(each, 1, SPECTRUM) for each in (kernel, learned))
    q = int(learned.rpartition(" ")[2])
    inside = max(i for i in results.places(learned, SPECTRUM) if i <= q)
    level = float(np.abs(results.at(learned, inside, SPECTRUM) / flat - 1).max()) < LEVEL_WITHIN
    figure = next(name for name in results.values if name.startswith("test"))
    t = results.places(EIGENPRO, figure)[-1]
    ends = (f"{each} {shown(results.at(each, t, figure))}" for each in (LEARNED, DESCENT))
    return Verdict(
        f"predictions on the test rows differ by at most {IDENTITY:g} after any number of "
        f"iterations, and the first q eigenvalues of k_EP are equal, within {LEVEL_WITHIN:g}, and "
        "below the first one of k",
        max(worst.values()) <= IDENTITY and level and bool((flat < top).all()),
        f"largest difference {worst[LEARNED]:.1g}, of the features {worst[LINEAR]:.1g}; top "
        f"eigenvalue {shown(top)} of k and {shown(flat)} of k_EP; {figure} after {t:g} iterations: "
        f"{', '.join(ends)}",
    )


EXPERIMENT = Experiment(
    source="EP1, section 3, EigenPro as kernel learning",
    claim="EigenPro on the kernel k is the same as Richardson iteration on another kernel, k_EP, "
    "whose top eigenvalues are lowered",
    x="iterations",
    x_of={SPECTRUM: "index i"},
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=2, epochs=256),
    paper=Sizes(rows=5000, repetitions=1, epochs=256),
)
