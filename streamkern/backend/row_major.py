"""Calls of cuBLAS, which is column-major, on row-major matrices without a copy.

For cuBLAS a row-major matrix is its transpose, and a lower triangle is an upper one. CuPy's
functions copy some layouts, and cannot multiply float16 operands to a float32 result, so these
methods call cuBLAS directly. They accept any 2-d view with contiguous rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array

MAX_INT32 = 2**31 - 1
"""Largest dimension or stride: cuBLAS takes C ints. Their products may be larger."""


class RowMajor:
    """Matrix products and triangular solves of row-major matrices, on the current stream.

    Parameters
    ----------
    cublas : bindings to cuBLAS, a module like CuPy's `cupy.cuda.cublas`.
    types : cudaDataType of each dtype.
    handle : returns the current cuBLAS handle.
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
        """Return the host address of a scalar, which cuBLAS reads during a call.

        The scalars are cached, because allocating them takes a large part of a call's time.
        """
        cached = self._numbers.get((x, dtype))
        if cached is None:
            number = np.array(x, dtype)
            cached = self._numbers.setdefault((x, dtype), (number, number.ctypes.data))
        return cached[1]

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
        """Compute out <- alpha A @ B + beta out.

        `transposed` takes B.T instead of B, and `left_transposed` A.T instead of A.

        A : (r, k), or (k, r) if `left_transposed`. Its rows or its columns are contiguous.
        B : (k, c), or (c, k) if `transposed`. Its rows or its columns are contiguous.
        out : (r, c), with contiguous rows. beta = 0 ignores its values.

        All three are float64, or all are float32, or A and B are float16 and out is float32. Sums
        are in the precision of out, never in TF32, and in the order of cuBLAS's default algorithm
        for the shape.
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
        dtype, cuda_type = out.dtype, self._types[A.dtype]
        # cuBLAS sees the transposes of all matrices, and out.T = B.T A.T.
        self._cublas.gemmEx(
            self._handle(), of_B, of_A, c, r, k, self._number(alpha, dtype),
            B.data.ptr, cuda_type, ldb, A.data.ptr, cuda_type, lda,
            self._number(beta, dtype), out.data.ptr, self._types[dtype],
            _leading_dimension(out), self._compute[dtype], self._cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip

    def lower(
        self, A: Array, B: Array, out: Array, block: int, *, transposed: bool = False,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Compute out <- scale A @ B for a lower triangular A; scale A.T @ B if `transposed`.

        The triangle is halved until the blocks on its diagonal have fewer than `block` rows. One
        batched product multiplies all of these, and one batched product multiplies all squares of
        each size below the diagonal. Of the zeros, only those within diagonal blocks are read.

        A : (b, b), with contiguous rows and zeros above the diagonal.
        B : (b, c), with contiguous rows or columns.
        out : (b, c), with contiguous rows; its values are overwritten.
        block : upper bound of the rows of a block on the diagonal.

        Dtypes are as in `gemm`.
        """
        n, c = out.shape
        assert A.shape == (n, n)
        assert B.shape == (n, c)
        assert A.dtype == B.dtype
        if 0 in (n, c):
            return
        of_B, ldb = self._layout(B, False)
        lda = _leading_dimension(A)
        ldc = _leading_dimension(out)
        dtype = out.dtype
        item, out_item = A.itemsize, out.itemsize
        of_A = self._cublas.CUBLAS_OP_T if transposed else self._cublas.CUBLAS_OP_N
        products = triangle_parts(n, block, lda, B.strides[0] // item, ldc, transposed)
        kind = self._types[A.dtype]
        out_kind = self._types[dtype]
        handle = self._handle()
        compute, algorithm = self._compute[dtype], self._cublas.CUBLAS_GEMM_DEFAULT
        alpha = self._number(scale, dtype)
        for part in products:
            self._cublas.gemmStridedBatchedEx(
                handle, of_B, of_A, c, part.r, part.k, alpha,
                B.data.ptr + item * part.first.B, kind, ldb, part.stride.B,
                A.data.ptr + item * part.first.A, kind, lda, part.stride.A,
                self._number(part.beta, dtype),
                out.data.ptr + out_item * part.first.out, out_kind, ldc, part.stride.out,
                part.n_products, compute, algorithm,
            )  # fmt: skip

    def _layout(self, A: Array, transposed: bool) -> tuple[int, int]:
        """Return cuBLAS's operation for A, or for A.T if `transposed`, and the leading dimension.

        A : 2-d, with contiguous rows or contiguous columns.
        """
        by_rows = A.shape[1] == 1 or A.strides[1] == A.itemsize
        operations = self._cublas.CUBLAS_OP_N, self._cublas.CUBLAS_OP_T
        return operations[by_rows is transposed], _leading_dimension(A, by_rows)

    def solve_lower(
        self, L: Array, B: Array, *, transposed: bool = False, right: bool = False
    ) -> None:
        """Solve for B in place: B <- L^-1 B; L^-T B if `transposed`; B L^-T if `right`.

        L : (b, b) lower triangular; its upper part is not read.
        B : (b, k), or (k, b) if `right`, of L's dtype: float32 or float64.
        """
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
            B.shape[1], len(B), self._number(1.0, B.dtype), L.data.ptr, _leading_dimension(L),
            B.data.ptr, _leading_dimension(B),
        )  # fmt: skip

    def add_gram(self, C: Array, W: Array, scale: float) -> None:
        """Add scale W.T @ W to the lower triangle of C; the upper part is not touched.

        C : (b, b), float32 or float64.
        W : (k, b), of C's dtype, with contiguous rows or columns.
        """
        cublas, (k, b) = self._cublas, W.shape
        assert C.shape == (b, b)
        if k == 0:
            return
        update = cublas.ssyrk if C.dtype == np.float32 else cublas.dsyrk
        operation, ldw = self._layout(W, False)
        update(
            self._handle(), cublas.CUBLAS_FILL_MODE_UPPER, operation, b, k,
            self._number(scale, C.dtype), W.data.ptr, ldw,
            self._number(1.0, C.dtype), C.data.ptr, _leading_dimension(C),
        )  # fmt: skip


