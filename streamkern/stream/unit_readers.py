"""Read units of a source: on the calling thread, or on the workers of a Dask cluster.

Transient faults are retried. A worker receives the pickled source with its first task, opens the
stores itself and keeps the source open, so a worker that joins late or restarts needs nothing else.
The bits of a unit depend neither on the worker that reads it nor on the number of tries. Tasks of a
lost worker run on another worker; a lost cluster ends the run.

A cluster is faster than the threads of this process if transforms or generators take more processor
time than moving the rows; docs/howto/cluster.md gives the measured costs, and `python -m benchmarks
cluster` measures them. Units of 4 to 8 MB are best: for smaller units a task costs more than moving
its rows, and larger units slow the scheduler down. A client made with `direct_to_workers=True` (or
DASK_DISTRIBUTED__CLIENT__DIRECT_TO_WORKERS=true) fetches rows from the workers instead of through
the scheduler; it must be able to connect to them.
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
# Errors that are not retried: errors of streamkern itself, some after retries until a
# deadline, and OSErrors that would occur again.
_PERMANENT_ERRORS = (
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
        # The event that ends the current iteration, and the source whose requests end with it.
        self._cancellable: tuple[threading.Event | None, BaseSource] = (None, source)

    def read(self, u: int, seed: int, epoch: int, stopped: threading.Event) -> RowBlock:
        cancellable = self._cancellable  # one tuple, so that threads need no lock
        if cancellable[0] is not stopped:  # the first read of an iteration
            cancellable = self._cancellable = stopped, self._source.with_stop_event(stopped)
        return cancellable[1].read_unit(u, seed, epoch)

    def close(self) -> None:
        pass


def read_with_retries(
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

    A transient OSError (a time-out, a reset connection) is retried after a random pause of up to
    0.1, 0.2, 0.4 … 10 s, so that many readers do not retry at once, until `retry_s` would be
    exceeded; setting `stopped` ends a pause. The last error is raised with a note that names the
    unit.

    bounds : first row of the unit, and the row after its last, for the note
    """
    pauses = backoff_delays(FIRST_RETRY_S, LONGEST_RETRY_S, time.monotonic() + retry_s)
    n_tries = 1
    while True:
        try:
            return reader.read(u, seed, epoch, stopped)
        except Exception as error:
            is_transient = isinstance(error, OSError) and not isinstance(error, _PERMANENT_ERRORS)
            pause = next(pauses, None) if is_transient and not stopped.is_set() else None
            if pause is None or stopped.wait(pause):
                tries_text = f", {n_tries} tries" if n_tries > 1 else ""
                rows_text = f"rows {bounds[0]} to {bounds[1] - 1}"
                error.add_note(f"while reading unit {u} ({rows_text}) of epoch {epoch}{tries_text}")
                raise
        n_tries += 1
        on_retry()


MAX_INLINE_BYTES = 64 << 10  # larger sources are sent once, not with every task
_POLL_S = 0.25  # seconds between two checks of a thread that waits
_REQUEST_TIMEOUT_S = 2.0  # also the smallest time between two requests to the scheduler
MAX_OPEN_SOURCES = 4  # sources that a worker keeps open
_RESUME_HINT = "run the same command again: a run with a run_dir resumes from its last checkpoint"


def cluster_text(client: Any) -> str:
    """Return "the cluster at ADDRESS" for messages."""
    scheduler = client.scheduler
    return "the cluster" if scheduler is None else f"the cluster at {redact(scheduler.address)}"


def run_on(loop: Any, coroutine: Any) -> Future[Any]:
    """Run `coroutine` on the thread of `loop`."""
    return asyncio.run_coroutine_threadsafe(coroutine, loop.asyncio_loop)


