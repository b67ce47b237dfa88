"""Train each candidate of a search once; record, count and report the trainings."""

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
from streamkern.tuning.metrics import MSE, known_metrics, pack_losses, row_losses, row_weights
from streamkern.tuning.table import HELD_OUT, HELD_OUT_MSE, TrialPoint, TrialRow

LOSS_PARAMETERS = "loss_parameters"
"""Entry of a record for the parameters of the loss."""
_UNREPORTED_ENTRIES = ("losses", "settings", LOSS_PARAMETERS)
"""Entries of a record that are not reported."""
TrialSettings = tuple[Any, Any, Any]
"""Kernel, bandwidth and ridge of a candidate, as JSON values."""


class Trainings:
    """The trainings of a search.

    candidates : settings and rows
    journal : records of the trainings; recorded ones are not repeated
    stop : stop request, which a signal sets to end the search
    total : largest number of trainings
    report : see `search_settings`
    progress : see `search_settings`
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
        self._finished: set[str] = set()  # keys of the trainings that this search has finished
        self._n_trained, self._spent_s = 0, 0.0

    def announce(self) -> TrialRow:
        """Report and return the sizes of the search, with the number of recorded trainings."""
        sizes = {"trainings": self.total, **self.candidates.sizes()}
        n_recorded = sum(r["fold"] < self.candidates.folds for r in self.journal.records())
        self._report("search", {**sizes, "recorded": min(self.total, n_recorded)})
        return sizes

    def evaluate(self, settings: TrialSettings) -> TrialPoint:
        """Return the results of settings on all folds; train on the folds without a record.

        Every training chooses values for "auto"; the results show the values of the first one.
        """
        records = []
        for fold in range(self.candidates.folds):
            record = self.journal.get(settings, fold) or self._train(settings, fold)
            self._finished.add(repr((*settings, fold)))
            records.append(record)
        return TrialPoint(records, is_given=settings == self.candidates.given_settings())

    def with_measured_bandwidth(self, kernel: Any, ridge: float) -> tuple[Any, float]:
        """Return the kernel with a number as bandwidth of every part, and the largest bandwidth.

        Bandwidths "auto" are replaced by the median distance between centers, which a training
        measures. Raises DivergenceError if this training diverges.
        """
        bandwidths = notation.bandwidths(kernel)
        if "auto" not in bandwidths:
            return kernel, float(max(bandwidths))
        records = (r for r in self.journal.records() if r.get("given") == kernel)
        record = next(records, None) or self._train_with_median(kernel, ridge)
        return record["kernel"], record["bandwidth"]

    def _train(self, settings: TrialSettings, fold: int) -> TrialRow:
        """Train a candidate on one fold, record the result, and return the record."""
        start_s, candidates = time.perf_counter(), self.candidates
        config = (
            candidates.with_chosen_metric(candidates.trial)
            if settings == candidates.given_settings()
            else candidates.config(*settings)
        )
        kernel, *values = settings
        bandwidth, ridge = (None if isinstance(value, str) else value for value in values)
        # The row of a training that diverges; results replace its entries.
        row = {"kernel": kernel, "bandwidth": bandwidth, "ridge": ridge, HELD_OUT_MSE: None}
        with suppress(DivergenceError):
            row |= self._train_once(config, fold, settings)
        return self._record(settings, fold, row, time.perf_counter() - start_s)

    def _train_with_median(self, kernel: Any, ridge: float) -> TrialRow:
        """Train with the bandwidth "median", record the result, and return the record."""
        start_s = time.perf_counter()
        config = self.candidates.config(kernel, None, ridge)
        row = self._train_once(config, 0, (kernel, "median", ridge)) | {"given": kernel}
        settings = row["kernel"], row["bandwidth"], ridge
        return self._record(settings, 0, row, time.perf_counter() - start_s)

    def _train_once(self, config: RunConfig, fold: int, settings: TrialSettings) -> TrialRow:
        """Train once; return kernel, bandwidth, ridge and held-out metrics as numbers.

        If a metric is not finite, all are left out, and the training counts as diverged.
        """
        self.stop.check()
        fit, held_out = self.candidates.split(fold)
        with warnings.catch_warnings():
            # These warnings are not needed: the held-out rows show a bad solution.
            for note in (SINGULAR_NOTE, NOTHING_NOTE, ISOLATED_NOTE, SQUEEZED_NOTE):
                warnings.filterwarnings("ignore", note)
            result = train(
                config, source=fit, test=held_out, metric=self.candidates.distances,
                progress=self.progress, stop=self.stop, last_line=False,
            )  # fmt: skip
        figures: TrialRow = {HELD_OUT_MSE: None}
        with closing(result.model.backend) as backend, backend.active():
            if result.metrics and all(map(math.isfinite, result.metrics.values())):
                figures = self._held_out_figures(result, fold)
        return _numeric_settings(settings, result) | figures

    def _held_out_figures(self, result: Result, fold: int) -> TrialRow:
        """Return the value of every metric, and the losses of each held-out row.

        If parameters of the loss are estimated from the data, all candidates are compared with the
        values of the first recorded training.
        """
        y, w = self.candidates.targets(fold)
        has_classes = result.model.classes is not None
        variance = None
        if not has_classes:
            weights, values = row_weights(MSE, y, w), np.float64(y).reshape(len(y), -1)
            variance = weights @ np.square(values - weights @ values)
        loss, to_host = self._common_loss(result.model.loss), result.model.backend.to_host
        parts = [
            row_losses(to_host(F), to_host(Y), variance, loss)
            for _, F, Y in result.model.stream(self.candidates.split(fold)[1])
        ]
        losses = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        metrics = known_metrics(has_classes, None if loss is None else type(loss))
        figures = {
            name: metric.to_loss(float(row_weights(metric, y, w) @ losses[metric.loss]))
            for name, metric in metrics.items()
        }
        # The run's own metrics replace these, except the mean loss, for which the run used its own
        # parameters of the loss.
        run_metrics = {name.removeprefix("test_"): value for name, value in result.metrics.items()}
        figures |= {k: v for k, v in run_metrics.items() if loss is None or k != loss.figure}
        row: TrialRow = {f"{HELD_OUT}_{name}": value for name, value in figures.items()}
        row |= {} if loss is None else {LOSS_PARAMETERS: loss.parameters()}
        return row | {"losses": {name: pack_losses(values) for name, values in losses.items()}}

    def _common_loss(self, loss: Loss | None) -> Loss | None:
        """Return the loss with the parameters that the first training recorded."""
        records = (r[LOSS_PARAMETERS] for r in self.journal.records() if LOSS_PARAMETERS in r)
        parameters = next(records, None)
        return loss if loss is None or parameters is None else type(loss)(**parameters)

    def _record(
        self, settings: Sequence[Any], fold: int, row: TrialRow, seconds: float
    ) -> TrialRow:
        """Record a finished training, and report it."""
        record = {**row, "fold": fold, "settings": list(settings), "seconds": seconds}
        self.journal.add(record)
        self._finished.add(repr((*settings, fold)))
        self._n_trained, self._spent_s = self._n_trained + 1, self._spent_s + seconds
        n_left = self.total - len(self._finished)
        progress = {"left": n_left, "seconds_left": n_left * self._spent_s / self._n_trained}
        reported = {k: v for k, v in record.items() if k not in _UNREPORTED_ENTRIES}
        self._report("trial", {**reported, "folds": self.candidates.folds, **progress})
        return record


def _numeric_settings(settings: TrialSettings, result: Result) -> TrialRow:
    """Return kernel, bandwidth and ridge, with text in `settings` replaced by the run's values.

    The bandwidth of a sum or product is its largest one. If some of its parts have a given
    bandwidth, the description of the kernel has the bandwidths of all parts.
    """
    kernel, bandwidth, ridge = settings
    description = result.meta["kernel"]
    description = description.get("of", description)  # the kernel that Fourier features approximate
    bandwidths = notation.bandwidths(description)
    if kernel == "auto":
        kernel = description["kernel"]
    elif isinstance(bandwidth, str) and set(notation.bandwidths(kernel)) != {"auto"}:
        kernel = notation.with_bandwidths(kernel, bandwidths)
    return {
        "kernel": kernel,
        "bandwidth": max(bandwidths) if isinstance(bandwidth, str) else bandwidth,
        "ridge": result.ridge if isinstance(ridge, str) else ridge,
    }
