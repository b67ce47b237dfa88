"""The trainings of a search: done once, recorded, counted and reported."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from streamkern.basics.errors import DivergenceError
from streamkern.basics.stop import StopRequest
from streamkern.kernels import notation
from streamkern.solver.equations import SINGULAR_NOTE
from streamkern.solver.method import Report
from streamkern.train.train import Result, train
from streamkern.tuning.candidates import Candidates
from streamkern.tuning.records import Trials

Row = dict[str, Any]
HELD_OUT = "held_out"  # in front of the figures of a row, which are of the rows held out
MSE = f"{HELD_OUT}_mse"


class Trainings:
    """Of `candidates`, kept in `trials`; `total` : at most so many. report : see `search.tune`."""

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

    def announce(self, kernels: Sequence[Any], ridges: Sequence[float]) -> Row:
        """What there is to do, and with what; reported with the number of those recorded before."""
        sizes = {"trainings": self.total, **self.candidates.sizes()}
        records = self.trials.records()
        known = [*kernels, *(r["kernel"] for r in records if r.get("given") in kernels)]
        like = (
            r["kernel"] in known and r["fold"] < self.candidates.folds
            # Those of the grid, and what the refinement goes on to.
            and (r["ridge"] in ridges or not ridges[0] <= r["ridge"] <= ridges[-1])
            for r in records
        )  # fmt: skip
        self._report("search", {**sizes, "recorded": min(self.total, sum(like))})
        return sizes

    def measured(self, kernel: Any, bandwidth: float | None, ridge: float) -> Row:
        """A row of the table: all splits of a candidate."""
        records = [
            self._recorded(kernel, bandwidth, ridge, fold)
            or self._trained(kernel, bandwidth, ridge, fold)
            for fold in range(self.candidates.folds)
        ]
        row: Row = {"kernel": kernel, "bandwidth": bandwidth, "ridge": ridge, MSE: None}
        errors = [record[MSE] for record in records]
        if None not in errors:
            figures = [name for name in records[0] if name.startswith(f"{HELD_OUT}_")]
            row |= {name: float(np.mean([r[name] for r in records])) for name in figures}
            if len(errors) > 1:
                row["se"] = float(np.std(errors, ddof=1) / math.sqrt(len(errors)))
        return row | {"seconds": math.fsum(record["seconds"] for record in records)}

    def automatic(self, kernel: Any, ridge: float) -> Row:
        """The record of the kernel with its bandwidth as the engine chooses it, in numbers.

        A kernel of which some parts say theirs has that of all parts in them.
        """
        known = (r for r in self.trials.records() if r.get("given") == kernel)
        return next(known, None) or self._trained(kernel, "auto", ridge, 0)

    def _recorded(self, *key: Any) -> Row | None:
        found = self.trials.get(key)
        if found is not None:
            self._used.add(repr(key))
        return found

    def _trained(self, kernel: Any, bandwidth: Any, ridge: float, fold: int) -> Row:
        """The record of a training that is done now."""
        self.stop.check()
        began, given = time.perf_counter(), kernel if bandwidth == "auto" else None
        fit, held_out = self.candidates.split(fold)
        config = self.candidates.config(kernel, None if given else bandwidth, ridge)
        metrics: dict[str, float] = {}
        try:
            with warnings.catch_warnings():
                # What the solution without a ridge is worth, the rows held out say here.
                warnings.filterwarnings("ignore", SINGULAR_NOTE)
                result = train(
                    config, source=fit, test=held_out, progress=self.progress, stop=self.stop
                )
            result.model.backend.close()
            metrics = {HELD_OUT + k.removeprefix("test"): v for k, v in result.metrics.items()}
            if given:
                kernel, bandwidth = _resolved(kernel, result)
        except DivergenceError:
            if given:
                raise  # without its number there is no grid
        # A loss that overflows has diverged as well.
        finite = metrics if metrics and all(map(math.isfinite, metrics.values())) else {MSE: None}
        key, seconds = (kernel, bandwidth, ridge, fold), time.perf_counter() - began
        record = dict(zip(("kernel", "bandwidth", "ridge", "fold"), key, strict=True))
        record |= {"given": given, **finite, "seconds": seconds}
        self.trials.add(key, record)
        self._used.add(repr(key))
        self._done, self._spent_s = self._done + 1, self._spent_s + seconds
        left = self.total - len(self._used)
        progress = {"left": left, "seconds_left": left * self._spent_s / self._done}
        self._report("trial", {**record, "folds": self.candidates.folds, **progress})
        return record


def _resolved(kernel: Any, result: Result) -> tuple[Any, float]:
    """The kernel, with the bandwidths of all parts if some said theirs, and its largest one."""
    described = result.meta["kernel"]
    widths = notation.bandwidths(described.get("of", described))  # of Fourier features
    if set(notation.bandwidths(kernel)) != {"auto"}:
        kernel = notation.with_bandwidths(kernel, widths)
    return kernel, max(widths)
