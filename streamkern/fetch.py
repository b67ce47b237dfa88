"""Read one unit of a source on this thread or on a cluster, and retry faults that may pass."""

from __future__ import annotations

import random
import threading
import time
from typing import Any, Protocol

from dask.local import get_sync

from streamkern.errors import StreamkernError
from streamkern.source_base import Block, Source

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 10.0
_POLL_S = 0.5
# OSErrors that waiting does not cure; what streamkern itself found wrong is never retried.
_PERMANENT = (
    StreamkernError,
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)


class UnitReader(Protocol):
    """Reads units; called by several threads at once."""

    def read(self, u: int, seed: int, epoch: int, stopped: threading.Event) -> Block: ...

    def close(self) -> None: ...


class LocalReader:
    """Runs a unit's Dask graph on the calling thread."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def read(self, u: int, seed: int, epoch: int, stopped: threading.Event) -> Block:
        # A plain graph: `delayed` and `compute` would take 0.8 ms to build and optimise one task.
        block: Block = get_sync({"unit": (self._source.read_unit, u, seed, epoch)}, "unit")
        return block

    def close(self) -> None:
        pass


class ClusterReader:
    """Runs units on the workers of a `distributed.Client`; the calling thread waits.

    The source travels to every worker once: stores are opened there anew, arrays are copied.
    """

    def __init__(self, source: Source, client: Any) -> None:
        self._client = client
        self._source = client.scatter(source, broadcast=True, hash=False)

    def read(self, u: int, seed: int, epoch: int, stopped: threading.Event) -> Block:
        future = self._client.submit(_read_unit, self._source, u, seed, epoch, pure=False)
        while True:
            try:
                block: Block = future.result(timeout=_POLL_S)
                return block
            except TimeoutError:
                if future.done():  # the read timed out, not the wait for it
                    raise
                if stopped.is_set():
                    future.cancel()
                    raise

    def close(self) -> None:
        self._source = None  # the workers drop their copies


def _read_unit(source: Source, u: int, seed: int, epoch: int) -> Block:
    return source.read_unit(u, seed, epoch)


def read_patiently(
    reader: UnitReader,
    u: int,
    seed: int,
    epoch: int,
    *,
    bounds: tuple[int, int],
    stopped: threading.Event,
    retry_s: float,
) -> tuple[Block, int]:
    """The unit, and how many retries it took.

    An OSError that may pass (a time-out, a reset connection) is retried after 0.1, 0.2, 0.4 …
    up to 10 s, each shortened at random by up to half so that many readers do not return at
    once, until `retry_s` have gone by. What stays is raised as it came, with a note naming
    the unit.
    """
    give_up = time.monotonic() + retry_s
    retries = 0
    while True:
        try:
            return reader.read(u, seed, epoch, stopped), retries
        except Exception as error:
            pause = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0**retries) * random.uniform(0.5, 1)
            if (
                not isinstance(error, OSError)
                or isinstance(error, _PERMANENT)
                or time.monotonic() + pause > give_up
                or stopped.wait(pause)
            ):
                tries = f", {retries + 1} tries" if retries else ""
                error.add_note(
                    f"while reading unit {u} (rows {bounds[0]} to {bounds[1] - 1}) "
                    f"of epoch {epoch}{tries}"
                )
                raise
        retries += 1
