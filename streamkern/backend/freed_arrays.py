"""Memory of freed arrays: the C library keeps it for new ones, or gives it back to the system.

This applies to glibc. Other C libraries decide for themselves.
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
"""Bytes of about the largest array whose memory glibc ever keeps."""


@cache
def keep() -> None:
    """Keep the memory of freed arrays for new ones, from now on.

    glibc gets memory for each array above a threshold from the system, which zeroes each page when
    it is first written: a tenth of the time of a process's first fit. If such an array is freed,
    the threshold grows to its size, as it would in the course of a fit. The array here is never
    written, so it takes no memory. Memory at the end of an arena of a thread stays until the thread
    ends.
    """
    np.empty(LARGEST_KEPT, np.uint8)


def release() -> None:
    """Give the memory of freed arrays back, which may be as much as a whole phase used."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)
