"""Row-major matrices on cuBLAS, which is column-major, without a copy.

To cuBLAS a row-major matrix is its transpose, and its lower triangle the upper one. CuPy's own
calls copy some layouts and have no product of half operands with a float32 result, so these
methods call cuBLAS directly. Any 2-d view with contiguous rows is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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
        left_transposed: bool = False,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        """Compute out <- alpha A @ B + beta out, with B.T if `transposed`, A.T if asked.

        A : (r, k), B : (k, c), out : (r, c), or their transposes, all float64, all float32, or
        float16 operands with a float32 result. A and B may also have contiguous columns. Sums are
        in the precision of the result, never in TF32, and in one order: the library's default
        algorithm for a shape.
        """
        (r, k), (inner, c) = A.shape, B.shape
        if left_transposed:
            r, k = k, r
        if transposed:
            inner, c = c, inner
        assert (r, c) == out.shape
        assert k == inner
        assert A.dtype == B.dtype
        if 0 in (r, c, k):
            if beta == 0:
                out[...] = 0
            return
        of_A, lda = self._layout(A, left_transposed)
        of_B, ldb = self._layout(B, transposed)
        dtype, kind = out.dtype, self._types[A.dtype]
        # out.T = B.T A.T, as cuBLAS sees the matrices.
        self._cublas.gemmEx(
            self._handle(), of_B, of_A, c, r, k, self._number(alpha, dtype), B.data.ptr, kind, ldb,
            A.data.ptr, kind, lda, self._number(beta, dtype), out.data.ptr, self._types[dtype],
            _rows_apart(out), self._compute[dtype], self._cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip

    def lower(
        self, A: Array, B: Array, out: Array, block: int, *, transposed: bool = False,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Compute out <- scale A @ B, or A.T @ B, for a lower triangular A, (b, b) in rows.

        The triangle is halved until its blocks have fewer than `block` rows: a launch for those on
        the diagonal, and one for all squares of a size below them. Of the zeros, only those within
        blocks of the diagonal are read.

        B : (b, c), may have contiguous columns. out : (b, c). Dtypes are as in `gemm`.
        """
        n, c = out.shape
        assert A.shape == (n, n)
        assert B.shape == (n, c)
        assert A.dtype == B.dtype
        if 0 in (n, c):
            return
        of_B, ldb = self._layout(B, False)
        lda, ldc, dtype = _rows_apart(A), _rows_apart(out), out.dtype
        item, size = A.itemsize, out.itemsize
        of_A = self._cublas.CUBLAS_OP_T if transposed else self._cublas.CUBLAS_OP_N
        parts = triangle_parts(n, block, lda, B.strides[0] // item, ldc, transposed)
        a, b, o = A.data.ptr, B.data.ptr, out.data.ptr
        kind, result, handle = self._types[A.dtype], self._types[dtype], self._handle()
        compute, algorithm = self._compute[dtype], self._cublas.CUBLAS_GEMM_DEFAULT
        number = self._number(scale, dtype)
        for r, k, (at_a, at_b, at_o), (apart_a, apart_b, apart_o), count, beta in parts:
            self._cublas.gemmStridedBatchedEx(
                handle, of_B, of_A, c, r, k, number, b + item * at_b, kind, ldb, apart_b,
                a + item * at_a, kind, lda, apart_a, self._number(beta, dtype),
                o + size * at_o, result, ldc, apart_o, count, compute, algorithm,
            )  # fmt: skip

    def _layout(self, A: Array, transposed: bool) -> tuple[int, int]:
        """Return cuBLAS's operation on A, or on its transpose, and the leading dimension."""
        by_rows = A.shape[1] == 1 or A.strides[1] == A.itemsize
        plain = self._cublas.CUBLAS_OP_N, self._cublas.CUBLAS_OP_T
        return plain[by_rows is transposed], _apart(A, by_rows)

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
        operation, apart = self._layout(W, False)
        update(
            self._handle(), cublas.CUBLAS_FILL_MODE_UPPER, operation, b, k,
            self._number(scale, C.dtype), W.data.ptr, apart,
            self._number(1.0, C.dtype), C.data.ptr, _rows_apart(C),
        )  # fmt: skip


Three = tuple[int, int, int]


@cache
def triangle_parts(
    n: int, block: int, rows_of_A: int, rows_of_B: int, rows_of_out: int, transposed: bool
) -> list[tuple[int, int, Three, Three, int, float]]:
    """Return the batches of products that `RowMajor.lower` is made of.

    Each is (r, k, at, apart, count, beta): products of (r, k) blocks of A, or of their transposes,
    whose first elements of A, B and the result are `at`, and `apart` from each other.

    rows_of_A, rows_of_B, rows_of_out : elements from one row to the next.
    """
    halvings = (n // block).bit_length()
    t = n >> halvings
    end = t << halvings
    parts = list[tuple[int, int, Three, Three, int, float]]()

    def add(r: int, k: int, row: int, column: int, step: int, count: int, beta: float) -> None:
        """Add blocks of A that begin at a row and a column, and every `step` of both."""
        from_B, to_out = (row, column) if transposed else (column, row)
        at = row * rows_of_A + column, from_B * rows_of_B, to_out * rows_of_out
        apart = step * (rows_of_A + 1), step * rows_of_B, step * rows_of_out
        parts.append((r, k, at, apart, count, beta))

    rest = n - end  # rows at the end
    if rest:
        add(*((n, rest) if transposed else (rest, n)), end, 0, 0, 1, 0.0)
    add(t, t, 0, 0, t, 1 << halvings, float(bool(rest) and transposed))
    for half in range(halvings):
        side = t << half
        add(side, side, side, 0, 2 * side, 1 << (halvings - half - 1), 1.0)
    return parts


def _rows_apart(A: Array) -> int:
    """Return the leading dimension: elements from one row to the next."""
    return _apart(A, True)


def _apart(A: Array, by_rows: bool) -> int:
    """Return the elements from one row, or one column, to the next; they must be contiguous."""
    (n, length), (outer, inner) = A.shape, A.strides
    if not by_rows:
        n, length, outer, inner = length, n, inner, outer
    assert length == 1 or inner == A.itemsize, "rows must be contiguous"
    apart = int(outer) // A.itemsize if n > 1 else int(length)
    assert length <= apart
    assert max(n, apart) <= MAX_INT32
    return apart
