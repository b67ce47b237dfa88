"""Products with a lower triangle by kernels of their own, which no run uses yet.

H g and H.T v take one launch each, and read the triangle alone: nothing above the diagonal. H is
float32 or float16, in rows of equal length or packed; the other operand, sums and results are
float32. The package calls cuBLAS (`RowMajor.lower`), for several products that also read zeros, and
splits the other operand for H in float16. `gpu_step --parts thin` measures both.

Sums are in two stages, each in a fixed order: first of a thread, then of the threads of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MOST_COLUMNS = 32
"""Largest number of columns of the other operand: one for each lane of a warp."""
ROWS, ROW_WARPS = 4, 4
"""For H g: rows of a warp, and warps of a block."""
COLUMN_WARPS, SUMMED = 16, 8
"""For H.T v: warps of a block, and results that it sums at once."""
WIDE = 16_384
"""Rows of H from which a thread has two columns in H.T v; with fewer, blocks would be too few."""

_SOURCE = """
typedef %(element)s Element;
constexpr int C = %(columns)d, ROWS = %(rows)d, WIDTH = %(width)d;
constexpr int ROW_WARPS = %(row_warps)d, TILE = 32 * ROW_WARPS, PITCH = C | 1;
constexpr int COLUMN_WARPS = %(column_warps)d, SUMMED = %(summed)d;

__device__ float value(float x) { return x; }
#ifdef __CUDACC__
__device__ float value(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %%0, %%1;" : "=f"(x) : "h"(bits));
    return x;
}
#else
float value(unsigned short bits) {
    union { unsigned short bits; _Float16 half; } number = {bits};
    return number.half;
}
#endif

// The first entry of a row. Row i of a packed triangle has i + 1 entries.
__device__ long long start(long long row, long long stride) {
    return %(packed)d ? row * (row + 1) / 2 : row * stride;
}

extern "C" __global__ void pack(
    const Element* __restrict__ H, long long stride, long long n, Element* packed)
{
    for (long long row = blockIdx.x; row < n; row += gridDim.x)
        for (long long j = threadIdx.x; j <= row; j += blockDim.x)
            packed[row * (row + 1) / 2 + j] = H[row * stride + j];
}

