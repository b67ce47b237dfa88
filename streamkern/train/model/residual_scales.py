"""Fit and evaluate the residual scale sigma(x) on the model's device.

`streamkern.predict.residual_scale` describes it. A bandwidth of 0 stands for the model's kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.basics.array_types import Floats
from streamkern.centers.random_rows import median_bandwidth
from streamkern.kernels.builtin import Laplace
from streamkern.kernels.products import KernelOperator
from streamkern.kernels.sparse import for_sparse_rows
from streamkern.planning.memory import RESIDUAL_SCALE_BYTES, RESIDUAL_SCALE_ROWS
from streamkern.predict.residual_scale import ResidualScale, fit_residual_scale

MAX_BANDWIDTH_RATIO = 4
"""Widest bandwidth that is tried, relative to the median distance. A wide kernel finds noise
that varies slowly with the features from fewer rows."""


class ResidualScaleEvaluator:
    """Evaluator of the residual scale sigma(x) of a model for rows on its device.

    op : kernel products of the model; its kernel and backend are used
    scale : fitted residual scale, with q points
    """

    def __init__(self, op: KernelOperator, scale: ResidualScale) -> None:
        self.scale = scale
        self._op = _operator(op, scale.points, scale.bandwidth)
        if len(scale.points):
            backend = op.backend
            self._Z = self._op.points(backend.asarray(scale.points), right=True)
            self._W = backend.asarray(scale.weights, self._op.dtype)

    def __call__(self, X: Array) -> Floats:
        """Return sigma (k, c) on the host, as float64, in 2 k q (d + c) FLOPs.

        X : (k, d) on the device, scaled
        """
        if not len(self.scale.points):
            return np.ones((len(X), len(self.scale.low)))
        G = self._op.product(self._op.points(X, left=True), self._Z, self._W)
        return self.scale.sigma(self._op.backend.to_host(G))


def max_scale_rows(n: int, d: int, itemsize: int) -> int:
    """Return the number of rows, at most n / 2, to which the residual scale is fitted.

    n : number of calibration rows
    d : number of features of a row
    itemsize : bytes of a feature
    """
    return min(n // 2, RESIDUAL_SCALE_ROWS, max(RESIDUAL_SCALE_BYTES // (d * itemsize), 1))


def choose_residual_scale(
    op: KernelOperator, X: npt.NDArray[Any], abs_residuals: Floats, w: Floats | None
) -> ResidualScale:
    """Fit the residual scale to the absolute residuals of rows.

    Up to three kernels are tried: the kernel of the model in its metric, if the model has one, and
    Laplace kernels with the median distance and `MAX_BANDWIDTH_RATIO` times this distance as
    bandwidth, because the residual scale may depend on other features than the targets do. If all
    rows are equal, or with fewer than `MIN_ROWS_OF_SCALE` rows, the scale is constant.

    op : kernel products of the model
    X : (q, d) on the host, scaled
    abs_residuals : (q, c) absolute residuals, in the units of the targets
    w : (q,) sample weights; None: all are 1
    """
    bandwidths = [] if op.kernel.explicit else [0.0]  # 0: the model's kernel
    if (X[:1] == X).all():  # equal rows show no differences
        bandwidths.clear()
    else:
        width = median_bandwidth(X, sparse=op.kernel.sparse)
        bandwidths += [width, MAX_BANDWIDTH_RATIO * width]
    return fit_residual_scale(
        X, {width: _gram(op, X, width) for width in bandwidths}, abs_residuals, w
    )


def _operator(op: KernelOperator, X: npt.NDArray[Any], bandwidth: float) -> KernelOperator:
    """Return the operator of a Laplace kernel, or of the model's kernel if the bandwidth is 0.

    Its precision is float64 if the model's precision is, otherwise "exact": points are not rounded.

    X : (q, d) points of the scale; the operator shifts all points by their mean
    """
    kernel = Laplace(bandwidth) if bandwidth else op.kernel
    kernel = for_sparse_rows(kernel) if op.kernel.sparse else kernel
    precision = "float64" if op.precision == "float64" else "exact"
    shift = X.mean(axis=0, dtype=np.float64).astype(X.dtype) if len(X) else None
    return KernelOperator(kernel, op.backend, precision, shift)


def _gram(op: KernelOperator, X: npt.NDArray[Any], bandwidth: float) -> Floats:
    """Return K(X, X) (q, q) as float64 on the host; bandwidth as for `_operator`."""
    own_operator = _operator(op, X, bandwidth)
    points = own_operator.points(op.backend.asarray(X), right=True)
    return np.asarray(op.backend.to_host(own_operator.gram(points)), np.float64)
