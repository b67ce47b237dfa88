"""Rows, FLOPs and bytes that choosing the centers takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """Cost of a selector that reads more rows than it keeps as centers.

    first : rows that it begins with.
    rows : rows that it reads.
    flops : leading terms.
    buffers : every large buffer, (name, bytes).
    streamed : whether the rows are a stream and everything is on the host; otherwise they are read
        once, and are on the device.
    library_bytes : code that is loaded for it, and stays in memory.
    """

    first: int
    rows: int
    flops: int
    buffers: tuple[tuple[str, int], ...]
    streamed: bool = False
    library_bytes: int = 0

    @property
    def total(self) -> int:
        """Return the bytes of all buffers."""
        return sum(size for _, size in self.buffers)
