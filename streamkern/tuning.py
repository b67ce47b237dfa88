"""Choosing kernel, bandwidth and ridge by trainings on a small sample of the data.

A bounded sample of the stored rows is split into rows to fit and rows held out (`holdout`). Every
combination of the kernels, bandwidths and ridges is trained on the one with few centers, by the
same `train` as a real run, and evaluated on the other. Then come rounds of refinement, in each of
which the bandwidth of the best combination gets two more neighbours: half way, on the log scale, to
those it has; where it has none on one side, as far out again as the other one is. Every candidate
sees the same rows, centers and batches, so that differences are those of the settings.

How what is found carries over to the run on all of the data:

- The bandwidth is a length in the space of the (scaled) features, and carries over as it is. With
  more rows and centers slightly smaller ones become affordable.
- The ridge belongs to the mean loss, (1/2n) sum |f(x_i) - y_i|^2 + (ridge/2) |f|^2, and needs no
  rescaling. The best one falls as n grows, so the one found is an upper bound for the run.
- Errors are those of a model with few centers on few rows, and not those of the run.

The candidates are compared by mean squared error, which is what training minimises, also where
there are classes: on a few thousand rows accuracy has many ties.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamkern.candidates import (
    Candidates,
    Wishes,
    check_whole,
    numbers_or_auto,
    plain_kernels,
)
from streamkern.config import RunConfig, load_run_file
from streamkern.errors import DivergenceError, TrainingInterrupted
from streamkern.identity import StopRequest
from streamkern.problem import Data, open_data
from streamkern.runfile import toml
from streamkern.source_base import Source
from streamkern.train import train
from streamkern.trials import Trials

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the median distance between centers
MAX_FOLDS, MAX_REFINE = 20, 20

Row = dict[str, Any]
Report = Callable[[str, Row], None]


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    table : a row for each combination, best first: kernel, bandwidth (None of a kernel without
    one), ridge, mse, accuracy (with classes), seconds. With several folds, mse and accuracy are
    means, `se` is the standard error of mse, and `within` says whether mse is within one `se` of
    the best. Where a training diverged mse is None.
    best : the first row. config : the settings given, with the best in them. search : rows,
    centers, epochs and the like. edge : no bandwidth on one side of the best was tried.
    """

    best: Row
    table: list[Row]
    config: RunConfig
    search: Row
    edge: bool

    @property
    def toml(self) -> str:
        """The best settings, to be pasted into a run file."""
        return toml(_sections(self.best))


def tune(
    config: RunConfig | str | os.PathLike[str],
    *,
    bandwidths: Sequence[float] | str = "auto",
    ridges: Sequence[float] | str = "auto",
    kernels: Sequence[Any] | None = None,
    rows: int | None = None,
    centers: int | None = None,
    epochs: int | None = None,
    folds: int = 1,
    refine: int = 2,
    out: str | os.PathLike[str] | None = None,
    source: Source | None = None,
    progress: bool = False,
    report: Report | None = None,
) -> Tuned:
    """Search the kernel, bandwidth and ridge of a run on a sample of its data.

    Parameters
    ----------
    config : settings, or the path of a run file.
    bandwidths : of every kernel; "auto": 1/4, 1/2, 1, 2 and 4 times the median distance.
    ridges : "auto": 0, 1e-6, 1e-4 and that of the settings; 0 where the solver knows no ridge.
    kernels : as in a run file; default: that of the settings.
    rows : of the sample, at most; default: 20 000, or what 512 MiB hold.
    centers : default: a fifth of the rows, at most 2 000 and at most those of the settings.
    epochs : passes over the rows to fit; default: for 100 000 samples, at most 20. Copies of an
        augmented source count as passes.
    folds : splits, which hold different rows out. refine : rounds of two more bandwidths.
    out : folder or URL where every training is kept once it is done: the same call goes on, also
        with further kernels, bandwidths, ridges or folds. SIGTERM and SIGINT end it cleanly.
    source : in place of data.train and data.transforms.
    progress : draw a line on the terminal during a training.
    report : called with ("search", sizes) before the first training, ("trial", record) after each.

    Raises
    ------
    ConfigError, DataError : before anything was written.
    ResumeMismatchError : `out` holds a search with other settings or data, which are named.
    RunError : `out` can not be used, or another process is at it.
    TrainingInterrupted : a signal, with `out`. DivergenceError : every candidate diverged.
    """
    config = config if isinstance(config, RunConfig) else load_run_file(config)
    for name, value, low, high in (
        ("folds", folds, 1, MAX_FOLDS),
        ("refine", refine, 0, MAX_REFINE),
        ("rows", rows, 1, None),
        ("centers", centers, 1, None),
        ("epochs", epochs, 1, None),
    ):
        check_whole(name, value, low, high)
    chosen = plain_kernels(config, kernels)
    widths = numbers_or_auto("bandwidths", bandwidths, above=True)
    penalties = numbers_or_auto("ridges", ridges, above=False)
    data = open_data(config, source)
    candidates = Candidates(config, data, Wishes(rows, centers, epochs), folds)
    penalties = candidates.ridges(penalties, chosen, None if widths is None else widths[0])
    trials = Trials(out, _identity(candidates, data), config.data.storage_options)
    with trials, StopRequest(install=out is not None) as stop:
        search = _Search(candidates, trials, chosen, widths, penalties, refine, stop)
        search.report, search.progress = report or search.report, progress
        table = search.run()
        best = table[0]
        keys = {f"{s}.{k}": v for s, t in _sections(best).items() for k, v in t.items()}
        tuned = Tuned(
            best, table, config.with_overrides(keys), search.sizes(), _at_edge(best, table)
        )
        trials.finish({"best": best, "table": table, "search": tuned.search, "toml": tuned.toml})
    return tuned


