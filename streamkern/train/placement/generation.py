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
    MAX_REPORT_GAP_S,
    Job,
    RankFailed,
    RankSpec,
    RemoteError,
    run_rank,
    start_tracker,
)

_CHECK_INTERVAL_S, _LIST_INTERVAL_S = 0.1, 0.25
"""Seconds between two checks of the ranks, and between two requests for the list of workers."""
_CAUSE_WAIT_S = 1.0
"""Seconds to wait for the cause of an error, which other ranks may notice before the failed one."""
_FIRST_MESSAGE_S = 60.0
"""Seconds to wait for the first message of a rank, which has to import the code first."""
_SAVE_WAIT_S = 600.0
"""Seconds to wait for rank 0 to save, after a request to stop."""
_MAX_SILENCE_S = 2 * MAX_REPORT_GAP_S
"""Seconds to wait for a message of a rank after a request to stop; without all ranks, none can
save."""


@dataclass(frozen=True)
class GenerationEnd:
    """End of a generation.

    result : result of rank 0, if no rank was lost
    loss : description of the loss, or None
    n_restarting : number of workers that restart by themselves
    all_ended : False if a rank may still be running, because its machine does not answer
    """

    result: Any = None
    loss: str | None = None
    n_restarting: int = 0
    all_ended: bool = True


