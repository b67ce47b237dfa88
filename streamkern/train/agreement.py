"""What the ranks of a run do alike: meet, end, and go on from the same step.

Weights and losses are the same on all of them, and so is what follows from these. What follows from
rank 0's clock, its figures or a signal, it tells the others.
"""

from __future__ import annotations

from streamkern.backend.ranks import Ranks
from streamkern.basics.errors import RunError
from streamkern.basics.stop import StopRequest
from streamkern.train.steps import Steps

GATHERED = 32
"""Steps between two times at which ranks put together their sums over rows, within a pass."""


class Agreement:
    """Of one rank with the others. stop : of rank 0 the one that counts."""

    def __init__(self, ranks: Ranks, stop: StopRequest) -> None:
        self._ranks, self._stop = ranks, stop

    def check_step(self, step: int) -> None:
        """Raise unless all ranks go on from the same step."""
        (first,) = self._ranks.same([step])
        if first != step:
            raise RunError(
                f"rank {self._ranks.rank} read a checkpoint of step {step}, rank 0 one of "
                f"{first:.0f}; give a run_dir whose files all ranks see"
            )

    def meets(self, steps: Steps) -> bool:
        """Whether a run may be saved or end after this step.

        Sums over rows are gathered at fixed steps, so that no save changes the order in which they
        are added up.
        """
        if self._ranks.alone:
            return True
        solver, state, at = steps.solver, steps.state, steps.position
        if not at.batch:
            return True  # what there was, the end of the pass has gathered
        if at.step % GATHERED and solver.sums_of_rows(state):
            return False
        solver.gather(state)
        return True

    def ended(self, why: str | None) -> str | None:
        """Why rank 0 ends the run after this step; raises Stopped where a signal is why."""
        if self._ranks.alone:
            return why
        stopped, ended = self._ranks.same([self._stop.requested is not None, why is not None])
        if stopped:
            self._stop.requested = self._stop.requested or "rank 0"
            self._stop.check()
        return why or ("rank 0 has ended it" if ended else None)
