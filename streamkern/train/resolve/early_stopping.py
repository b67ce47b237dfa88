"""Early stopping: score each epoch on validation rows, keep the best weights, and decide the end.

All decisions follow from the scores, which a checkpoint stores with the weights of the best epoch.
`stream.sources.split` describes which rows are set aside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.run_config import ExecutionConfig, RunConfig

VALIDATION_PREFIX = "validation"
"""Prefix of the names of figures on the validation rows."""


def check_early_stopping(config: RunConfig, *, complete: bool, has_initial_weights: bool) -> None:
    """Raise ConfigError for early stopping in `partial_fit`, from initial weights, or of one epoch.

    complete : whether the run has all of its rows; False for `partial_fit`
    has_initial_weights : whether training begins from existing weights
    """
    if not config.run.early_stopping:
        return
    problem = None
    if not complete:
        problem = "cannot be used with partial_fit, whose caller decides the number of epochs"
    elif has_initial_weights:
        problem = "cannot be used with initial weights, which the rows set aside may have trained"
    elif config.data.epochs == 1:
        problem = f"has nothing to stop with {mention('data.epochs', 1)}"
    if problem is not None:
        raise ConfigError(f"{mention('run.early_stopping')} {problem}", "leave it out")


class EarlyStopping:
    """The early stopping of one run.

    loss_figure : name of the loss in evaluations, whose negative is the score; None for the
        squared error, whose score is the accuracy or R2
    scores : score of each epoch, -inf if it is not finite
    """

    def __init__(self, settings: ExecutionConfig, loss_figure: str | None = None) -> None:
        self._loss_figure = loss_figure
        self._patience = settings.n_iter_no_change if settings.early_stopping else None
        self.scores: list[float] = []

    @property
    def is_active(self) -> bool:
        """True if rows are set aside for validation."""
        return self._patience is not None

    def lacks_score(self, n_epochs: int) -> bool:
        """Return whether the last of `n_epochs` epochs has no score.

        This is so if a signal or an error came before its evaluation.
        """
        return self.is_active and len(self.scores) < n_epochs

    def add_score(self, figures: Mapping[str, float], keep_weights: Callable[[], object]) -> None:
        """Record the score of the epoch that has ended.

        figures : figures on the validation rows
        keep_weights : called if the score is the best so far, before it is recorded
        """
        if self._loss_figure is not None:
            score = -figures[f"{VALIDATION_PREFIX}_{self._loss_figure}"]
        else:
            name = "accuracy" if f"{VALIDATION_PREFIX}_accuracy" in figures else "r2"
            score = figures[f"{VALIDATION_PREFIX}_{name}"]
        score = score if math.isfinite(score) else -math.inf
        if _best_epoch([*self.scores, score]) == len(self.scores):
            keep_weights()
        self.scores.append(score)

    @property
    def newest_is_best(self) -> bool:
        """True if the newest score is above all scores before it."""
        return bool(self.scores) and _best_epoch(self.scores) == len(self.scores) - 1

    def stop_reason(self) -> str | None:
        """Return why training ends, or None if it goes on."""
        if self._patience is None or not self.scores:
            return None
        best_epoch = _best_epoch(self.scores)
        since_best = self.scores[max(best_epoch, 0) :]
        epochs_since = len(since_best) - 1
        if self._loss_figure is not None and best_epoch >= 0:
            # Equal losses mean equal weights: a step that was taken back, or not yet taken.
            epochs_since = sum(a != b for a, b in itertools.pairwise(since_best))
        if epochs_since < self._patience:
            return None
        if best_epoch < 0:
            return (
                "no score on the validation rows is finite; the model keeps the weights of the "
                f"last epoch, {len(self.scores)}"
            )
        return (
            f"the score on the validation rows has not improved for {epochs_since} epochs; the "
            f"model keeps the weights of epoch {best_epoch + 1}"
        )


def _best_epoch(scores: Sequence[float]) -> int:
    """Return the index of the first epoch with the highest score; -1 if no score is finite."""
    highest = max(scores, default=-math.inf)
    return scores.index(highest) if highest > -math.inf else -1


def scores_as_json(scores: Sequence[float]) -> list[float | None]:
    """Return scores as JSON values, for a checkpoint."""
    return [score if math.isfinite(score) else None for score in scores]


def scores_from_json(json_scores: Sequence[float | None]) -> list[float]:
    """Return the scores that `scores_as_json` converted."""
    return [-math.inf if score is None else score for score in json_scores]
