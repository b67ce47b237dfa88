"""Read one unit of a source on the calling thread, and retry transient faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from streamkern.basics.backoff import backoff_delays
from streamkern.basics.errors import StreamkernError
from streamkern.store.row_block import RowBlock
from streamkern.stream.sources.base import BaseSource

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 10.0
# OSErrors that a retry does not cure; errors of streamkern itself, and errors that it has already
# retried until a deadline, are never retried.
_PERMANENT = (
    StreamkernError,
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)


class UnitReader(Protocol):
    """A reader of units, called by several threads at once."""

    def read(self, u: int, seed: int, epoch: int, stopped: threading.Event) -> RowBlock: ...

    def close(self) -> None: ...


class LocalReader:
    """Reads units on the calling threads."""

    def __init__(self, source: BaseSource) -> None:
        self._source = source
        self._bound: tuple[threading.Event | None, BaseSource] = (None, source)

    def read(self, u: int, seed: int, epoch: int, stopped: threading.Event) -> RowBlock:
        bound = self._bound  # one value, so that threads need no lock
        if bound[0] is not stopped:  # so that closing does not wait for a lost network
            bound = self._bound = stopped, self._source.until(stopped)
        return bound[1].read_unit(u, seed, epoch)

    def close(self) -> None:
        pass


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, OSError) and not isinstance(error, _PERMANENT)


def read_patiently(
    reader: UnitReader,
    u: int,
    seed: int,
    epoch: int,
    *,
    bounds: tuple[int, int],
    stopped: threading.Event,
    retry_s: float,
    on_retry: Callable[[], None],
) -> RowBlock:
    """Return the block of unit u.

    A transient OSError (a time-out, a reset connection) is retried after up to 0.1, 0.2, 0.4 … 10
    s, drawn at random so that many readers do not return at once, until `retry_s` would be
    exceeded; setting `stopped` ends a pause. The last error is raised unchanged but for a note that
    names the unit.
    """
    left = backoff_delays(FIRST_RETRY_S, LONGEST_RETRY_S, time.monotonic() + retry_s)
    tries = 1
    while True:
        try:
            return reader.read(u, seed, epoch, stopped)
        except Exception as error:
            again = _may_pass(error) and not stopped.is_set()
            pause = next(left, None) if again else None
            if pause is None or stopped.wait(pause):
                more = f", {tries} tries" if tries > 1 else ""
                rows = f"rows {bounds[0]} to {bounds[1] - 1}"
                error.add_note(f"while reading unit {u} ({rows}) of epoch {epoch}{more}")
                raise
        tries += 1
        on_retry()
