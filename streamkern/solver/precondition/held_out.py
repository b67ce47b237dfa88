"""The choice of held-out rows to find a ridge, and the search of a grid of exponents.

Normal equations are sums over rows. If the held-out rows also have sums of their own, the other
rows can be fitted, and the error on the held-out rows measured, in the same epoch. Rows of one
origin are in the same part, because held-out copies of fitted rows would favour models that
memorise rows. An origin is a stored row, or a hash of `hash_rows`, which is the same for equal
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.norm import eps

FOLDS = 5
"""Number of folds with few centers."""
MAX_CENTERS_OF_FOLDS = 1024
"""Largest number of centers for which all rows are held out in turn, in `FOLDS` folds.

With so few centers the sums of every fold are cheap, and there may be too few rows to measure the
error on one part alone. With more centers, one row in `HELD_OUT_PARTS` is held out.
"""
HELD_OUT_PARTS = 10
"""Number of parts with many centers, only one of which is held out."""
MIN_ERROR_REDUCTION = 1e-3
"""Smallest relative decrease of the error for which a search continues in a direction."""
TINY_ERROR = 1e-300
"""Lower bound of numbers that are divisors or have a logarithm."""
BITS_SLAB = 256
"""Number of rows that are hashed at a time."""


def n_parts(p: int) -> int:
    """Return the number of parts that are held out, one after the other, for p centers."""
    return FOLDS if p <= MAX_CENTERS_OF_FOLDS else 1


def hash_rows(X: Array, backend: Backend) -> npt.NDArray[np.uint64]:
    """Return a hash of the bits of each row of X (m, d), (m,) on the host.

    It is the sum, modulo 2**64, of the entries as unsigned integers times random odd numbers: equal
    rows have equal hashes, and other rows hardly ever.
    """
    bits = X.view(f"u{X.dtype.itemsize}")
    xp = backend.xp
    random = np.random.default_rng(0).integers(1 << 63, size=X.shape[1], dtype=np.uint64)
    factors = backend.asarray(2 * random + 1)
    hashes = xp.empty(len(X), np.uint64)
    for rows in tiles(len(X), BITS_SLAB):
        hashes[rows] = (bits[rows] * factors).sum(axis=1)
    result: npt.NDArray[np.uint64] = backend.to_host(hashes)
    return result


def held_out_parts(origins: npt.NDArray[Any], n: int) -> npt.NDArray[np.int64]:
    """Return the held-out part of each row, (m,), from 1 to n; 0: the row is never held out.

    origins : (m,) integers; rows of one origin are in the same part.
    n : number of parts, `n_parts`.
    """
    x = origins.astype(np.uint64)
    # The finaliser of SplitMix64: parts are random even for consecutive and periodic origins.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    part = (x ^ (x >> np.uint64(31))) % np.uint64(FOLDS if n == FOLDS else HELD_OUT_PARTS)
    return np.where(part < n, part + 1, 0).astype(np.int64)


def rounding(op: KernelOperator, Z: Points) -> float:
    """Return an estimate of the rounding error of kernel values, relative to the largest value.

    It is 10 eps. For kernels of squared distances it is multiplied by the squared norm of the
    centers, shifted and in bandwidths: the error of |a - b|^2 is about eps (|a|^2 + |b|^2), see
    `kernels.products`.

    Solvers derive their jitter from it. With less jitter, the weights of nearly equal centers fit
    the rounding errors, and predictions of other rows are wrong (measured in
    docs/explanation/solver-measured.md).
    """
    squared_norm = 1.0
    if op.kernel.geometry == "distance" and op.precision != "integer":
        # The 99th percentile, as a few outliers must not determine the jitter.
        # The norms of sparse rows are not in bandwidths yet; `op.scale` converts them.
        norms = op.backend.to_host(Z.portable(0)[1])
        squared_norm = max(squared_norm, op.scale * float(np.quantile(norms, 0.99)))
    return 10 * eps(op.dtype) * squared_norm


def is_not_center(op: KernelOperator, Z: Points, K: Array) -> npt.NDArray[np.bool_]:
    """Return a mask (m,) of the rows that do not coincide with a center.

    Only these rows measure the error on unseen data. If a row coincides with a center, hardly any
    other row determines the weight of this center; while the row is held out, the function at this
    row is arbitrary. A ridge chosen with such rows would be wrong.

    A row coincides with a center if their distance is 0 up to `rounding`. With kernels of inner
    products, the mask is true for all rows.

    Z : points of the centers.
    K : (m, p) kernel values between the rows and the centers.
    """
    if op.kernel.geometry not in ("distance", "l1"):
        return np.ones(len(K), bool)
    xp = op.backend.xp
    at_center = float(op.kernel.profile(xp.asarray([rounding(op, Z)]), xp)[0])
    result: npt.NDArray[np.bool_] = op.backend.to_host(K.max(axis=1) < at_center)
    return result


def geometric_search(
    measure: Callable[[float], float], start: int, low: int, high: int, base: float = 10.0,
    stride: int = 2,
) -> dict[int, float]:  # fmt: skip
    """Return errors at powers of `base`, by exponent, ascending; the least error is among them.

    From `start` the exponent moves by `stride`, first down and then up, while the error decreases
    by at least the fraction `MIN_ERROR_REDUCTION`. Then both neighbours of the best one are tried.

    measure : function that returns the error at base**exponent, or infinity if there is no fit.
    low, high : smallest and largest exponent that may be tried.
    """
    errors = {start: measure(base**start)}

    def measure_and_compare(exponent: int) -> bool:
        """Measure an exponent, and return whether its error is less than all errors before."""
        if exponent in errors or not low <= exponent <= high:
            return False
        best_error = min(errors.values())
        errors[exponent] = measure(base**exponent)
        limit = (1 - MIN_ERROR_REDUCTION) * best_error
        return errors[exponent] < limit or math.isinf(best_error)

    for step in (-stride, stride):
        exponent = start + step
        while measure_and_compare(exponent):
            exponent += step
    best = min(errors, key=lambda exponent: errors[exponent])
    for exponent in (best - 1, best + 1):
        measure_and_compare(exponent)
    return dict(sorted(errors.items()))


def parabola_minimum(errors: Mapping[int, float]) -> float:
    """Return the exponent at the minimum of a parabola through three logarithms of the error.

    The middle one is the best exponent whose two neighbours have finite errors; the result differs
    from it by at most 1. Without such an exponent, or if the parabola has no minimum, the result is
    the best exponent that was tried.
    """
    best = min(errors, key=lambda exponent: errors[exponent])
    has_neighbours = [
        exponent
        for exponent in errors
        if math.isfinite(sum(errors.get(exponent + k, math.inf) for k in (-1, 1)))
    ]
    if not has_neighbours:
        return float(best)
    middle = min(has_neighbours, key=lambda exponent: errors[exponent])
    left, mid, right = (math.log(max(errors[middle + k], TINY_ERROR)) for k in (-1, 0, 1))
    curvature = left - 2 * mid + right
    if curvature <= 0:
        return float(best)
    return middle + min(max(0.5 * (left - right) / curvature, -1.0), 1.0)
