"""Products, factors and eigenpairs of large matrices on a backend's threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from streamkern.backend import lapack
from streamkern.backend.assignments import Assignments
from streamkern.planning.memory import PRODUCT_TILE

Array = Any
"""An array of `backend.xp`: numpy.ndarray on the CPU, cupy.ndarray on a GPU."""


def tiles(n: int, size: int) -> list[slice]:
    """Return consecutive slices of at most `size` indices that cover range(n)."""
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


_T = TypeVar("_T")
SINGLE_THREAD_COLUMNS = 2048
"""Largest number of columns of a matrix that a single LAPACK call factors."""
ZEROED_ROWS = 64
"""Number of rows of a Cholesky factor whose upper part is set to zero at once."""
ABOVE_DIAGONAL = ~np.tri(ZEROED_ROWS, dtype=np.bool_)
MAX_VECTORS = 2
"""Largest number of columns that are solved one by one. The BLAS copies the triangle to solve for
several columns, and takes three to five times as long for the first one."""
INVERTED_COLUMNS = 64
"""Number of columns of the inverse of a small triangle that are solved at once."""


class DenseAlgebra(ABC):
    """Linear algebra of C-ordered arrays. The order of every sum depends on the shapes alone."""

    xp: Any
    """The array module, NumPy or CuPy."""
    chunk = PRODUCT_TILE
    """Number of rows, or rows and columns, of a result that one thread computes at once."""
    half_operand: npt.DTypeLike = np.float32
    """Dtype of the operand that is multiplied by a float16 matrix; its values fit in float16."""
    mirror_block = 256
    """Rows and columns of a block in `mirror_lower`."""
    _row_numbers: Array = ()
    """The numbers 0 to n - 1 on the device, for `one_hot`."""

    @abstractmethod
    def run(self, fn: Callable[[_T], None], items: Iterable[_T]) -> None:
        """Call `fn` on every item, in any order."""

    @abstractmethod
    def single_threaded_blas(self) -> AbstractContextManager[None]:
        """Limit BLAS calls to their own thread for a `with` block."""

    @abstractmethod
    def workspace(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike
    ) -> AbstractContextManager[Array]:
        """Lend a scratch array for a `with` block."""

    def assign(self, assignments: Assignments, **values: Any) -> None:
        """Run element-wise assignments. values : name -> array or number."""
        assignments.on_host(self.xp, self.workspace, *assignments.arguments(values))

    def one_hot(self, ids: Array, out: Array) -> None:
        """Set row i of `out` (m, c) to 1 in column ids[i], and to 0 elsewhere. ids : (m,)."""
        rows = self._row_numbers
        if len(rows) < len(ids):
            rows = self._row_numbers = self.xp.arange(len(ids))
        out[...] = 0
        out[rows[: len(ids)], ids] = 1

    def sum_squares(
        self, a: Array, out: Array, axis: int, scratch: Array, w: Array | None = None,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Write the sums of scale w a^2 over an axis to `out`, in its dtype.

        a : an array of two or three dimensions.
        scratch : an array of a's shape and dtype, overwritten; may be a itself.
        w : an array that broadcasts to the shape of a; None for 1.
        """
        self.xp.multiply(a, a, out=scratch)
        if w is not None:
            scratch *= w
        scratch.sum(axis=axis, dtype=out.dtype, out=out)
        if scale != 1:
            out *= scale

    def matmul(self, A: Array, B: Array, out: Array, *, lower: bool = False) -> Array:
        """Compute out = A @ B, with fixed chunks of rows on the threads, and return out.

        A : (m, k), of B's dtype, or float16 if B has `half_operand`.
        B : (k, c).
        lower : whether A is lower triangular; the zeros above its diagonal are then not read.
        """

        def multiply(rows: slice) -> None:
            end = rows.stop if lower else A.shape[1]
            with self._as_dtype(A[rows, :end], B.dtype) as part:
                self.xp.matmul(part, B[:end], out=out[rows])

        # In descending order of cost, so that threads finish at about the same time.
        self.run(multiply, tiles(len(A), self.chunk // 2 if lower else self.chunk)[::-1])
        return out

    def matmul_t(
        self, A: Array, B: Array, out: Array, *, lower: bool = False, scale: float = 1.0
    ) -> Array:
        """Compute out = scale * A.T @ B, with fixed chunks of A's columns on the threads.

        A : (k, m), of B's dtype, or float16 if B has `half_operand`.
        B : (k, c).
        lower : whether A is lower triangular; the zeros above its diagonal are then not read.
        """

        # (Bᵀ A)ᵀ reads the rows of A in memory order, which is faster than Aᵀ B for thin B.
        with self.workspace(B.shape[::-1], B.dtype) as Bt:
            Bt[...] = B.T

            def multiply(cols: slice) -> None:
                start = cols.start if lower else 0
                width = cols.stop - cols.start
                with (
                    self.workspace((len(Bt), width), B.dtype) as product,
                    self._as_dtype(A[start:, cols], B.dtype) as A_part,
                ):
                    np.matmul(Bt[:, start:], A_part, out=product)
                    out[cols] = product.T

            self.run(multiply, tiles(A.shape[1], self.chunk))
        if scale != 1:
            out *= scale
        return out

    def _as_dtype(self, A: Array, dtype: np.dtype[Any]) -> AbstractContextManager[Array]:
        """Return a context manager of A in this dtype; a copy is scratch memory."""
        return nullcontext(A) if A.dtype == dtype else self._lend_copy(A, dtype)

    @contextmanager
    def _lend_copy(self, A: Array, dtype: np.dtype[Any]) -> Iterator[Array]:
        with self.workspace(A.shape, dtype) as copy:
            copy[...] = A
            yield copy

    def accumulate(self, C: Array, A: Array, B: Array, scale: float = 1.0) -> None:
        """Add scale * A @ B to C, with fixed chunks of rows on the threads.

        C : (m, c).
        A : (m, k), of B's dtype: that of C, or `half_operand`.
        B : (k, c).
        """

        def add(rows: slice) -> None:
            with self.workspace((rows.stop - rows.start, C.shape[1]), C.dtype) as part:
                np.matmul(A[rows], B, out=part)
                if scale != 1:
                    part *= scale
                C[rows] += part

        self.run(add, tiles(len(C), self.chunk))

    def cholesky(self, A: Array, *, keep_upper: bool = False) -> bool:
        """Replace A by its lower Cholesky factor, with zeros above the diagonal.

        Return False, with A overwritten, if A is not positive definite.

        A : (b, b), C-ordered, symmetric; only its lower part is read. b^3/3 FLOPs.
        keep_upper : whether the entries above the squares on the diagonal, `diagonal_square(b)`
            wide, stay as they are; the entries above the diagonal of these squares are arbitrary.

        The method is left-looking by block columns, whose blocks are distributed over the threads.
        The threads of the BLAS itself wait for each other, and are slow for small matrices and if
        another process is busy.
        """
        blocks = tiles(len(A), self.diagonal_square(len(A)))
        with self.single_threaded_blas():
            for k in blocks:
                not_above = [i for i in blocks if i.start >= k.start]
                self.run(partial(self._subtract, A, k), not_above if k.start else [])
                if not lapack.potrf(A[k, k]):
                    return False
                self.run(partial(self._solve_right, A, k), not_above[1:])
        if not keep_upper:
            self._set_upper_to_zero(A)
        return bool(np.isfinite(A.diagonal()).all())

    @staticmethod
    def _set_upper_to_zero(A: Array) -> None:
        """Set the entries above the diagonal of A (b, b) to 0."""
        for rows in tiles(len(A), ZEROED_ROWS):
            A[rows, rows.stop :] = 0
            square = A[rows, rows]
            np.copyto(square, 0, where=ABOVE_DIAGONAL[: len(square), : len(square)])

    def diagonal_square(self, b: int) -> int:
        """Return the width of the diagonal squares by which `cholesky` factors a matrix (b, b)."""
        return self.chunk // 2 if b > SINGLE_THREAD_COLUMNS else SINGLE_THREAD_COLUMNS

    @staticmethod
    def _subtract(A: Array, k: slice, i: slice) -> None:
        """Subtract from A[i, k] the product of the factor's columns before k."""
        A[i, k] -= A[i, : k.start] @ A[k, : k.start].T

    @staticmethod
    def _solve_right(A: Array, k: slice, i: slice) -> None:
        """Solve for A[i, k], given the factor A[k, k]."""
        lapack.trsm(A[k, k], A[i, k], right=True)

    def solve_lower(self, L: Array, B: Array, transposed: bool = False) -> Array:
        """Compute B <- L^-1 B (or L^-T B) in place. L : (b, b) lower, B : (b, k), C-ordered."""
        if B.shape[1] <= MAX_VECTORS:
            for b in B.T:
                lapack.trsv(L, b, transposed=transposed)
        else:
            lapack.trsm(L, B, transposed=transposed)
        return B

    def solve_lower_triangular(self, L: Array, B: Array) -> Array:
        """Compute B <- L^-1 B in place for a lower triangular B, and return B.

        L, B : (b, b), C-ordered; the zeros above B's diagonal are not read.

        This is forward substitution by square blocks, whose columns are distributed over the
        threads. It takes b^3/3 FLOPs, a third of those of `solve_lower`.
        """
        blocks = tiles(len(L), self.chunk // 2)
        inverses = [self._invert(L[i, i], self.xp.zeros_like(L[i, i])) for i in blocks]

        def substitute(k: int) -> None:
            j = blocks[k]
            B[j, j] = inverses[k] @ B[j, j]
            for i, inverse in zip(blocks[k + 1 :], inverses[k + 1 :], strict=True):
                X = B[i, j]
                X -= L[i, j.start : i.start] @ B[j.start : i.start, j]
                X[...] = inverse @ X

        self.run(substitute, range(len(blocks)))
        return B

    def inverse_lower(self, L: Array) -> Array:
        """Return L^-1 of a lower triangular L, both (b, b), C-ordered.

        This is `solve_lower_triangular` for the identity, whose blocks need no products.
        """
        blocks, B = tiles(len(L), self.chunk // 2), self.xp.zeros(L.shape, L.dtype)
        for i in blocks:
            self._invert(L[i, i], B[i, i])

        def substitute(k: int) -> None:
            j = blocks[k]
            for i in blocks[k + 1 :]:
                X = self.xp.matmul(L[i, j.start : i.start], B[j.start : i.start, j], out=B[i, j])
                self.xp.negative(B[i, i] @ X, out=X)

        self.run(substitute, range(len(blocks)))
        return B

    def _invert(self, L: Array, out: Array) -> Array:
        """Write L^-1 to `out`, which must be zero, and return it, for L of few rows.

        L, out : (b, b), L lower triangular. A few columns are solved at once, and without the rows
        above their diagonal, which are zero.
        """
        for cols in tiles(len(L), INVERTED_COLUMNS):
            not_above, diagonal = slice(cols.start, None), self.xp.arange(cols.start, cols.stop)
            out[diagonal, diagonal] = 1
            self.solve_lower(L[not_above, not_above], out[not_above, cols])
        return out

    def solve_lower_right(self, L: Array, B: Array) -> Array:
        """Compute B <- B L^-T in place: rows of B (k, b) solved with L (b, b), both C-ordered."""
        lapack.trsm(L, B, right=True)
        return B

    def add_gram(self, C: Array, W: Array, scale: float, *, lower: bool = False) -> None:
        """Add scale * W.T @ W to the lower part of C, by tiles on the threads.

        C : (b, b); parts of its upper triangle are overwritten as well.
        W : (k, b). k b^2 FLOPs.
        lower : whether W is lower triangular; the zeros above its diagonal are then not read, which
            saves a third of the work.
        """

        def add(tile: tuple[slice, slice]) -> None:
            i, j = tile
            start = i.start if lower else 0
            with self.workspace((i.stop - i.start, j.stop - j.start), C.dtype) as part:
                np.matmul(W[start:, i].T, W[start:, j], out=part)
                if scale != 1:
                    part *= scale
                C[i, j] += part

        blocks = tiles(len(C), self.chunk)
        self.run(add, [(i, j) for i in blocks for j in blocks if j.start <= i.start])

    def mirror_lower(self, C: Array) -> None:
        """Copy the lower triangle of a square C onto the upper one, in place, in blocks."""
        for rows in tiles(len(C), self.mirror_block):
            for cols in tiles(rows.start, self.mirror_block):
                C[cols, rows] = C[rows, cols].T
            square = C[rows, rows]
            square[...] = self.xp.tril(square) + self.xp.tril(square, -1).T

    def top_eigh(self, A: Array, k: int) -> tuple[Array, Array]:
        """Return the k largest eigenpairs of a symmetric matrix, descending: (k,), (b, k)."""
        b = len(A)
        w, v = lapack.syevr(A, k)
        if len(w) < k:  # bisection may miss eigenvalues that are equal up to rounding
            w, v = (part[..., b - k :] for part in np.linalg.eigh(A))
        return w[::-1].copy(), v[:, ::-1]

    def add_unequal(self, A: Array, B: Array, weights: Sequence[float], out: Array) -> None:
        """Add to each entry of out the weights of the columns in which its two rows differ.

        A : (r, k), B : (t, k), weights : k numbers, out : (r, t).
        """
        with (
            self.workspace(out.shape, np.bool_) as is_unequal,
            self.workspace(out.shape, out.dtype) as term,
        ):
            for k, weight in enumerate(weights):
                self.xp.not_equal(A[:, k, None], B[:, k], out=is_unequal)
                term[...] = is_unequal
                term *= weight
                out += term

    def add_count_of_unequal(self, A: Array, B: Array, weight: float, out: Array) -> None:
        """Add to each entry of out the weight times the number of columns in which its rows differ.

        A : (r, k), B : (t, k), integers below 256 of any dtype, k at most 255, out : (r, t).
        """
        with (
            self.workspace(out.shape, np.bool_) as is_unequal,
            self.workspace(out.shape, np.uint8) as count,
            self.workspace(out.shape, out.dtype) as term,
        ):
            # Vector instructions compare more bytes than floats at once.
            At, Bt = (side.T.astype(np.uint8, order="C") for side in (A, B))
            count[...] = 0
            for a, b in zip(At, Bt, strict=True):
                self.xp.not_equal(a[:, None], b, out=is_unequal)
                count += is_unequal.view(np.uint8)
            term[...] = count
            term *= weight
            out += term
