"""The log of a run: one JSON object per line, in a file or in objects.

    {"line": 7, "time": "...", "step": 40, "epoch": 0, "samples": 20480, ..., "crc32c": "6a9f1c03"}

The last entry is the checksum of the rest of the line. Lines are numbered across all resumes of a
run, and every checkpoint records how many were stored before it, so that the loss of a line is
detected.

On a disk, lines are appended to a file. Objects cannot be appended to: `ObjectLines` collects lines
in parts of a MiB, ``log/<writer's number>-<part>.jsonl``, and rewrites the newest part every few
seconds.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import google_crc32c
import numpy as np

from streamkern.basics.errors import RunError
from streamkern.basics.text import SECRET_NAME, redact, utc_now
from streamkern.basics.values import parse_json
from streamkern.basics.warning import warn
from streamkern.filesystem.durable import sync_folder
from streamkern.filesystem.objects import Bytes, Objects

_LINE_PATTERN = re.compile(rb'(\{.+), "crc32c": "([0-9a-f]{8})"\}')
FLUSH_S = 10.0
"""Seconds between two writes of the log to an object store."""
PART_BYTES = 1 << 20
"""Size in bytes from which a new part is started."""
_WRITE_DEADLINE_S = 30.0
"""Seconds for which writing a part is retried; after that it is written with the next lines."""


class RunLog:
    """The log of a run, for writing.

    lines : file or objects that receive the lines; None to write nothing
    last_number : number of the last line that earlier processes have written
    """

    def __init__(self, lines: LogLines | None, last_number: int = 0) -> None:
        self._lines = lines
        self._last_number = self._stored_number = last_number
        self._write_lock = threading.Lock()

    def write(self, *, step: int, epoch: int, samples: int, **fields: object) -> None:
        """Append one record: the time, the step, epoch and samples so far, and `fields`."""
        if self._lines is None:
            return
        position = {"time": utc_now(), "step": step, "epoch": epoch, "samples": samples}
        with self._write_lock:
            record = _as_json({"line": self._last_number + 1, **position, **fields})
            self._lines.append(_sealed_line(json.dumps(record, allow_nan=False).encode()))
            self._last_number += 1

    def flush(self) -> int:
        """Make the written lines durable; return the number of the last durable line."""
        last_number = self._last_number  # read first: lines may be written during the flush
        if self._lines is not None and self._lines.flush():
            self._stored_number = last_number
        return self._stored_number

    def close(self) -> None:
        """Store the written lines and close. May be called more than once."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _as_json(value: object) -> object:
    """Return `value` as strict JSON values.

    NaN and infinity become strings, NumPy values become Python ones, and secrets in text are
    redacted.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, np.generic | np.ndarray):
        return _as_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): _as_json_field(str(name), item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_as_json(v) for v in value]
    return redact(str(value))


def _as_json_field(name: str, value: object) -> object:
    secret = SECRET_NAME.search(name) and not isinstance(value, int | float | None)
    return "***" if secret else _as_json(value)


# -- in a file ---------------------------------------------------------------------------------


class FileLines:
    """Lines of a log in a file.

    Each line is appended by a single unbuffered write, so that a kill can truncate at most the last
    line, which is repaired when the log is opened again.

    path : path of the file
    check : called before each line; its exceptions are raised
    """

    def __init__(
        self, path: str | os.PathLike[str], check: Callable[[], object] = lambda: None
    ) -> None:
        self.path, self._check = Path(path), check
        self._fd: int | None = None
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            _repair_tail(self._fd)
            sync_folder(self.path.parent)
        except OSError as error:
            self.close()
            raise RunError(
                f"run log {self.path} cannot be opened: {error.strerror}",
                "make it writable, and run the same command again",
            ) from error

    def append(self, line: bytes) -> None:
        """Append one line; raise RunError if it cannot be written."""
        if self._fd is None:
            return
        self._check()
        end = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(0, "only a part of a line could be written (disk full?)")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, end)
            raise RunError(f"run log {self.path}: {error.strerror}") from error

    def flush(self) -> bool:
        """Make the appended lines durable and return True; raise RunError if that fails."""
        try:
            if self._fd is not None:
                os.fsync(self._fd)
        except OSError as error:
            raise RunError(
                f"run log {self.path} cannot be stored: {error.strerror}",
                "solve this problem, and run the same command again",
            ) from error
        return True

    def close(self) -> None:
        """Close the file. May be called more than once."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _repair_tail(fd: int) -> None:
    """Complete a last line that only lacks its newline, or remove an incomplete last line."""
    size = os.fstat(fd).st_size
    tail, start = b"", size
    while start > 0 and b"\n" not in tail:
        n_bytes = min(start, 1 << 16)
        start -= n_bytes
        os.lseek(fd, start, os.SEEK_SET)
        tail = os.read(fd, n_bytes) + tail
    incomplete = tail[tail.rfind(b"\n") + 1 :]
    if incomplete:
        complete = _complete_line(incomplete)
        os.ftruncate(fd, size - len(incomplete) + len(complete))
        os.write(fd, b"\n" if complete else b"")


def _complete_line(tail: bytes) -> bytes:
    """Return the last line of a log without its newline if the line is complete, else b"".

    A damaged newline counts as missing.
    """
    return next((line for line in (tail, tail[:-1]) if _record(line) is not None), b"")


# -- in objects --------------------------------------------------------------------------------


