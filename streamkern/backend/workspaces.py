"""Scratch memory of the threads of a backend."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.dense import Array

MAX_VIEWS = 64
"""Largest number of views of a piece of scratch memory that are cached."""
MIN_RETURNED_BYTES = 32 << 20
"""Bytes of a dropped piece from which on its memory is returned to the device at once."""


class Workspaces:
    """Scratch memory of each thread, which is reused.

    Arrays that are in use at the same time never share memory, also in nested `with` blocks. A
    thread keeps as many pieces of memory as it has used at once. A piece is replaced by a larger
    one when none is large enough, so that a step that is repeated allocates nothing.
    """

    def __init__(self) -> None:
        self._local: Any = threading.local()

    def lend(self, xp: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> LentArray:
        """Return a context manager for an uninitialised array of `xp` of this shape and dtype."""
        try:
            free_pieces: list[_Piece] = self._local.free_pieces
        except AttributeError:
            free_pieces = self._local.free_pieces = []
        dtype = np.dtype(dtype)
        n_bytes = math.prod(shape) * dtype.itemsize
        piece = _take_piece(free_pieces, n_bytes)
        if piece is None:
            dropped_bytes = _drop_largest(free_pieces)
            if dropped_bytes >= MIN_RETURNED_BYTES:
                self._return_memory()
            piece = _Piece(xp.empty(n_bytes, np.uint8))
        return LentArray(free_pieces, piece, piece.array(shape, dtype, n_bytes))

    def _return_memory(self) -> None:
        """Return the memory of a dropped piece; do nothing, as NumPy has returned it already."""


class _Piece:
    """A piece of memory, with a cache of its views, because creating a view takes time on a GPU."""

    __slots__ = ("_memory", "_views", "n_bytes")

    def __init__(self, memory: Array) -> None:
        self._memory, self.n_bytes = memory, len(memory)
        self._views: dict[Any, Array] = {}

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], n_bytes: int) -> Array:
        """Return a view of the first n_bytes as an array."""
        view = self._views.get((shape, dtype))
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._memory[:n_bytes].view(dtype).reshape(shape)
            self._views[shape, dtype] = view
        return view


class SharedWorkspaces(Workspaces):
    """Scratch memory that all threads of a backend share, because their work is on one stream.

    return_memory : function that returns free memory of the pool to the device. Otherwise the pool
        would keep a dropped piece while the larger one is allocated.
    """

    def __init__(self, return_memory: Callable[[], None]) -> None:
        super().__init__()
        self._free_pool = return_memory
        self._local, self._lock = SimpleNamespace(free_pieces=[]), threading.Lock()

    def lend(self, xp: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> LentArray:
        """Return a context manager as `Workspaces` does.

        The memory is free after the block, even if its work is still queued: later work on it
        follows on the same stream.
        """
        with self._lock:
            return super().lend(xp, shape, dtype)

    def _return_memory(self) -> None:
        self._free_pool()


class LentArray:
    """Context manager of a scratch array, which returns the memory to the free list at its end.

    It is a class because `contextlib.contextmanager` takes longer.
    """

    __slots__ = ("_array", "_free_pieces", "_piece")

    def __init__(self, free_pieces: list[_Piece], piece: _Piece, array: Any) -> None:
        self._free_pieces, self._piece, self._array = free_pieces, piece, array

    def __enter__(self) -> Any:
        return self._array

    def __exit__(self, *error: object) -> None:
        self._free_pieces.append(self._piece)


def _take_piece(free_pieces: list[_Piece], n_bytes: int) -> _Piece | None:
    """Remove the smallest piece of at least n_bytes from the free list, and return it.

    Return None if there is none.
    """
    sufficient = [piece for piece in free_pieces if piece.n_bytes >= n_bytes]
    if not sufficient:
        return None
    piece = min(sufficient, key=lambda piece: piece.n_bytes)
    free_pieces.remove(piece)
    return piece


def _drop_largest(free_pieces: list[_Piece]) -> int:
    """Remove the largest piece from the free list, and return its bytes; 0 if the list is empty."""
    if not free_pieces:
        return 0
    largest = max(free_pieces, key=lambda piece: piece.n_bytes)
    free_pieces.remove(largest)
    return largest.n_bytes
