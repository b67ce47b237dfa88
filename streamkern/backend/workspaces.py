"""Scratch arrays, lent for the length of a `with` block."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt


class Workspaces:
    """Memory that is used again and again, by each thread its own.

    What is lent to one user is lent to no other, however their blocks nest: no two arrays that are
    in use share memory. A thread keeps as many pieces as it had in use at once, each as large as
    it was ever wanted, so that a step which is repeated allocates nothing.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def lend(self, xp: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Lent:
        """For a `with` block an array of `xp`, of which only shape and dtype are known."""
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
    """An array, and whom its memory goes back to. (`contextmanager` would take 1 us more.)"""

    __slots__ = ("_array", "_free", "_piece")

    def __init__(self, free: list[Any], piece: Any, array: Any) -> None:
        self._free, self._piece, self._array = free, piece, array

    def __enter__(self) -> Any:
        return self._array

    def __exit__(self, *error: object) -> None:
        self._free.append(self._piece)


def _taken(free: list[Any], n_bytes: int) -> Any:
    """The smallest piece that has room; where none has, the largest is given up for a new one."""
    if not free:
        return None
    sizes = [len(piece) for piece in free]
    fit = [size for size in sizes if size >= n_bytes]
    piece = free.pop(sizes.index(min(fit) if fit else max(sizes)))
    return piece if fit else None
