"""Products, factors and eigenpairs of large matrices on a GPU, by cuBLAS and cuSOLVER."""

from __future__ import annotations

import numpy as np

from streamkern.backend.dense import Array, DenseAlgebra, tiles
from streamkern.backend.row_major import RowMajor

CHOLESKY_BLOCK = 4096
"""Number of columns that one call factors. cuSOLVER multiplies sizes as C ints, which could
overflow."""
TRIANGLE_BLOCK = 4096
"""Number of columns of a triangle that one call solves for or multiplies in setup."""
TRIANGLE_BYTES = 256_000_000
"""Bytes of the rows of an (n, n) triangle from which on `RowMajor.lower` halves a diagonal block.

Halving all diagonal blocks of s rows saves reading n s / 4 entries, and takes one more launch,
which takes the host 10 to 50 us. With this bound a halving saves at least 64 MB, which a GPU reads
in about 30 us. Counted in docs/explanation/block-measured.md, "Zeros of the factor".
"""


class DeviceAlgebra(DenseAlgebra):
    """Linear algebra of CuPy arrays. `DenseAlgebra` documents the methods."""

    blas: RowMajor
    half_operand = np.float16

    def matmul(self, A: Array, B: Array, out: Array, *, lower: bool = False) -> Array:
        """Compute out = A @ B by one GEMM; for a triangle, by a few, see `RowMajor.lower`."""
        if lower:
            self.blas.lower(A, B, out, _block_rows(A))
        else:
            self.blas.gemm(A, B, out)
        return out

    def matmul_t(
        self, A: Array, B: Array, out: Array, *, lower: bool = False, scale: float = 1.0
    ) -> Array:
        """Compute out = scale * A.T @ B as `matmul` does."""
        if lower:
            self.blas.lower(A, B, out, _block_rows(A), transposed=True, scale=scale)
        else:
            self.blas.gemm(A, B, out, left_transposed=True, alpha=scale)
        return out

    def accumulate(self, C: Array, A: Array, B: Array, scale: float = 1.0) -> None:
        """Add scale * A @ B to C by one GEMM."""
        self.blas.gemm(A, B, C, alpha=scale, beta=1)

    def cholesky(self, A: Array, *, keep_upper: bool = False) -> bool:
        """Factor A as on the CPU, by blocks of columns, and wait for the device after each."""
        n = len(A)
        for k in tiles(n, CHOLESKY_BLOCK):
            if not self._factor(A[k, k]):
                return False
            if not keep_upper:
                A[k, k.stop :] = 0
            self.blas.solve_lower(A[k, k], A[k.stop :, k], right=True)
            for part in tiles(n - k.stop, CHOLESKY_BLOCK):
                i = slice(k.stop + part.start, k.stop + part.stop)
                j = slice(k.stop, i.stop)  # only the lower part of the rest
                self.blas.gemm(A[i, k], A[j, k], A[i, j], transposed=True, alpha=-1, beta=1)
        return bool(self.xp.isfinite(A.diagonal()).all())

    def diagonal_square(self, b: int) -> int:
        """Return the width as on the CPU."""
        return CHOLESKY_BLOCK

    def _factor(self, A: Array) -> bool:
        """Replace a square view by its lower Cholesky factor, by cuSOLVER.

        Return False if it is not positive definite.
        """
        xp, library = self.xp, self.xp.cuda.cusolver
        is_single, n = A.dtype == np.float32, len(A)
        buffer_size = library.spotrf_bufferSize if is_single else library.dpotrf_bufferSize
        factor = library.spotrf if is_single else library.dpotrf
        handle = xp.cuda.device.get_cusolver_handle()
        # The lower part of a row-major matrix is the upper one of its transpose.
        matrix = (handle, xp.cuda.cublas.CUBLAS_FILL_MODE_UPPER, n, A.data.ptr,
                  int(A.strides[0]) // A.itemsize)  # fmt: skip
        size, info = buffer_size(*matrix), xp.empty(1, np.int32)
        work = xp.empty(max(1, size), A.dtype)
        factor(*matrix, work.data.ptr, size, info.data.ptr)
        A[...] = xp.tril(A)
        return int(info[0]) == 0

    def solve_lower(self, L: Array, B: Array, transposed: bool = False) -> Array:
        """Solve as on the CPU."""
        self.blas.solve_lower(L, B, transposed=transposed)
        return B

    def solve_lower_triangular(self, L: Array, B: Array) -> Array:
        """Solve as on the CPU, with one triangular solve for each block of columns."""
        for cols in tiles(len(B), TRIANGLE_BLOCK):
            self.blas.solve_lower(L[cols.start :, cols.start :], B[cols.start :, cols])
        return B

    def inverse_lower(self, L: Array) -> Array:
        """Return L^-1 as on the CPU."""
        return self.solve_lower_triangular(L, self.xp.eye(len(L), dtype=L.dtype))

    def solve_lower_right(self, L: Array, B: Array) -> Array:
        """Solve as on the CPU."""
        self.blas.solve_lower(L, B, right=True)
        return B

    def add_gram(self, C: Array, W: Array, scale: float, *, lower: bool = False) -> None:
        """Add as on the CPU; for a triangle, one GEMM for every `TRIANGLE_BLOCK` rows of C."""
        if not lower:
            return self.blas.add_gram(C, W, scale)
        for i in tiles(len(C), TRIANGLE_BLOCK):
            left, right = W[i.start :, i].T, W[i.start :, : i.stop]
            self.blas.gemm(left, right, C[i, : i.stop], alpha=scale, beta=1)

    def top_eigh(self, A: Array, k: int) -> tuple[Array, Array]:
        """Return eigenpairs as on the CPU; cuSOLVER computes all of them."""
        w, v = self.xp.linalg.eigh(A)
        return w[::-1][:k].copy(), v[:, ::-1][:, :k]


def _block_rows(A: Array) -> int:
    """Return the bound of the rows of a diagonal block in products with a triangle (n, n)."""
    row_bytes = int(A.shape[1] * A.itemsize)
    return max(2, TRIANGLE_BYTES // max(1, row_bytes))
