"""CUDA text, as functions of a kernel's expression; nothing here needs a device or CuPy.

`kernel_value` is the epilogue of a GEMM: an entry of K from a product of two points. The primary
path wraps it in an element-wise kernel and leaves the sums K @ W to the library, which reads the
tile once more. `half_fused` takes them in the same pass, for few outputs: the tile is read once
and written only where it is kept.
"""

from __future__ import annotations

from streamkern.backend.expression import render

MAX_OUTPUTS = 16
"""Of `half_fused`, whose sums are in registers."""
WARPS = 4
"""In a block of `half_fused`."""
SPLIT = 4096
"""Columns whose share of the sums one warp takes: the order of the additions depends on it."""


def kernel_value(expression: str) -> str:
    """`T kernel_value(p, x, z, scale)`, T float or double: product, norms of row and column.

    NaN is kept, which max() would turn into a distance of zero.
    """
    return (
        "template <typename T>\n"
        "__device__ T kernel_value(T p, T x, T z, T scale) {\n"
        "    T s = (x + z - (T)2 * p) * scale;\n"
        "    s = s < (T)0 ? (T)0 : s;\n"
        f"    return {render(expression, '(T){}')};\n"
        "}\n"
    )


def rows_per_warp(c: int) -> int:
    """Rows of K that a warp has in flight; rows * c sums have to fit its registers."""
    return min(8, 48 // c)


def half_fused(expression: str, c: int) -> str:
    """Two kernels for out += K @ W with c outputs: `half_fused`, then `add_shares`.

    A warp owns `rows_per_warp(c)` rows of the tile and `SPLIT` columns, lane l taking the columns
    l, l + 32, ... of them; its sums meet in a fixed tree. Shares of the splits are added in order
    by the second kernel, so every bit of the result is the same in every run.
    """
    constants = f"#define C {c}\n#define ROWS {rows_per_warp(c)}\n#define SPLIT {SPLIT}\n"
    return constants + kernel_value(expression) + _HALF_FUSED


# tile : (rows, cols) products, K on return if `keep`. Wt : (C, cols). shares : (splits, rows, C).
# Grid: x over groups of rows, a warp each; y over splits of the columns.
_HALF_FUSED = r"""
extern "C" __global__ void half_fused(
    float* tile, const float* row_norms, const float* col_norms, float scale,
    const float* Wt, float* shares, int rows, int cols, long long stride, int keep)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = (blockIdx.x * (blockDim.x / 32) + warp) * ROWS;
    if (first >= rows) return;  // the whole warp
    const int start = blockIdx.y * SPLIT;
    const int stop = cols - start < SPLIT ? cols : start + SPLIT;
    float sums[ROWS][C] = {}, norms[ROWS];
    long long begin[ROWS];
    for (int r = 0; r < ROWS; ++r) {  // past the end: the last row again, never written
        const int row = first + r < rows ? first + r : rows - 1;
        norms[r] = row_norms[row];
        begin[r] = row * stride;
    }
    for (int j = start + lane; j < stop; j += 32) {
        float k[ROWS], w[C];
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) k[r] = tile[begin[r] + j];
        #pragma unroll
        for (int c = 0; c < C; ++c) w[c] = Wt[(long long)c * cols + j];
        const float norm = col_norms[j];
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            k[r] = kernel_value(k[r], norms[r], norm, scale);
            #pragma unroll
            for (int c = 0; c < C; ++c) sums[r][c] += k[r] * w[c];
        }
        if (keep)
            #pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (first + r < rows) tile[begin[r] + j] = k[r];
    }
    #pragma unroll
    for (int r = 0; r < ROWS; ++r)
        #pragma unroll
        for (int c = 0; c < C; ++c) {
            float sum = sums[r][c];
            for (int step = 16; step > 0; step /= 2)
                sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (lane == 0 && first + r < rows)
                shares[((long long)blockIdx.y * rows + first + r) * C + c] = sum;
        }
}

extern "C" __global__ void add_shares(const float* shares, float* out, long long n, int splits)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0;
    for (int s = 0; s < splits; ++s) sum += shares[s * n + i];
    out[i] += sum;
}
"""
