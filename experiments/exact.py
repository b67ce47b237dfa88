"""Kernels and exact solutions in float64, with NumPy alone: the references of the experiments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from experiments.results import Array

Kernel = Callable[[Array, Array], Array]


def squared_distances(A: Array, B: Array) -> Array:
    """Return the (m, n) squared Euclidean distances of rows (m, d) and (n, d)."""
    sq = (A**2).sum(axis=1)[:, None] + (B**2).sum(axis=1) - 2 * A @ B.T
    return np.asarray(np.maximum(sq, 0))


def gaussian(A: Array, B: Array) -> Array:
    """Return exp(-|a - b|^2 / 2)."""
    return np.asarray(np.exp(-squared_distances(A, B) / 2))


def laplace(A: Array, B: Array) -> Array:
    """Return exp(-|a - b|)."""
    return np.asarray(np.exp(-np.sqrt(squared_distances(A, B))))


def cauchy(A: Array, B: Array) -> Array:
    """Return 1 / (1 + |a - b|^2)."""
    return np.asarray(1 / (1 + squared_distances(A, B)))


KERNELS: dict[str, Kernel] = {"gaussian": gaussian, "laplace": laplace, "cauchy": cauchy}


def ridge_weights(K: Array, Y: Array, ridge: float) -> Array:
    """Return (K + n ridge I)^-1 Y, (n, c)."""
    import scipy.linalg

    n = len(K)
    return np.asarray(scipy.linalg.solve(K + n * ridge * np.eye(n), Y, assume_a="pos"))


def nystrom_weights(K_nm: Array, K_mm: Array, Y: Array, ridge: float) -> Array:
    """Return the weights of M centers that minimise |K_nm a - Y|^2 + n ridge a^T K_mm a, (M, c).

    A jitter of rounding keeps the equations definite.
    """
    import scipy.linalg

    H = K_nm.T @ K_nm + len(K_nm) * ridge * K_mm
    H[np.diag_indices_from(H)] += 1e-13 * np.trace(H)
    return np.asarray(scipy.linalg.solve(H, K_nm.T @ Y, assume_a="pos"))
