"""CUDA text, as functions of a kernel's expression; nothing here needs a device or CuPy.

`kernel_value` is the epilogue of a GEMM: an entry of K from a product of two points. The backend
wraps it in an element-wise kernel and leaves the sums K @ W to the library, which reads the tile
once more.
"""

from __future__ import annotations

from streamkern.backend.expression import render


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
