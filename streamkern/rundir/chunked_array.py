"""Arrays that are read and written in parts, as checkpoints are saved and loaded."""

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
    """An array that receives only the parts it needs; others are neither read nor verified."""

    def needs(self, part: Any, /) -> bool: ...


TargetFactory = Callable[[str, tuple[int, ...], np.dtype[Any]], ChunkedArray | None]
"""Function that returns, for the name, shape and dtype of a saved array, the array that receives
its parts; None if it is not needed."""


def allocate_on_host(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray:
    """Return a new NumPy array (a `TargetFactory`)."""
    return np.empty(shape, dtype)


@dataclass(frozen=True)
class _DiscardTarget:
    """Target whose parts are verified as they are read, and discarded."""

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
    """Return a target that discards its parts, to verify a group (a `TargetFactory`)."""
    return _DiscardTarget(shape, dtype)
