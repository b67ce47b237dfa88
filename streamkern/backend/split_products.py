"""Gram matrices and triangular systems by products of float16 parts, for the tensor cores of a GPU.

A number in float32 becomes the sum of two numbers in float16, high + low, which keep 22 of its 24
bits. A product becomes three, low high + high low + high high, and the negligible low low is left
out. The parts follow each other along the summed dimension, so that one GEMM with float32 sums
computes all three. Tensor cores do these FLOPs about ten times as fast as those of float32.

Tensor cores truncate sums to float32 instead of rounding to nearest (Fasi et al. 2021, "Numerical
behavior of NVIDIA tensor cores"), so the errors of all additions have one sign. Two rules keep them
small:

* A product sums at most `SPLIT_PANEL` terms; float32 additions, which round, add the products.
* The first `SPLIT_PANEL` columns of a triangle, and the first square of a Gram matrix, are
  multiplied in float32. They hold most of the kernel values, which have one sign, so their sums are
  large.

Measured in docs/explanation/block-measured.md, "The setup in float16 parts".
"""

from __future__ import annotations

from streamkern.backend.assignments import Assignments
from streamkern.backend.base import Array, Backend, tiles
from streamkern.backend.half_products import half_scale

SPLIT_PANEL = 1024
"""Number of terms of a sum in a product, and of columns of a triangle that are solved at once."""
ALIGNED_HALVES = 8
"""Number of float16 numbers of which a row has a multiple; cuBLAS has faster kernels for these."""
SPLIT_PARTS = Assignments(
    "split_parts", "y = x * scale; h = rounded(y); low = rounded(y - h); high = h; copy = h",
    local="y h", halves="low high copy",
)  # fmt: skip


def solve_split_right(backend: Backend, L: Array, B: Array) -> Array:
    """Compute B <- B L^-T in place, as `DenseAlgebra.solve_lower_right`, and return B.

    Takes k b^2 FLOPs, of which those in float16 parts count three times, and, besides the
    arguments, 6 (k + b) `SPLIT_PANEL` bytes.

    L : (b, b) float32, lower triangular.
    B : (k, b) float32.
    """
    b = len(L)
    for j in tiles(b, SPLIT_PANEL):
        backend.solve_lower_right(L[j, j], B[:, j])
        right = slice(j.stop, b)
        if right.start == b:
            break
        if not j.start:  # see the module docstring
            backend.accumulate(B[:, right], B[:, j], L[right, j].T, -1.0)
            continue
        scale, terms = _split_columns(backend, B[:, j], "low high copy")
        other_scale, factors = _split_columns(backend, L[right, j], "high low copy")
        backend.accumulate(B[:, right], terms, factors.T, -1 / (scale * other_scale))
        del terms, factors
    return B


def _split_columns(backend: Backend, A: Array, order: str) -> tuple[float, Array]:
    """Return the scale and the parts (n, 3 k) of A (n, k), side by side in the order of names."""
    n, k = A.shape
    parts = backend.xp.empty((n, 3 * k), backend.half_operand)
    outputs = {name: parts[:, i * k : (i + 1) * k] for i, name in enumerate(order.split())}
    scale = half_scale(A)
    backend.assign(SPLIT_PARTS, x=A, scale=scale, **outputs)
    return scale, parts


def add_split_gram(backend: Backend, C: Array, W: Array, scale: float) -> None:
    """Add scale * W.T @ W to the lower part of C, as `DenseAlgebra.add_gram`.

    Takes k b^2 FLOPs, three times as many in float16 parts, and 8 b `SPLIT_PANEL` bytes besides the
    arguments.

    C : (b, b) float32; parts of its upper triangle are overwritten as well.
    W : (k, b) float32.
    """
    first, *others = tiles(len(C), SPLIT_PANEL)
    backend.add_gram(C[first, first], W[:, first], scale)
    if not others:
        return
    row = -(-len(C) // ALIGNED_HALVES) * ALIGNED_HALVES
    buffer = backend.xp.empty((4 * min(SPLIT_PANEL, len(W)), row), backend.half_operand)
    buffer = buffer[:, : len(C)]
    for rows in tiles(len(W), SPLIT_PANEL):
        k = rows.stop - rows.start
        high, low, copy, last = (buffer[i * k : (i + 1) * k] for i in range(4))
        half = half_scale(W[rows])
        backend.assign(SPLIT_PARTS, x=W[rows], scale=half, low=low, high=high, copy=copy)
        last[...] = high
        # The products are high low, low high and high high.
        left, right = buffer[k : 4 * k].T, buffer[: 3 * k]
        for i in others:
            backend.accumulate(C[i, : i.stop], left[i], right[:, : i.stop], scale / half**2)
