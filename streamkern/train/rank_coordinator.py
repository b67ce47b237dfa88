"""What the ranks of a run do alike: meet, end, and go on from the same step.

Weights and losses are the same on all of them, and so is what follows from these. What follows from
rank 0's clock, its figures or a signal, it tells the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import RankLostError
from streamkern.basics.stop import StopRequest
from streamkern.stream.meter import three_digits
from streamkern.train.step_loop import Steps

GATHERED = 32
"""Steps between two times at which ranks put together their sums over rows, within a pass."""

NO_CHECKPOINT = -1
"""In the place of its step."""

WORTH_SAYING = 0.1
"""Of the time, that one rank waits more than another."""


class RankTimings(NamedTuple):
    """Of a rank so far: seconds on the clock, waiting for data, waiting for the others; its rows of
    the batches."""

    clock: float
    stall: float
    wait: float
    rows: float


class RankCoordinator:
    """Of one rank with the others. stop : of rank 0 the one that counts."""

    def __init__(self, ranks: Communicator, stop: StopRequest) -> None:
        self._ranks, self._stop = ranks, stop
        self._before = self._now = [RankTimings(0.0, 0.0, 0.0, 0.0)] * ranks.size

    def check_step(self, step: int = NO_CHECKPOINT) -> None:
        """Raise unless all ranks go on from the same step: rank 0 of before may have saved one."""
        (first,) = self._ranks.broadcast_scalars([step])
        if first != step:
            said = [
                "no checkpoint" if at == NO_CHECKPOINT else f"a checkpoint of step {at:.0f}"
                for at in (step, first)
            ]
            raise RankLostError(
                f"rank {self._ranks.rank} read {said[0]}, rank 0 {said[1]}; give a run_dir whose "
                "files all ranks see"
            )

    def meets(self, steps: Steps, *, now: bool) -> bool:
        """Whether a run may be evaluated, saved or end after this step.

        Sums over rows are gathered at fixed steps, so that no save changes the order in which they
        are added up. now : at this one in any case, for which there are settings.
        """
        if self._ranks.alone:
            return True
        solver, state, at = steps.solver, steps.state, steps.position
        if not at.batch:
            return True  # what there was, the end of the pass has gathered
        if at.step % GATHERED and not now and solver.sums_of_rows(state):
            return False
        solver.gather(state)
        return True

    def gathered(self, steps: Steps) -> bool:
        """Whether rank 0 has by itself all that a checkpoint keeps, at any step."""
        if self._ranks.alone:
            return True
        return steps.share.whole and not steps.solver.sums_of_rows(steps.state)

    def says(self, so: bool) -> bool:
        """Whether rank 0 says so. Everybody asks."""
        return bool(self._ranks.broadcast_scalars([so])[0])

    def ended(self, why: str | None, *, saves: bool = False) -> tuple[str | None, bool]:
        """Why rank 0 ends the run after this step, and whether it saves it; raises Stopped where a
        signal is why."""
        if self._ranks.alone:
            return why, saves
        stopped, ended, saved = self._ranks.broadcast_scalars(
            [self._stop.requested is not None, why is not None, saves]
        )
        if stopped:
            self._stop.requested = self._stop.requested or "rank 0"
            self._stop.check()
        return why or ("rank 0 has ended it" if ended else None), bool(saved)

    def exchange(self, step: int, stall_s: float, rows: int) -> None:
        """Tell each other, every now and then, what the time goes to."""
        if not self._ranks.alone and step % GATHERED == 0:
            own = RankTimings(time.perf_counter(), stall_s, self._ranks.waited_s, rows)
            self._before, self._now = (
                self._now,
                [RankTimings(*each) for each in self._ranks.allgather(own)],
            )

    def facts(self) -> dict[str, Any]:
        """For the log: of each rank, and between the last two exchanges, the rows a second that it
        takes where it waits for nobody, and the shares of its time that it waited for data and for
        the others. Who waits least is whom the others wait for."""
        if not self._before[0].clock:
            return {}
        pairs = zip(self._before, self._now, strict=True)
        spent = [RankTimings(*(b - a for a, b in zip(*pair, strict=True))) for pair in pairs]
        waits = [_share(one.wait, one.clock) for one in spent]
        return {
            "rank_samples_per_s": [
                one.rows / max(one.clock - one.wait, 1e-9 + 1e-3 * one.clock) for one in spent
            ],
            "rank_stall_shares": [_share(one.stall, one.clock) for one in spent],
            "rank_wait_shares": waits,
            "slowest_rank": waits.index(min(waits)),
        }

    def words(self) -> str:
        """For the line."""
        return format_rank_figures(self.facts())


def format_rank_figures(facts: Mapping[str, Any]) -> str:
    """What `Agreement.facts` says of ranks, of each figure the least and the largest; the slowest
    rank where that is worth knowing. Nothing of none."""
    if "rank_wait_shares" not in facts:
        return ""
    rates, stalls, waits = (
        facts[f"rank_{name}"] for name in ("samples_per_s", "stall_shares", "wait_shares")
    )
    apart = max(waits) - min(waits) >= WORTH_SAYING
    return ", ".join([
        f"{len(waits)} ranks",
        *([f"slowest {facts['slowest_rank']}"] if apart else []),
        f"waiting {_between(waits, '{:.0%}'.format)}",
        f"stall {_between(stalls, '{:.0%}'.format)}",
        f"{_between(rates, three_digits)}/s each",
    ])  # fmt: skip


def _between(figures: Sequence[float], text: Callable[[float], str]) -> str:
    least, most = text(min(figures)), text(max(figures))
    return least if least == most else f"{least}-{most}"


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
