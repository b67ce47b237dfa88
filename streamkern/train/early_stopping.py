"""Early stopping: the scores of the passes on rows set aside, the best of them, and when to end.

All of it follows from the scores, which a checkpoint keeps beside the weights of the best pass.
Which rows are set aside says `stream.sources.validation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from streamkern.basics.errors import ConfigError
from streamkern.config.run_config import ExecutionConfig, RunConfig

DATA = "validation"
"""In front of the names of its figures."""


def check_early_stopping(config: RunConfig, *, whole: bool, goes_on: bool) -> None:
    """Raise ConfigError where passes can not be stopped early, or rows set aside mean nothing.

    whole : whether no other rows will follow. goes_on : from weights that were there before.
    """
    if not config.run.early_stopping:
        return
    why = None
    if not whole:
        why = "can not be used with partial_fit, which decides itself how often it is called"
    elif goes_on or config.solver.warm_start is not None:
        why = "can not be used with weights to go on from, which rows set aside may have trained"
    elif config.data.epochs == 1:
        why = "has nothing to stop with data.epochs=1, which is one pass"
    if why is not None:
        raise ConfigError(f"run.early_stopping {why}; leave it out")


class EarlyStopping:
    """Of one run. scores : of its passes, accuracy or R2, -inf where that is not a number."""

    def __init__(self, settings: ExecutionConfig) -> None:
        self._patience = settings.n_iter_no_change if settings.early_stopping else None
        self.scores: list[float] = []

    @property
    def active(self) -> bool:
        """Whether rows are set aside."""
        return self._patience is not None

    def owes(self, epoch: int) -> bool:
        """Whether one of so many passes has no score: what told of its end has failed."""
        return self.active and len(self.scores) < epoch

    def judge(self, figures: Mapping[str, float], keep: Callable[[], object]) -> None:
        """Take the score of the pass that has ended; `keep` its weights first if it is the best so
        far, so that no score is there without them. figures : on the rows set aside."""
        name = "accuracy" if f"{DATA}_accuracy" in figures else "r2"
        score = figures[f"{DATA}_{name}"]
        if math.isfinite(score) and all(score > other for other in self.scores):
            keep()
        self.scores.append(score if math.isfinite(score) else -math.inf)

    @property
    def at_best(self) -> bool:
        """Whether the newest score is the best, and the first that is as good."""
        newest = self.scores[-1] if self.scores else -math.inf
        return newest > max(self.scores[:-1], default=-math.inf)

    def reason(self) -> str | None:
        """Why no further pass is needed, or None."""
        if self._patience is None or not self.scores:
            return None
        best = self.scores.index(max(self.scores))
        since = len(self.scores) - 1 - best
        if since < self._patience:
            return None
        return (
            f"the score on the rows set aside has not got better for {since} passes; the weights "
            f"are those of pass {best + 1}"
        )


def kept_scores(scores: Sequence[float]) -> list[float | None]:
    """As JSON values, for a checkpoint."""
    return [score if math.isfinite(score) else None for score in scores]


def scores_in(kept: Sequence[float | None]) -> list[float]:
    """What `kept_scores` returned."""
    return [-math.inf if score is None else score for score in kept]
