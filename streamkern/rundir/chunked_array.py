"""Arrays that are read and written in parts, and that receive the parts of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class ChunkedArray(Protocol):
    """An array that is read and written in parts: a NumPy array, or one on a device."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def ndim(self) -> int: ...

    def __getitem__(self, part: Any, /) -> Any: ...

    def __setitem__(self, part: Any, host: Any, /) -> None: ...


@runtime_checkable
class SelectiveTarget(ChunkedArray, Protocol):
    """An array that wants only some of its parts: the others are neither read nor verified."""

    def wants(self, part: Any, /) -> bool: ...


TargetFactory = Callable[[str, tuple[int, ...], np.dtype[Any]], ChunkedArray | None]


def on_host(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray:
    """Return a new NumPy array."""
    return np.empty(shape, dtype)


@dataclass(frozen=True)
class _Unkept:
    """Array whose parts are verified as they are read, and discarded."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, part: Any) -> Any:
        raise KeyError(part)

    def __setitem__(self, part: Any, host: Any) -> None:
        pass


def discard_target(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray:
    """Return an array that discards its parts: to read only the meta, or to verify a group."""
    return _Unkept(shape, dtype)
