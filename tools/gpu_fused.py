"""A variant of kernel values and their product in one kernel, which no run uses yet.

It reads a tile of products once, and writes K in float16 and sums of K @ W, where the package
writes K in float32 and reads it again for K @ W. `gpu_step` measures both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.backend.epilogue import epilogue_source

WARP, ROWS, WARPS = 32, 4, 4
"""Threads of a warp, rows of a tile that a warp takes at once, and warps of a block."""
MOST_WARPS = 3168
"""Largest number of warps of a launch, unless the rows need more: twice as many as an H100 runs at
once with 168 registers a thread."""

_SOURCE = """
#ifdef __CUDACC__
__device__ unsigned short half_bits(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %%0, %%1;" : "=h"(bits) : "f"(x));
    return bits;
}
#else
unsigned short half_bits(float x) {
    union { _Float16 half; unsigned short bits; } number = {(_Float16)x};
    return number.bits;
}
#endif

// A thread adds its columns, one of 32, in their order; sums[slab][lane] are added afterwards.
extern "C" __global__ void fused(
    const T* __restrict__ tile, long long rows, long long cols,
    const T* __restrict__ row_norms, const T* __restrict__ col_norms, T scale,
    const T* __restrict__ W, long long slab, unsigned short* __restrict__ K, T* __restrict__ sums)
{
    const int lane = threadIdx.x %% 32;
    const long long first = ((long long)blockIdx.x * %(warps)d + threadIdx.x / 32) * %(rows)d;
    if (first >= rows) return;
    T total[%(rows)d][%(columns)d] = {};
    T x[%(rows)d];
    long long row[%(rows)d];
    for (int r = 0; r < %(rows)d; ++r) {  // rows below the tile repeat its last one
        row[r] = first + r < rows ? first + r : rows - 1;
        x[r] = row_norms[row[r]];
    }
    const long long end = (blockIdx.y + 1) * slab < cols ? (blockIdx.y + 1) * slab : cols;
    for (long long col = blockIdx.y * slab + lane; col < end; col += 32) {
        T k[%(rows)d];
        for (int r = 0; r < %(rows)d; ++r) k[r] = tile[row[r] * cols + col];
        for (int r = 0; r < %(rows)d; ++r) {
            k[r] = kernel_value(k[r], x[r], col_norms[col], scale);
            K[row[r] * cols + col] = half_bits(k[r]);
        }
        for (int c = 0; c < %(columns)d; ++c) {
            const T w = W[c * cols + col];
            for (int r = 0; r < %(rows)d; ++r) total[r][c] += k[r] * w;
        }
    }
    for (int r = 0; r < %(rows)d; ++r) if (first + r < rows)
        for (int c = 0; c < %(columns)d; ++c)
            sums[((blockIdx.y * 32LL + lane) * rows + row[r]) * %(columns)d + c] = total[r][c];
}
"""


def fused_source(expression: str, columns: int) -> str:
    """Return the CUDA source for a kernel's expression and a number of columns of W."""
    text = _SOURCE % {"rows": ROWS, "warps": WARPS, "columns": columns}
    return epilogue_source(expression, np.dtype(np.float32)) + text


class Fused:
    """The kernel for tiles (m, p) and c columns, with memory for its results.

    K : (m, p) kernel values in float16.
    """

    def __init__(self, xp: Any, expression: str, m: int, p: int, c: int) -> None:
        self._kernel = xp.RawKernel(fused_source(expression, c), "fused")
        warps = -(-m // ROWS)
        self._grid = -(-warps // WARPS), max(1, min(MOST_WARPS // warps, -(-p // WARP)))
        self._slab = -(-p // self._grid[1])
        self._sums = xp.empty((self._grid[1] * WARP, m, c), np.float32)
        self._xp, self.K = xp, xp.empty((m, p), np.float16)

    def __call__(self, tile: Any, norms: tuple[Any, Any], scale: float, W: Any, out: Any) -> None:
        """Write K of a tile of products, and K @ W to out (m, c). W : (c, p), the transpose."""
        numbers = (*tile.shape, *norms, np.float32(scale))
        arguments = (tile, *numbers, W, self._slab, self.K.view(np.uint16), self._sums)
        self._kernel(self._grid, (WARP * WARPS,), arguments)
        self._xp.sum(self._sums, axis=0, out=out)
