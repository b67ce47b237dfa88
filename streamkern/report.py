"""What a run says about itself: the log file, timers, the progress line, end-of-run tables.

Nothing here raises into the training loop for a cosmetic reason, and no text leaves without
passing `redact`: user names, passwords, signatures and tokens in URLs never reach a log.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import numpy as np

from streamkern.errors import RunError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(\S+)")
_SECRET_NAME = re.compile(r"secret|passw|token|credential|signature|(api|access)_?key", re.I)


def redact(text: str | os.PathLike[str]) -> str:
    """`text` with user info, query and fragment cut out of every URL in it.

    A raw AWS secret may hold a slash, so what stands before the *last* ``@`` goes whenever it
    holds a colon. A path that holds both is shown too short; the other choice leaks.
    """
    return _URL.sub(lambda m: m[1] + _without_secrets(m[2]), os.fspath(text))


def _without_secrets(rest: str) -> str:
    head, at, tail = rest.rpartition("@")
    if at and (":" in head or not re.search(r"[/?#]", head)):
        rest = tail
    return re.split(r"[?#]", rest, maxsplit=1)[0]


def utc_now() -> str:
    """The time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _plain(value: object) -> object:
    """`value` as strict JSON: NaN and infinities as strings, NumPy as Python, text redacted."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): _plain_field(str(name), item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    return redact(str(value))


def _plain_field(name: str, value: object) -> object:
    secret = _SECRET_NAME.search(name) and not isinstance(value, int | float | None)
    return "***" if secret else _plain(value)


class RunLog:
    """Appends one JSON object per line to a file; with ``None`` it does nothing.

    A line goes out in one unbuffered write, so a kill tears at most the last one. Opening the
    log again repairs that. Lines are not fsynced: losing some to a power cut costs nothing.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self._fd: int | None = None
        self._lock = threading.Lock()
        if self.path is None:
            return
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            _mend_tail(self._fd)
        except OSError as error:
            self.close()
            raise RunError(f"run log {self.path} can not be opened: {error.strerror}") from error

    def write(self, *, step: int, epoch: int, samples: int, **fields: object) -> None:
        """Append one record: the time, the position of the run, and `fields`."""
        if self._fd is None:
            return
        record = {"time": utc_now(), "step": step, "epoch": epoch, "samples": samples, **fields}
        line = json.dumps(_plain(record), allow_nan=False).encode() + b"\n"
        with self._lock:
            end = os.fstat(self._fd).st_size
            try:
                if os.write(self._fd, line) != len(line):
                    raise OSError(0, "only a part of a line could be written (disk full?)")
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, end)
                raise RunError(f"run log {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _mend_tail(fd: int) -> None:
    """Finish a last line that only lacks its newline; cut off a torn one."""
    size = os.fstat(fd).st_size
    tail, start = b"", size
    while start > 0 and b"\n" not in tail:
        take = min(start, 1 << 16)
        start -= take
        os.lseek(fd, start, os.SEEK_SET)
        tail = os.read(fd, take) + tail
    torn = tail[tail.rfind(b"\n") + 1 :]
    if not torn:
        return
    if _record(torn) is None:
        os.ftruncate(fd, size - len(torn))
    else:
        os.write(fd, b"\n")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a run log in order; torn lines are left out, a missing file is empty."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"run log {path} can not be read: {error.strerror}") from error
    return [record for line in data.split(b"\n") if (record := _record(line)) is not None]


class Timers:
    """Seconds and entries by name: ``with timers("kernel"): ...``; safe to share by threads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self.entries: dict[str, int] = {}
        self._clock = clock
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` measured elsewhere towards `name`."""
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self.entries[name] = self.entries.get(name, 0) + 1


class Progress:
    """One line on the terminal: samples/s, running loss, stall share, time left.

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

    def update(
        self, samples: int, *, loss: float | None = None, stall_share: float | None = None
    ) -> None:
        """Show that `samples` of the total are done; redrawn at most ten times a second."""
        now = time.monotonic()
        if self._bar is None or now - self._drawn < self._PERIOD_S:
            return
        self._drawn = now
        try:
            note = "" if loss is None else f"loss {loss:.4g}"
            note += "" if stall_share is None else f"  stall {stall_share:.0%}"
            self._bar.update(self._task, completed=samples, note=note)
            speed = self._bar.tasks[0].speed
            rate = f"{speed:,.0f} samples/s  " if speed else ""
            self._bar.update(self._task, note=rate + note, refresh=True)
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

    columns = (BarColumn(bar_width=20), TaskProgressColumn(), TextColumn("{task.fields[note]}"))
    return RichProgress(
        *columns, TimeRemainingColumn(), console=Console(file=stream), auto_refresh=False
    )


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
