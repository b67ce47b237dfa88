"""Scratch arrays, lent for the length of a `with` block."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt


class Workspaces:
    """Memory that is reused, separately for each thread.

    Memory that is lent is lent only once, however the blocks nest: no two arrays in use share
    memory. A thread keeps as many pieces as it ever had in use at once, each as large as its
    largest request, so that a repeated step allocates nothing.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def lend(self, xp: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Lent:
        """Lend an uninitialised array of `xp` of this shape and dtype, for a `with` block."""
        try:
            free: list[Any] = self._local.free
        except AttributeError:
            free = self._local.free = []
        dtype = np.dtype(dtype)
        n_bytes = math.prod(shape) * dtype.itemsize
        piece = _taken(free, n_bytes)
        if piece is None:
            piece = xp.empty(n_bytes, np.uint8)
        return Lent(free, piece, piece[:n_bytes].view(dtype).reshape(shape))


class Lent:
    """An array, and the list its memory goes back to. (`contextmanager` would take 1 us more.)"""

    __slots__ = ("_array", "_free", "_piece")

    def __init__(self, free: list[Any], piece: Any, array: Any) -> None:
        self._free, self._piece, self._array = free, piece, array

    def __enter__(self) -> Any:
        return self._array

    def __exit__(self, *error: object) -> None:
        self._free.append(self._piece)


def _taken(free: list[Any], n_bytes: int) -> Any:
    """Take the smallest piece that is large enough; otherwise drop the largest and return None."""
    if not free:
        return None
    sizes = [len(piece) for piece in free]
    fit = [size for size in sizes if size >= n_bytes]
    piece = free.pop(sizes.index(min(fit) if fit else max(sizes)))
    return piece if fit else None