// out = scale H g, (n, C). A lane adds one of 32 columns; the longest rows come first.
extern "C" __global__ void __launch_bounds__(32 * ROW_WARPS) multiply(
    const Element* __restrict__ H, long long stride, long long n,
    const float* __restrict__ g, float scale, float* __restrict__ out)
{
    __shared__ float shared[32 * ROW_WARPS * (C | 1) > 33 * ROW_WARPS * C
                            ? 32 * ROW_WARPS * (C | 1) : 33 * ROW_WARPS * C];
    const int lane = threadIdx.x %% 32, warp = threadIdx.x / 32;
    const long long end = n - (long long)blockIdx.x * ROW_WARPS * ROWS;  // after the block's rows
    const long long last = end - 1 - warp * ROWS;  // row of the warp; may be before the first
    const Element* entries[ROWS];
    float total[ROWS][C] = {};
    for (int r = 0; r < ROWS; ++r) entries[r] = H + start(last - r < 0 ? 0 : last - r, stride);
    for (long long tile = 0; tile < end; tile += TILE) {
        const int length = end - tile < TILE ? (int)(end - tile) : TILE;
        __syncthreads();
        for (int i = threadIdx.x; i < length * C; i += 32 * ROW_WARPS)
            shared[i / C * PITCH + i %% C] = g[tile * C + i];
        __syncthreads();
        for (int part = 0; part < TILE; part += 32) {
            const long long col = tile + part + lane;
            float h[ROWS];
            for (int r = 0; r < ROWS; ++r)
                h[r] = col <= last - r ? value(entries[r][col]) : 0.0f;
            if (col < end) for (int c = 0; c < C; ++c) {
                const float w = shared[(part + lane) * PITCH + c];
                for (int r = 0; r < ROWS; ++r) total[r][c] += h[r] * w;
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        __syncthreads();
        for (int c = 0; c < C; ++c) shared[(warp * C + c) * 33 + lane] = total[r][c];
        __syncthreads();
        if (lane < C && last - r >= 0) {
            float sum = 0.0f;
            for (int i = 0; i < 32; ++i) sum += shared[(warp * C + lane) * 33 + i];
            out[(last - r) * C + lane] = scale * sum;
        }
    }
}

// out = scale H.T v, (n, C). A warp adds one of COLUMN_WARPS rows; the longest columns come first.
extern "C" __global__ void __launch_bounds__(32 * COLUMN_WARPS) multiply_t(
    const Element* __restrict__ H, long long stride, long long n,
    const float* __restrict__ v, float scale, float* __restrict__ out)
{
    __shared__ float shared[SUMMED][COLUMN_WARPS][32];
    const int lane = threadIdx.x %% 32, warp = threadIdx.x / 32;
    const long long first = (long long)blockIdx.x * 32 * WIDTH, col = first + lane;
    float total[WIDTH * C] = {};
    #pragma unroll 4
    for (long long row = first + warp; row < n; row += COLUMN_WARPS) {
        const Element* const entries = H + start(row, stride);
        float h[WIDTH];
        for (int w = 0; w < WIDTH; ++w)
            h[w] = col + 32 * w <= row ? value(entries[col + 32 * w]) : 0.0f;
        for (int c = 0; c < C; ++c) {
            const float x = v[row * C + c];
            for (int w = 0; w < WIDTH; ++w) total[w * C + c] += h[w] * x;
        }
    }
    #pragma unroll
    for (int result = 0; result < WIDTH * C; result += SUMMED) {
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < SUMMED; ++k)
            if (result + k < WIDTH * C) shared[k][warp][lane] = total[result + k];
        __syncthreads();
        const int mine = result + warp;  // of the first SUMMED warps
        const long long column = col + 32 * (mine / C);
        if (warp < SUMMED && mine < WIDTH * C && column < n) {
            float sum = 0.0f;
            for (int i = 0; i < COLUMN_WARPS; ++i) sum += shared[warp][i][lane];
            out[column * C + mine %% C] = scale * sum;
        }
    }
}
"""


def triangle_source(columns: int, *, half: bool, packed: bool, width: int) -> str:
    """Return the CUDA source for a number of columns of the other operand.

    half : whether H is float16.
    packed : whether row i has i + 1 entries, which follow those of row i - 1.
    width : columns of H of a thread in H.T v.
    """
    assert 1 <= columns <= MOST_COLUMNS
    return _SOURCE % {
        "element": "unsigned short" if half else "float", "columns": columns, "rows": ROWS,
        "width": width, "row_warps": ROW_WARPS, "column_warps": COLUMN_WARPS, "summed": SUMMED,
        "packed": packed,
    }  # fmt: skip


class Triangle:
    """A lower triangle H (n, n), float32 or float16, and its products with c columns.

    xp : the module `cupy`.
    packed : whether to copy H without its zeros, which halves its memory.
    """

    def __init__(self, xp: Any, H: Any, c: int, *, packed: bool = False) -> None:
        half, self._n = H.dtype == np.float16, len(H)
        assert H.strides[1] == H.itemsize
        source = triangle_source(c, half=half, packed=packed, width=1 + (self._n >= WIDE))
        pack, self._multiply, self._multiply_t = (
            xp.RawKernel(source, name) for name in ("pack", "multiply", "multiply_t")
        )
        self._columns_of_block = 32 * (1 + (self._n >= WIDE))
        entries = H.view(np.uint16) if half else H
        self._stride = H.strides[0] // H.itemsize
        self._entries = entries
        if packed:
            self._entries = xp.empty(self._n * (self._n + 1) // 2, entries.dtype)
            grid = min(self._n, 1 << 15), 1
            pack(grid, (256,), (entries, self._stride, self._n, self._entries))

    def __call__(self, B: Any, out: Any, *, transposed: bool = False, scale: float = 1.0) -> None:
        """Write scale H B to out, or scale H.T B. B, out : (n, c), contiguous, float32."""
        kernel, warps, rows = self._multiply, ROW_WARPS, ROW_WARPS * ROWS
        if transposed:
            kernel, warps, rows = self._multiply_t, COLUMN_WARPS, self._columns_of_block
        numbers = self._entries, self._stride, self._n
        kernel((-(-self._n // rows), 1), (32 * warps,), (*numbers, B, np.float32(scale), out))