class Generation:
    """The ranks of one attempt, each on its own worker.

    cluster : cluster of the workers
    number : number of the generation
    workers : worker of each rank
    job : work of the ranks
    stop : request by which a signal ends the run
    on_event : called with the events of `run_ranks`
    earlier_ranks_s : see `RankSpec`
    progress : progress from which the work continues, once rank 0 has reported it
    """

    def __init__(
        self, cluster: RankCluster, number: int, workers: list[WorkerInfo], job: Job,
        stop: StopRequest, on_event: Callable[..., None], earlier_ranks_s: float,
    ) -> None:  # fmt: skip
        self.progress: int | None = None
        self._earlier_ranks_s = earlier_ranks_s
        self._cluster, self._number, self._workers, self._job = cluster, number, workers, job
        self._stop, self._on_event = stop, on_event
        self._stop_wait_s = _SAVE_WAIT_S if job.saves else _CAUSE_WAIT_S  # after a request to stop
        self._futures: list[Any] = []
        self._end_errors: dict[int, BaseException | None] = {}  # error of each rank that has ended
        self._sent_at = self._listed_at = self._failed_at = self._stop_sent_at = 0.0
        self._active = set[int]()  # ranks whose processes belong to this generation
        self._messages = deque[dict[str, Any]]()
        self._present = {worker.address for worker in workers}

    def run(self) -> GenerationEnd:
        """Run to the end, and return how the generation ended.

        Raises the error of a rank, unless it is the loss of another rank, and ClusterError if the
        scheduler is gone.
        """
        cluster, workers = self._cluster, self._workers
        processes = cluster.processes(workers)
        without_reply = [w.address for w in workers if not processes.get(w.nanny)]
        if without_reply:
            no_reply = f"the nanny of {without_reply[0]} does not answer"
            self._on_event("lost", why=no_reply, stopping=bool(self._stop.requested_by))
            return self._kill_all(processes, no_reply)
        begin_s = max(0.0, _FIRST_MESSAGE_S - self._cluster.timeout_s)
        self._last_message_at = [time.monotonic() + begin_s] * len(self._workers)
        cluster.listen(self._receive)
        try:
            self._submit()
            loss = self._wait_for_end()
            if loss is None:
                result: Any = self._futures[0].result(self._cluster.timeout_s)
                return GenerationEnd(result)
            return self._kill_all(processes, loss)
        except ClusterError:  # the scheduler is gone
            raise
        except BaseException:
            # A preparation that has failed by itself holds no resources, and need not be killed.
            is_preparation = len(workers) == 1 and not self._job.saves
            if not (is_preparation and isinstance(self._end_errors.get(0), StreamkernError)):
                with contextlib.suppress(Exception):
                    self._kill_all(processes, "")
            raise
        finally:
            cluster.stop_listening()
            self._release_futures()

    def _submit(self) -> None:
        """Submit the tasks of the tracker and of all ranks."""
        cluster, workers = self._cluster, self._workers
        cluster.message_ranks(self._number, None)
        options: dict[str, Any] = {"allow_other_workers": False, "retries": 0, "pure": False}
        hosts, job = Counter(worker.host for worker in workers), pickle.dumps(self._job)
        addresses = tuple(worker.address for worker in workers)
        tracker = cluster.client.submit(
            start_tracker, len(workers), workers=[addresses[0]], **options
        )
        for rank, worker in enumerate(workers):
            spec = RankSpec(
                cluster.name, self._number, rank, addresses, hosts[worker.host], cluster.timeout_s,
                cluster.driver_timeout_s, self._earlier_ranks_s, job,
            )  # fmt: skip
            future = cluster.client.submit(
                run_rank, spec, tracker, workers=[worker.address], **options
            )
            future.add_done_callback(lambda _: cluster.message_arrived.set())
            self._futures.append(future)

    def _receive(self, report: dict[str, Any]) -> None:
        """Receive a message of a rank, on the client's thread."""
        if report["generation"] == self._number:
            self._last_message_at[report["rank"]] = time.monotonic()
            self._active.add(report["rank"])
            if "message" in report:
                self._messages.append(report)
                self._cluster.message_arrived.set()
            elif report["progress"] is not None:
                self.progress = report["progress"]

    def _wait_for_end(self) -> str | None:
        """Monitor the ranks until they end; return a description of the loss, or None."""
        while True:
            self._cluster.message_arrived.wait(_CHECK_INTERVAL_S)
            self._cluster.message_arrived.clear()
            self._message_ranks()
            self._record_ends()
            while self._messages:  # messages of a rank arrive before its end
                report = self._messages.popleft()
                self._on_event("message", rank=report["rank"], message=report["message"])
            if len(self._end_errors) == len(self._workers) and not self._errors():
                return None
            missing_rank = self._missing_rank()
            loss = self._reported_loss() or missing_rank
            if loss is not None:
                self._on_event("lost", why=loss, stopping=bool(self._stop_sent_at))
                return loss

    def _message_ranks(self) -> None:
        """Send the ranks a message once a second, and a request to stop immediately."""
        now, stop_reason = time.monotonic(), self._stop.requested_by
        is_new_stop = bool(stop_reason) and not self._stop_sent_at
        if is_new_stop:
            self._stop_sent_at = now
        if is_new_stop or now - self._sent_at >= min(1.0, self._cluster.driver_timeout_s / 6):
            self._cluster.message_ranks(self._number, stop_reason)
            self._sent_at = now

    def _record_ends(self) -> None:
        """Record which ranks have ended, and their errors."""
        for rank, future in enumerate(self._futures):
            if rank not in self._end_errors and future.done():
                finished = future.status == "finished"
                self._end_errors[rank] = None if finished else _error_of(future)

    def _errors(self) -> dict[int, BaseException]:
        """Return the errors of the ranks that have ended with one, by rank."""
        return {r: error for r, error in sorted(self._end_errors.items()) if error is not None}

    def _missing_rank(self) -> str | None:
        """Return a description of a rank that is gone or silent before its end, or None.

        After a request to stop, ranks that have sent messages before may be silent for a shorter
        time only.
        """
        now = time.monotonic()
        if now - self._listed_at >= _LIST_INTERVAL_S:
            self._present, self._listed_at = set(self._cluster.workers()), now
        for rank, worker in enumerate(self._workers):
            if rank in self._end_errors:
                continue
            if worker.address not in self._present:
                return f"rank {rank} at {worker.address} is gone"
            since, silent_s = self._last_message_at[rank], self._cluster.timeout_s
            if self._stop_sent_at and rank in self._active and silent_s > _MAX_SILENCE_S:
                since, silent_s = max(since, self._stop_sent_at), _MAX_SILENCE_S
            if now - since > silent_s:
                return f"rank {rank} at {worker.address} has been silent for {silent_s:g} s"
        return None

    def _reported_loss(self) -> str | None:
        """Return a description of the loss that the errors of ranks report; None if there is none.

        After the first error, this waits for an error that is not the loss of another rank, and
        raises it: the error of rank 0, or else of the first rank that has one. After a request to
        stop, other ranks may end before rank 0 has saved, so that the wait is longer.
        """
        errors, now = self._errors(), time.monotonic()
        if self._stop_sent_at and now - self._stop_sent_at > self._stop_wait_s:
            return "the ranks did not end after a request to stop"
        if not errors:
            return None
        self._failed_at = self._failed_at or now
        causes = {r: error for r, error in errors.items() if not isinstance(error, RankLostError)}
        only_stops = all(isinstance(error, TrainingInterrupted) for error in causes.values())
        wait_s = self._stop_wait_s if causes and only_stops else _CAUSE_WAIT_S
        if 0 not in causes and now - self._failed_at < wait_s:
            return None
        for error in causes.values():
            raise error
        rank, error = next(iter(errors.items()))
        return f"rank {rank}: {error}"

    def _release_futures(self) -> None:
        """Release the futures, so that Dask does not restart the tasks of lost workers."""
        for future in self._futures:
            future.release()

    def _kill_all(self, processes: dict[str, int], loss: str) -> GenerationEnd:
        """Kill all processes of this generation after a loss, and wait until they are gone.

        processes : process ids of the workers, by the address of the nanny
        loss : description of the loss
        """
        self._release_futures()
        our_nannies = {self._workers[rank].nanny for rank in self._active}
        replied = self._cluster.kill({n: pid for n, pid in processes.items() if n in our_nannies})
        our_addresses = {worker.address for worker in self._workers if worker.nanny in replied}
        give_up = time.monotonic() + self._cluster.timeout_s
        while our_addresses & set(self._cluster.workers()) and time.monotonic() < give_up:
            time.sleep(_CHECK_INTERVAL_S / 2)
        n_restarting = len(replied) + len(processes.keys() - our_nannies)
        return GenerationEnd(loss=loss, n_restarting=n_restarting, all_ended=our_nannies <= replied)


def _error_of(future: Any) -> BaseException:
    """Return the error of a task. Errors of Dask itself become RankLostError."""
    error: BaseException | None = future.exception()
    if error is None:
        return RankLostError(
            f"Dask ended the task of a rank ({future.status})",
            "run the same command again to continue",
        )
    if isinstance(error, RankFailed | RemoteError):
        return error.error()
    is_from_dask = type(error).__module__.startswith("distributed.")
    if is_from_dask or isinstance(error, CancelledError):
        return RankLostError(f"{type(error).__name__}: {error}")
    return error