class Elements(NamedTuple):
    """A number of elements for each of the three matrices of a product."""

    A: int
    B: int
    out: int


class BatchedProduct(NamedTuple):
    """Products of blocks (r, k) of A, or of transposes of such blocks, in one call.

    r, k : size of the products' left operands.
    first : offset of the first block in each matrix, in elements.
    stride : distance from one block to the next in each matrix, in elements.
    n_products : number of products.
    beta : 1.0 adds to the result, 0.0 overwrites it.
    """

    r: int
    k: int
    first: Elements
    stride: Elements
    n_products: int
    beta: float


@cache
def triangle_parts(
    n: int, block: int, rows_of_A: int, rows_of_B: int, rows_of_out: int, transposed: bool
) -> list[BatchedProduct]:
    """Return the batched products that compute `RowMajor.lower`, in order.

    n : rows of the triangle.
    block : upper bound of the rows of a block on the diagonal.
    rows_of_A, rows_of_B, rows_of_out : elements from one row to the next.
    transposed : whether the left operand is A.T.
    """
    halvings = (n // block).bit_length()
    side = n >> halvings  # rows of a block on the diagonal
    end = side << halvings  # rows of all these blocks
    products = list[BatchedProduct]()

    def add(r: int, k: int, row: int, column: int, step: int, count: int, beta: float) -> None:
        """Append the products of `count` blocks (r, k) of A.

        The first block begins at `row` and `column`, and each next one `step` further in both.
        """
        row_of_B, row_of_out = (row, column) if transposed else (column, row)
        first = Elements(row * rows_of_A + column, row_of_B * rows_of_B, row_of_out * rows_of_out)
        stride = Elements(step * (rows_of_A + 1), step * rows_of_B, step * rows_of_out)
        products.append(BatchedProduct(r, k, first, stride, count, beta))

    n_below = n - end  # rows below the last block on the diagonal
    if n_below:
        r, k = (n, n_below) if transposed else (n_below, n)
        add(r, k, row=end, column=0, step=0, count=1, beta=0.0)
    # The transposed product of the rows below wrote the whole result; these products add to it.
    beta = 1.0 if n_below and transposed else 0.0
    add(side, side, row=0, column=0, step=side, count=1 << halvings, beta=beta)
    for level in range(halvings):
        size = side << level
        count = 1 << (halvings - level - 1)
        add(size, size, row=size, column=0, step=2 * size, count=count, beta=1.0)
    return products


def _leading_dimension(A: Array, by_rows: bool = True) -> int:
    """Return the elements from one row to the next, or else from one column to the next.

    by_rows : whether the rows are contiguous; otherwise the columns must be.
    """
    (n, length), (outer, inner) = A.shape, A.strides
    if not by_rows:
        n, length, outer, inner = length, n, inner, outer
    assert length == 1 or inner == A.itemsize, "rows must be contiguous"
    stride = int(outer) // A.itemsize if n > 1 else int(length)
    assert length <= stride
    assert max(n, stride) <= MAX_INT32
    return stride
