"""The CUDA kernel that turns a tile of products into kernel values, in place.

The kernel reads and writes each entry once, so that the bandwidth of the device's memory should
limit it. A thread keeps its columns and walks down the rows. It thus finds its entries without a
division, reads the norms of its columns once, and moves 16 bytes at a time where the rows of the
tile begin at multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.backend.base import Array
from streamkern.backend.expression import render

THREADS = 128
"""Number of threads of a block."""
MAX_BLOCKS = 1 << 15
"""Largest number of blocks of a launch, unless one row of the tile needs more: about 15 times as
many as an H100 runs at once. CUDA allows 65535 along the rows."""
ACCESS_BYTES = 16
"""Size of the largest access of a thread."""

_C_TYPES = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
_SOURCE = """
typedef %(type)s T;
constexpr int COLUMNS = %(bytes)d / sizeof(T);  // of a thread
struct alignas(%(bytes)d) Entries { T at[COLUMNS]; };

// p is a product of two points, and x and z are the norms of its row and column. A product of NaN
// has the value NaN; max() would turn it into a distance of zero.
__device__ T kernel_value(T p, T x, T z, T scale) {
    T s = (x + z - (T)2 * p) * scale;
    s = s < (T)0 ? (T)0 : s;
    return %(value)s;
}

extern "C" __global__ void %(name)s(
    T* tile, long long stride, long long rows, long long cols,
    const T* __restrict__ row_norms, const T* __restrict__ col_norms, T scale)
{
    // In aligned rows, a thread has adjacent columns, and accesses them together. In others it has
    // one of every blockDim.x columns, so that adjacent threads access adjacent columns.
    const bool aligned = ((unsigned long long)tile | stride * sizeof(T)) %% %(bytes)d == 0;
    const int step = aligned ? 1 : blockDim.x;
    const long long first = (long long)blockIdx.x * blockDim.x * COLUMNS
                            + threadIdx.x * (aligned ? COLUMNS : 1);
    if (first >= cols) return;
    const bool together = aligned && first + COLUMNS <= cols;
    Entries z = {};
    for (int j = 0; j < COLUMNS; ++j)
        if (first + j * step < cols) z.at[j] = col_norms[first + j * step];
    for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
        T* const k = tile + row * stride + first;
        const T x = row_norms[row];
        Entries entries = {};
        if (together) entries = *(const Entries*)k;
        else for (int j = 0; j < COLUMNS; ++j)
            if (first + j * step < cols) entries.at[j] = k[j * step];
        for (int j = 0; j < COLUMNS; ++j)
            entries.at[j] = kernel_value(entries.at[j], x, z.at[j], scale);
        if (together) *(Entries*)k = entries;
        else for (int j = 0; j < COLUMNS; ++j)
            if (first + j * step < cols) k[j * step] = entries.at[j];
    }
}
"""
NAME = "streamkern_epilogue"
"""Name of the kernel."""


def epilogue_source(expression: str, dtype: np.dtype[Any]) -> str:
    """Return the CUDA source of the kernel for the expression of a kernel's values.

    expression : see `backend.expression`.
    dtype : float32 or float64, the dtype of the tile.
    """
    return _SOURCE % {
        "type": _C_TYPES[dtype], "bytes": ACCESS_BYTES, "name": NAME,
        "value": render(expression, "(T){}"),
    }  # fmt: skip


class Epilogues:
    """Compiled kernels by expression and dtype.

    xp : the module `cupy`.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._kernels: dict[tuple[str, np.dtype[Any]], Any] = {}

    def __call__(
        self, expression: str, tile: Array, norms: tuple[Array, Array], scale: float
    ) -> None:
        """Replace a tile of products by the values of an expression, in one launch.

        tile : (r, t), float32 or float64, with contiguous rows.
        norms : contiguous numbers (norms) of the tile's rows (r,) and columns (t,), in its dtype.
        scale : factor by which squared distances are multiplied.
        """
        if tile.size == 0:
            return
        rows, cols = tile.shape
        dtype, (row_stride, col_stride) = tile.dtype, tile.strides
        assert col_stride == tile.itemsize or cols == 1, "rows must be contiguous"
        for a, n in zip(norms, (rows, cols), strict=True):
            assert (a.dtype, a.shape) == (dtype, (n,))
            assert a.flags.c_contiguous
        kernel = self._kernels.get((expression, dtype))
        if kernel is None:
            source = epilogue_source(expression, dtype)
            kernel = self._kernels.setdefault((expression, dtype), self._xp.RawKernel(source, NAME))
        blocks_in_row = -(-cols * tile.itemsize // (THREADS * ACCESS_BYTES))
        grid = blocks_in_row, min(rows, max(1, MAX_BLOCKS // blocks_in_row))
        stride = row_stride // tile.itemsize
        # CuPy passes Python's integers as long long, and numbers of NumPy in their own type.
        kernel(grid, (THREADS,), (tile, stride, rows, cols, *norms, dtype.type(scale)))