class ClusterReader:
    """Reads units on the workers of a `distributed.Client` while the calling thread waits.

    Each thread submits one unit at a time and releases its rows once they are fetched, so the
    workers and the scheduler hold one unit per waiting thread. KilledWorker (several workers died
    in a task) is raised as an OSError, which `read_with_retries` retries.

    Raises
    ------
    ClusterError
        If the client was closed or has lost its scheduler, if for `patience_s` seconds the
        scheduler did not answer or had no worker, or if a worker has other packages.
    ConfigError
        By the constructor, if the source cannot be pickled.
    """

    def __init__(self, source: BaseSource, client: Any, patience_s: float) -> None:
        self._killed_worker = on_demand("distributed").KilledWorker
        self._client, self._patience_s = client, patience_s
        self._address = cluster_text(client)
        self._recipe, self._numbers = Recipe(source), itertools.count()
        # Two tasks are the same as `read_unit` only if a class does not override it.
        is_default = type(source).read_unit is BaseSource.read_unit
        self._two_tasks = is_default and bool(source.host_transforms)
        self._recipe_future: Any = None
        self._lock = threading.Lock()
        self._request_lock = threading.Lock()
        self._last_reply_s = self._last_request_s = time.monotonic()
        self._problem = ""

    def read(self, u: int, seed: int, epoch: int, stopped: threading.Event) -> RowBlock:
        start_s = time.monotonic()
        while True:
            future = None
            try:
                future = self._submit(u, seed, epoch)
                return self._wait_for_rows(future, start_s, stopped)
            except CancelledError:  # the scheduler was lost, or restarted its workers
                if stopped.wait(_POLL_S):
                    raise
                self._check_cluster(start_s)
            except ImportError as error:
                raise ClusterError(
                    f"a worker of {self._address} cannot import a package of the source ({error})",
                    f"install it on the workers; then {_RESUME_HINT}",
                ) from error
            except Exception as error:
                self._check_client(error)
                if isinstance(error, self._killed_worker):
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
        recipe = self._recipe_argument()
        number = (epoch, u, next(self._numbers))
        # Without the time-out, a worker would read all of its units before it transforms one.
        submit = partial(self._client.submit, fifo_timeout="0s")
        key = (f"read-{self._recipe.token}", *number)
        rows = submit(_read, recipe, not self._two_tasks, u, seed, epoch, key=key)
        if not self._two_tasks:
            return rows
        key = (f"transform-{self._recipe.token}", *number)
        return submit(_transform, recipe, rows, seed, epoch, key=key)

    def _recipe_argument(self) -> Any:
        """Return the recipe, or a future of it if it is large."""
        if len(self._recipe.data) <= MAX_INLINE_BYTES:
            return self._recipe
        with self._lock:
            future = self._recipe_future
            if future is None or future.status in ("cancelled", "lost", "error"):
                # Dask would warn of a large graph, but the source is sent only once.
                limit = {"distributed.admin.large-graph-warning-threshold": "1 PiB"}
                with on_demand("dask").config.set(limit):
                    self._recipe_future = self._client.submit(
                        share_recipe, self._recipe, pure=False
                    )
            return self._recipe_future

    def _wait_for_rows(self, future: Any, start_s: float, stopped: threading.Event) -> RowBlock:
        """Return the result of the task.

        It polls one transfer, because `future.result(timeout)` would restart a slow one each time.
        """
        gather = self._client.gather(future, errors="skip", asynchronous=True)
        gathered = run_on(self._client.loop, gather)
        try:
            while True:
                wait([gathered], timeout=_POLL_S)
                if gathered.done():
                    block: RowBlock | None = gathered.result()
                    # Without a block, the future raises the error of the task.
                    return future.result(_REQUEST_TIMEOUT_S) if block is None else block
                if stopped.is_set():
                    raise CancelledError("the loader was closed")
                self._check_cluster(start_s)
        finally:
            gathered.cancel()

    def _check_client(self, error: BaseException | None = None) -> None:
        """Raise ClusterError if the client was closed or has lost its scheduler.

        error : the error that led to this check
        """
        if self._client.status in ("closing", "closed"):
            raise ClusterError(
                f"{self._address} is lost: its scheduler ended, or the client was closed",
                f"start it again, then {_RESUME_HINT}",
            ) from error

    def _check_cluster(self, start_s: float) -> None:
        """Raise ClusterError if the client is closed, or the cluster has not answered for too long.

        So it does if the cluster had no worker for too long. One of the waiting threads sends a
        request to the scheduler; the others only compare times.

        start_s : start of the read, from which the time counts at the earliest
        """
        self._check_client()
        if not self._request_lock.acquire(blocking=False):
            return
        try:
            if time.monotonic() - self._last_request_s >= _REQUEST_TIMEOUT_S:
                self._problem = self._cluster_problem()
                self._last_request_s = time.monotonic()
                if not self._problem:
                    self._last_reply_s = self._last_request_s
        finally:
            self._request_lock.release()
        silent_s = time.monotonic() - max(self._last_reply_s, start_s)
        if self._problem and silent_s > self._patience_s:
            raise ClusterError(
                f"{self._address} {self._problem} for {silent_s:.0f} s",
                f"start its scheduler and workers again, then {_RESUME_HINT}",
            )

    def _cluster_problem(self) -> str:
        """Return the problem of the cluster as a phrase for messages; "" if it has workers."""
        try:
            identity = run_on(self._client.loop, self._client.scheduler.identity(n_workers=0))
            try:
                workers = identity.result(_REQUEST_TIMEOUT_S)["n_workers"]
            finally:
                identity.cancel()
        except Exception:
            return "has not answered"
        return "" if workers else "has had no worker"

    def _release(self, future: Any) -> None:
        """Release a future, and ignore errors of a closed client."""
        with contextlib.suppress(Exception):  # a closed client has released it already
            future.release()


