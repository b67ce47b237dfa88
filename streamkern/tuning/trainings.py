"""The trainings of a search: done once, recorded, counted and reported."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from streamkern.basics.errors import DivergenceError
from streamkern.basics.stop import StopRequest
from streamkern.config.run_config import RunConfig
from streamkern.kernels import notation
from streamkern.solver.equations import SINGULAR_NOTE
from streamkern.solver.method import Report
from streamkern.train.train import Result, train
from streamkern.train.training_fit import ISOLATED_NOTE, NOTHING_NOTE, SQUEEZED_NOTE
from streamkern.tuning.candidates import Candidates
from streamkern.tuning.metrics import (
    MSE,
    OF_CLASSES,
    OF_VALUES,
    losses,
    packed_predictions,
    row_weights,
)
from streamkern.tuning.records import Trials
from streamkern.tuning.table import HELD_OUT, TrialPoint, TrialRow

TrialKey = tuple[Any, Any, Any]


class Trainings:
    """Trainings of `candidates`, kept in `trials`, at most `total`.

    report : see `search_settings`
    """

    def __init__(
        self,
        candidates: Candidates,
        trials: Trials,
        stop: StopRequest,
        total: int,
        report: Report | None,
        progress: bool | str,
    ) -> None:
        self.candidates, self.trials, self.stop = candidates, trials, stop
        self.total, self.progress = total, progress
        self._report: Report = report or (lambda event, fields: None)
        self._used: set[str] = set()  # trainings of this search that are recorded
        self._done, self._spent_s = 0, 0.0

    def announce(self, kernels: Sequence[Any], knows: Callable[[float], bool]) -> TrialRow:
        """Report and return the sizes of the search, with the number of trainings already recorded.

        knows : returns whether trainings with a ridge are known to be part of the search
        """
        sizes = {"trainings": self.total, **self.candidates.sizes()}
        records, own = self.trials.records(), list(self.candidates.given())
        known = [*kernels, *(r["kernel"] for r in records if r.get("given") in kernels)]
        like = (
            r["asked"] == own or (r["asked"][0] in known and knows(r["ridge"]))
            for r in records
            if r["fold"] < self.candidates.folds
        )
        self._report("search", {**sizes, "recorded": min(self.total, sum(like))})
        return sizes

    def measured(self, kernel: Any, bandwidth: float | None, ridge: float) -> TrialPoint:
        """Return a candidate, trained on all splits."""
        return self._point((kernel, bandwidth, ridge))

    def as_given(self) -> TrialPoint:
        """Return the settings as they were given, trained on all splits.

        Open values are found in every training, and shown as the first one found them.
        """
        return self._point(self.candidates.given())

    def automatic(self, kernel: Any, ridge: float) -> TrialRow:
        """Return the record of the kernel with the median distance as its bandwidth, in numbers.

        A kernel with a bandwidth in some of its parts gets one in all of them. Raises
        DivergenceError: without this number there is no grid.
        """
        known = (r for r in self.trials.records() if r.get("given") == kernel)
        return next(known, None) or self._automatic(kernel, ridge)

    def _point(self, asked: TrialKey) -> TrialPoint:
        records = []
        for fold in range(self.candidates.folds):
            found = self.trials.get((*asked, fold))
            if found is None:
                found = self._trained(asked, fold)
            self._used.add(repr((*asked, fold)))
            records.append(found)
        return TrialPoint(records, is_given=asked == self.candidates.given())

    def _trained(self, asked: TrialKey, fold: int) -> TrialRow:
        began, as_given = time.perf_counter(), asked == self.candidates.given()
        candidates = self.candidates
        config = candidates.in_metric(candidates.trial) if as_given else candidates.config(*asked)
        shown = tuple(None if isinstance(value, str) else value for value in asked[1:])
        found: TrialRow = dict(
            zip(("kernel", "bandwidth", "ridge"), (asked[0], *shown), strict=True)
        )
        try:
            found |= self._result(config, fold, asked)
        except DivergenceError:
            found[f"{HELD_OUT}_mse"] = None
        return self._keep(asked, fold, found, time.perf_counter() - began)

    def _automatic(self, kernel: Any, ridge: float) -> TrialRow:
        began = time.perf_counter()
        config = self.candidates.config(kernel, None, ridge)
        found = self._result(config, 0, (kernel, "median", ridge)) | {"given": kernel}
        asked = found["kernel"], found["bandwidth"], ridge
        return self._keep(asked, 0, found, time.perf_counter() - began)

    def _result(self, config: RunConfig, fold: int, asked: TrialKey) -> TrialRow:
        """Return kernel, bandwidth and ridge in numbers, figures and losses of the held-out rows.

        Without figures if they are not finite: an overflow counts as divergence.
        """
        self.stop.check()
        fit, held_out = self.candidates.split(fold)
        with warnings.catch_warnings():
            # Held-out rows measure the quality of a solution here.
            for note in (SINGULAR_NOTE, NOTHING_NOTE, ISOLATED_NOTE, SQUEEZED_NOTE):
                warnings.filterwarnings("ignore", note)
            result = train(
                config, source=fit, test=held_out, metric=self.candidates.distances,
                progress=self.progress, stop=self.stop, last_line=False,
            )  # fmt: skip
        figures: TrialRow = {f"{HELD_OUT}_mse": None}
        with closing(result.model.backend) as backend, backend.active():
            if result.metrics and all(map(math.isfinite, result.metrics.values())):
                figures = self._figures(result, fold)
        return _in_numbers(asked, result) | figures

    def _figures(self, result: Result, fold: int) -> TrialRow:
        """Return the figure of every metric, and the losses of each row."""
        y, w = self.candidates.targets(fold)
        classes, variance = result.model.classes is not None, None
        if not classes:
            v, values = row_weights(MSE, y, w), np.float64(y).reshape(len(y), -1)
            variance = v @ np.square(values - v @ values)
        to_host = result.model.backend.to_host
        parts = [
            losses(to_host(F), to_host(Y), variance)
            for _, F, Y in result.model.stream(self.candidates.split(fold)[1])
        ]
        lost = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        figures = {
            name: metric.loss_of(float(row_weights(metric, y, w) @ lost[metric.loss]))
            for name, metric in (OF_CLASSES if classes else OF_VALUES).items()
        }
        figures |= {k.removeprefix("test_"): v for k, v in result.metrics.items()}
        named: TrialRow = {f"{HELD_OUT}_{name}": value for name, value in figures.items()}
        return named | {
            "losses": {name: packed_predictions(values) for name, values in lost.items()}
        }

    def _keep(self, asked: TrialKey, fold: int, found: TrialRow, seconds: float) -> TrialRow:
        """Record a training, and report that it is done."""
        record = {**found, "fold": fold, "asked": list(asked), "seconds": seconds}
        self.trials.add((*asked, fold), record)
        self._used.add(repr((*asked, fold)))
        self._done, self._spent_s = self._done + 1, self._spent_s + seconds
        left = self.total - len(self._used)
        progress = {"left": left, "seconds_left": left * self._spent_s / self._done}
        shown = {k: v for k, v in record.items() if k not in ("losses", "asked")}
        self._report("trial", {**shown, "folds": self.candidates.folds, **progress})
        return record


def _in_numbers(asked: TrialKey, result: Result) -> TrialRow:
    """Return kernel, bandwidth and ridge, with words in `asked` replaced by the values of the run.

    The bandwidth of a sum or product is its largest one; if some parts have their own, the kernel
    holds that of all parts.
    """
    kernel, bandwidth, ridge = asked
    described = result.meta["kernel"]
    described = described.get("of", described)  # of Fourier features
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
