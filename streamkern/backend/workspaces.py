"""Scratch arrays, lent for the length of a `with` block."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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

    @contextmanager
    def lend(self, xp: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Iterator[Any]:
        """An array of `xp`, of which nothing is known but its shape and dtype."""
        try:
            free: list[Any] = self._local.free
        except AttributeError:
            free = self._local.free = []
        dtype = np.dtype(dtype)
        n_bytes = math.prod(shape) * dtype.itemsize
        piece = _taken(free, n_bytes)
        if piece is None:
            piece = xp.empty(n_bytes, np.uint8)
        try:
            yield piece[:n_bytes].view(dtype).reshape(shape)
        finally:
            free.append(piece)


def _taken(free: list[Any], n_bytes: int) -> Any:
    """The smallest piece that has room; where none has, the largest is given up for a new one."""
    free.sort(key=len)
    for i, piece in enumerate(free):
        if len(piece) >= n_bytes:
            return free.pop(i)
    if free:
        free.pop()
    return None
