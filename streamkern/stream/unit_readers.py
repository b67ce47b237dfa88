"""Read units of a source: on the calling thread, or on the workers of a Dask cluster.

Transient faults are retried. A worker receives the pickled source with its first task and keeps it
open, so a worker that joins late or restarts needs nothing else; it opens the stores itself. The
bits do not depend on which worker reads a unit, or on how often. Tasks of a lost worker run on
another one; a lost cluster ends the run.

When a cluster pays (`python -m benchmarks cluster`; client, scheduler and two workers on two
cores): a task costs about 2.5 ms (the second task of a unit, if host transforms are separate, 1
ms), and its rows 1 ms or more per MB through the scheduler, half of that or less if fetched from
the workers. Threads of this process hand over the same rows at 0.1 to 0.3 ms per MB. So a cluster
does not pay for plain reads. It pays for transforms and generators that need more than some 5 ms of
processor time per MB, on cores of other machines (with 5 ms of Python per MB, two workers on the
same two cores reached 0.95 of the threads' speed, and 0.68 through the scheduler). Units of 4 to 8
MB are best: for smaller ones the task costs more than its rows; at 32 MB the scheduler slows down.
Several units per task would help below 4 MB only, which is rare. A client made with
`direct_to_workers=True`, or DASK_DISTRIBUTED__CLIENT__DIRECT_TO_WORKERS=true, fetches from the
workers, and must be able to reach them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any, Protocol

import numpy as np

from streamkern.basics.errors import ClusterError, ConfigError, StreamkernError
from streamkern.basics.optional import import_optional, on_demand
from streamkern.basics.text import redact
from streamkern.basics.version import __version__
from streamkern.filesystem.waiting import backoff_delays
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


def _is_transient(error: BaseException) -> bool:
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
    pauses = backoff_delays(FIRST_RETRY_S, LONGEST_RETRY_S, time.monotonic() + retry_s)
    tries = 1
    while True:
        try:
            return reader.read(u, seed, epoch, stopped)
        except Exception as error:
            again = _is_transient(error) and not stopped.is_set()
            pause = next(pauses, None) if again else None
            if pause is None or stopped.wait(pause):
                more = f", {tries} tries" if tries > 1 else ""
                rows = f"rows {bounds[0]} to {bounds[1] - 1}"
                error.add_note(f"while reading unit {u} ({rows}) of epoch {epoch}{more}")
                raise
        tries += 1
        on_retry()


INLINE_BYTES = 64 << 10  # larger sources are sent once, not with every task
_POLL_S = 0.25
_ANSWER_S = 2.0
KEPT_SOURCES = 4  # that a worker keeps open
_RESUME_HINT = "run the same command again and a run with a run_dir goes on where it was saved"


def address_of(client: Any) -> str:
    scheduler = client.scheduler
    return "the cluster" if scheduler is None else f"the cluster at {redact(scheduler.address)}"


def run_on(loop: Any, coroutine: Any) -> Future[Any]:
    """Run `coroutine` on the thread of `loop`."""
    return asyncio.run_coroutine_threadsafe(coroutine, loop.asyncio_loop)


class ClusterReader:
    """Runs units on the workers of a `distributed.Client` while the calling thread waits.

    Each thread has one unit submitted and releases its rows once fetched, so the workers and the
    scheduler hold no more rows than the threads wait for. KilledWorker (several workers died of a
    task) is raised as an OSError, which `read_patiently` retries.

    Raises
    ------
    ClusterError
        The client was closed or has given up its scheduler, or for `patience_s` the scheduler did
        not answer or had no worker.
    """

    def __init__(self, source: BaseSource, client: Any, patience_s: float) -> None:
        self._killed = on_demand("distributed").KilledWorker
        self._client, self._patience_s = client, patience_s
        self._address = address_of(client)
        self._recipe, self._numbers = Recipe(source), itertools.count()
        # Only if `read_unit` is the same as the two tasks one after the other.
        standard = type(source).read_unit is BaseSource.read_unit
        self._two_tasks = standard and bool(source.host_transforms)
        self._recipe_future: Any = None
        self._lock = threading.Lock()
        self._request_lock = threading.Lock()
        self._last_answer = self._last_request = time.monotonic()
        self._problem = ""

    def read(self, u: int, seed: int, epoch: int, stopped: threading.Event) -> RowBlock:
        began = time.monotonic()
        while True:
            future = None
            try:
                future = self._submit(u, seed, epoch)
                return self._wait(future, began, stopped)
            except CancelledError:  # the scheduler was lost, or restarted its workers
                if stopped.wait(_POLL_S):
                    raise
                self._check_pulse(began)
            except ImportError as error:
                raise ClusterError(
                    f"a worker of {self._address} cannot import what the source needs ({error})",
                    f"install it there; then {_RESUME_HINT}",
                ) from error
            except Exception as error:
                self._check_client(error)
                if isinstance(error, self._killed):
                    raise OSError(str(error)) from error
                raise
            finally:
                if future is not None:
                    self._release(future)

    def close(self) -> None:
        if self._recipe_future is not None:
            self._release(self._recipe_future)
            self._recipe_future = None

    def _submit(self, u: int, seed: int, epoch: int) -> Any:
        """Return the future of unit u, read by one task, or by two with host transforms.

        A dashboard shows the tasks of a loader as one "read" and one "transform". No two tasks
        share a key, not even two tries to read the same unit.
        """
        recipe, number = self._argument(), (epoch, u, next(self._numbers))
        # With a time-out a worker reads all of its units before it transforms one.
        submit = partial(self._client.submit, fifo_timeout="0s")
        key = (f"read-{self._recipe.token}", *number)
        read = submit(_read, recipe, not self._two_tasks, u, seed, epoch, key=key)
        if not self._two_tasks:
            return read
        key = (f"transform-{self._recipe.token}", *number)
        return submit(_transform, recipe, read, seed, epoch, key=key)

    def _argument(self) -> Any:
        """Return the recipe, or a future of it if it is large."""
        if len(self._recipe.data) <= INLINE_BYTES:
            return self._recipe
        with self._lock:
            if self._recipe_future is None or self._recipe_future.status in (
                "cancelled",
                "lost",
                "error",
            ):
                # Dask warns of large graphs; this one goes out once, not with every task.
                limit = {"distributed.admin.large-graph-warning-threshold": "1 PiB"}
                with on_demand("dask").config.set(limit):
                    self._recipe_future = self._client.submit(hold, self._recipe, pure=False)
            return self._recipe_future

    def _wait(self, future: Any, began: float, stopped: threading.Event) -> RowBlock:
        """Return the result; `future.result(timeout)` would restart a slow transfer."""
        gather = self._client.gather(future, errors="skip", asynchronous=True)
        answer = run_on(self._client.loop, gather)
        try:
            while True:
                wait([answer], timeout=_POLL_S)
                if answer.done():
                    block: RowBlock | None = answer.result()
                    return future.result(_ANSWER_S) if block is None else block  # which raises
                if stopped.is_set():
                    raise CancelledError("the loader was closed")
                self._check_pulse(began)
        finally:
            answer.cancel()

    def _check_client(self, error: BaseException | None = None) -> None:
        if self._client.status in ("closing", "closed"):
            raise ClusterError(
                f"{self._address} is gone: its scheduler was lost, or the client was closed",
                f"start it again, then {_RESUME_HINT}",
            ) from error

    def _check_pulse(self, began: float) -> None:
        """Raise if the cluster had no worker for too long; one of the waiting threads asks."""
        self._check_client()
        if not self._request_lock.acquire(blocking=False):
            return
        try:
            if time.monotonic() - self._last_request >= _ANSWER_S:
                self._problem = self._cluster_problem()
                self._last_request = time.monotonic()
                if not self._problem:
                    self._last_answer = self._last_request
        finally:
            self._request_lock.release()
        silent_s = time.monotonic() - max(self._last_answer, began)
        if self._problem and silent_s > self._patience_s:
            raise ClusterError(
                f"{self._address} {self._problem} for {silent_s:.0f} s",
                f"bring it back, then {_RESUME_HINT}",
            )

    def _cluster_problem(self) -> str:
        """Return the problem of the cluster as a phrase for messages; "" if it has workers."""
        try:
            identity = run_on(self._client.loop, self._client.scheduler.identity(n_workers=0))
            try:
                workers = identity.result(_ANSWER_S)["n_workers"]
            finally:
                identity.cancel()
        except Exception:
            return "has not answered"
        return "" if workers else "has had no worker"

    def _release(self, future: Any) -> None:
        with contextlib.suppress(Exception):  # the client may be closed, which released it too
            future.release()


def _read(recipe: Recipe, transformed: bool, u: int, seed: int, epoch: int) -> RowBlock:
    source = opened(recipe)
    return source.read_unit(u, seed, epoch) if transformed else source.read_rows(u, seed, epoch)


def _transform(recipe: Recipe, rows: RowBlock, seed: int, epoch: int) -> RowBlock:
    return opened(recipe).transform(rows, seed, epoch)


# ------------------------------------------------------------------- a source that travels


def draw_versions() -> dict[str, str]:
    """Return the package versions that must agree: NumPy's random draws depend on its version."""
    return {"streamkern": __version__, "numpy": np.__version__}


