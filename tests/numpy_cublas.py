"""cuBLAS as its manual describes it, in NumPy: column-major matrices behind pointers.

An array for it has the attribute of CuPy's that gives its address.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.linalg

CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
CUBLAS_FILL_MODE_LOWER, CUBLAS_FILL_MODE_UPPER = 0, 1
CUBLAS_SIDE_LEFT, CUBLAS_SIDE_RIGHT = 0, 1
CUBLAS_DIAG_NON_UNIT, CUBLAS_GEMM_DEFAULT = 0, -1
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F = 68, 70
TYPES = {np.dtype(np.float16): 2, np.dtype(np.float32): 0, np.dtype(np.float64): 1}
HANDLE = 7


class Addressed(np.ndarray):
    """A NumPy array with `data.ptr`."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def addressed(a: Any) -> Any:
    """Return the same memory with `data.ptr`."""
    return a.view(Addressed)


def _matrix(pointer: int, dtype: Any, rows: int, columns: int, leading: int) -> np.ndarray:
    """Return a view of a column-major matrix."""
    dtype = np.dtype(dtype)
    assert leading >= max(1, rows)
    size = (leading * (columns - 1) + rows) * dtype.itemsize
    buffer = (ctypes.c_byte * size).from_address(pointer)
    strides = (dtype.itemsize, leading * dtype.itemsize)
    return np.ndarray((rows, columns), dtype, buffer, strides=strides)


def _scalar(pointer: int, dtype: Any) -> Any:
    return _matrix(pointer, dtype, 1, 1, 1)[0, 0]


def getVersion(handle: int) -> int:
    """Return some version."""
    assert handle == HANDLE
    return 130000


def gemmEx(
    handle: int, transa: int, transb: int, m: int, n: int, k: int,
    alpha: int, A: int, Atype: int, lda: int, B: int, Btype: int, ldb: int,
    beta: int, C: int, Ctype: int, ldc: int, computeType: int, algo: int,
) -> None:  # fmt: skip
    """Compute C (m, n) <- alpha op(A) op(B) + beta C; C is not read if beta is 0."""
    dtypes = {number: dtype for dtype, number in TYPES.items()}
    compute = {CUBLAS_COMPUTE_32F: np.float32, CUBLAS_COMPUTE_64F: np.float64}[computeType]
    assert (handle, algo) == (HANDLE, CUBLAS_GEMM_DEFAULT)
    assert Atype == Btype
    a = _matrix(A, dtypes[Atype], *((k, m) if transa else (m, k)), lda).astype(compute)
    b = _matrix(B, dtypes[Btype], *((n, k) if transb else (k, n)), ldb).astype(compute)
    c = _matrix(C, dtypes[Ctype], m, n, ldc)
    product = _scalar(alpha, compute) * ((a.T if transa else a) @ (b.T if transb else b))
    factor = _scalar(beta, compute)
    c[...] = product + factor * c if factor else product


_gemm = gemmEx


def gemmStridedBatchedEx(
    handle: int, transa: int, transb: int, m: int, n: int, k: int,
    alpha: int, A: int, Atype: int, lda: int, strideA: int,
    B: int, Btype: int, ldb: int, strideB: int,
    beta: int, C: int, Ctype: int, ldc: int, strideC: int, batchCount: int, computeType: int,
    algo: int,
) -> None:  # fmt: skip
    """Compute `gemmEx` for each product of a batch. strideA, strideB, strideC : elements from one
    matrix to the next."""
    size = {number: dtype.itemsize for dtype, number in TYPES.items()}
    for i in range(batchCount):
        _gemm(
            handle, transa, transb, m, n, k, alpha, A + i * strideA * size[Atype], Atype, lda,
            B + i * strideB * size[Btype], Btype, ldb, beta, C + i * strideC * size[Ctype], Ctype,
            ldc, computeType, algo,
        )  # fmt: skip


def _trsm(dtype: Any) -> Any:
    def trsm(
        handle: int, side: int, uplo: int, trans: int, diag: int, m: int, n: int,
        alpha: int, A: int, lda: int, B: int, ldb: int,
    ) -> None:  # fmt: skip
        """Compute B (m, n) <- alpha op(A)^-1 B, or alpha B op(A)^-1."""
        assert (handle, diag) == (HANDLE, CUBLAS_DIAG_NON_UNIT)
        right = side == CUBLAS_SIDE_RIGHT
        a, b = _matrix(A, dtype, *[n if right else m] * 2, lda), _matrix(B, dtype, m, n, ldb)
        lower = uplo == CUBLAS_FILL_MODE_LOWER
        target = _scalar(alpha, dtype) * b
        if right:  # B op(A)^-1 = (op(A)^-T B^T)^T
            b[...] = scipy.linalg.solve_triangular(a, target.T, trans=1 - trans, lower=lower).T
        else:
            b[...] = scipy.linalg.solve_triangular(a, target, trans=trans, lower=lower)

    return trsm


def _syrk(dtype: Any) -> Any:
    def syrk(
        handle: int, uplo: int, trans: int, n: int, k: int,
        alpha: int, A: int, lda: int, beta: int, C: int, ldc: int,
    ) -> None:  # fmt: skip
        """Compute one triangle of C (n, n) <- alpha op(A) op(A)^T + beta C."""
        assert handle == HANDLE
        a = _matrix(A, dtype, *((k, n) if trans else (n, k)), lda)
        a = a.T if trans else a
        c = _matrix(C, dtype, n, n, ldc)
        result = _scalar(alpha, dtype) * (a @ a.T) + _scalar(beta, dtype) * c
        triangle = np.tril_indices(n) if uplo == CUBLAS_FILL_MODE_LOWER else np.triu_indices(n)
        c[triangle] = result[triangle]

    return syrk


strsm, dtrsm = _trsm(np.float32), _trsm(np.float64)
ssyrk, dsyrk = _syrk(np.float32), _syrk(np.float64)