class _Search:
    """One search, over the trainings that are recorded and those that are not yet."""

    def __init__(
        self,
        candidates: Candidates,
        trials: Trials,
        kernels: list[Any],
        bandwidths: list[float] | None,
        ridges: list[float],
        refine: int,
        stop: StopRequest,
    ) -> None:
        self.candidates, self.trials, self.stop = candidates, trials, stop
        self.kernels, self.bandwidths, self.ridges = kernels, bandwidths, ridges
        n_widths = len(FACTORS if bandwidths is None else bandwidths)
        self.refine = refine if n_widths > 1 else 0
        self.total = (len(kernels) * n_widths * len(ridges) + 2 * self.refine) * candidates.folds
        self.used: set[str] = set()  # trainings of this search that are recorded
        self.done, self.spent_s = 0, 0.0
        self.report: Report = lambda event, fields: None
        self.progress = False

    def sizes(self) -> Row:
        """What there is to do, and with what."""
        made = self.candidates
        fit, held_out = made.split(0)
        return {
            "trainings": self.total,
            "rows": len(made.sample.X),
            "fit": fit.n_rows // made.copies,
            "held_out": held_out.n_rows,
            "centers": made.trial.model.n_centers,
            "epochs": made.trial.data.epochs,
            "copies": made.copies,
            "folds": made.folds,
        }

    def run(self) -> list[Row]:
        """The grid, the refinement, the table."""
        like = (
            record["kernel"] in self.kernels
            and record["ridge"] in self.ridges
            and record["fold"] < self.candidates.folds
            for record in self.trials.records()
        )
        self.report("search", {**self.sizes(), "recorded": min(self.total, sum(like))})
        table = [
            self._measured(kernel, bandwidth, ridge)
            for kernel in self.kernels
            for bandwidth in self._grid(kernel)
            for ridge in self.ridges
        ]
        for _ in range(self.refine):
            best = _sorted(table)[0]
            tried = _tried(best, table)
            for bandwidth in _neighbours(best["bandwidth"], tried):
                table.append(self._measured(best["kernel"], bandwidth, best["ridge"]))
        table = _sorted(table)
        if table[0]["mse"] is None:
            raise DivergenceError(
                "every candidate diverged; check the data for outliers, or scale the features"
            )
        if self.candidates.folds > 1:
            bound = table[0]["mse"] + table[0]["se"]
            for row in table:
                row["within"] = row["mse"] is not None and row["mse"] <= bound
        return table

    def _grid(self, kernel: Any) -> Sequence[float | None]:
        """The bandwidths to try, or None of a kernel that has none."""
        if self.bandwidths is not None:
            return self.bandwidths
        known = [r for r in self.trials.records() if r["auto"] and r["kernel"] == kernel]
        # The engine says what "auto" is, and whether the kernel has a bandwidth.
        first = known[0] if known else self._trained(kernel, "auto", self.ridges[0], 0)
        scale = first["bandwidth"]
        if scale is None:
            return [None]
        return [scale if factor == 1 else _neat(factor * scale) for factor in FACTORS]

    def _measured(self, kernel: Any, bandwidth: float | None, ridge: float) -> Row:
        """A row of the table: all folds of a candidate."""
        records = [
            self._recorded(kernel, bandwidth, ridge, fold)
            or self._trained(kernel, bandwidth, ridge, fold)
            for fold in range(self.candidates.folds)
        ]
        row: Row = {"kernel": kernel, "bandwidth": bandwidth, "ridge": ridge, "mse": None}
        errors = [record["mse"] for record in records]
        if None not in errors:
            row["mse"] = float(np.mean(errors))
            if len(errors) > 1:
                row["se"] = float(np.std(errors, ddof=1) / math.sqrt(len(errors)))
            if "accuracy" in records[0]:
                row["accuracy"] = float(np.mean([record["accuracy"] for record in records]))
        return row | {"seconds": math.fsum(record["seconds"] for record in records)}

    def _recorded(self, *key: Any) -> Row | None:
        found = self.trials.get(key)
        if found is not None:
            self.used.add(repr(key))
        return found

    def _trained(self, kernel: Any, bandwidth: Any, ridge: float, fold: int) -> Row:
        """The record of a training that is done now; a bandwidth of "auto" is put in numbers."""
        self._check_stop()
        began = time.perf_counter()
        record = {"kernel": kernel, "ridge": ridge, "fold": fold, "auto": bandwidth == "auto"}
        fit, held_out = self.candidates.split(fold)
        config = self.candidates.config(kernel, bandwidth, ridge)
        metrics: dict[str, float] = {}
        try:
            result = train(
                config, source=fit, test=held_out, progress=self.progress, stop=self.stop
            )
            result.model.backend.close()
            metrics = result.metrics
            if record["auto"]:
                bandwidth = result.meta["kernel"].get("bandwidth")
        except TrainingInterrupted:
            self._check_stop()
        except DivergenceError:
            if record["auto"]:
                raise  # without its number there is no grid
        # A loss that overflows has diverged as well.
        finite = metrics if metrics and all(map(math.isfinite, metrics.values())) else {"mse": None}
        seconds = time.perf_counter() - began
        record |= {"bandwidth": bandwidth, **finite, "seconds": seconds}
        key = (kernel, bandwidth, ridge, fold)
        self.trials.add(key, record)
        self.used.add(repr(key))
        self.done, self.spent_s = self.done + 1, self.spent_s + seconds
        left = self.total - len(self.used)
        progress = {"left": left, "seconds_left": left * self.spent_s / self.done}
        self.report("trial", {**record, "folds": self.candidates.folds, **progress})
        return record

    def _check_stop(self) -> None:
        if self.stop.requested:
            raise TrainingInterrupted(
                f"stopped by {self.stop.requested} with {len(self.trials.records())} of "
                f"{self.total} trainings recorded; run the same command again to go on"
            )


