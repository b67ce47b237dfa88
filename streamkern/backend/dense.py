"""Products, factors and eigenpairs of large matrices, in chunks over the threads of a backend."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from streamkern.backend import lapack
from streamkern.backend.assignments import Assignments
from streamkern.planning.memory import PRODUCT_TILE

Array = Any
"""An array of `backend.xp`: numpy.ndarray on the CPU, cupy.ndarray on a GPU."""


def tiles(n: int, size: int) -> list[slice]:
    """Consecutive slices of at most `size` that cover range(n)."""
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


_T = TypeVar("_T")
MOST_VIEWS = 64
"""Arrays of a piece of scratch memory that are kept."""
SINGLE_THREAD_COLUMNS = 2048
"""Largest number of columns of a matrix that one thread factors alone."""
ZEROED_ROWS = 64
"""Rows of a factor whose upper part is zeroed at once."""
ABOVE_DIAGONAL = ~np.tri(ZEROED_ROWS, dtype=np.bool_)
INVERTED_COLUMNS = 64
"""Columns of the inverse of a small triangle that are solved at once."""


class DenseAlgebra(ABC):
    """Linear algebra of C-ordered arrays. The order of every sum depends on the shapes alone."""

    xp: Any
    chunk = PRODUCT_TILE
    mirror_block = 256
    """Rows and columns of a block in `mirror_lower`."""

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
        """Run element-wise assignments; `values` are the arrays and numbers by their names."""
        assignments.on_host(self.xp, self.workspace, *assignments.arguments(values))

    def sum_squares(
        self, a: Array, out: Array, axis: int, scratch: Array, w: Array | None = None,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Write the sums of scale w a^2 over an axis to `out`, in its dtype.

        a : two or three dimensions. w : None, or an array that broadcasts against it.
        scratch : as `a`, may be `a`; overwritten.
        """
        self.xp.multiply(a, a, out=scratch)
        if w is not None:
            scratch *= w
        scratch.sum(axis=axis, dtype=out.dtype, out=out)
        if scale != 1:
            out *= scale

    def matmul(self, A: Array, B: Array, out: Array, *, lower: bool = False) -> Array:
        """Compute out = A @ B, rows of A in fixed chunks over the threads. A : (m, k), B : (k, c).

        lower : A is lower triangular, and its zeros are not read.
        """

        def rows_of(rows: slice) -> None:
            end = rows.stop if lower else A.shape[1]
            self.xp.matmul(A[rows, :end], B[:end], out=out[rows])

        # The longest rows first, so that threads finish at about the same time.
        self.run(rows_of, tiles(len(A), self.chunk // 2 if lower else self.chunk)[::-1])
        return out

    def matmul_t(
        self, A: Array, B: Array, out: Array, *, lower: bool = False, scale: float = 1.0
    ) -> Array:
        """Compute out = scale * A.T @ B, columns of A in fixed chunks over the threads.

        A : (k, m), B : (k, c). lower : A is lower triangular, and its zeros are not read.
        """

        # (Bᵀ A)ᵀ reads the rows of A in memory order: 1.3 times as fast as Aᵀ B for thin B.
        with self.workspace(B.shape[::-1], B.dtype) as Bt:
            Bt[...] = B.T

            def columns_of(cols: slice) -> None:
                start, width = cols.start if lower else 0, cols.stop - cols.start
                with self.workspace((len(Bt), width), B.dtype) as part:
                    np.matmul(Bt[:, start:], A[start:, cols], out=part)
                    out[cols] = part.T

            self.run(columns_of, tiles(A.shape[1], self.chunk))
        if scale != 1:
            out *= scale
        return out

    def cholesky(self, A: Array) -> bool:
        """Replace A by its lower Cholesky factor, upper part zeroed. False: A is not positive.

        A : (b, b), C-ordered, symmetric; only its lower part is read. b^3/3 FLOPs.

        Works by columns of blocks, with rows of blocks over the threads. The library's own threads
        wait for each other: at 426 columns two took 4 ms and one .9, and a hundred when another
        process was busy. At 4096 they reached 89 GFLOP/s, these blocks 70.
        """
        columns = tiles(
            len(A), self.chunk // 2 if len(A) > SINGLE_THREAD_COLUMNS else SINGLE_THREAD_COLUMNS
        )
        with self.single_threaded_blas():
            for k in columns:
                below = [i for i in columns if i.start >= k.start]

                self.run(partial(self._subtract, A, k), below if k.start else [])
                if not lapack.potrf(A[k, k]):
                    return False
                self.run(partial(self._solve_right, A, k), below[1:])
        for rows in tiles(len(A), ZEROED_ROWS):
            A[rows, rows.stop :] = 0
            square = A[rows, rows]
            np.copyto(square, 0, where=ABOVE_DIAGONAL[: len(square), : len(square)])
        return bool(np.isfinite(A.diagonal()).all())

    @staticmethod
    def _subtract(A: Array, k: slice, i: slice) -> None:
        """Subtract from A[i, k] the part that the columns before k explain."""
        A[i, k] -= A[i, : k.start] @ A[k, : k.start].T

    @staticmethod
    def _solve_right(A: Array, k: slice, i: slice) -> None:
        lapack.trsm(A[k, k], A[i, k], right=True)

    def solve_lower(self, L: Array, B: Array, transposed: bool = False) -> Array:
        """Compute B <- L^-1 B (or L^-T B) in place. L : (b, b) lower, B : (b, k), C-ordered."""
        lapack.trsm(L, B, transposed=transposed)
        return B

    def solve_lower_triangular(self, L: Array, B: Array) -> Array:
        """Compute B <- L^-1 B in place for a lower triangular B, whose zeros are not read.

        L, B : (b, b), C-ordered. b^3/3 FLOPs, a third of `solve_lower`: forward substitution by
        square blocks, columns of blocks over the threads.
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

        It is `solve_lower_triangular` with the identity, whose blocks need no products.
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
        """Write L^-1 to `out`, which is 0. L, out : (b, b), L lower triangular, of few rows.

        Half of the inverse is zeros: a few columns are solved at once, below their first entry.
        """
        for cols in tiles(len(L), INVERTED_COLUMNS):
            below, diagonal = slice(cols.start, None), self.xp.arange(cols.start, cols.stop)
            out[diagonal, diagonal] = 1
            self.solve_lower(L[below, below], out[below, cols])
        return out

    def solve_lower_right(self, L: Array, B: Array) -> Array:
        """Compute B <- B L^-T in place: rows of B (k, b) solved with L (b, b), both C-ordered."""
        lapack.trsm(L, B, right=True)
        return B

    def add_gram(self, C: Array, W: Array, scale: float, *, lower: bool = False) -> None:
        """Add to the lower part of C: C += scale * W.T @ W, by tiles over the threads.

        C : (b, b), some of whose upper part is written as well. W : (k, b). k b^2 FLOPs.
        lower : W is lower triangular, and its zeros, a third of the work, are not read.
        Tiles of 512 are up to 1.7 times as fast as the library's own routine on two threads.
        """

        def add(tile: tuple[slice, slice]) -> None:
            i, j = tile
            start = i.start if lower else 0
            with self.workspace((i.stop - i.start, j.stop - j.start), C.dtype) as part:
                np.matmul(W[start:, i].T, W[start:, j], out=part)
                if scale != 1:
                    part *= scale
                C[i, j] += part

        parts = tiles(len(C), self.chunk)
        self.run(add, [(i, j) for i in parts for j in parts if j.start <= i.start])

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
        if len(w) < k:  # bisection may miss eigenvalues that are equal but for rounding
            w, v = (part[..., b - k :] for part in np.linalg.eigh(A))
        return w[::-1].copy(), v[:, ::-1]


class Workspaces:
    """Memory that is reused, separately for each thread.

    Memory that is lent is lent only once, however the blocks nest: no two arrays in use share
    memory. A thread keeps as many pieces as it ever had in use at once, each as large as its
    largest request, so that a repeated step allocates nothing.
    """

    def __init__(self) -> None:
        self._local: Any = threading.local()

    def lend(self, xp: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Lent:
        """Lend an uninitialised array of `xp` of this shape and dtype, for a `with` block."""
        try:
            free: list[_Piece] = self._local.free
        except AttributeError:
            free = self._local.free = []
        dtype = np.dtype(dtype)
        n_bytes = math.prod(shape) * dtype.itemsize
        piece = _taken(free, n_bytes)
        if piece is None:
            piece = _Piece(xp.empty(n_bytes, np.uint8))
        return Lent(free, piece, piece.array(shape, dtype, n_bytes))


class _Piece:
    """Memory, and the arrays that were made of it: on a GPU each costs the host 5 us."""

    __slots__ = ("_arrays", "_memory", "n_bytes")

    def __init__(self, memory: Array) -> None:
        self._memory, self.n_bytes = memory, len(memory)
        self._arrays: dict[Any, Array] = {}

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], n_bytes: int) -> Array:
        """Return an array of this memory."""
        found = self._arrays.get((shape, dtype))
        if found is None:
            if len(self._arrays) >= MOST_VIEWS:
                self._arrays.clear()
            found = self._memory[:n_bytes].view(dtype).reshape(shape)
            self._arrays[shape, dtype] = found
        return found


class SharedWorkspaces(Workspaces):
    """Memory that all threads of a backend share, whose work is in order on one stream."""

    def __init__(self) -> None:
        super().__init__()
        self._local, self._lock = SimpleNamespace(free=[]), threading.Lock()

    def lend(self, xp: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Lent:
        """Lend an array as `Workspaces` does. It may go back while its work is still queued."""
        with self._lock:
            return super().lend(xp, shape, dtype)


class Lent:
    """An array, and the list its memory goes back to. (`contextmanager` would take 1 us more.)"""

    __slots__ = ("_array", "_free", "_piece")

    def __init__(self, free: list[_Piece], piece: _Piece, array: Any) -> None:
        self._free, self._piece, self._array = free, piece, array

    def __enter__(self) -> Any:
        return self._array

    def __exit__(self, *error: object) -> None:
        self._free.append(self._piece)


def _taken(free: list[_Piece], n_bytes: int) -> _Piece | None:
    """Take the smallest piece that is large enough; otherwise drop the largest and return None."""
    if not free:
        return None
    sizes = [piece.n_bytes for piece in free]
    fit = [size for size in sizes if size >= n_bytes]
    piece = free.pop(sizes.index(min(fit) if fit else max(sizes)))
    return piece if fit else None