def mismatch(name: str, ours: str, theirs: object, where: str) -> str:
    shown = f"has {name} {theirs}" if isinstance(theirs, str) else f"lacks {name} ({theirs})"
    return f"{where} {shown}; install {name} {ours} there, the version used here"


class Recipe:
    """A pickled source; its repr, which dashboards and logs may show, reveals nothing of it."""

    def __init__(self, source: BaseSource) -> None:
        self.token = uuid.uuid4().hex
        self.versions = draw_versions()
        cloudpickle = import_optional("cloudpickle", "reading on a cluster", "cluster")
        try:
            self.data: bytes = cloudpickle.dumps(source)
        except Exception as error:
            raise ConfigError(
                f"the source cannot travel to the workers of a cluster: {error}",
                "make it of things that can be pickled, and open stores by URL",
            ) from error


_open: OrderedDict[str, BaseSource] = OrderedDict()  # of this process, the last used at the end
_opening = threading.Lock()


def opened(recipe: Recipe) -> BaseSource:
    """Return the source, opened once per process; the last four are kept."""
    with _opening:
        source = _open.pop(recipe.token, None)
        if source is None:
            for name, version in draw_versions().items():
                if version != recipe.versions[name]:
                    where = "a worker of the cluster"
                    raise ClusterError(mismatch(name, recipe.versions[name], version, where))
            source = pickle.loads(recipe.data)
        _open[recipe.token] = source
        while len(_open) > KEPT_SOURCES:
            _open.popitem(last=False)
    return source


def hold(recipe: Recipe) -> Recipe:
    """Return the recipe; as the result of a task, workers fetch it from peers or recompute it."""
    return recipe