def _identity(candidates: Candidates, data: Data) -> dict[str, Any]:
    """What must not change when a search goes on: all but what is searched."""
    settings = candidates.trial.identity()
    settings["data"].pop("train", None)  # a store may move: its contents count
    for section, key in (("model", "kernel"), ("model", "bandwidth"), ("solver", "ridge")):
        settings[section].pop(key, None)
    sample = {"rows": len(candidates.sample.X), "parts": candidates.n_parts}
    return {"settings": settings, "data": data.source.describe(), "sample": sample}


# -- the table ---------------------------------------------------------------------------------


def _sorted(table: list[Row]) -> list[Row]:
    """Best first; those that diverged last."""
    return sorted(table, key=lambda row: math.inf if row["mse"] is None else row["mse"])


def _tried(best: Row, table: list[Row]) -> list[float]:
    """The bandwidths that were tried with the kernel and the ridge of `best`, in order."""
    like = [r for r in table if all(r[k] == best[k] for k in ("kernel", "ridge"))]
    return sorted({row["bandwidth"] for row in like if row["bandwidth"] is not None})


def _at_edge(best: Row, table: list[Row]) -> bool:
    tried = _tried(best, table)
    return len(tried) > 1 and best["bandwidth"] in (tried[0], tried[-1])


def _neighbours(best: float | None, tried: list[float]) -> list[float]:
    """Two more bandwidths beside `best`, one of the ascending `tried`; none without others."""
    if best is None or len(tried) < 2:
        return []
    at = tried.index(best)
    low = math.sqrt(tried[at - 1] * best) if at else best * best / tried[1]
    high = best * best / tried[at - 1] if best == tried[-1] else math.sqrt(tried[at + 1] * best)
    return [width for width in (_neat(low), _neat(high)) if width not in tried]


def _neat(bandwidth: float) -> float:
    """To four digits: more of them decide nothing."""
    return float(f"{bandwidth:.4g}")


def _sections(best: Row) -> dict[str, dict[str, Any]]:
    """A row of the table as sections of a run file."""
    width = {} if best["bandwidth"] is None else {"bandwidth": best["bandwidth"]}
    return {"model": {"kernel": best["kernel"], **width}, "solver": {"ridge": best["ridge"]}}
