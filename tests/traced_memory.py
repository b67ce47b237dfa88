"""The peak of memory that Python code allocates, by tracemalloc."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SETTLE_S = 0.005


@dataclass
class TracedMemory:
    peak: int = 0
    """Bytes; set when the block ends."""


@contextmanager
def traced_memory() -> Iterator[TracedMemory]:
    """Measure the most bytes that are allocated at one time in a block.

    Threads that a library leaves behind (pyarrow's read ahead) must be idle before the tracing
    stops: a thread that allocates at this instant crashes Python before 3.12.9 (CPython issue
    128679).
    """
    traced = TracedMemory()
    tracemalloc.start()
    try:
        yield traced
        traced.peak = tracemalloc.get_traced_memory()[1]
    finally:
        held = -1
        while held != (held := tracemalloc.get_traced_memory()[0]):
            time.sleep(SETTLE_S)
        tracemalloc.stop()
