"""Evaluate a run on validation and test data when it is due, and keep the history."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from streamkern.config.run_config import ExecutionConfig
from streamkern.predict.evaluation import with_data_prefix
from streamkern.stream.sources.base import BaseSource
from streamkern.train.loop.step_loop import Position
from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.resolve.early_stopping import VALIDATION_PREFIX


class EvaluationSchedule:
    """The evaluations of a run.

    settings : settings [run]
    test : test rows, or None
    on_evaluation : called with each evaluation, or None
    validation : validation rows, or None
    metrics : figures of the newest evaluation
    history : all evaluations, oldest first
    is_owed : whether an evaluation was interrupted, so that it has to be repeated
    """

    def __init__(
        self,
        settings: ExecutionConfig,
        test: BaseSource | None,
        on_evaluation: Callable[[dict[str, Any]], None] | None,
        validation: BaseSource | None = None,
    ) -> None:
        self._settings, self._on_evaluation = settings, on_evaluation
        sources = {VALIDATION_PREFIX: validation, "test": test}
        self._sources = {name: data for name, data in sources.items() if data is not None}
        self.metrics: dict[str, float] = {}
        self.history: list[dict[str, Any]] = []
        self.is_owed = False

    def is_due(self, position: Position, samples_before: int) -> bool:
        """Return whether the last step makes an evaluation due.

        It does if it has reached a number of samples in `evaluate_at`, or ended a period of
        `evaluate_every` steps. If this setting is "auto", and with early stopping, it also does if
        it has ended an epoch.

        samples_before : number of samples before the last step
        """
        interval = self._settings.evaluate_every
        if self._settings.early_stopping and position.batch == 0:
            return True
        if any(samples_before < count <= position.samples for count in self._settings.evaluate_at):
            return True
        if interval == "auto":
            return position.batch == 0
        return bool(interval) and position.step % interval == 0

    def evaluate(
        self,
        model: Callable[[], KernelModel],
        position: Position,
        stoppable: contextlib.AbstractContextManager[None],
        report: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """Evaluate the model on all sources, and report the figures.

        stoppable : context of the evaluation; if it raises Stopped, the evaluation is owed
        """
        self.metrics, self.is_owed = {}, bool(self._sources)
        if not self._sources:
            return
        metrics: dict[str, float] = {}
        with stoppable, np.errstate(over="ignore", invalid="ignore"):
            current_model = model()
            for name, data in self._sources.items():
                metrics |= with_data_prefix(name, current_model.evaluate(data))
        record = {"step": position.step, "samples": position.samples, **metrics}
        report("evaluation", metrics)
        self.metrics, self.is_owed = metrics, False
        if self.history and self.history[-1]["step"] == position.step:
            self.history.pop()  # evaluated again at the end of the run, maybe with other weights
        self.history.append(record)
        if self._on_evaluation is not None:
            self._on_evaluation(record)

    def metrics_as_json(self) -> dict[str, float | None] | None:
        """Return the newest figures as JSON values; None if they are owed."""
        return None if self.is_owed else figures_as_json(self.metrics)

    def restore_metrics(self, metrics_as_json: Mapping[str, float | None] | None) -> None:
        """Restore the figures that `metrics_as_json` returned."""
        self.is_owed = metrics_as_json is None
        self.metrics = figures_from_json(metrics_as_json or {})


def figures_as_json(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Return figures as JSON values: None stands for numbers that are not finite."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def figures_from_json(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Return figures that `figures_as_json` converted; NaN for numbers that were not finite."""
    return {name: math.nan if value is None else value for name, value in figures.items()}


def evaluations_in(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the evaluations among the records of a log, the newest of each step, in order."""
    newest = {r["step"]: r for r in records if r.get("event") == "evaluation"}
    omitted = ("time", "event", "epoch")
    return [{k: v for k, v in newest[step].items() if k not in omitted} for step in sorted(newest)]
