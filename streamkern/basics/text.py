"""What a run says about itself: the progress line, end-of-run tables, and `redact`.

Nothing here raises into the training loop for a cosmetic reason, and no text leaves without
passing `redact`: user names, passwords, signatures and tokens in URLs never reach a log.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Self, TextIO

import numpy as np

from streamkern.basics.redaction import redact as redact

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


_SHOWN = 12  # names in a message
SCHEDULER_ADDRESS = r"^(tcp|tls|ws|wss|ucx)://[^/@\s]+:\d{1,5}$"
"""What the address of a Dask scheduler looks like."""


def some(names: Sequence[str]) -> str:
    """The names, or the first of many, for a message."""
    return ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")


def utc_now() -> str:
    """The time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Progress:
    """One line on the terminal: a bar, a note of the caller's, the time left.

    Off when `stream` is no terminal or `enabled` is False. It redraws from `update` only, so it
    owns no thread, and a failing terminal switches it off instead of stopping the run.
    """

    _PERIOD_S = 0.1

    def __init__(
        self,
        total_samples: int,
        *,
        start: int = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._bar: RichProgress | None = None
        self._drawn = -math.inf
        stream = sys.stderr if stream is None else stream
        with contextlib.suppress(Exception):
            if enabled and stream.isatty():
                bar = _rich_bar(stream)
                self._task = bar.add_task("", total=total_samples, completed=start, note="")
                bar.start()
                self._bar = bar

    @property
    def enabled(self) -> bool:
        """Whether a line is being drawn."""
        return self._bar is not None

    def update(self, samples: int, note: str = "") -> None:
        """Show that `samples` of the total are done; redrawn at most ten times a second."""
        now = time.monotonic()
        if self._bar is None or now - self._drawn < self._PERIOD_S:
            return
        self._drawn = now
        try:
            self._bar.update(self._task, completed=samples, note=note, refresh=True)
        except Exception:  # a closed or broken terminal must not end the run
            self.close()

    def close(self) -> None:
        """Leave the last line on the terminal; harmless when repeated."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(Exception):
                bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _rich_bar(stream: TextIO) -> RichProgress:
    # Imported here: rich costs tens of milliseconds, and most runs in a batch queue draw nothing.
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    # The note comes last: on a narrow terminal it is the one that is cut short.
    note = TextColumn("{task.fields[note]}", markup=False)
    columns = (BarColumn(bar_width=8), TaskProgressColumn(), TimeRemainingColumn(), note)
    return RichProgress(*columns, console=Console(file=stream), auto_refresh=False)


_MOST = 2**1000  # what damaged headers declare may be more than a float can be


def size_text(n_bytes: int) -> str:
    """Bytes as "90 KiB" or "8 MiB", to three digits."""
    size, unit = float(min(n_bytes, _MOST)), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> str:
    """Plain text table: one line per row, numbers to the right, floats to four digits."""
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    widths = [max([len(name), *(len(line[j]) for line in cells)]) for j, name in enumerate(columns)]
    right = [
        any(isinstance(row.get(name), int | float | np.number) for row in rows) for name in columns
    ]

    def line(texts: Sequence[str]) -> str:
        padded = (
            text.rjust(w) if r else text.ljust(w)
            for text, w, r in zip(texts, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * w for w in widths]), *map(line, cells)])


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float | np.floating):
        return f"{float(value):.4g}"
    return " ".join(redact(str(value)).split())
