"""Train the candidates of a search, each of them once; record, count and report the trainings."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any

import numpy as np

from streamkern.basics.errors import DivergenceError
from streamkern.basics.stop import StopRequest
from streamkern.config.run_config import RunConfig
from streamkern.kernels import notation
from streamkern.losses.base import Loss
from streamkern.solver.equations import SINGULAR_NOTE
from streamkern.solver.method import Report
from streamkern.train.model.training_fit import ISOLATED_NOTE, NOTHING_NOTE, SQUEEZED_NOTE
from streamkern.train.train import Result, train
from streamkern.tuning.candidates import Candidates
from streamkern.tuning.journal import TrialJournal
from streamkern.tuning.metrics import (
    MSE,
    known_metrics,
    losses,
    packed_predictions,
    row_weights,
)
from streamkern.tuning.table import HELD_OUT, HELD_OUT_MSE, TrialPoint, TrialRow

LOSS_PARAMETERS = "loss_parameters"
"""Entry of a record for the parameters of the loss."""
_NOT_SHOWN = ("losses", "settings", LOSS_PARAMETERS)
"""Entries of a record that are not reported."""
TrialSettings = tuple[Any, Any, Any]
"""Kernel, bandwidth and ridge of a candidate, as JSON values."""


class Trainings:
    """The trainings of a search.

    candidates : settings and rows
    journal : records of the trainings; recorded ones are not repeated
    stop : request by which a signal ends the search
    total : largest number of trainings
    report, progress : see `search_settings`
    """

    def __init__(
        self,
        candidates: Candidates,
        journal: TrialJournal,
        stop: StopRequest,
        total: int,
        report: Report | None,
        progress: bool | str,
    ) -> None:
        self.candidates, self.journal, self.stop = candidates, journal, stop
        self.total, self.progress = total, progress
        self._report: Report = report or (lambda event, fields: None)
        self._used: set[str] = set()  # trainings of this search that are recorded
        self._done, self._spent_s = 0, 0.0

    def announce(self) -> TrialRow:
        """Report and return the sizes of the search, with the number of recorded trainings."""
        sizes = {"trainings": self.total, **self.candidates.sizes()}
        recorded = sum(r["fold"] < self.candidates.folds for r in self.journal.records())
        self._report("search", {**sizes, "recorded": min(self.total, recorded)})
        return sizes

    def measured(self, kernel: Any, bandwidth: float | None, ridge: float) -> TrialPoint:
        """Return the results of a candidate on all splits, from the records or by training it."""
        return self._point((kernel, bandwidth, ridge))

    def as_given(self) -> TrialPoint:
        """Train the given settings on all splits, and return the results.

        Every training chooses values for "auto"; the results show the values of the first one.
        """
        return self._point(self.candidates.given())

    def scale(self, kernel: Any, ridge: float) -> tuple[Any, float]:
        """Return a kernel whose parts all have bandwidths, and its bandwidth, for a grid around it.

        Bandwidths "auto" are replaced by the median distance between centers, which a training
        measures. Raises DivergenceError if this training diverges.
        """
        widths = notation.bandwidths(kernel)
        if "auto" not in widths:
            return kernel, float(max(widths))
        known = (r for r in self.journal.records() if r.get("given") == kernel)
        record = next(known, None) or self._median_training(kernel, ridge)
        return record["kernel"], record["bandwidth"]

    def _point(self, settings: TrialSettings) -> TrialPoint:
        records = []
        for fold in range(self.candidates.folds):
            record = self.journal.get(settings, fold) or self._trained(settings, fold)
            self._used.add(repr((*settings, fold)))
            records.append(record)
        return TrialPoint(records, is_given=settings == self.candidates.given())

    def _trained(self, settings: TrialSettings, fold: int) -> TrialRow:
        """Train a candidate on one split, record the result, and return the record."""
        began, candidates = time.perf_counter(), self.candidates
        config = (
            candidates.in_metric(candidates.trial)
            if settings == candidates.given()
            else candidates.config(*settings)
        )
        kernel, *numbers = settings
        shown = [None if isinstance(value, str) else value for value in numbers]
        row = {"kernel": kernel, "bandwidth": shown[0], "ridge": shown[1], HELD_OUT_MSE: None}
        with suppress(DivergenceError):
            row |= self._result(config, fold, settings)
        return self._record(settings, fold, row, time.perf_counter() - began)

    def _median_training(self, kernel: Any, ridge: float) -> TrialRow:
        began = time.perf_counter()
        config = self.candidates.config(kernel, None, ridge)
        row = self._result(config, 0, (kernel, "median", ridge)) | {"given": kernel}
        settings = row["kernel"], row["bandwidth"], ridge
        return self._record(settings, 0, row, time.perf_counter() - began)

    def _result(self, config: RunConfig, fold: int, settings: TrialSettings) -> TrialRow:
        """Train once; return kernel, bandwidth and ridge as numbers, and the held-out figures.

        Figures that are not finite are left out, and the training counts as diverged.
        """
        self.stop.check()
        fit, held_out = self.candidates.split(fold)
        with warnings.catch_warnings():
            # In a search, the held-out rows show that a solution is bad.
            for note in (SINGULAR_NOTE, NOTHING_NOTE, ISOLATED_NOTE, SQUEEZED_NOTE):
                warnings.filterwarnings("ignore", note)
            result = train(
                config, source=fit, test=held_out, metric=self.candidates.distances,
                progress=self.progress, stop=self.stop, last_line=False,
            )  # fmt: skip
        figures: TrialRow = {HELD_OUT_MSE: None}
        with closing(result.model.backend) as backend, backend.active():
            if result.metrics and all(map(math.isfinite, result.metrics.values())):
                figures = self._figures(result, fold)
        return _in_numbers(settings, result) | figures

    def _figures(self, result: Result, fold: int) -> TrialRow:
        """Return the figure of every metric, and the losses of each held-out row.

        If the parameters of the loss are found from the data, the values of the first recorded
        training are used, so that all candidates are compared by the same loss.
        """
        y, w = self.candidates.targets(fold)
        classes, variance = result.model.classes is not None, None
        if not classes:
            v, values = row_weights(MSE, y, w), np.float64(y).reshape(len(y), -1)
            variance = v @ np.square(values - v @ values)
        loss, to_host = self._common_loss(result.model.loss), result.model.backend.to_host
        parts = [
            losses(to_host(F), to_host(Y), variance, loss)
            for _, F, Y in result.model.stream(self.candidates.split(fold)[1])
        ]
        of_rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        figures = {
            name: metric.loss_of(float(row_weights(metric, y, w) @ of_rows[metric.loss]))
            for name, metric in known_metrics(classes, None if loss is None else type(loss)).items()
        }
        measured = {k.removeprefix("test_"): v for k, v in result.metrics.items()}
        figures |= {k: v for k, v in measured.items() if loss is None or k != loss.figure}
        row: TrialRow = {f"{HELD_OUT}_{name}": value for name, value in figures.items()}
        row |= {} if loss is None else {LOSS_PARAMETERS: loss.parameters()}
        return row | {"losses": {name: packed_predictions(v) for name, v in of_rows.items()}}

    def _common_loss(self, loss: Loss | None) -> Loss | None:
        """Return the loss with the parameters that the first training recorded."""
        recorded = (r[LOSS_PARAMETERS] for r in self.journal.records() if LOSS_PARAMETERS in r)
        parameters = next(recorded, None)
        return loss if loss is None or parameters is None else type(loss)(**parameters)

    def _record(
        self, settings: Sequence[Any], fold: int, row: TrialRow, seconds: float
    ) -> TrialRow:
        """Record a training, and report that it is done."""
        record = {**row, "fold": fold, "settings": list(settings), "seconds": seconds}
        self.journal.add(record)
        self._used.add(repr((*settings, fold)))
        self._done, self._spent_s = self._done + 1, self._spent_s + seconds
        left = self.total - len(self._used)
        progress = {"left": left, "seconds_left": left * self._spent_s / self._done}
        shown = {k: v for k, v in record.items() if k not in _NOT_SHOWN}
        self._report("trial", {**shown, "folds": self.candidates.folds, **progress})
        return record


def _in_numbers(settings: TrialSettings, result: Result) -> TrialRow:
    """Return kernel, bandwidth and ridge, with words in `settings` replaced by the run's values.

    The bandwidth of a sum or product is its largest one. If some of its parts have a given
    bandwidth, the description of the kernel has the bandwidths of all parts.
    """
    kernel, bandwidth, ridge = settings
    described = result.meta["kernel"]
    described = described.get("of", described)  # the kernel that Fourier features approximate
    widths = notation.bandwidths(described)
    if kernel == "auto":
        kernel = described["kernel"]
    elif isinstance(bandwidth, str) and set(notation.bandwidths(kernel)) != {"auto"}:
        kernel = notation.with_bandwidths(kernel, widths)
    return {
        "kernel": kernel,
        "bandwidth": max(widths) if isinstance(bandwidth, str) else bandwidth,
        "ridge": result.ridge if isinstance(ridge, str) else ridge,
    }
