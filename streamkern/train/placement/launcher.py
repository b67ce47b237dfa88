"""Start generations of ranks on a cluster, one after another, until one has finished the work."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from streamkern.basics.errors import EXIT_FAILED, ConfigError, RunError, TrainingInterrupted
from streamkern.basics.message import mention
from streamkern.basics.stop import StopRequest
from streamkern.stream.unit_readers import cluster_text
from streamkern.train.placement.generation import Generation, GenerationEnd
from streamkern.train.placement.rank_cluster import RankCluster, WorkerInfo
from streamkern.train.placement.task import (
    Job,
    ProgressFunction,
    RankWork,
    busy_worker_error,
    run_of_worker,
)

MAX_FRUITLESS_GENERATIONS = 3
"""Number of lost generations in a row without progress after which the driver gives up."""
DRIVER_TIMEOUT_S = 60.0
"""Default time, in seconds, for which ranks continue without a message from the driver."""
_POLL_S = 0.1
"""Seconds between two requests for the list of workers, while the driver waits for them."""
_RESUME = "run the same command again to continue"


def run_ranks(
    client: Any,
    work: RankWork,
    settings: dict[str, Any],
    *,
    ranks: int | None = None,
    min_ranks: int = 1,
    multiple: int = 1,
    prepare: RankWork | None = None,
    read_progress: ProgressFunction | None = None,
    timeout_s: float = 60.0,
    driver_timeout_s: float = DRIVER_TIMEOUT_S,
    stop: StopRequest,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> Any:
    """Run `work` on ranks, in the processes of a cluster's workers, and return rank 0's result.

    Parameters
    ----------
    client : a `distributed.Client` of workers with nannies and without limits on memory.
    work : function that does the work of a rank; like `prepare` and `read_progress`, it belongs to
        a module that workers can import.
    settings : argument of these functions; plain values.
    ranks : largest number of ranks, one per worker; None: as many as there are workers. Workers
        that join are used from the next generation on.
    min_ranks : smallest number of ranks with which the work is started.
    multiple : the number of ranks is a multiple of this number, which divides `ranks`.
    prepare : runs first, on a single rank.
    read_progress : returns the progress from which a generation continues.
    timeout_s : seconds without a message after which a rank counts as lost; also the longest wait
        for workers.
    driver_timeout_s : seconds for which ranks continue without a message from this process.
    stop : once requested, rank 0 is asked to stop, and its error is raised.
    on_event : called with {"event": "ranks", ...} when ranks start, {"event": "lost", "why": ...,
        "stopping": whether a stop was requested}, {"event": "message", "rank": ..., "message": ...}
        for each message of a rank, in which {"warning": text} is a warning of the rank.

    Raises
    ------
    Exception
        The error of a rank, unchanged, unless it is the loss of another rank, which starts the next
        generation.
    RunError
        `MAX_FRUITLESS_GENERATIONS` in a row made no progress, or there are not enough workers.
    TrainingInterrupted
        A stop was requested, or not enough workers are left after a loss.
    ClusterError
        The scheduler is gone.
    ConfigError
        A worker has no nanny, or a limit on its memory.
    """
    if not 1 <= min_ranks <= (ranks or min_ranks):
        raise ConfigError(
            f"{mention('min_ranks', min_ranks)} must be at least 1, and at most "
            f"{mention('ranks', ranks)}",
            "give min_ranks from 1 to ranks",
        )
    name = f"streamkern-{uuid.uuid4().hex[:12]}"
    cluster = RankCluster(client, name, timeout_s, driver_timeout_s)
    driver = _Driver(cluster, -(-min_ranks // multiple) * multiple, stop, on_event)
    # Signals only set `stop.requested_by`, which is checked between two waits.
    with stop.defer_signals():
        if prepare is not None:
            driver.run(Job(prepare, settings, saves=False), 1)
        return driver.run(Job(work, settings, read_progress), ranks, multiple)


class RetryBudget:
    """Counter of lost generations in a row that made no progress."""

    def __init__(self) -> None:
        self._furthest, self._n_fruitless = -2, 0  # -1 is before the first checkpoint

    def count_fruitless(self, start_progress: int | None) -> int:
        """Count a lost generation; return the number in a row that certainly made no progress.

        The progress of the lost generation itself is known only when the next one starts.

        start_progress : progress from which the lost generation started; None if it was lost before
        """
        if start_progress is not None and start_progress > self._furthest:
            self._furthest, self._n_fruitless = start_progress, 0
        else:
            self._n_fruitless += 1
        return self._n_fruitless


class _Driver:
    """Starts generations, counts those that made no progress, and waits for workers."""

    def __init__(
        self,
        cluster: RankCluster,
        min_ranks: int,
        stop: StopRequest,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._cluster, self._min_ranks = cluster, min_ranks
        self._stop, self._on_event = stop, on_event
        self._number, self._ranks_alive_until = 0, 0.0

    def run(self, job: Job, max_ranks: int | None, multiple: int = 1) -> Any:
        """Run the job on at most `max_ranks` ranks, a multiple of `multiple`."""
        retries, min_workers = RetryBudget(), min(self._min_ranks, max_ranks or self._min_ranks)
        n_wanted = max_ranks or min_workers
        state = "there"
        while True:
            workers = self._workers(min_workers, n_wanted, state)[: max_ranks or None]
            workers = workers[: len(workers) // multiple * multiple]
            self._number += 1
            addresses = [worker.address for worker in workers]
            wanted_ranks = max_ranks or len(workers)
            self._notify("ranks", ranks=len(workers), wanted=wanted_ranks, workers=addresses)
            generation = Generation(
                self._cluster, self._number, workers, job, self._stop, self._notify,
                max(0.0, self._ranks_alive_until - time.monotonic()),
            )  # fmt: skip
            generation_end = generation.run()
            if generation_end.loss is None:
                return generation_end.result
            if not generation_end.all_ended:
                alive_s = self._cluster.driver_timeout_s + self._cluster.timeout_s
                self._ranks_alive_until = time.monotonic() + alive_s
            self._check_stop()
            n_fruitless = retries.count_fruitless(generation.progress)
            if n_fruitless == MAX_FRUITLESS_GENERATIONS:
                error = RunError(
                    f"{n_fruitless} times in a row ranks were lost before they got further, the "
                    f"last time {generation_end.loss}; see to the cause, then {_RESUME}"
                )
                error.exit_code = EXIT_FAILED  # the run can be resumed from its files
                raise error
            n_wanted = self._n_expected_workers(generation_end, workers, max_ranks)
            state = "left"

    def _n_expected_workers(
        self, generation_end: GenerationEnd, workers: list[WorkerInfo], max_ranks: int | None
    ) -> int:
        """Return the number of workers to wait for: the ones that restart, and unused ones."""
        nannies = {worker.nanny for worker in workers}
        present = self._cluster.workers().values()
        unused = [worker for worker in present if worker.nanny not in nannies]
        n_expected = generation_end.n_restarting + len(unused)
        return n_expected if max_ranks is None else min(n_expected, max_ranks)

    def _workers(self, min_workers: int, n_wanted: int, state: str) -> list[WorkerInfo]:
        """Wait for workers that accept tasks: `n_wanted` or, after the time limit, `min_workers`.

        state : word for the message, "there" or "left"
        """
        give_up = time.monotonic() + self._cluster.timeout_s
        while True:
            self._check_stop()
            workers = self._cluster.workers().values()
            available = [worker for worker in workers if worker.takes_tasks]
            timed_out = time.monotonic() > give_up
            n_needed = min_workers if timed_out else max(n_wanted, min_workers)
            if len(available) >= n_needed:
                responsive = self._cluster.processes(available)  # Dask notices a lost machine late
                available = [worker for worker in available if worker.nanny in responsive]
                timed_out = time.monotonic() > give_up
                n_needed = min_workers if timed_out else max(n_wanted, min_workers)
            if len(available) >= n_needed:
                addresses = [worker.address for worker in available]
                for address, name in self._cluster.run_on_each(run_of_worker, addresses).items():
                    if name not in ("", self._cluster.name):  # a task would wait for its end
                        raise busy_worker_error(address)
                return available
            if timed_out:
                break
            time.sleep(_POLL_S)
        cluster = cluster_text(self._cluster.client)
        shortage = f"{len(available)} of at least {min_workers} workers are {state} at {cluster}"
        if state == "left":
            raise TrainingInterrupted(shortage, f"start others, then {_RESUME}")
        raise RunError(shortage, "start more workers, or set fewer ranks")

    def _check_stop(self) -> None:
        if self._stop.requested_by:
            raise TrainingInterrupted(f"stopped by {self._stop.requested_by}", _RESUME)

    def _notify(self, event: str, **facts: Any) -> None:
        self._on_event({"event": event, "generation": self._number, **facts})
