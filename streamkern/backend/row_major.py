"""Row-major matrices on cuBLAS, which is column-major, without a copy.

To cuBLAS a row-major matrix is its transpose, and its lower triangle the upper one. CuPy's own
calls copy some layouts and have no product of half operands with a float32 result, so these
methods call cuBLAS directly. Any 2-d view with contiguous rows is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from streamkern.backend.base import Array

MAX_INT32 = 2**31 - 1
"""Largest of the sizes, which cuBLAS takes as C integers; their products may be larger."""


class RowMajor:
    """Products and triangular solves in place.

    Parameters
    ----------
    cublas : module of bindings as CuPy's `cupy.cuda.cublas`; each call goes to the current stream.
    types : cudaDataType of a dtype.
    handle : returns the current handle.
    """

    def __init__(
        self, cublas: Any, types: dict[np.dtype[Any], int], handle: Callable[[], int]
    ) -> None:
        self._cublas, self._types, self._handle = cublas, types, handle
        self._compute = {
            np.dtype(np.float32): cublas.CUBLAS_COMPUTE_32F,
            np.dtype(np.float64): cublas.CUBLAS_COMPUTE_64F,
        }
        self._numbers: dict[tuple[float, np.dtype[Any]], tuple[Array, int]] = {}

    def _number(self, x: float, dtype: np.dtype[Any]) -> int:
        """Return the address of a number on the host, which cuBLAS reads during a call.

        The few numbers of a run are kept: to make two took a third of a call's time.
        """
        found = self._numbers.get((x, dtype))
        if found is None:
            number = np.array(x, dtype)
            found = self._numbers.setdefault((x, dtype), (number, number.ctypes.data))
        return found[1]

    def gemm(
        self,
        A: Array,
        B: Array,
        out: Array,
        *,
        transposed: bool = False,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        """Compute out <- alpha A @ B + beta out, with B.T if `transposed`.

        A : (r, k), B : (k, c), or (c, k) if transposed, out : (r, c), all float64, all float32, or
        float16 operands with a float32 result. A and B may also have contiguous columns. Sums are
        in the precision of the result, never in TF32, and in one order: the library's default
        algorithm for a shape.
        """
        if transposed:
            B = B.T
        (r, k), c, cublas = A.shape, out.shape[1], self._cublas
        assert out.shape == (r, c)
        assert B.shape == (k, c)
        assert A.dtype == B.dtype
        if 0 in (r, c, k):
            if beta == 0:
                out[...] = 0
            return
        (of_A, A), (of_B, B) = self._oriented(A), self._oriented(B)
        # out.T = B.T A.T, as cuBLAS sees the matrices.
        cublas.gemmEx(
            self._handle(), of_B, of_A, c, r, k,
            self._number(alpha, out.dtype), B.data.ptr, self._types[B.dtype], _rows_apart(B),
            A.data.ptr, self._types[A.dtype], _rows_apart(A),
            self._number(beta, out.dtype), out.data.ptr, self._types[out.dtype], _rows_apart(out),
            self._compute[out.dtype], cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip

    def _oriented(self, A: Array) -> tuple[int, Array]:
        """Return the cuBLAS operation, and the matrix with contiguous rows to apply it to."""
        if A.shape[1] == 1 or A.strides[1] == A.itemsize:
            return self._cublas.CUBLAS_OP_N, A
        return self._cublas.CUBLAS_OP_T, A.T

    def solve_lower(
        self, L: Array, B: Array, *, transposed: bool = False, right: bool = False
    ) -> None:
        """Compute B <- L^-1 B or L^-T B in place or, from the right, B L^-T. L : (b, b) lower."""
        cublas, b = self._cublas, len(L)
        assert L.shape == (b, b) == (b, B.shape[1] if right else len(B))
        if B.size == 0:
            return
        solve = cublas.strsm if B.dtype == np.float32 else cublas.dtrsm
        solve(
            self._handle(),
            cublas.CUBLAS_SIDE_LEFT if right else cublas.CUBLAS_SIDE_RIGHT,
            cublas.CUBLAS_FILL_MODE_UPPER,
            cublas.CUBLAS_OP_T if transposed or right else cublas.CUBLAS_OP_N,
            cublas.CUBLAS_DIAG_NON_UNIT,
            B.shape[1], len(B), self._number(1.0, B.dtype), L.data.ptr, _rows_apart(L),
            B.data.ptr, _rows_apart(B),
        )  # fmt: skip

    def add_gram(self, C: Array, W: Array, scale: float) -> None:
        """Add to the lower part of C: C += scale W.T @ W. C : (b, b), W : (k, b)."""
        cublas, (k, b) = self._cublas, W.shape
        assert C.shape == (b, b)
        if k == 0:
            return
        update = cublas.ssyrk if C.dtype == np.float32 else cublas.dsyrk
        update(
            self._handle(), cublas.CUBLAS_FILL_MODE_UPPER, cublas.CUBLAS_OP_N, b, k,
            self._number(scale, C.dtype), W.data.ptr, _rows_apart(W),
            self._number(1.0, C.dtype), C.data.ptr, _rows_apart(C),
        )  # fmt: skip


def _rows_apart(A: Array) -> int:
    """Return the leading dimension: elements from one row to the next."""
    columns = int(A.shape[1])
    assert columns == 1 or A.strides[1] == A.itemsize, "rows must be contiguous"
    row_length = int(A.strides[0]) // A.itemsize if len(A) > 1 else columns
    assert columns <= row_length
    assert max(len(A), row_length) <= MAX_INT32
    return row_length
