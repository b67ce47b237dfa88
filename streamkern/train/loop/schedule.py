"""Evaluate a run and save it in the background, when either is due.

`rundir.checkpoint_format` describes the files of a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from streamkern.config.run_config import ExecutionConfig
from streamkern.predict.evaluation import with_data_prefix
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.saver import AsyncSaver
from streamkern.stream.sources.base import BaseSource
from streamkern.train.loop.step_loop import Position, StepLoop
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


MIN_AUTO_INTERVAL_S, AUTO_INTERVAL_RATIO = 60.0, 20
"""Without a set interval, a checkpoint is due after so many seconds, or after this multiple of the
time for which the last checkpoint blocked training, if that is longer. A checkpoint may have p^2
numbers to compute and to copy."""


class Checkpoints:
    """Checkpoints of a run in `directory`; nothing is saved if it is None.

    stack : exit stack of the run, on which the background thread is closed
    """

    def __init__(
        self,
        settings: ExecutionConfig,
        directory: RunDirectory | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self._interval_steps, self._interval_s = settings.checkpoint_cadence
        self._saver = None if directory is None else stack.enter_context(AsyncSaver(directory))
        self._last_save, self._blocked_s = time.monotonic(), 0.0

    @property
    def saves(self) -> bool:
        """True if checkpoints are saved."""
        return self._saver is not None

    @property
    def has_failed(self) -> bool:
        """True if a save has failed."""
        return self._saver is not None and self._saver.has_failed

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` steps."""
        if self._interval_steps is not None:
            return self.is_set_for(step)
        auto_interval_s = max(MIN_AUTO_INTERVAL_S, AUTO_INTERVAL_RATIO * self._blocked_s)
        return time.monotonic() - self._last_save >= (self._interval_s or auto_interval_s)

    def is_set_for(self, step: int) -> bool:
        """Return whether the settings ask for a checkpoint after exactly `step` steps."""
        return self._interval_steps is not None and step % self._interval_steps == 0

    def save(
        self, step_loop: StepLoop, meta: dict[str, Any], before_commit: Callable[[], object]
    ) -> None:
        """Start to save the state of `step_loop`, with the entries `meta`.

        On ranks without checkpoints, this rank's arrays are sent to rank 0 instead. Collective if
        ranks partition the centers.

        before_commit : called before the files become a checkpoint, see `AsyncSaver`
        """
        if self._saver is None:
            step_loop.send_to_rank0()
            return
        start = time.monotonic()
        self._saver.wait()  # at most one copy is held
        arrays, values = step_loop.snapshot()
        self._saver.submit(step_loop.position.step, arrays, values | meta, before_commit)
        self._last_save = time.monotonic()
        self._blocked_s = self._last_save - start

    def wait(self) -> None:
        """Wait until the current save is done; raise its error if it failed."""
        if self._saver is not None:
            self._saver.wait()
