"""The average gradient outer product (AGOP) of f(x) = sum_j alpha_j k(x, z_j).

    G = weighted mean over rows x of sum over outputs of grad f(x) grad f(x)^T,     (d, d)

is the metric of recursive feature machines (Radhakrishnan, Beaglehole, Pandit and Belkin 2022,
arXiv 2212.13881). Prepared points are affine functions of the features: a = J^T x + const. With
b_j, the prepared center z_j, and k = phi(|a - b_j|^2),

    grad f(x) = 2 J (a sum_j phi'_j alpha_j - sum_j phi'_j alpha_j b_j).

The two sums over j are one product of the slopes phi' with r + 1 columns for each output, where r
is the number of coordinates of a.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, tiles
from streamkern.kernels.points import Points, n_terms
from streamkern.kernels.products import KernelOperator
from streamkern.kernels.slope import Slope
from streamkern.planning.memory import MAX_DERIVATIVE_COLUMNS


class GradientSum:
    """Running sum of w grad f grad f^T over rows, where w are the sample weights.

    Z : prepared centers, with their right side.
    weights : (p, c) weights alpha of the centers, on the device, in the dtype of `op`.

    A row costs 2 p (r + 1) c FLOPs in addition to the kernel values, where r is the number of
    coordinates of a prepared point. An output takes memory for (p + m) (r + 1) numbers during
    `add` of m rows; the outputs of a group are processed together. The sum over the rows of a call
    has the dtype of `op`, and the total is in float64. The bits of the total depend on the order of
    the calls, and on the rows of each.

    Raises
    ------
    ConfigError
        The kernel cannot be differentiated, see `Slope`.
    """

    def __init__(self, op: KernelOperator, Z: Points, weights: Array) -> None:
        self.op, self.Z = copy.copy(op), Z
        self.op.kernel = Slope(op.kernel)
        b, c, xp = coordinates(op, Z), weights.shape[1], op.backend.xp
        self.r, self.backend = int(b.shape[1]), op.backend
        group_size = max(1, MAX_DERIVATIVE_COLUMNS // (1 + self.r))
        self._output_groups = tiles(c, group_size)
        self._b, self._weights = b, weights
        self._total, self._total_weight = np.zeros((self.r, self.r)), 0.0
        self._batch_sum = xp.empty((self.r, self.r), op.dtype)

    def add(self, X: Array, w: Array | None = None) -> None:
        """Add rows X (m, d), features as the kernel receives them, with sample weights w (m,).

        Without w, every weight is 1.
        """
        points = self.op.points(X, left=True)
        a, total = coordinates(self.op, points), self._batch_sum
        total[...] = 0
        for group in self._output_groups:
            alpha = self._weights[:, group]
            n_outputs = alpha.shape[1]
            columns = self.backend.xp.concatenate(
                [alpha, *(alpha[:, k, None] * self._b for k in range(n_outputs))], axis=1
            )
            sums = self.op.product(points, self.Z, columns)
            for k in range(n_outputs):
                start = n_outputs + k * self.r
                g = sums[:, k, None] * a
                g -= sums[:, start : start + self.r]
                if w is not None:
                    g *= self.backend.xp.sqrt(w)[:, None]
                self.backend.add_gram(total, g, 1.0)
        self.backend.mirror_lower(total)
        self._total += self.backend.to_host(total)
        self._total_weight += len(X) if w is None else float(w.sum())

    def mean(self) -> npt.NDArray[np.float64]:
        """Return G (d, d) with respect to the original features; zeros if no row was added."""
        J = _jacobian(self.op)
        # `op.scale` is 1, unless points are in steps of a grid: then k = phi(scale |a - b|^2).
        G = 4 * self.op.scale**2 / max(self._total_weight, 1e-300) * self._total
        if J.ndim == 2:
            return np.asarray(J @ G @ J.T)
        return np.asarray(J[:, None] * G * J if J.ndim else J * G * J)


def coordinates(op: KernelOperator, points: Points) -> Array:
    """Return the coordinates (n, r) of prepared points, from the left side if they have one."""
    is_left, r = points.left is not None, points.n_coordinates
    side = points.left if is_left else points.right
    assert side is not None
    side = side[:, op.kernel.n_compared :]
    values = side[:, :r].astype(op.dtype)
    if n_terms(op.precision) == 3:  # high and low parts, see `kernels.points.preparation`
        low = 2 if is_left else 1
        values += side[:, low * r : (low + 1) * r]
    if is_left and op.norms_in_columns:  # this side holds -2 a
        values *= -0.5
    return values


def _jacobian(op: KernelOperator) -> npt.NDArray[Any]:
    """Return J of a = J^T x + const: a matrix (d, r), its diagonal (d,), or one number."""
    if op.grid is not None:
        return np.asarray(1 / op.grid.step)
    metric = op.kernel.metric
    return np.asarray((1.0 if metric is None else metric) / op.kernel.bandwidth)
