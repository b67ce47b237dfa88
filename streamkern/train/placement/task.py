"""The Dask task that runs one rank on a worker.

About once a second, the rank reports that it is alive, and reads the message of the driver: the
number of the newest generation, whether to stop, and a counter that shows that the driver is alive.
A rank of an older generation ends its process. If the driver is gone, the rank is asked to stop, so
that it saves the run, and then ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streamkern.backend.ranks import SINGLE, Communicator, process_group
from streamkern.basics import errors
from streamkern.basics.errors import (
    EXIT_TRY_AGAIN,
    RankLostError,
    StreamkernError,
    TrainingInterrupted,
)
from streamkern.basics.machine import available_cpus
from streamkern.basics.optional import import_optional, on_demand
from streamkern.basics.stop import Stopped, StopRequest
from streamkern.basics.text import redact
from streamkern.stream.unit_readers import run_on

_REPLY_TIMEOUT_S, _REPORT_INTERVAL_S = 5.0, 1.0
"""Seconds to wait for a reply of the scheduler, and between two reports of a rank."""
MAX_REPORT_GAP_S = _REPLY_TIMEOUT_S + _REPORT_INTERVAL_S
"""Longest time, in seconds, between two reports of a healthy rank: a reply may be lost."""
_runs: list[str] = []
"""Name of the run of which this process is a rank, if any. A process belongs to one run at a time,
and the driver of that run may kill it."""
_runs_lock = threading.Lock()
_COLLECTIVE_TIMEOUT_S = 7 * 86400
"""Time-out of collectives, in seconds (in ms it must fit an int). The driver ends ranks that
hang."""


SendMessage = Callable[[dict[str, Any]], None]
"""Function that sends JSON values to the driver."""


def _ignore(message: dict[str, Any]) -> None:
    """Drop a message, because the rank is not running yet."""


@dataclass(frozen=True)
class RankSpec:
    """The arguments of a rank.

    name : name under which driver and ranks communicate
    generation : number of the generation
    rank : number of this rank
    addresses : addresses of the workers of all ranks
    n_host_ranks : number of ranks on the same host
    timeout_s : longest time in seconds for which the rank may be silent
    driver_timeout_s : seconds without a message from the driver after which the rank saves and ends
    earlier_ranks_s : seconds for which a rank of an earlier generation that could not be killed may
        still run
    job : pickled `Job`; its settings may hold secrets, which no repr may show
    send_message : sends JSON values to the driver, once the rank runs
    """

    name: str
    generation: int
    rank: int
    addresses: tuple[str, ...]
    n_host_ranks: int
    timeout_s: float
    driver_timeout_s: float
    earlier_ranks_s: float
    job: bytes = field(repr=False)
    send_message: SendMessage = field(default=_ignore, repr=False)

    @property
    def report_interval_s(self) -> float:
        """Seconds between two reports that the rank is alive."""
        return min(_REPORT_INTERVAL_S, self.timeout_s / 6, self.driver_timeout_s / 6)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.addresses)

    @property
    def address(self) -> str:
        """Address of this rank."""
        return self.addresses[self.rank]

    @property
    def threads(self) -> int:
        """Number of threads that the rank may use, on its machine."""
        return max(1, available_cpus() // self.n_host_ranks)


RankWork = Callable[[Communicator, RankSpec, dict[str, Any], StopRequest], Any]
"""Function that does the work of one rank. Its third argument are the settings of the job."""
ProgressFunction = Callable[[dict[str, Any]], int]
"""Function from the settings of a job to the progress from which the work would continue."""


@dataclass(frozen=True)
class Job:
    """Work of the ranks. The functions are pickled by name, so they must belong to modules.

    work : does the work of one rank
    settings : argument of the functions, plain values
    read_progress : called on rank 0 before the work
    saves : whether the work saves when it is asked to stop; the driver then waits for it
    """

    work: RankWork
    settings: dict[str, Any]
    read_progress: ProgressFunction | None = None
    saves: bool = True


def start_tracker(size: int) -> dict[str, Any]:
    """Start the tracker that connects `size` ranks; return the arguments to connect to it.

    A single rank needs no tracker, and gets {}.

    It runs in the process of rank 0, and ends with it, that is, with the generation. In the process
    of the driver it would end with the driver, but ranks save the run after that.
    """
    if size == 1:
        return {}
    tracker_class = import_optional(
        "xgboost.tracker", "a run of several ranks", "ranks"
    ).RabitTracker
    tracker = tracker_class(
        host_ip=on_demand("distributed").get_worker().ip, n_workers=size, sortby="task"
    )
    tracker.start()
    threading.Thread(target=_wait_for_tracker, args=(tracker,), daemon=True).start()
    return {**tracker.worker_args(), "dmlc_timeout": _COLLECTIVE_TIMEOUT_S}


def run_of_worker(dask_worker: Any) -> str:
    """Return the name of the run of which a worker is a rank, or "".

    As a function with the argument `dask_worker`, it runs even if the worker's threads are busy.
    """
    return _runs[0] if _runs else ""


def busy_worker_error(address: str) -> TrainingInterrupted:
    """Return the error for a worker that is a rank of another driver's run."""
    return TrainingInterrupted(
        f"the Dask worker at {address} is a rank of another run, or of this one by a driver that "
        "is gone, which ends within minutes",
        "run the same command again then",
    )


