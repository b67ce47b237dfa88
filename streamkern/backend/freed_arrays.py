"""Memory of freed arrays, which the C library keeps for new arrays or returns to the system.

This module controls glibc. Other C libraries are left at their defaults.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

try:
    _MALLOC_TRIM: Any = ctypes.CDLL(None).malloc_trim
except (AttributeError, OSError, TypeError):  # another C library than glibc
    _MALLOC_TRIM = None

LARGEST_KEPT = (32 << 20) - (1 << 16)
"""Bytes, approximately, of the largest array whose memory glibc can keep."""


@cache
def keep() -> None:
    """Make glibc keep the memory of freed arrays for new ones, from now on.

    For each array above a threshold, glibc requests memory from the system, which zeroes every page
    at its first write; this slows a process's first fit. When such an array is freed, glibc raises
    the threshold to its size. Here a large array is allocated and freed for this purpose; it is
    never written, so it takes no memory.
    """
    np.empty(LARGEST_KEPT, np.uint8)


def release() -> None:
    """Return the memory of freed arrays to the system."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)
