"""Choose the rows that are held out to find a ridge, and search a grid of exponents.

Normal equations are sums over rows. If the sums over the held-out rows are kept apart, the other
rows can be fitted, and the error on the held-out rows measured, without another pass. Rows of one
origin are in the same part, because held-out copies of fitted rows would reward memorising them.
The caller gives the origins: stored rows, or the hashes of `bits_of`, by which equal rows have one
origin.
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
SMALL = 1024
"""Largest number of centers for which all rows are held out in turn, in `FOLDS` folds.

With so few centers the sums of every fold are cheap, and there may be too few rows to measure the
error on one part alone. With more centers, one row in `HELD_OUT_PARTS` is held out.
"""
HELD_OUT_PARTS = 10
NOTABLE = 1e-3
"""Smallest relative decrease of the error for which a search goes on in a direction."""
TINY_ERROR = 1e-300
BITS_SLAB = 256
"""Number of rows that are hashed at a time."""


def n_parts(p: int) -> int:
    """Return the number of parts that are held out in turn, for p centers."""
    return FOLDS if p <= SMALL else 1


def bits_of(X: Array, backend: Backend) -> npt.NDArray[np.uint64]:
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


def part_of(origins: npt.NDArray[Any], n: int) -> npt.NDArray[np.int64]:
    """Return the part, 1 to n, in which each row is held out; 0 for a row that never is.

    origins : (m,) integers; rows of one origin are in the same part.
    """
    x = origins.astype(np.uint64)
    # The finaliser of SplitMix64: parts are random even for consecutive and periodic origins.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    part = (x ^ (x >> np.uint64(31))) % np.uint64(FOLDS if n == FOLDS else HELD_OUT_PARTS)
    return np.where(part < n, part + 1, 0).astype(np.int64)


def rounding(op: KernelOperator, Z: Points) -> float:
    """Return an estimate of the rounding error of kernel values, relative to the largest value.

    It is 10 eps. For kernels of squared distances it grows with the squared norms of the centers,
    shifted and in bandwidths: the error of |a - b|^2 is about eps (|a|^2 + |b|^2), see `products`.

    Solvers derive their jitter from it. With less jitter, the weights of nearly equal centers fit
    the rounding error, and predictions of other rows are wrong. Measured with a Laplace kernel, 80
    centers, as many copies, equal or moved by 1e-4 to 1e-6 bandwidths, and squared norms up to 460;
    a ridge gave a test error of .204:

        jitter      1e-12   1e-10   1e-8   1e-7   1e-5
        test error    .57     .46    .26   .207   .206
    """
    squared_norm = 1.0
    if op.kernel.geometry == "distance" and op.precision != "integer":
        # The 99th percentile: a few outliers do not represent the other centers.
        norms = op.backend.to_host(Z.portable(0)[1])
        squared_norm = max(squared_norm, float(np.quantile(norms, 0.99)))
    return 10 * eps(op.dtype) * squared_norm


def is_not_center(op: KernelOperator, Z: Points, K: Array) -> npt.NDArray[np.bool_]:
    """Return a mask (m,) of the rows that do not coincide with a center.

    Only these rows measure the error on unseen data. If a row coincides with a center, nothing but
    this row determines the center's weight; while it is held out, the function is arbitrary there,
    and only there. On tables of 6000 rows, a third of them centers, the ridge with the least error
    on all held-out rows raised the test error by up to a fifth.

    A row coincides with a center if their distance is 0 up to `rounding`. For kernels of inner
    products, no row is taken to coincide with one.

    Z : points of the centers.
    K : (m, p), kernel values between the rows and the centers.
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
    """Search the power of `base` with the least error; return all measured errors, by exponent.

    From `start` the exponent moves by `stride`, first down and then up, as long as the error falls
    by the share `NOTABLE`; then both neighbours of the best exponent are tried.

    measure : returns the error at base**exponent, infinity if there is no fit.
    low, high : smallest and largest exponent that may be tried.
    """
    errors = {start: measure(base**start)}

    def improves(exponent: int) -> bool:
        if exponent in errors or not low <= exponent <= high:
            return False
        least = min(errors.values())
        errors[exponent] = measure(base**exponent)
        return errors[exponent] < (1 - NOTABLE) * least or math.isinf(least)

    for step in (-stride, stride):
        exponent = start + step
        while improves(exponent):
            exponent += step
    best = min(errors, key=lambda exponent: errors[exponent])
    for exponent in (best - 1, best + 1):
        improves(exponent)
    return dict(sorted(errors.items()))


def parabola_minimum(errors: Mapping[int, float]) -> float:
    """Return the exponent at the minimum of a parabola through three logarithms of the error.

    They are those at the best exponent with finite errors at both neighbours, and at these; the
    result is at most 1 from it. Without such an exponent, or if the parabola has no minimum, the
    result is the best exponent that was tried.
    """
    best = min(errors, key=lambda exponent: errors[exponent])
    inner = [
        exponent
        for exponent in errors
        if math.isfinite(sum(errors.get(exponent + k, math.inf) for k in (-1, 1)))
    ]
    if not inner:
        return float(best)
    middle = min(inner, key=lambda exponent: errors[exponent])
    left, mid, right = (math.log(max(errors[middle + k], TINY_ERROR)) for k in (-1, 0, 1))
    curvature = left - 2 * mid + right
    if curvature <= 0:
        return float(best)
    return middle + min(max(0.5 * (left - right) / curvature, -1.0), 1.0)