def _wait_for_tracker(tracker: Any) -> None:
    with contextlib.suppress(Exception):  # ranks may end without closing their connection
        tracker.wait_for()


def run_rank(spec: RankSpec, tracker: Mapping[str, Any]) -> Any:
    """Do the work of one rank, as a Dask task. Return the result on rank 0, and None on others.

    Raises RankLostError if the task runs on the wrong worker, or belongs to an older generation,
    and RankFailed or RemoteError for other errors.
    """
    worker = on_demand("distributed").get_worker()
    with _runs_lock:
        if spec.name in _runs:
            raise RankLostError(f"an earlier rank has not ended yet at {worker.address}")
        if _runs:
            error = busy_worker_error(worker.address)
            raise RankFailed(type(error).__name__, str(error), error.exit_code, ())
        _runs.append(spec.name)
    try:
        return _run_rank(worker, spec, tracker)
    finally:
        _runs.clear()


def _run_rank(worker: Any, spec: RankSpec, tracker: Mapping[str, Any]) -> Any:
    """Do the work of the rank while the heartbeat runs, and send warnings and errors."""
    stop = StopRequest(install=False)
    heartbeat = _Heartbeat(worker, spec, stop)
    if worker.address != spec.address or not heartbeat.is_newest_generation():
        raise RankLostError(
            f"rank {spec.rank} at {spec.address} has been replaced by another process; no action "
            "is needed, because the run continues there"
        )
    failure, result = None, None
    with heartbeat, _warnings_sent_to(heartbeat.send_message):
        try:
            result = _do_work(
                replace(spec, send_message=heartbeat.send_message), tracker, stop, heartbeat
            )
        except BaseException as error:
            failure = _as_picklable(error, spec)
    if failure is not None:
        raise failure  # outside `except`, so that the original error is not sent as its context
    return result if spec.rank == 0 else None


def _do_work(
    spec: RankSpec, tracker: Mapping[str, Any], stop: StopRequest, heartbeat: _Heartbeat
) -> Any:
    """Connect the ranks, do the work of the job, and return its result."""
    job: Job = pickle.loads(spec.job)
    if job.read_progress is not None and spec.rank == 0:
        heartbeat.progress = job.read_progress(job.settings)
    heartbeat.report()
    group: contextlib.AbstractContextManager[Communicator] = contextlib.nullcontext(SINGLE)
    if spec.size > 1:
        group = process_group(spec.rank, tracker)
    with group as ranks:
        return job.work(ranks, spec, job.settings, stop)


@contextlib.contextmanager
def _warnings_sent_to(send_message: SendMessage) -> Iterator[None]:
    """Send warnings to the driver, which decides whether its terminal shows them."""
    with warnings.catch_warnings():  # also forgets the warnings of earlier runs
        warnings.showwarning = lambda message, *details: send_message(
            {"warning": redact(str(message))}
        )
        yield


class RankFailed(Exception):
    """A StreamkernError as it is sent to the driver.

    Its arguments are the name of the class, the message, the exit code and the notes. The error
    itself cannot be sent, because Dask restores errors without calling `__init__`, which fails for
    classes with two bases.
    """

    def error(self) -> StreamkernError:
        """Return the error as it was raised."""
        name, text, code, notes = self.args
        error: StreamkernError = getattr(errors, name)(text)
        error.exit_code = code
        for note in notes:
            error.add_note(note)
        return error


