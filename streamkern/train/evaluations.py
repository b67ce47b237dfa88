"""The figures of a run on held-out data: when they are due, what they were, and what is owed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from streamkern.config.run_config import ExecutionConfig
from streamkern.predict.figures import named
from streamkern.stream.sources.base import BaseSource
from streamkern.train.model import KernelModel
from streamkern.train.steps import Position


class Evaluations:
    """Of a run on `test`, where there is one.

    metrics : the newest. history : all of them, oldest first. owed : whether one was begun that did
    not end.
    """

    def __init__(
        self,
        settings: ExecutionConfig,
        test: BaseSource | None,
        heard: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self._settings, self._test, self._heard = settings, test, heard
        self.metrics: dict[str, float] = {}
        self.history: list[dict[str, Any]] = []
        self.owed = False

    def due(self, position: Position, before: int) -> bool:
        """Whether an epoch ended, the period is over, or a count of `evaluate_at` is reached.

        before : samples before the last step.
        """
        every = self._settings.evaluate_every
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
        """Evaluate. stoppable : entered meanwhile; the figures are owed if it ends with Stopped."""
        self.metrics, self.owed = {}, self._test is not None
        if self._test is None:
            return
        with stoppable, np.errstate(over="ignore", invalid="ignore"):
            metrics = named("test", model().evaluate(self._test))
        self.metrics, self.owed = metrics, False
        record = {"step": position.step, "samples": position.samples, **metrics}
        self.history.append(record)
        report("evaluation", metrics)
        if self._heard is not None:
            self._heard(record)

    def kept(self) -> dict[str, float | None] | None:
        """The newest figures as JSON values; None where they are owed."""
        if self.owed:
            return None
        return {k: v if math.isfinite(v) else None for k, v in self.metrics.items()}

    def restore(self, kept: dict[str, float | None] | None) -> None:
        """What `kept` returned."""
        self.owed = kept is None
        self.metrics = {k: math.nan if v is None else v for k, v in (kept or {}).items()}

    def recall(self, records: Iterable[dict[str, Any]]) -> None:
        """The history of all processes that worked on the run, from the records of its log."""
        self.history = evaluations_in(records)


def evaluations_in(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The evaluations among the records of a log, each step's newest, in order."""
    seen = {r["step"]: r for r in records if r.get("event") == "evaluation"}
    drop = ("time", "event", "epoch")
    return [{k: v for k, v in seen[step].items() if k not in drop} for step in sorted(seen)]
