"""Evaluate a run on validation and test data when it is due, and keep the history."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from streamkern.config.run_config import ExecutionConfig
from streamkern.predict.evaluation import prefixed
from streamkern.stream.sources.base import BaseSource
from streamkern.train.loop.step_loop import Position
from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.resolve.early_stopping import DATA


class EvaluationSchedule:
    """The evaluations of a run.

    test : test rows, or None
    heard : called with each evaluation, or None
    aside : validation rows, or None
    metrics : figures of the newest evaluation
    history : all evaluations, oldest first
    owed : whether an evaluation was interrupted, so that it has to be repeated
    """

    def __init__(
        self,
        settings: ExecutionConfig,
        test: BaseSource | None,
        heard: Callable[[dict[str, Any]], None] | None,
        aside: BaseSource | None = None,
    ) -> None:
        self._settings, self._heard = settings, heard
        sources = {DATA: aside, "test": test}
        self._sources = {name: data for name, data in sources.items() if data is not None}
        self.metrics: dict[str, float] = {}
        self.history: list[dict[str, Any]] = []
        self.owed = False

    def due(self, position: Position, before: int) -> bool:
        """Return whether the last step makes an evaluation due.

        That is, it has ended an epoch or a period of `evaluate_every` steps, or has reached a
        number of samples in `evaluate_at`.

        before : number of samples before the last step
        """
        every = self._settings.evaluate_every
        if self._settings.early_stopping and position.batch == 0:
            return True
        if any(before < count <= position.samples for count in self._settings.evaluate_at):
            return True
        if every == "auto":
            return position.batch == 0
        return bool(every) and position.step % every == 0

    def take(
        self,
        model: Callable[[], KernelModel],
        position: Position,
        stoppable: contextlib.AbstractContextManager[None],
        report: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """Evaluate the model on all sources, and report the figures.

        stoppable : context of the evaluation; if it raises Stopped, the evaluation is owed
        """
        self.metrics, self.owed = {}, bool(self._sources)
        if not self._sources:
            return
        metrics: dict[str, float] = {}
        with stoppable, np.errstate(over="ignore", invalid="ignore"):
            evaluated = model()
            for name, data in self._sources.items():
                metrics |= prefixed(name, evaluated.evaluate(data))
        record = {"step": position.step, "samples": position.samples, **metrics}
        report("evaluation", metrics)
        self.metrics, self.owed = metrics, False
        if self.history and self.history[-1]["step"] == position.step:
            self.history.pop()  # evaluated again at the end of the run, maybe with other weights
        self.history.append(record)
        if self._heard is not None:
            self._heard(record)

    def kept(self) -> dict[str, float | None] | None:
        """Return the newest figures as JSON values; None if they are owed."""
        if self.owed:
            return None
        return {k: v if math.isfinite(v) else None for k, v in self.metrics.items()}

    def restore(self, kept: dict[str, float | None] | None) -> None:
        """Restore the figures that `kept` returned."""
        self.owed = kept is None
        self.metrics = {k: math.nan if v is None else v for k, v in (kept or {}).items()}

    def recall(self, records: Iterable[dict[str, Any]]) -> None:
        """Restore the history of all processes of the run, from the records of its log."""
        self.history = evaluations_in(records)


def evaluations_in(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the evaluations among the records of a log, the newest of each step, in order."""
    seen = {r["step"]: r for r in records if r.get("event") == "evaluation"}
    drop = ("time", "event", "epoch")
    return [{k: v for k, v in seen[step].items() if k not in drop} for step in sorted(seen)]
