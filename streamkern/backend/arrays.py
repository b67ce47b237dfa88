"""The array type of any library, and slices of it."""

from __future__ import annotations

from typing import Any

Array = Any
"""An array of `backend.xp`: numpy.ndarray on the CPU, cupy.ndarray on a GPU."""


def tiles(n: int, size: int) -> list[slice]:
    """Consecutive slices of at most `size` that cover range(n)."""
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]
