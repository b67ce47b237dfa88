"""Driver of ranks: it starts one generation after another, until one has finished the work."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import EXIT_FAILED, ConfigError, RunError, TrainingInterrupted
from streamkern.basics.stop import StopRequest
from streamkern.stream.unit_readers import address_of
from streamkern.train.placement.generation import Ended, Generation, Limits
from streamkern.train.placement.rank_cluster import RankCluster, WorkerInfo
from streamkern.train.placement.task import (
    Job,
    RankSpec,
    RankWork,
    Reached,
    Tell,
    of_another_run,
    run_of,
)

MAX_FRUITLESS_GENERATIONS = 3
LONELY_S = 60.0
_LOOK_S = 0.1
_GO_ON = "run the same command again to go on"

Prepare = Callable[[dict[str, Any], StopRequest, Tell], Any]


def place(
    client: Any,
    work: RankWork,
    settings: dict[str, Any],
    *,
    ranks: int | None = None,
    min_ranks: int = 1,
    multiple: int = 1,
    prepare: Prepare | None = None,
    reached: Reached | None = None,
    timeout_s: float = 60.0,
    lonely_s: float = LONELY_S,
    stop: StopRequest,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> Any:
    """Return rank 0's result of `work`, done by ranks in processes of a cluster's workers.

    Parameters
    ----------
    client : a `distributed.Client` of workers with nannies and without limits on memory.
    work, prepare, reached : functions of modules that workers can import. `prepare` runs first, on
        a single rank. `reached` returns the progress from which a generation continues.
    settings : their argument; plain values.
    ranks : largest number of ranks, one per worker; None: as many as there are workers. Workers
        that join are used from the next generation on.
    min_ranks : smallest number of ranks with which the work is started.
    multiple : the number of ranks is a multiple of it; it divides `ranks`.
    timeout_s : longest silence of a rank, and longest wait for workers.
    lonely_s : time for which ranks continue without this process.
    stop : once requested, rank 0 is asked to stop, and its error is raised.
    on_event : called with {"event": "ranks", ...} when ranks start, {"event": "lost", "why": ...,
        "stopping": whether a stop was requested}, {"event": "told", "rank": ..., "said": ...} for
        each message of a rank, in which {"warning": text} is a warning of the rank.

    Raises
    ------
    Exception
        The error of a rank, unchanged, unless it is the loss of another rank, which starts the next
        generation.
    RunError
        Three generations in a row made no progress, or there are not enough workers.
    TrainingInterrupted
        The stop was requested, or not enough workers are left.
    ClusterError, ConfigError
        The scheduler is gone; a worker has no nanny, or a limit on its memory.
    """
    if not 1 <= min_ranks <= (ranks or min_ranks):
        raise ConfigError(
            f"min_ranks={min_ranks} must be at least 1, and at most ranks={ranks}; correct it"
        )
    site = RankCluster(client, f"streamkern-{uuid.uuid4().hex[:12]}", timeout_s)
    driver = _Driver(site, -(-min_ranks // multiple) * multiple, timeout_s, stop, on_event)
    with stop.later():  # nothing is left half done: signals are checked between two waits
        if prepare is not None:
            job = Job(_prepared, {"prepare": prepare, "settings": settings})
            driver.run(job, 1, Limits(timeout_s, lonely_s, saves=False))
        job, limits = Job(work, settings, reached), Limits(timeout_s, lonely_s)
        return driver.run(job, ranks, limits, multiple)


def _prepared(
    ranks: Communicator, spec: RankSpec, settings: dict[str, Any], stop: StopRequest
) -> Any:
    return settings["prepare"](settings["settings"], stop, spec.tell)


class RetryBudget:
    """Counter of lost generations in a row that made no progress."""

    def __init__(self) -> None:
        self._furthest, self._in_vain = -2, 0  # -1 is before the first checkpoint

    def in_vain(self, began: int | None) -> int:
        """Return the number of generations in a row that surely made no progress, after one more
        was lost.

        began : progress from which the lost generation started, and thus the progress of those
            before it; its own progress is known only from the next generation. None: it was lost
            before it started.
        """
        if began is not None and began > self._furthest:
            self._furthest, self._in_vain = began, 0
        else:
            self._in_vain += 1
        return self._in_vain


class _Driver:
    """Starts generations, counts those that made no progress, and waits for workers."""

    def __init__(
        self,
        site: RankCluster,
        min_ranks: int,
        timeout_s: float,
        stop: StopRequest,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._site, self._min_ranks, self._timeout_s = site, min_ranks, timeout_s
        self._stop, self._on_event = stop, on_event
        self._number, self._outlived_until = 0, 0.0

    def run(self, job: Job, most: int | None, limits: Limits, multiple: int = 1) -> Any:
        """Run the job on at most `most` ranks, a multiple of `multiple`."""
        tries, least = RetryBudget(), min(self._min_ranks, most or self._min_ranks)
        wanted, what = most or least, "there"
        while True:
            spots = self._workers(least, wanted, what)[: most or None]
            spots = spots[: len(spots) // multiple * multiple]
            self._number += 1
            workers = [spot.address for spot in spots]
            self._say("ranks", ranks=len(spots), wanted=most or len(spots), workers=workers)
            generation = Generation(
                self._site, self._number, spots, job, limits, self._stop, self._say,
                max(0.0, self._outlived_until - time.monotonic()),
            )  # fmt: skip
            ended = generation.run()
            if ended.lost is None:
                return ended.result
            if not ended.all_gone:
                self._outlived_until = time.monotonic() + limits.outlived_s
            self._check_stop()
            in_vain = tries.in_vain(generation.reached)
            if in_vain == MAX_FRUITLESS_GENERATIONS:
                raise _failed(
                    f"{in_vain} times in a row ranks were lost before they got further, the last "
                    f"time {ended.lost}; see to the cause, then {_GO_ON}"
                )
            wanted, what = self._coming(ended, spots, most), "left"

    def _coming(self, ended: Ended, spots: list[WorkerInfo], most: int | None) -> int:
        """Return the number of workers to wait for: those that restart, and those that were not
        used."""
        used = {spot.nanny for spot in spots}
        others = [spot for spot in self._site.workers().values() if spot.nanny not in used]
        found = ended.back + len(others)
        return found if most is None else min(found, most)

    def _workers(self, least: int, wanted: int, what: str) -> list[WorkerInfo]:
        """Return the workers that accept tasks, once there are `wanted`, or `least` after the time
        limit."""
        give_up = time.monotonic() + self._timeout_s
        while True:
            self._check_stop()
            found = [spot for spot in self._site.workers().values() if spot.takes_tasks]
            late = time.monotonic() > give_up
            if len(found) >= max(wanted, least) or (late and len(found) >= least):
                answering = self._site.processes(found)  # Dask notices a lost machine late
                found = [spot for spot in found if spot.nanny in answering]
                late = time.monotonic() > give_up
            if len(found) >= max(wanted, least) or (late and len(found) >= least):
                self._check_free([spot.address for spot in found])
                return found
            if late:
                break
            time.sleep(_LOOK_S)
        place = address_of(self._site.client)
        said = f"{len(found)} of at least {least} workers are {what} at {place}"
        if what == "left":
            raise TrainingInterrupted(f"{said}; start others, then {_GO_ON}")
        raise RunError(f"{said}; start more, or ask for fewer ranks")

    def _check_free(self, addresses: list[str]) -> None:
        """Raise if a worker is a rank of another driver: a task would wait until that rank has
        ended."""
        for address, name in self._site.each(run_of, addresses).items():
            if name not in ("", self._site.name):
                raise of_another_run(address)

    def _check_stop(self) -> None:
        if self._stop.requested:
            raise TrainingInterrupted(f"stopped by {self._stop.requested}; {_GO_ON}")

    def _say(self, event: str, **facts: Any) -> None:
        self._on_event({"event": event, "generation": self._number, **facts})


def _failed(said: str) -> RunError:
    error = RunError(said)
    error.exit_code = EXIT_FAILED  # the saved files are good
    return error
