"""The line on a terminal that says how far the work is."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

Progress = Callable[[str, int, int | None], None]
"""Called with what is done ("read", "write"), how many rows are, and of how many, if known."""

WIPE = "\r\x1b[K"


class Line:
    """One line, drawn over and over; nothing where there is no terminal, or without `enabled`.

    It draws when it is called, so it owns no thread, and a failing terminal switches it off
    instead of ending the work.
    """

    PERIOD_S = 0.1

    def __init__(self, stream: TextIO | None = None, *, enabled: bool = True) -> None:
        stream = sys.stderr if stream is None else stream
        self._stream: TextIO | None = None
        self._drawn = -math.inf
        self.shown = False  # whether there was anything to do
        with contextlib.suppress(Exception):
            if enabled and stream.isatty():
                self._stream = stream

    def show(self, what: str, done: int, total: int | None) -> None:
        """`done` of `total` rows read or written."""
        self.shown = True
        of = "" if total is None else f" of {total:,}"
        self.draw(f"{what} {done:,}{of} rows")

    def draw(self, text: str) -> None:
        """`text` in the place of what is there, at most ten times a second."""
        now = time.monotonic()
        if self._stream is not None and now - self._drawn >= self.PERIOD_S:
            self._drawn = now
            self._write(f"{WIPE}{text[: shutil.get_terminal_size().columns - 1]}")

    def close(self) -> None:
        """Wipe it; the next call of `draw` draws it again."""
        self._write(WIPE)

    def _write(self, text: str) -> None:
        if self._stream is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except Exception:  # a closed or broken terminal
                self._stream = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