class RemoteError(Exception):
    """Any other error as it is sent to the driver.

    Its arguments are the error, and the text of its traceback on the rank.
    """

    def error(self) -> BaseException:
        """Return the error as it was raised, with the rank's traceback as its cause."""
        error: BaseException = self.args[0]
        error.__cause__ = RankTraceback(self.args[1])
        return error


class RankTraceback(Exception):
    """Traceback of a rank as text, the cause of the error that the rank raised."""


def _as_picklable(error: BaseException, spec: RankSpec) -> BaseException:
    """Return an error that can be pickled in place of `error`: `RankFailed` or `RemoteError`."""
    if type(error).__module__ == errors.__name__ and isinstance(error, StreamkernError):
        notes = tuple(getattr(error, "__notes__", ()))
        return RankFailed(type(error).__name__, error.message, error.exit_code, notes)
    trace_lines = "".join(traceback.format_exception(error)).rstrip()
    trace_text = f"rank {spec.rank} of {spec.size}, {spec.address}:\n{trace_lines}"
    error.__traceback__ = error.__context__ = error.__cause__ = None  # frames keep all memory alive
    try:
        if isinstance(error, Exception | Stopped):
            pickle.loads(pickle.dumps(error))
            return RemoteError(error, trace_text)
    except Exception:  # its class cannot be pickled
        pass
    replacement = RuntimeError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        replacement.add_note(note)
    return RemoteError(replacement, trace_text)


class _Heartbeat:
    """Thread that sends reports of a rank to the driver, and reads the messages of the driver.

    progress : progress from which the work continues, for the reports
    """

    def __init__(self, worker: Any, spec: RankSpec, stop: StopRequest) -> None:
        self.progress: int | None = None
        self._worker, self._spec, self._stop = worker, spec, stop
        self._end_event = threading.Event()
        self._last_message_at, self._last_beat = time.monotonic(), None
        self._thread = threading.Thread(target=self._run, name="streamkern-pulse", daemon=True)

    def __enter__(self) -> _Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end_event.set()
        self._thread.join()

    def report(self) -> None:
        """Report that this rank is alive."""
        self._send_report(progress=self.progress)

    def send_message(self, message: dict[str, Any]) -> None:
        """Send a message to the driver, which receives it before the end of this rank."""
        self._send_report(message=message)

    def _send_report(self, **entries: Any) -> None:
        report = {"generation": self._spec.generation, "rank": self._spec.rank, **entries}
        self._worker.log_event(self._spec.name, report)

    def is_newest_generation(self) -> bool:
        """Return whether this rank belongs to the newest generation; False if it is unknown."""
        message = self._driver_message()
        return message is not None and message["generation"] == self._spec.generation

    def _run(self) -> None:
        """Report and read messages until the rank ends."""
        while not self._end_event.wait(self._spec.report_interval_s):
            with contextlib.suppress(Exception):  # the worker may be closing
                self.report()
            self._act_on_driver_message()

    def _driver_message(self) -> dict[str, Any] | None:
        """Return the newest message of the driver, or None if the scheduler does not answer."""
        loop, scheduler = self._worker.loop, self._worker.scheduler
        query = scheduler.get_metadata(keys=[self._spec.name], default=None)
        reply = run_on(loop, query)
        try:
            message: dict[str, Any] | None = reply.result(_REPLY_TIMEOUT_S)
        except Exception:
            return None
        finally:
            reply.cancel()
        return message

    def _act_on_driver_message(self) -> None:
        """Read the driver's message; ask the work to stop, or end the process, if necessary."""
        message, spec = self._driver_message(), self._spec
        if message is not None and message["generation"] != spec.generation:
            os._exit(EXIT_TRY_AGAIN)  # this process was suspended, and has been replaced
        if message is not None and message["beat"] != self._last_beat:
            self._last_message_at, self._last_beat = time.monotonic(), message["beat"]
        silent_s = time.monotonic() - self._last_message_at
        stop_reason = message["stop"] if message is not None else None
        if self._worker.status.name not in ("running", "paused"):  # the worker ends its process
            stop_reason = "the loss of its scheduler"
        elif silent_s > spec.driver_timeout_s:
            stop_reason = "the loss of its driver"
        if stop_reason and spec.rank == 0:  # rank 0 broadcasts it; all end after the same step
            self._stop.requested_by = self._stop.requested_by or stop_reason
            if self._stop.may_end:  # nothing to save, as in a setup
                os._exit(EXIT_TRY_AGAIN)
        if silent_s > spec.driver_timeout_s + spec.timeout_s:
            os._exit(EXIT_TRY_AGAIN)