def _read(recipe: Recipe, transformed: bool, u: int, seed: int, epoch: int) -> RowBlock:
    """Task of a worker: return the rows of unit u, after the host transforms if `transformed`."""
    source = open_recipe(recipe)
    return source.read_unit(u, seed, epoch) if transformed else source.read_rows(u, seed, epoch)


def _transform(recipe: Recipe, rows: RowBlock, seed: int, epoch: int) -> RowBlock:
    """Task of a worker: return the rows after the host transforms."""
    return open_recipe(recipe).transform(rows, seed, epoch)


# -------------------------------------------------------------------------- pickled sources


def checked_versions() -> dict[str, str]:
    """Return the versions of the packages that decide the rows, by name.

    NumPy is one of them, because its random draws depend on its version.
    """
    return {"streamkern": __version__, "numpy": np.__version__}


def version_mismatch(name: str, local: str, remote: object, process: str) -> str:
    """Return the message for a process with another version of a package, or without the package.

    name : the package
    local : version of the package in this process
    remote : version of the package in the other process, or the error of its import there
    process : the other process, as the subject of the message
    """
    problem = f"has {name} {remote}" if isinstance(remote, str) else f"lacks {name} ({remote})"
    return f"{process} {problem}; install {name} {local} there, the version of this process"


class Recipe:
    """A pickled source. Its repr, which dashboards and logs may show, reveals no contents."""

    def __init__(self, source: BaseSource) -> None:
        self.token = uuid.uuid4().hex
        self.versions = checked_versions()
        cloudpickle = import_optional("cloudpickle", "reading on a cluster", "cluster")
        try:
            self.data: bytes = cloudpickle.dumps(source)
        except Exception as error:
            raise ConfigError(
                f"the source cannot be pickled for the workers of a cluster: {error}",
                "use only objects that can be pickled, and open stores by URL",
            ) from error


# Open sources of this process by token, the most recently used last.
_open_sources: OrderedDict[str, BaseSource] = OrderedDict()
_open_lock = threading.Lock()


def open_recipe(recipe: Recipe) -> BaseSource:
    """Return the source, opened once per process; the last `MAX_OPEN_SOURCES` stay open.

    Raises ClusterError if this process has other versions than the one that made the recipe.
    """
    with _open_lock:
        source = _open_sources.pop(recipe.token, None)
        if source is None:
            for name, version in checked_versions().items():
                if version != recipe.versions[name]:
                    process = "a worker of the cluster"
                    raise ClusterError(
                        version_mismatch(name, recipe.versions[name], version, process)
                    )
            source = pickle.loads(recipe.data)
        _open_sources[recipe.token] = source
        while len(_open_sources) > MAX_OPEN_SOURCES:
            _open_sources.popitem(last=False)
    return source


def share_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe: as the result of a task, workers fetch it from each other."""
    return recipe
