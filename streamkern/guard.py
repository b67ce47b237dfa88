"""The divergence guard: judged at fixed steps, so that it decides alike on every machine."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from streamkern.errors import DivergenceError

WINDOW = 32
FACTOR = 0.5
MAX_BACK_OFFS = 8


@dataclass
class Guard:
    """Compares the mean loss of each window of `WINDOW` steps with the best so far.

    Losses are taken before the step, on rows not seen before, so they are honest. A window is bad
    if it is not finite, if it is twice as bad as predicting zero, or if it is ten times the best
    window and a tenth of predicting zero: minibatch noise and hard stretches of data do neither,
    an exponentially growing error does both within a few windows.
    """

    best: float = math.inf
    back_offs: int = 0

    def judge(self, loss: float, zero_loss: float) -> bool:
        """Whether the window is bad. loss : its mean; zero_loss : that of predicting zero."""
        bad = (
            not math.isfinite(loss)
            or loss > 2 * zero_loss
            or (loss > 10 * self.best and loss > 0.1 * zero_loss)
        )
        if not bad:
            self.best = min(self.best, loss)
            return False
        self.back_offs += 1
        if self.back_offs > MAX_BACK_OFFS:
            raise DivergenceError(
                f"training diverged and halving the step size {MAX_BACK_OFFS} times did not help "
                f"(loss {loss:.3g}, predicting zero {zero_loss:.3g}); check the data for outliers, "
                "or set solver.damping, ridge or a larger bandwidth"
            )
        return True

    def scalars(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON knows no infinity."""
        kept = asdict(self)
        return kept | {"best": None if math.isinf(self.best) else self.best}

    @classmethod
    def restore(cls, scalars: dict[str, Any]) -> Guard:
        """The guard that `scalars` came from."""
        best = scalars["best"]
        return cls(math.inf if best is None else best, scalars["back_offs"])
