"""Evaluate a model in float64 if the rounding errors of float32 would be visible in predictions.

The weights of nearly equal centers are large and cancel; with a wide kernel, so do the weights of
all centers. The rounding errors of float32 kernel values are multiplied by these weights. The
weights themselves have the accuracy of training, but the sum over the centers can be computed in
float64. docs/howto/precision.md has gains and costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend
from streamkern.kernels.fourier import FourierFeatures
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator

MAX_RELATIVE_ROUNDING = 1e-4
"""Root mean square of the rounding, relative to the standard deviation of f, above which sums are
computed in float64."""
MAX_FLOAT64_CENTER_BYTES = 1 << 30
"""Size of the centers in float64, in bytes, above which sums stay in float32."""

_MAX_PROBES = 128
"""Largest number of probes, the points at which the sums are compared."""
_NEAR_CENTER = 2.0**-7
"""Distance of a probe from the center that it lies near, relative to the distance between this
center and the next one."""


class KernelSum(NamedTuple):
    """The function f(X) = K(X, Z) weights.

    op : products with kernel matrices
    Z : (p,) prepared centers on the device, right side only
    weights : (p, c) on the device, in the dtype of `op`
    """

    op: KernelOperator
    Z: Points
    weights: Array

    def __call__(self, X: Array) -> Array:
        """Return f(X), (n, c) on the device. X : (n, d) on the device, scaled."""
        return self.op.product(self.op.points(X, left=True), self.Z, self.weights)


def may_be_wide(settings: Mapping[str, Any]) -> bool:
    """Return whether the settings of a run allow predictions in float64 sums."""
    return bool(settings.get("run", {}).get("precision") == "auto")


def wide_sum(float32_sum: KernelSum, centers: npt.NDArray[Any]) -> KernelSum:
    """Return the same function in float64. centers : (p, d) on the host, scaled."""
    op = KernelOperator(
        float32_sum.op.kernel, float32_sum.op.backend, "float64", float32_sum.op.origin
    )
    Z = op.points(op.backend.asarray(centers, np.float64), right=True)
    return KernelSum(op, Z, op.backend.asarray(float32_sum.weights, np.float64))


def rounding_shows(float32_sum: KernelSum, centers: npt.NDArray[Any]) -> bool:
    """Return whether the rounding errors of float32 are visible in predictions.

    False for other precisions than "exact", for sparse rows and Fourier features, and for fewer
    than two centers or more than `MAX_FLOAT64_CENTER_BYTES` of them, where nothing is compared.

    Sums in float32 and in float64 are compared at up to 128 points between centers, which takes
    128 p kernel values in each precision. NumPy computes them for every backend, because each
    rounds in its own way: the result depends on the model alone, so that a row has the same
    prediction after `fit` and after `load`, which may compile the kernel.

    float32_sum : the function in float32
    centers : (p, d) on the host, scaled
    """
    op = float32_sum.op
    is_feature_map = op.kernel.sparse or isinstance(op.kernel, FourierFeatures)
    if (
        op.precision != "exact"
        or is_feature_map
        or len(centers) < 2
        or 8 * centers.size > MAX_FLOAT64_CENTER_BYTES
    ):
        return False
    on_host = KernelOperator(op.kernel, Backend(), op.precision, op.origin)
    Z = on_host.points(np.asarray(centers, op.dtype), right=True)
    float32_sum = KernelSum(on_host, Z, op.backend.to_host(float32_sum.weights))
    with np.errstate(over="ignore", invalid="ignore"):  # a run may diverge
        probes = np.asarray(_probes(centers, op.categorical_columns), op.dtype)
        F, rounded_F = wide_sum(float32_sum, centers)(probes), float32_sum(probes)
        variance = np.square(F - F.mean(axis=0)).mean()
        return bool(np.square(F - rounded_F).mean() > MAX_RELATIVE_ROUNDING**2 * variance)


def _probes(centers: npt.NDArray[Any], categorical: list[int]) -> npt.NDArray[Any]:
    """Return points (k, d) on the lines from centers to the next centers in the list.

    Every other point is half-way; the rest are near a center, where a kernel may have a kink.

    centers : (p, d) on the host, scaled.
    categorical : indices of the categorical features, which keep the values of the first center.
    """
    n_probes = min(_MAX_PROBES, len(centers) - 1)
    k = np.linspace(0, len(centers) - 2, n_probes).astype(np.int64)  # the first of two centers
    position = np.where(np.arange(n_probes) % 2, 0.5, _NEAR_CENTER)[:, None]
    points: npt.NDArray[Any] = centers[k] + position * (centers[k + 1] - centers[k])
    points[:, categorical] = centers[k][:, categorical]
    return points
