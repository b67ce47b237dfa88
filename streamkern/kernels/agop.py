"""The average gradient outer product of f(x) = sum_j alpha_j k(x, z_j), summed over rows.

    G = mean over rows x, weighted, of sum over outputs of grad f(x) grad f(x)^T,     (d, d)

is the metric of recursive feature machines (Radhakrishnan, Beaglehole, Pandit and Belkin 2022,
arXiv 2212.13881). For k = phi(s), s = |a - b|^2 of prepared points a = J^T x + ..., b of z,

    grad f(x) = 2 J (a sum_j phi'_j alpha_j - sum_j phi'_j alpha_j b_j):

one product of the slopes phi' with d + 1 columns for each output.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.kernels.points import Points, n_terms
from streamkern.kernels.products import KernelOperator
from streamkern.kernels.slope import Slope
from streamkern.planning.memory import MAX_DERIVATIVE_COLUMNS


class GradientSum:
    """Running sum of w grad f grad f^T over rows.

    Z : prepared centers, right side.
    weights : (p, c) on the device, of op.dtype.

    A row costs 2 p (r + 1) c FLOPs beside the kernel, for r columns of a prepared point; memory is
    p (r + 1) and m (r + 1) elements for a group of outputs, for m rows. A sum over m rows is of
    op.dtype, the total in float64; every bit of it depends on the order of the rows.

    Raises
    ------
    ConfigError
        The kernel has no slope, see `Slope`.
    """

    def __init__(self, op: KernelOperator, Z: Points, weights: Array) -> None:
        self.op, self.Z = copy.copy(op), Z
        self.op.kernel = Slope(op.kernel)
        b, c, xp = coordinates(op, Z), weights.shape[1], op.backend.xp
        self.r, self.backend = int(b.shape[1]), op.backend
        together = max(1, MAX_DERIVATIVE_COLUMNS // (1 + self.r))
        self.groups = [slice(k, min(k + together, c)) for k in range(0, c, together)]
        self.b, self.weights = b, weights
        self.total = np.zeros((self.r, self.r))
        self.n, self.w = 0, 0.0
        self._C = xp.empty((self.r, self.r), op.dtype)

    def add(self, X: Array, w: Array | None = None) -> None:
        """Add rows X (m, d), as the kernel receives them, with sample weights w (m,)."""
        x = self.op.points(X, left=True)
        a, m, C = coordinates(self.op, x), len(X), self._C
        C[...] = 0
        for group in self.groups:
            alpha = self.weights[:, group]
            W = self.backend.xp.concatenate(
                [alpha, *(alpha[:, k, None] * self.b for k in range(alpha.shape[1]))], axis=1
            )
            sums = self.op.product(x, self.Z, W)
            for k in range(alpha.shape[1]):
                first = alpha.shape[1] + k * self.r
                g = sums[:, k, None] * a
                g -= sums[:, first : first + self.r]
                if w is not None:
                    g *= self.backend.xp.sqrt(w)[:, None]
                self.backend.add_gram(C, g, 1.0)
        self.backend.mirror_lower(C)
        self.total += self.backend.to_host(C)
        self.n += m
        self.w += m if w is None else float(w.sum())

    def mean(self) -> npt.NDArray[np.float64]:
        """Return G, (d, d), for the original features; zeros before the first row."""
        J = _units(self.op)
        G = 4 * self.op.scale**2 / max(self.w, 1e-300) * self.total
        if J.ndim == 2:
            return np.asarray(J @ G @ J.T)
        return np.asarray(J[:, None] * G * J if J.ndim else J * G * J)


def coordinates(op: KernelOperator, points: Points) -> Array:
    """Return the coordinates (n, r) of prepared points that have one side."""
    left, r = points.left is not None, points.n_coordinates
    side = points.left if left else points.right
    assert side is not None
    side = side[:, len(op.kernel.categorical) :]
    values = side[:, :r].astype(op.dtype)
    if n_terms(op.precision) == 3:  # high and low parts, see `kernels.points.preparation`
        low = 2 if left else 1
        values += side[:, low * r : (low + 1) * r]
    if left and op.norms_in_columns:
        values *= -0.5
    return values


def _units(op: KernelOperator) -> npt.NDArray[Any]:
    """Return J of a = J^T x + ...: a matrix (d, r), its diagonal (d,), or one number."""
    if op.grid is not None:
        return np.asarray(1 / op.grid.step)
    metric = op.kernel.metric
    return np.asarray((1.0 if metric is None else metric) / op.kernel.bandwidth)
