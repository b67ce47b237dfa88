"""CUDA source text; nothing here needs a device or CuPy.

`kernel_value` is the epilogue of a GEMM: an entry of K from a product of two points. The backend
wraps it in an element-wise kernel and leaves the sums K @ W to the library, which reads the tile
once more. `WORDS` and `NORMALS` are bodies of element-wise kernels over the counters of
`basics.randomness`, with `DRAWS_CUDA` before them: one call instead of some ninety of NumPy's kind.
"""

from __future__ import annotations

from streamkern.backend.expression import render


def kernel_value(expression: str) -> str:
    """Return CUDA text of `T kernel_value(p, x, z, scale)`: product, norms of row and column.

    T is float or double. NaN is kept; max() would turn it into a distance of zero.
    """
    return (
        "template <typename T>\n"
        "__device__ T kernel_value(T p, T x, T z, T scale) {\n"
        "    T s = (x + z - (T)2 * p) * scale;\n"
        "    s = s < (T)0 ? (T)0 : s;\n"
        f"    return {render(expression, '(T){}')};\n"
        "}\n"
    )


DRAWS_CUDA = """
struct Words { unsigned int c0, c1, c2, c3; };

__device__ Words philox(long long row, long long block, unsigned int k0, unsigned int k1) {
    unsigned long long bits = (unsigned long long)row;
    Words w = {(unsigned int)bits, (unsigned int)(bits >> 32), (unsigned int)block, 0u};
    for (int r = 0; r < 10; ++r) {
        unsigned long long p0 = 0xD2511F53ull * w.c0, p1 = 0xCD9E8D57ull * w.c2;
        Words next = {(unsigned int)(p1 >> 32) ^ w.c1 ^ k0, (unsigned int)p1,
                      (unsigned int)(p0 >> 32) ^ w.c3 ^ k1, (unsigned int)p0};
        w = next;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return w;
}

__device__ float normal_radius(unsigned int bits) {
    return sqrtf(-2.0f * logf((float)((bits >> 8) + 1u) * 5.9604644775390625e-8f));
}

__device__ float half_turns(unsigned int bits) {
    return (float)(bits >> 8) * 1.1920928955078125e-7f;
}
"""
"""Philox4x32-10 and the halves of Box and Muller's pair, as in `RowRandom.normal`."""

WORDS = """
Words w = philox(rows[i / n_blocks], first + i % n_blocks, k0, k1);
out[4 * i] = w.c0; out[4 * i + 1] = w.c1; out[4 * i + 2] = w.c2; out[4 * i + 3] = w.c3;
"""
NORMALS = """
Words w = philox(rows[i / n_blocks], first + i % n_blocks, k0, k1);
float r0 = normal_radius(w.c0), a0 = half_turns(w.c1);
float r1 = normal_radius(w.c2), a1 = half_turns(w.c3);
out[4 * i] = r0 * cospif(a0); out[4 * i + 1] = r0 * sinpif(a0);
out[4 * i + 2] = r1 * cospif(a1); out[4 * i + 3] = r1 * sinpif(a1);
"""
"""Bodies for counter i; rows, k0, k1, first and n_blocks as for `basics.randomness.Fills`."""
