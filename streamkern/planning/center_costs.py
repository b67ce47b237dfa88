"""What choosing the centers takes, as arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """What a way to choose centers takes that looks at more rows than it keeps.

    first : rows that it begins with. rows : that it looks at. flops : leading terms.
    buffers : everything of size, (what, bytes). streamed : whether the rows are a stream and all
    of it is on the host; otherwise they are read once, and are on the device. library_bytes : of
    code that is loaded for it, and stays.
    """

    first: int
    rows: int
    flops: int
    buffers: tuple[tuple[str, int], ...]
    streamed: bool = False
    library_bytes: int = 0

    @property
    def total(self) -> int:
        """Bytes of all buffers."""
        return sum(size for _, size in self.buffers)