class ObjectLines:
    """Lines of a log in the objects ``log/<token>-<part>.jsonl``, written by a separate thread.

    `append` never waits for the network. A kill loses the lines since the last flush. A part that
    cannot be written stays in memory and is written again later; the run continues, with a warning.

    token : number of the writer
    period_s : seconds between two flushes
    """

    def __init__(self, objects: Objects, token: int, *, period_s: float = FLUSH_S) -> None:
        self._objects = copy.copy(objects)
        self._objects.deadline_s = min(objects.deadline_s, _WRITE_DEADLINE_S)
        self._token, self._period = token, period_s
        self._parts = {1: bytearray()}  # by number; all but the last are full
        self._has_unsaved = False
        self._failure: Exception | None = None
        self._warned = False
        self._append_lock, self._flush_lock = threading.Lock(), threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._flush_periodically, name="streamkern-log", daemon=True
        )
        self._thread.start()

    def append(self, line: bytes) -> None:
        """Append one line, which the next flush writes."""
        with self._append_lock:
            number = max(self._parts)
            if self._parts[number] and len(self._parts[number]) + len(line) > PART_BYTES:
                number += 1
                self._parts[number] = bytearray()
            self._parts[number] += line
            self._has_unsaved = True
        self._warn_of_failure()

    def flush(self) -> bool:
        """Write the parts that have changed; return False if that fails."""
        with self._flush_lock:
            with self._append_lock:
                if not self._has_unsaved:
                    return True
                parts = {number: bytes(part) for number, part in self._parts.items()}
                self._has_unsaved = False
            try:
                for number, part in parts.items():
                    key = f"log/{self._token:012d}-{number:06d}.jsonl"
                    self._objects.put(key, part)
            except Exception as error:  # a failing log must not stop a run
                self._failure, self._has_unsaved = error, True
                return False
            with self._append_lock:
                for number in parts:
                    if number < max(parts):
                        del self._parts[number]
            return True

    def _flush_periodically(self) -> None:
        while not self._closing.wait(self._period):
            self.flush()

    def _warn_of_failure(self) -> None:
        """Warn of a failed write, once, on the thread of the caller."""
        if self._failure is not None and not self._warned:
            self._warned = True
            warn(
                f"the run log could not be written ({self._failure}); the run goes on, and it is "
                "tried again"
            )

    def close(self) -> None:
        """Write the remaining lines and end the thread."""
        self._closing.set()
        self._thread.join()
        self.flush()
        self._warn_of_failure()


LogLines = FileLines | ObjectLines


def _is_intact_part(part: Bytes) -> bool:
    return all(_record(line) is not None for line in bytes(part).splitlines())


def part_keys(objects: Objects) -> list[str]:
    """Return the keys of all parts, in the order in which they were written."""
    return [key for key, _ in objects.list("log") if key.endswith(".jsonl")]


def read_parts(objects: Objects) -> bytes:
    """Return the lines of all parts in order.

    A run that was copied from a disk also has a file, whose lines come first. A part whose lines do
    not match their checksums is read again.
    """
    parts = list(objects.get_many(part_keys(objects), is_intact=_is_intact_part))
    with contextlib.suppress(FileNotFoundError):
        parts.insert(0, objects.get("log.jsonl", is_intact=_is_intact_part))
    return b"".join(map(bytes, parts))


# -- reading -----------------------------------------------------------------------------------


def _sealed_line(record: bytes) -> bytes:
    """Return the line of a record with its checksum. record : a JSON object that is not empty"""
    return b'%s, "crc32c": "%08x"}\n' % (record[:-1], google_crc32c.value(record))


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if the line is not intact."""
    match = _LINE_PATTERN.fullmatch(line)
    if match is None or google_crc32c.value(match[1] + b"}") != int(match[2], 16):
        return None
    try:
        value = parse_json(line)
    except ValueError:
        return None
    numbers = [value.get(name) for name in ("line", "step", "epoch", "samples")]
    if not all(isinstance(number, int) for number in numbers):
        return None
    return {name: entry for name, entry in value.items() if name != "crc32c"}


def _parsed_lines(data: bytes) -> list[dict[str, Any] | None]:
    """Return the record of each line, or None for a damaged line.

    An incomplete last line is left out.
    """
    *lines, tail = data.split(b"\n")
    complete = _complete_line(tail)
    return [_record(line) for line in (*lines, *([complete] if complete else []))]


def last_line_number(data: bytes, minimum: int) -> int:
    """Return the number of the last intact line of a log, or `minimum` if that is larger."""
    numbers = [int(record["line"]) for record in _parsed_lines(data) if record is not None]
    return max([minimum, *numbers])


def read_lines(
    data: bytes, location: str, n_stored: int = 0
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the records of a log in order, and a sentence if any are damaged or lost.

    location : name of the log, for the sentence
    n_stored : number of lines that a checkpoint records. An incomplete last line after these does
        not count as damage, because a kill has truncated it, or it is being written.
    """
    parsed = _parsed_lines(data)
    damaged = [number for number, record in enumerate(parsed, 1) if record is None]
    records = [record for record in parsed if record is not None]
    line_numbers = {record.pop("line") for record in records}
    n_lost = max({n_stored, *line_numbers}) - len(line_numbers) - len(damaged)
    sentences = []
    if damaged:
        damaged_text = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        sentences.append(
            f"{len(damaged)} damaged line(s) of {location} are left out: {damaged_text}"
        )
    if n_lost > 0:
        sentences.append(f"{n_lost} line(s) of {location} are lost")
    return records, "; ".join(sentences) or None


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a log file in order; [] if there is no file.

    Damaged lines are left out with a warning, and an incomplete last line without one. Only
    `RunDirectory.read_log` can detect that lines at the end are lost.
    """
    try:
        records, damage = read_lines(Path(path).read_bytes(), f"the run log {path}")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(
            f"run log {path} cannot be read: {error.strerror}", "make it readable, or restore it"
        ) from error
    if damage is not None:
        warn(damage)
    return records
