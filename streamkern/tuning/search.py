"""Choosing kernel, bandwidth and ridge by trainings on a small sample of the data.

A bounded sample of the stored rows is split into rows to fit and rows held out (`holdout`). Every
combination of the kernels, bandwidths and ridges is trained on the one with few centers, by the
same `train` as a real run, and evaluated on the other. Then come rounds of refinement, in each of
which the bandwidth of the best combination gets two more neighbours: half way, on the log scale, to
those it has; where it has none on one side, as far out again as the other one is. A best ridge
with none beyond it gets one more, as far out again; there is nothing below 0. Every candidate sees
the same rows and batches, and centers chosen the same way, so that differences are those of the
settings. In a sum or a product of kernels the bandwidths of all parts change by one factor.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamkern.basics.errors import ConfigError, DivergenceError
from streamkern.basics.stop import StopRequest, resumable
from streamkern.config.run_config import RunConfig, load_run_file
from streamkern.config.toml import toml
from streamkern.kernels import notation
from streamkern.solver.method import Report
from streamkern.stream.sources.base import Source
from streamkern.train.given_arrays import open_metric
from streamkern.train.same_run import digest
from streamkern.train.training_data import Data, open_data
from streamkern.tuning.candidates import (
    Candidates,
    Wishes,
    check_whole,
    numbers_or_auto,
    plain_kernels,
)
from streamkern.tuning.records import Trials
from streamkern.tuning.trainings import MSE, Row, Trainings

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the median distance between centers, or what is given
MAX_FOLDS, MAX_REFINE = 20, 20


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    table : a row for each combination, best first: kernel, bandwidth (of a sum or product the
    largest of its parts, which change by a common factor; None of a kernel without), ridge,
    held_out_mse, held_out_r2 (held_out_accuracy with classes), seconds. With several folds these
    figures are means, `se` is the standard error of held_out_mse, and `within` says whether that is
    within one `se` of the best. Where a training diverged it is None.
    best : the first row. config : the settings given, with the best in them, the bandwidth to six
    digits. search : rows, centers, epochs and the like. edge : no bandwidth on one side of the
    best was tried. ridge_edge : no ridge.
    """

    best: Row
    table: list[Row]
    config: RunConfig
    search: Row
    edge: bool
    ridge_edge: bool

    @property
    def toml(self) -> str:
        """The best settings, to be pasted into a run file."""
        tables = _sections(self.best)
        if tables["model"]["bandwidth"] == "auto":
            del tables["model"]["bandwidth"]
        return toml(tables)


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
    progress: bool | str = False,
    report: Report | None = None,
    stop: StopRequest | None = None,
) -> Tuned:
    """Search the kernel, bandwidth and ridge of a run on a sample of its data.

    Parameters
    ----------
    config : settings, or the path of a run file.
    bandwidths : of every kernel that has one, of sums and products that of the widest part;
        "auto": 1/4, 1/2, 1, 2 and 4 times that of a table that says it, or the median distance.
    ridges : "auto": 0, 1e-6, 1e-4 and that of the settings; 0 where the solver knows no ridge.
    kernels : as in a run file; default: that of the settings.
    rows : of the sample, at most; default: 20 000, or what 512 MiB hold.
    centers : or Fourier features; default: a fifth of the rows, at most 2 000 and at most those of
        the settings.
    epochs : passes over the rows to fit; default: for 100 000 samples, at most 20. Copies of an
        augmented source count as passes.
    folds : splits, which hold different rows out. refine : rounds of two more bandwidths, and of
        one more ridge where the best has none beyond it.
    out : folder or URL where every training is kept once it is done: the same call goes on, also
        with further kernels, bandwidths, ridges or folds. SIGTERM, SIGINT and SIGHUP end it
        at once.
    source : in place of data.train and data.transforms.
    progress : say how far a training is; see `train`.
    report : called with ("search", sizes) before the first training, ("trial", record) after each.
    stop : the caller's own, for a search that is a part of something larger.

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
    with_width = sum(1 for kernel in chosen if notation.bandwidths(kernel))
    if widths is not None and not with_width:
        raise ConfigError(f"bandwidths={bandwidths!r} but no kernel has one; leave bandwidths= out")
    data = open_data(config, source)
    candidates = Candidates(config, data, Wishes(rows, centers, epochs), folds)
    penalties = candidates.ridges(penalties, chosen, None if widths is None else widths[0])
    trials = Trials(out, _identity(candidates, data), config.data.storage_options)
    n_widths = len(FACTORS if widths is None else widths)
    more = 2 * bool(with_width and n_widths > 1) + (sum(map(bool, penalties)) > 1)
    tried = (with_width * n_widths + len(chosen) - with_width) * len(penalties) + more * refine

    def recorded() -> str:
        return f"with {len(trials.records())} of {tried * folds} trainings recorded"

    with resumable(stop, kept=out is not None, where=recorded) as request, trials:
        trainings = Trainings(candidates, trials, request, tried * folds, report, progress)
        sizes = trainings.announce(chosen, penalties)
        table = _searched(trainings, chosen, widths, penalties, refine)
        best = table[0]
        keys = {f"{s}.{k}": v for s, t in _sections(best).items() for k, v in t.items()}
        edges = (_at_edge(name, best, table) for name in ("bandwidth", "ridge"))
        tuned = Tuned(best, table, config.with_overrides(keys), sizes, *edges)
        trials.finish({"best": best, "table": table, "search": sizes, "toml": tuned.toml})
    return tuned


def _searched(
    trainings: Trainings,
    kernels: list[Any],
    bandwidths: list[float] | None,
    ridges: list[float],
    refine: int,
) -> list[Row]:
    """The grid, the refinement, the table."""
    table = [
        trainings.measured(made, bandwidth, ridge)
        for kernel in kernels
        for made, bandwidth in _grid(trainings, kernel, bandwidths, ridges[0])
        for ridge in ridges
    ]
    for _ in range(refine):
        best = _sorted(table)[0]
        table += [
            trainings.measured(best["kernel"], best["bandwidth"], ridge)
            for ridge in _beyond(best["ridge"], _tried("ridge", best, table))
        ]
        best = _sorted(table)[0]
        table += [
            trainings.measured(best["kernel"], bandwidth, best["ridge"])
            for bandwidth in _neighbours(best["bandwidth"], _tried("bandwidth", best, table))
        ]
    table = _sorted(table)
    if table[0][MSE] is None:
        raise DivergenceError(
            "every candidate diverged; check the data for outliers, or scale the features"
        )
    if "se" in table[0]:
        bound = table[0][MSE] + table[0]["se"]
        for row in table:
            row["within"] = row[MSE] is not None and row[MSE] <= bound
    return table


def _grid(
    trainings: Trainings, kernel: Any, bandwidths: list[float] | None, ridge: float
) -> list[tuple[Any, float | None]]:
    """The kernel, with ratios of bandwidths that are known, and each bandwidth to try."""
    own = notation.bandwidths(kernel)
    if not own:
        return [(kernel, None)]
    if bandwidths is not None:
        return [(kernel, bandwidth) for bandwidth in bandwidths]
    if "auto" not in own:
        scale = float(max(own))
    else:  # the engine says what it is
        first = trainings.automatic(kernel, ridge)
        kernel, scale = first["kernel"], first["bandwidth"]
    return [(kernel, scale if factor == 1 else _neat(factor * scale)) for factor in FACTORS]


def _identity(candidates: Candidates, data: Data) -> dict[str, Any]:
    """What must not change when a search goes on: all but what is searched."""
    settings = candidates.trial.identity()
    settings["data"].pop("train", None)  # a store may move: its contents count
    for section, key in (("model", "kernel"), ("model", "bandwidth"), ("solver", "ridge")):
        settings[section].pop(key, None)
    sample = {"rows": len(candidates.sample.X), "parts": candidates.n_parts}
    found = {"settings": settings, "data": data.source.describe(), "sample": sample}
    model = candidates.trial.model
    if model.metric != "none" and not model.learns_metric:
        found["metric"] = digest(open_metric(candidates.trial, int(candidates.sample.X[0].size)))
    return found


# -- the table ---------------------------------------------------------------------------------


def _sorted(table: list[Row]) -> list[Row]:
    """Best first; those that diverged last."""
    return sorted(table, key=lambda row: math.inf if row[MSE] is None else row[MSE])


def _tried(name: str, best: Row, table: list[Row]) -> list[float]:
    """The bandwidths or the ridges that were tried with the kernel of `best`, in order."""
    like = (row[name] for row in table if row["kernel"] == best["kernel"])
    return sorted({value for value in like if value is not None})


def _at_edge(name: str, best: Row, table: list[Row]) -> bool:
    tried = _tried(name, best, table)
    return len(tried) > 1 and best[name] in (tried[0], tried[-1]) and best[name] > 0


def _neighbours(best: float | None, tried: list[float]) -> list[float]:
    """Two more bandwidths beside `best`, one of the ascending `tried`; none without others."""
    if best is None or len(tried) < 2:
        return []
    at = tried.index(best)
    low = math.sqrt(tried[at - 1] * best) if at else best * best / tried[1]
    high = best * best / tried[at - 1] if best == tried[-1] else math.sqrt(tried[at + 1] * best)
    return [width for width in (_neat(low), _neat(high)) if width not in tried]


def _beyond(best: float, tried: list[float]) -> list[float]:
    """One more ridge, if `best` is at an end of the ascending `tried` other than 0."""
    above = [ridge for ridge in tried if ridge]
    if len(above) < 2 or best not in (above[-1], tried[0]) or not best:
        return []
    return [_neat(best * best / above[-2 if best == above[-1] else 1])]


def _neat(bandwidth: float) -> float:
    """To four digits: more of them decide nothing."""
    return float(f"{bandwidth:.4g}")


def _sections(best: Row) -> dict[str, dict[str, Any]]:
    """A row of the table as settings; a bandwidth that the kernel holds, or lacks, is "auto"."""
    model = notation.in_settings(best["kernel"], best["bandwidth"])
    if model["bandwidth"] != "auto":
        model["bandwidth"] = float(f"{model['bandwidth']:.6g}")
    return {"model": model, "solver": {"ridge": best["ridge"]}}
