"""Products with a matrix in float16, whose other operand and result are float32."""

from __future__ import annotations

import math

import numpy as np

from streamkern.backend.assignments import Assignments
from streamkern.backend.base import Array, Backend

LARGEST_HALF = 16384
"""Largest entry of a column after scaling. The largest number of float16 is 65504."""
TINY = 1e-30
"""Number that is added to the largest entry of a column, which may be 0."""
SPLIT = Assignments(
    "split", f"y = x * {LARGEST_HALF} / (largest + tiny); h = rounded(y); high = h; "
    "low = rounded(y - h)", local="y h", halves="high low",
)  # fmt: skip
JOIN = Assignments("join", "out = (high + low) * (largest + tiny) * factor")


def half_scale(A: Array) -> float:
    """Return a power of two that brings the largest entry of A near 2^14, a quarter of the range.

    The other entries then have the full precision down to 2^-28 of the largest one.
    """
    _, exponent = math.frexp(max(float(A.max()), -float(A.min())))
    return math.ldexp(1.0, 14 - exponent)


def half_product(
    backend: Backend, A: Array, B: Array, out: Array, *, transposed: bool = False,
    lower: bool = False, scale: float = 1.0,
) -> Array:  # fmt: skip
    """Compute out = scale * A @ B, or scale * A.T @ B if `transposed`, and return out.

    Each entry of B becomes a sum of two float16 numbers, which keep 22 of its 24 bits; each column
    is scaled to use their range. On a GPU, one product on the tensor cores multiplies both halves
    side by side, and its sums are float32. The CPU multiplies the same halves in float32.

    A : (m, k), or (k, m) if `transposed`, float16.
    B : (k, c), float32.
    out : (m, c), float32.
    lower : whether A is lower triangular, see `DenseAlgebra.matmul`.
    """
    (k, c), workspace = B.shape, backend.workspace
    with (
        workspace((k, 2 * c), backend.half_operand) as halves,
        workspace((len(out), 2 * c), np.float32) as products,
        workspace((k, c), np.float32) as sizes,
        workspace((c,), np.float32) as largest,
    ):
        backend.xp.absolute(B, out=sizes)
        sizes.max(axis=0, out=largest)
        high, low = halves[:, :c], halves[:, c:]
        backend.assign(SPLIT, x=B, largest=largest, tiny=TINY, high=high, low=low)
        multiply = backend.matmul_t if transposed else backend.matmul
        multiply(A, halves, products, lower=lower)
        backend.assign(
            JOIN, high=products[:, :c], low=products[:, c:], largest=largest, tiny=TINY,
            factor=scale / LARGEST_HALF, out=out,
        )  # fmt: skip
    return out
