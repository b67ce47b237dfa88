"""Coordinate the ranks of a run, so that they synchronise, end and resume at the same step.

All ranks have the same losses, and the same weights unless these are sharded, and make the same
decisions from them. Decisions that depend on a clock, a signal or the figures of rank 0 are
broadcast from rank 0. Between steps, sums over rows are gathered, rank 0 tells the others whether
to save or to end the run, and timings are exchanged for the log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import RankLostError
from streamkern.basics.stop import StopRequest
from streamkern.stream.meter import three_digits
from streamkern.train.loop.step_loop import StepLoop

GATHER_INTERVAL_STEPS = 32
"""Partial sums over rows are summed over the ranks after each step of the run whose number is a
multiple of this, at the end of an epoch, and before evaluations and checkpoints at set steps."""

AGREEMENT_INTERVAL_S = 0.1
"""Seconds between two broadcasts of whether the run is saved or ended. They are at most
`GATHER_INTERVAL_STEPS` steps apart."""

NO_CHECKPOINT = -1
"""Step number that stands for "no checkpoint"."""

UNEVEN_WAIT_SHARE = 0.1
"""Smallest difference between two ranks' shares of waiting time for which the slowest rank is
shown."""


class RankTimings(NamedTuple):
    """Cumulative figures of a rank.

    clock : seconds on its clock
    stall, wait : seconds spent waiting for data, and for other ranks
    rows : number of rows that it has processed
    """

    clock: float
    stall: float
    wait: float
    rows: float


class RankCoordinator:
    """Coordinate this rank with the others.

    stop : stop request of this process; the one of rank 0 decides
    """

    def __init__(self, ranks: Communicator, stop: StopRequest) -> None:
        self._ranks, self._stop = ranks, stop
        self._last_exchange = self._this_exchange = [RankTimings(0.0, 0.0, 0.0, 0.0)] * ranks.size
        self._last_agreement_s = time.perf_counter()
        self._steps_since_sync, self._steps_to_sync = 0, 1

    def check_step(self, step: int = NO_CHECKPOINT) -> None:
        """Raise RankLostError unless this rank continues from the step of rank 0. Collective.

        Another process may have saved a checkpoint while the ranks were reading.

        step : step of the checkpoint that this rank has read
        """
        (rank0_step,) = self._ranks.broadcast_scalars([step])
        if rank0_step != step:
            texts = [
                "no checkpoint"
                if read_step == NO_CHECKPOINT
                else f"a checkpoint of step {read_step:.0f}"
                for read_step in (step, rank0_step)
            ]
            raise RankLostError(
                f"rank {self._ranks.rank} read {texts[0]}, but rank 0 read {texts[1]}",
                "give a run_dir whose files all ranks see",
            )

    def sync_if_due(self, step_loop: StepLoop, *, is_forced: bool) -> bool:
        """Synchronise the ranks if this step requires it; return whether it did. Collective.

        Only then may the run be evaluated, saved or ended. If the solver has sums over rows, they
        are summed over the ranks at fixed steps, so that no save changes the order of summation.
        Otherwise the interval is the number of steps that rank 0 broadcasts in `agree_on_end`.

        is_forced : synchronise after this step in any case, because the settings require it
        """
        if self._ranks.is_single:
            return True
        solver, state, position = step_loop.solver, step_loop.state, step_loop.position
        self._steps_since_sync += 1
        if not position.batch:
            return True  # the end of the epoch has gathered the sums
        if solver.sums_of_rows(state):
            is_due = position.step % GATHER_INTERVAL_STEPS == 0
        else:
            is_due = self._steps_since_sync >= self._steps_to_sync
        if not (is_due or is_forced):
            return False
        solver.reduce_to_rank_0(state)
        return True

    def rank0_holds_state(self, step_loop: StepLoop) -> bool:
        """Return whether rank 0 alone holds everything that a checkpoint stores, after any step."""
        if self._ranks.is_single:
            return True
        return step_loop.share.is_replicated and not step_loop.solver.sums_of_rows(step_loop.state)

    def broadcast_decision(self, decision: bool) -> bool:
        """Return the decision of rank 0. Collective."""
        return bool(self._ranks.broadcast_scalars([decision])[0])

    def agree_on_end(self, reason: str | None, *, saves: bool = False) -> tuple[str | None, bool]:
        """Return why rank 0 ends the run after this step, or None, and whether it saves the run.

        Collective. The broadcast also sets the number of steps to the next one. Raises Stopped on
        all ranks if rank 0 has received a signal.

        reason, saves : decisions of this rank, which count on rank 0 only
        """
        if self._ranks.is_single:
            return reason, saves
        step_s = (time.perf_counter() - self._last_agreement_s) / max(1, self._steps_since_sync)
        steps = min(GATHER_INTERVAL_STEPS, max(1, int(AGREEMENT_INTERVAL_S / max(step_s, 1e-9))))
        stops, ends, saves, self._steps_to_sync = self._ranks.broadcast_scalars(
            [self._stop.requested_by is not None, reason is not None, saves, steps]
        ).tolist()
        self._last_agreement_s, self._steps_since_sync = time.perf_counter(), 0
        if stops:
            self._stop.requested_by = self._stop.requested_by or "rank 0"
            self._stop.check()
        return (reason or "rank 0 has ended it") if ends else None, bool(saves)

    def exchange(self, step: int, stall_s: float, rows: int) -> None:
        """Exchange timings between the ranks, every `GATHER_INTERVAL_STEPS` steps. Collective."""
        if not self._ranks.is_single and step % GATHER_INTERVAL_STEPS == 0:
            timings = RankTimings(time.perf_counter(), stall_s, self._ranks.waited_s, rows)
            self._last_exchange = self._this_exchange
            self._this_exchange = [
                RankTimings(*values) for values in self._ranks.allgather(timings)
            ]

    def facts(self) -> dict[str, Any]:
        """Return figures of each rank for the log, measured between the last two exchanges.

        These are the rows per second, without the time spent waiting for other ranks, and the
        shares of the time spent waiting for data and for other ranks. The slowest rank is the one
        that waits least for the others.
        """
        if not self._last_exchange[0].clock:
            return {}
        pairs = zip(self._last_exchange, self._this_exchange, strict=True)
        # Differences of the cumulative figures of each rank.
        intervals = [RankTimings(*(b - a for a, b in zip(*pair, strict=True))) for pair in pairs]
        waits = [_share(rank.wait, rank.clock) for rank in intervals]
        return {
            "rank_samples_per_s": [
                rank.rows / max(rank.clock - rank.wait, 1e-9 + 1e-3 * rank.clock)
                for rank in intervals
            ],
            "rank_stall_shares": [_share(rank.stall, rank.clock) for rank in intervals],
            "rank_wait_shares": waits,
            "slowest_rank": waits.index(min(waits)),
        }


def format_rank_figures(facts: Mapping[str, Any]) -> str:
    """Return text with the smallest and the largest value of each of `RankCoordinator.facts`.

    The slowest rank is added if it is noticeably slower. The text is "" if there are no figures.
    """
    if "rank_wait_shares" not in facts:
        return ""
    rates, stalls, waits = (
        facts[f"rank_{name}"] for name in ("samples_per_s", "stall_shares", "wait_shares")
    )
    is_uneven = max(waits) - min(waits) >= UNEVEN_WAIT_SHARE
    return ", ".join([
        f"{len(waits)} ranks",
        *([f"slowest {facts['slowest_rank']}"] if is_uneven else []),
        f"waiting {_range_text(waits, '{:.0%}'.format)}",
        f"stall {_range_text(stalls, '{:.0%}'.format)}",
        f"{_range_text(rates, three_digits)}/s each",
    ])  # fmt: skip


def _range_text(figures: Sequence[float], text: Callable[[float], str]) -> str:
    low, high = text(min(figures)), text(max(figures))
    return low if low == high else f"{low}-{high}"


def _share(part: float, total: float) -> float:
    return min(1.0, max(0.0, part / total)) if total > 0 else 0.0
