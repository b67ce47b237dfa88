"""One generation: ranks that start together, are monitored, and end together.

The first loss ends the generation: a worker is gone, a rank is silent, or a rank reports the loss
of another one. The processes of all its ranks are then killed. Only this certainly releases their
resources (sockets, the lock of a run directory, GPU memory), and a new process is available sooner
than the old one would be.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from streamkern.basics.errors import (
    ClusterError,
    RankLostError,
    StreamkernError,
    TrainingInterrupted,
)
from streamkern.basics.stop import StopRequest
from streamkern.train.placement.rank_cluster import RankCluster, WorkerInfo
from streamkern.train.placement.task import (
    QUIET_S,
    Job,
    Raised,
    RankFailed,
    RankSpec,
    run_rank,
    start_tracker,
)

_TICK_S, _LIST_S = 0.1, 0.25
"""Seconds between two checks of the ranks, and between two requests for the list of workers."""
_CAUSE_S = 1.0
"""Seconds to wait for the cause of an error, which other ranks may notice before the failed one."""
_BEGIN_S = 60.0
"""Seconds to wait for the first message of a rank, which has to import the code first."""
_SAVE_S = 600.0
"""Seconds to wait for rank 0 to save, after a request to stop."""
_SILENT_S = 2 * QUIET_S
"""Seconds to wait for a message of a rank after a request to stop; without all ranks, none can
save."""


@dataclass(frozen=True)
class Ended:
    """End of a generation.

    result : result of rank 0, if no rank was lost
    lost : description of the loss, or None
    back : number of workers that restart by themselves
    all_gone : False if a rank may still be running, because its machine does not answer
    """

    result: Any = None
    lost: str | None = None
    back: int = 0
    all_gone: bool = True


class Generation:
    """The ranks of one attempt, each on its own worker.

    number : number of the generation
    workers : worker of each rank
    on_event : called with the events of `run_ranks`
    outlived_s : see `RankSpec`
    reached : progress from which the work continues, once rank 0 has reported it
    """

    def __init__(
        self, cluster: RankCluster, number: int, workers: list[WorkerInfo], job: Job,
        stop: StopRequest, on_event: Callable[..., None], outlived_s: float,
    ) -> None:  # fmt: skip
        self.reached: int | None = None
        self._outlived_s = outlived_s
        self._cluster, self._number, self._workers, self._job = cluster, number, workers, job
        self._stop, self._on_event = stop, on_event
        self._patience_s = _SAVE_S if job.saves else _CAUSE_S  # after a request to stop
        self._futures: list[Any] = []
        self._ended: dict[int, BaseException | None] = {}  # rank -> its error
        self._sent_at = self._listed_at = self._failed_at = self._stop_sent_at = 0.0
        self._active = set[int]()  # ranks whose processes belong to this generation
        self._messages = deque[dict[str, Any]]()
        self._present = {worker.address for worker in workers}

    def run(self) -> Ended:
        """Run to the end. Raises the error of a rank, unless it is the loss of another rank."""
        cluster = self._cluster
        processes = cluster.processes(self._workers)
        silent = [worker.address for worker in self._workers if not processes.get(worker.nanny)]
        if silent:
            lost = f"the nanny of {silent[0]} does not answer"
            self._on_event("lost", why=lost, stopping=bool(self._stop.requested))
            return self._end(processes, lost)
        begin_s = max(0.0, _BEGIN_S - self._cluster.timeout_s)
        self._heard_at = [time.monotonic() + begin_s] * len(self._workers)
        cluster.listen(self._receive)
        try:
            self._submit()
            missed = self._watched()
            if missed is None:
                result: Any = self._futures[0].result(self._cluster.timeout_s)
                return Ended(result)
            return self._end(processes, missed)
        except ClusterError:  # the scheduler is gone
            raise
        except BaseException:
            if not self._preparation_refused():
                with contextlib.suppress(Exception):
                    self._end(processes, "")
            raise
        finally:
            cluster.stop_listening()
            self._forget()

    def _submit(self) -> None:
        """Submit the tasks of the tracker and of all ranks."""
        cluster, workers = self._cluster, self._workers
        cluster.message_ranks(self._number, None)
        only: dict[str, Any] = {"allow_other_workers": False, "retries": 0, "pure": False}
        hosts, job = Counter(worker.host for worker in workers), pickle.dumps(self._job)
        addresses = tuple(worker.address for worker in workers)
        tracker = cluster.client.submit(start_tracker, len(workers), workers=[addresses[0]], **only)
        for rank, worker in enumerate(workers):
            spec = RankSpec(
                cluster.name, self._number, rank, addresses, hosts[worker.host], cluster.timeout_s,
                cluster.driver_timeout_s, self._outlived_s, job,
            )  # fmt: skip
            future = cluster.client.submit(
                run_rank, spec, tracker, workers=[worker.address], **only
            )
            future.add_done_callback(lambda _: cluster.message_arrived.set())
            self._futures.append(future)

    def _receive(self, report: dict[str, Any]) -> None:
        """Receive a message of a rank, on the client's thread."""
        if report["generation"] == self._number:
            self._heard_at[report["rank"]] = time.monotonic()
            self._active.add(report["rank"])
            if "message" in report:
                self._messages.append(report)
                self._cluster.message_arrived.set()
            elif report["reached"] is not None:
                self.reached = report["reached"]

    def _relay(self) -> None:
        """Pass on the ranks' messages, on the driver's thread."""
        while self._messages:
            report = self._messages.popleft()
            self._on_event("message", rank=report["rank"], message=report["message"])

    def _watched(self) -> str | None:
        """Monitor the ranks until they end; return a description of the loss, or None."""
        while True:
            self._cluster.message_arrived.wait(_TICK_S)
            self._cluster.message_arrived.clear()
            self._send()
            self._collect()
            self._relay()  # messages of a rank arrive before its end
            if len(self._ended) == len(self._workers) and not self._errors():
                return None
            missing = self._missing()
            lost = self._judged() or missing
            if lost is not None:
                self._on_event("lost", why=lost, stopping=bool(self._stop_sent_at))
                return lost

    def _send(self) -> None:
        """Send the ranks a message once a second, and a request to stop immediately."""
        now, stop_reason = time.monotonic(), self._stop.requested
        new = bool(stop_reason) and not self._stop_sent_at
        if new:
            self._stop_sent_at = now
        if new or now - self._sent_at >= min(1.0, self._cluster.driver_timeout_s / 6):
            self._cluster.message_ranks(self._number, stop_reason)
            self._sent_at = now

    def _collect(self) -> None:
        """Record which ranks have ended, and their errors."""
        for rank, future in enumerate(self._futures):
            if rank not in self._ended and future.done():
                finished = future.status == "finished"
                self._ended[rank] = None if finished else _error_of(future)

    def _errors(self) -> dict[int, BaseException]:
        return {r: error for r, error in sorted(self._ended.items()) if error is not None}

    def _missing(self) -> str | None:
        """Return a description of a rank that is gone or silent before its end, or None.

        After a request to stop, ranks that have sent messages before may be silent for a shorter
        time only.
        """
        now = time.monotonic()
        if now - self._listed_at >= _LIST_S:
            self._present, self._listed_at = set(self._cluster.workers()), now
        for rank, worker in enumerate(self._workers):
            if rank in self._ended:
                continue
            if worker.address not in self._present:
                return f"rank {rank} at {worker.address} is gone"
            since, silent_s = self._heard_at[rank], self._cluster.timeout_s
            if self._stop_sent_at and rank in self._active and silent_s > _SILENT_S:
                since, silent_s = max(since, self._stop_sent_at), _SILENT_S
            if now - since > silent_s:
                return f"rank {rank} at {worker.address} has been silent for {silent_s:g} s"
        return None

    def _judged(self) -> str | None:
        """Return a description of the loss that the errors of ranks report; None if there is none.

        After the first error, the cause is waited for. If it is not the loss of a rank, it is
        raised: the error of rank 0, or else of the first rank that has one. After a request to
        stop, other ranks may end before rank 0 has saved, which is waited for.
        """
        errors, now = self._errors(), time.monotonic()
        if self._stop_sent_at and now - self._stop_sent_at > self._patience_s:
            return "it was asked to stop, and did not"
        if not errors:
            return None
        self._failed_at = self._failed_at or now
        real = {r: error for r, error in errors.items() if not isinstance(error, RankLostError)}
        stopped = all(isinstance(error, TrainingInterrupted) for error in real.values())
        waits_s = self._patience_s if real and stopped else _CAUSE_S
        if 0 not in real and now - self._failed_at < waits_s:
            return None
        for error in real.values():
            raise error
        rank, error = next(iter(errors.items()))
        return f"rank {rank}: {error}"

    def _preparation_refused(self) -> bool:
        """Return whether the rank of a preparation has ended with a StreamkernError.

        It holds no resources then, and its process need not be killed.
        """
        prepared = len(self._workers) == 1 and not self._job.saves
        return prepared and isinstance(self._ended.get(0), StreamkernError)

    def _forget(self) -> None:
        """Release the futures, so that Dask does not restart the tasks of lost workers."""
        for future in self._futures:
            future.release()

    def _end(self, processes: dict[str, int], lost: str) -> Ended:
        """Kill all processes of this generation after a loss, and wait until they are gone.

        processes : process ids of the workers, by the address of the nanny
        """
        self._forget()
        ours = {self._workers[rank].nanny for rank in self._active}
        ended = self._cluster.kill({n: pid for n, pid in processes.items() if n in ours})
        old = {worker.address for worker in self._workers if worker.nanny in ended}
        give_up = time.monotonic() + self._cluster.timeout_s
        while old & set(self._cluster.workers()) and time.monotonic() < give_up:
            time.sleep(_TICK_S / 2)
        back = len(ended) + len(processes.keys() - ours)
        return Ended(lost=lost, back=back, all_gone=ours <= ended)


def _error_of(future: Any) -> BaseException:
    """Return the error of a task. Errors of Dask itself become RankLostError."""
    error: BaseException | None = future.exception()
    if error is None:
        return RankLostError(f"Dask has {future.status} its task")
    if isinstance(error, RankFailed | Raised):
        return error.error()
    of_dask = isinstance(error, CancelledError) or type(error).__module__.startswith("distributed.")
    return RankLostError(f"{type(error).__name__}: {error}") if of_dask else error
