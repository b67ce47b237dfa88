"""Fit and evaluate the residual scale sigma(x), see `ResidualScale`, on the model's device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.basics.array_types import Floats
from streamkern.centers.random_rows import median_bandwidth
from streamkern.kernels.builtin import Laplace
from streamkern.kernels.products import KernelOperator
from streamkern.kernels.sparse import of_sparse_rows
from streamkern.planning.memory import RESIDUAL_SCALE_BYTES, RESIDUAL_SCALE_ROWS
from streamkern.predict.residual_scale import ResidualScale, fit_residual_scale

MAX_BANDWIDTH_RATIO = 4
"""Widest bandwidth that is tried, relative to the median distance. It finds a noise that varies
slowly with the features, from few rows."""


class ResidualScales:
    """The residual scale sigma(x) of a model as a function of rows.

    op : kernel products of the model; its kernel and backend are used
    difficulty : fitted residual scale, with q points
    """

    def __init__(self, op: KernelOperator, difficulty: ResidualScale) -> None:
        self.difficulty = difficulty
        self._op = _operator(op, difficulty.points, difficulty.bandwidth)
        if len(difficulty.points):
            backend = op.backend
            self._Z = self._op.points(backend.asarray(difficulty.points), right=True)
            self._W = backend.asarray(difficulty.weights, self._op.dtype)

    def __call__(self, X: Array) -> Floats:
        """Return sigma (k, c) on the host, as float64, in 2 k q (d + c) FLOPs.

        X : (k, d) on the device, scaled.
        """
        if not len(self.difficulty.points):
            return np.ones((len(X), len(self.difficulty.low)))
        G = self._op.product(self._op.points(X, left=True), self._Z, self._W)
        return self.difficulty.sigma(self._op.backend.to_host(G))


def max_points(n: int, d: int, itemsize: int) -> int:
    """Return the number of rows, at most n / 2, to which `find_residual_scale` is fitted.

    n : number of calibration rows
    d : number of features of a row
    itemsize : bytes of a feature
    """
    return min(n // 2, RESIDUAL_SCALE_ROWS, max(RESIDUAL_SCALE_BYTES // (d * itemsize), 1))


def find_residual_scale(
    op: KernelOperator, X: npt.NDArray[Any], abs_residuals: Floats, w: Floats | None
) -> ResidualScale:
    """Fit the residual scale to the absolute residuals of rows.

    Three kernels are tried: the kernel of the model in its metric, and Laplace kernels with the
    median distance and `MAX_BANDWIDTH_RATIO` times this distance as bandwidth. The residual scale
    may depend on other features than the targets do, and a wide kernel finds a slowly varying scale
    from fewer rows.

    X : (q, d) on the host, scaled.
    abs_residuals : (q, c) absolute residuals, in the units of the targets.
    w : (q,) sample weights; None: all are 1.
    """
    bandwidths = [] if op.kernel.explicit else [0.0]
    if (X[:1] == X).all():  # equal rows show no differences
        bandwidths.clear()
    else:
        width = median_bandwidth(X, sparse=op.kernel.sparse)
        bandwidths += [width, MAX_BANDWIDTH_RATIO * width]
    return fit_residual_scale(
        X, {width: _gram(op, X, width) for width in bandwidths}, abs_residuals, w
    )


def _operator(op: KernelOperator, X: npt.NDArray[Any], bandwidth: float) -> KernelOperator:
    kernel = Laplace(bandwidth) if bandwidth else op.kernel
    kernel = of_sparse_rows(kernel) if op.kernel.sparse else kernel
    precision = "float64" if op.precision == "float64" else "exact"
    shift = X.mean(axis=0, dtype=np.float64).astype(X.dtype) if len(X) else None
    return KernelOperator(kernel, op.backend, precision, shift)


def _gram(op: KernelOperator, X: npt.NDArray[Any], bandwidth: float) -> Floats:
    own_operator = _operator(op, X, bandwidth)
    points = own_operator.points(op.backend.asarray(X), right=True)
    return np.asarray(op.backend.to_host(own_operator.gram(points)), np.float64)
