"""Choice of the rows that are held out to find a ridge, and the search over powers of ten.

Sums over rows, such as normal equations, can be summed separately over some of them: then the fit
to the other rows is measured on these without another pass. All rows made from one stored row are
in the same part, and so are equal rows; otherwise copies of a row would reward memorising it.
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
"""Largest number of centers for which all folds are held out in turn.

A fifth of the rows is held out at a time: sums for each of the folds are cheap there, and few rows
are a poor measure. With more centers, one row in `HELD_OUT_PARTS` is held out throughout.
"""
HELD_OUT_PARTS = 10
NOTABLE = 1e-3
"""Smallest relative decrease of the error with which a search continues."""
TINY_ERROR = 1e-300
BITS_SLAB = 256
"""Number of rows whose bits are multiplied at a time."""


def n_parts(p: int) -> int:
    """Return the number of parts of the rows that are held out in turn, for p centers."""
    return FOLDS if p <= SMALL else 1


def bits_of(X: Array, backend: Backend) -> npt.NDArray[np.uint64]:
    """Return hashes (m,) on the host, equal for equal rows of X (m, d) and hardly any others."""
    unsigned = X.view(f"u{X.dtype.itemsize}")
    xp = backend.xp
    halves = np.random.default_rng(0).integers(1 << 63, size=X.shape[1], dtype=np.uint64)
    odd = backend.asarray(2 * halves + 1)
    sums = xp.empty(len(X), np.uint64)
    for rows in tiles(len(X), BITS_SLAB):
        sums[rows] = (unsigned[rows] * odd).sum(axis=1)
    result: npt.NDArray[np.uint64] = backend.to_host(sums)
    return result


def part_of(origins: npt.NDArray[Any], n: int) -> npt.NDArray[np.int64]:
    """Return the part, 1 to n, in which each row is held out, or 0; equal for rows of one origin.

    origins : (m,) integers.
    """
    x = origins.astype(np.uint64)
    # The finaliser of SplitMix64: neighbours and periodic rows fall into random parts.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    part = (x ^ (x >> np.uint64(31))) % np.uint64(FOLDS if n == FOLDS else HELD_OUT_PARTS)
    return np.where(part < n, part + 1, 0).astype(np.int64)


def rounding(op: KernelOperator, Z: Points) -> float:
    """Return the rounding error of kernel values, relative to the largest.

    It is 10 eps, and more far from the mean. A squared distance is known to eps times the squared
    norms, in bandwidths (`products`). Weights that fit the rounding of nearly equal centers are
    wrong on other rows. Measured with Laplace, 80 centers and as many doubled or moved by 1e-4 to
    1e-6 bandwidths, squared norms up to 460: a jitter of 1e-12, 1e-10, 1e-8, 1e-7, 1e-5 had a test
    error of .57, .46, .26, .207, .206, and .204 with a ridge.
    """
    far = 1.0
    if op.kernel.geometry == "distance" and op.precision != "integer":
        # The 99th percentile: a few rows far from all others do not represent the rest.
        far = max(far, float(np.quantile(op.backend.to_host(Z.portable(0)[1]), 0.99)))
    return 10 * eps(op.dtype) * far


def is_not_center(op: KernelOperator, Z: Points, K: Array) -> npt.NDArray[np.bool_]:
    """Return which rows are no center: only they measure a function on unseen rows.

    Nothing but the row itself determines the weight of a center at a row, so without the row the
    function is wild there, and nowhere else. On tables of 6000 rows, a third of them centers, the
    ridge with the least error on all held-out rows cost up to a fifth of the test error.

    Z : points of the centers.
    K : (m, p), between the rows and these.
    """
    if op.kernel.geometry not in ("distance", "l1"):
        return np.ones(len(K), bool)
    xp = op.backend.xp
    same = float(op.kernel.profile(xp.asarray([rounding(op, Z)]), xp)[0])
    result: npt.NDArray[np.bool_] = op.backend.to_host(K.max(axis=1) < same)
    return result


def geometric_search(
    measure: Callable[[float], float], start: int, low: int, high: int, base: float = 10.0,
    stride: int = 2,
) -> dict[int, float]:  # fmt: skip
    """Return errors at powers of `base`, by exponent.

    Steps of `stride` go both ways from `start` while the error falls notably; then the neighbours
    of the best are tried. The error is infinite if there was no result.

    low, high : the last exponents that are tried.
    """
    errors = {start: measure(base**start)}

    def try_at(at: int) -> bool:
        if at in errors or not low <= at <= high:
            return False
        least = min(errors.values())
        errors[at] = measure(base**at)
        return errors[at] < (1 - NOTABLE) * least or math.isinf(least)

    for step in (-stride, stride):
        at = start + step
        while try_at(at):
            at += step
    best = min(errors, key=lambda at: errors[at])
    for at in (best - 1, best + 1):
        try_at(at)
    return dict(sorted(errors.items()))


def parabola_minimum(errors: Mapping[int, float]) -> float:
    """Return the exponent of the least error, by a parabola through its logarithm at three trials.

    The middle one is the best with trials on both sides; the result is at most one step from it.
    """
    best = min(errors, key=lambda at: errors[at])
    inner = [
        at for at in errors if math.isfinite(sum(errors.get(at + k, math.inf) for k in (-1, 1)))
    ]
    if not inner:
        return float(best)
    middle = min(inner, key=lambda at: errors[at])
    below, least, above = (math.log(max(errors[middle + k], TINY_ERROR)) for k in (-1, 0, 1))
    curvature = below - 2 * least + above
    if curvature <= 0:
        return float(best)
    return middle + min(max(0.5 * (below - above) / curvature, -1.0), 1.0)
