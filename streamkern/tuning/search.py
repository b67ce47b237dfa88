"""Choose kernel, bandwidth and ridge by trainings on a small sample of the data.

A bounded sample of the stored rows is split into rows to fit and held-out rows (`holdout`). The
given settings, and combinations of kernels, bandwidths and ridges (`points`), are trained on the
rows to fit with few centers, by the same `train` as a real run, and evaluated on the held-out rows.
Optuna's journal records each training (`journal`). Every candidate has the same rows and batches,
and centers chosen in the same way, so that only the settings differ. In a sum or a product of
kernels, the bandwidths of all parts change by a common factor.

Candidates are compared by an evaluation metric on the held-out rows (`metrics`), and by mean
squared error if it is equal. By default, this is the metric of the loss that the training
minimises; for the squared error, it is the accuracy or the mean squared error. The given settings
are kept unless others are better by more than two standard errors of the difference, estimated from
the losses of single rows (`table`).

The result applies to the run on all data as follows:

- The bandwidth is a length in the space of the scaled features, and is used unchanged. With more
  rows and centers, the best bandwidth is often slightly smaller.
- The ridge refers to the mean loss, (1/2n) sum |f(x_i) - y_i|^2 + (ridge/2) |f|^2, and needs no
  rescaling. The best ridge falls as n grows, so the result is an upper bound for the run.
- Settings "auto" stay "auto" if the given settings are kept; the run then chooses the values.
- If the metric of the kernel is "auto", every training learns one or none, as the run would with
  this kernel and bandwidth "auto" (`resolve.metric_mode`). The best settings record "learn" or
  "none", because a bandwidth refers to distances in this metric.
- If the scale of the targets is "auto", it is chosen once from the rows to fit, for all trainings,
  and recorded with the best settings (`setup.choose_transform`).
- The errors are those of models with few centers and few rows. The errors of the run differ.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from streamkern.basics.errors import DivergenceError
from streamkern.basics.stop import StopRequest, handle_stop
from streamkern.config.model import LEARNED, METRICS
from streamkern.config.run_config import RunConfig, load_run_file
from streamkern.config.toml import toml
from streamkern.kernels import notation
from streamkern.losses.base import Loss
from streamkern.losses.losses import SQUARES, loss_class
from streamkern.losses.own import recorded_loss
from streamkern.solver.method import Report
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.quantile_scores import scores_among
from streamkern.train.resolve.given_arrays import open_metric
from streamkern.train.resolve.training_data import Data, open_data
from streamkern.train.run_identity import array_identity
from streamkern.tuning.arguments import (
    bandwidths_to_try,
    checked_counts,
    checked_numbers,
    kernel_descriptions,
    n_rounds_and_trials,
)
from streamkern.tuning.candidates import Candidates
from streamkern.tuning.journal import TrialJournal
from streamkern.tuning.metrics import find_metric, known_metrics, row_weights
from streamkern.tuning.points import RIDGE_RANGE, SearchPoints
from streamkern.tuning.table import SearchTable, TrialRow
from streamkern.tuning.trainings import Trainings

_DISABLED_SETTINGS = ("run.early_stopping", "run.calibrate", "solver.posterior")
"""Settings that trainings of a search do not need."""


@dataclass(frozen=True)
class Tuned:
    """The result of a search.

    best : first row of the table: the given settings, unless others are better by more than two
        standard errors
    table : a row for each combination; after the first row, in the order of `metric`. The entries
        of a row are:

        - "kernel"
        - "bandwidth", the largest one of a sum or product; None for a kernel without one
        - "ridge"
        - "as_given", whether these are the given settings; their "auto" is replaced by the value
          that a training chose
        - "held_out_mse" and other metrics, means over the folds; if a training diverged, only
          "held_out_mse", which is None
        - "se", the standard error over the held-out rows of the difference to the best value of
          `metric`; None for a single row
        - "within", whether this difference is at most two standard errors
        - "seconds", the time of the trainings
    config : the given settings, if these are the best; else with the best kernel, bandwidth (to six
        digits) and ridge, and with the metric "learn" or "none" and the target transform of the
        trainings if these were "auto". If the features have quantile scores, data.scale is
        "quantiles" in either case.
    metric : name of the metric by which the settings were compared
    search : rows, centers, epochs and other sizes of the search
    edge : whether the best bandwidth is the smallest or the largest of several with this kernel;
        False if the given settings are the best and leave it open
    ridge_edge : whether the best ridge is the smallest or the largest of several with this kernel,
        and not 0; False as for `edge`
    estimator : estimator with the best settings, if the data was given as for `fit`; else None
    """

    best: TrialRow
    table: list[TrialRow]
    config: RunConfig
    metric: str
    search: TrialRow
    edge: bool
    ridge_edge: bool
    estimator: Any = None

    @property
    def toml(self) -> str:
        """The best settings, to be pasted into a run file."""
        settings = self.config.model_dump(mode="json")
        model = {name: settings["model"][name] for name in ("kernel", "bandwidth", "metric")}
        model["kernel"] = notation.without_values(model["kernel"])
        if model["bandwidth"] == "auto":
            del model["bandwidth"]
        if model["metric"] not in ("none", *LEARNED):
            del model["metric"]
        if self.config.model.target_transform == "log":
            model["target_transform"] = "log"
        scale = settings["data"]["scale"]
        data = {"data": {"scale": scale}} if scale == "quantiles" else {}
        return toml(data | {"model": model, "solver": {"ridge": settings["solver"]["ridge"]}})

    def as_record(self) -> dict[str, Any]:
        """Return the result as JSON values, as in result.json."""
        names = ("best", "table", "metric", "search", "toml")
        return {name: getattr(self, name) for name in names}


def search_settings(
    config: RunConfig | str | os.PathLike[str],
    *,
    metric: str = "auto",
    bandwidths: Sequence[float] | str = "auto",
    ridges: Sequence[float] | str = "auto",
    kernels: Sequence[Any] | None = None,
    rows: int | None = None,
    centers: int | None = None,
    epochs: int | None = None,
    folds: int = 1,
    refine: int | None = None,
    sampler: str = "grid",
    n_trials: int | None = None,
    out: str | os.PathLike[str] | None = None,
    source: Source | None = None,
    distances: npt.NDArray[Any] | None = None,
    progress: bool | str = False,
    report: Report | None = None,
    stop: StopRequest | None = None,
) -> Tuned:
    """Search the kernel, bandwidth and ridge of a run on a sample of its data.

    Parameters and errors as in `streamkern.tune`, and in addition:

    config : settings, or the path of a run file
    source : replaces data.train and data.transforms
    distances : replaces model.metric
    """
    config = config if isinstance(config, RunConfig) else load_run_file(config)
    folds, refine, n_trials = checked_counts(folds=folds, refine=refine, n_trials=n_trials)
    rows, centers, epochs = checked_counts(rows=rows, centers=centers, epochs=epochs)
    rounds, n_proposals = n_rounds_and_trials(sampler, refine, n_trials)
    kernel_list = kernel_descriptions(config, kernels)
    bandwidth_list = bandwidths_to_try(bandwidths, kernel_list)
    ridge_list = checked_numbers("ridges", ridges, positive=False)
    original = config
    config = config.with_overrides(dict.fromkeys(_DISABLED_SETTINGS, False))
    data = open_data(config, source, scores=None if distances is None else False)
    if scores_among(data.fixed_transforms):  # the kernel is chosen for features with scores
        scaled = {"data.scale": "quantiles"}
        original, config = original.with_overrides(scaled), config.with_overrides(scaled)
    criterion = find_metric(metric, data.source.classes is not None, _loss_class(config))
    candidates = Candidates(
        config, data, folds, distances=distances, rows=rows, centers=centers, epochs=epochs
    )
    smallest = None if bandwidth_list is None else bandwidth_list[0]
    ridges_to_try = candidates.ridges(ridge_list, kernel_list, smallest)
    if n_proposals and ridge_list is None and any(ridges_to_try):
        ridges_to_try = list(RIDGE_RANGE)
    points = SearchPoints(kernel_list, bandwidth_list, ridges_to_try, rounds, n_proposals)
    total = points.count(candidates.given_settings()) * folds
    journal = TrialJournal(out, _identity(candidates, data), config.data.storage_options)

    def progress_text() -> str:
        return f"with {len(journal.records())} of {total} trainings recorded"

    with handle_stop(stop, saves_work=out is not None, position=progress_text) as request, journal:
        trainings = Trainings(candidates, journal, request, total, report, progress)
        sizes = trainings.announce()
        targets = map(candidates.targets, range(folds))
        table = SearchTable(criterion, [row_weights(criterion, y, w) for y, w in targets])
        table.add(trainings.evaluate(candidates.given_settings()))
        points.train(table, trainings)
        tuned = _search_result(original, table, sizes, candidates)
        journal.finish(tuned.as_record())
    return tuned


def _search_result(
    config: RunConfig, table: SearchTable, sizes: TrialRow, candidates: Candidates
) -> Tuned:  # fmt: skip
    """Return the result of a search whose trainings are complete."""
    point, rows = table.chosen_point(), table.rows()
    if point.diverged:
        raise DivergenceError(
            "every candidate diverged", "check the data for outliers, or scale the features"
        )
    edges = []
    for name in ("bandwidth", "ridge"):
        values, value = table.tried_values(name, point.kernel), getattr(point, name)
        is_at_end = len(values) > 1 and value in (values[0], values[-1]) and value > 0
        edges.append(is_at_end and not point.is_open)
    if not point.is_given:
        settings = point.kernel, point.bandwidth, point.ridge
        metric = candidates.config(*settings).model.metric
        config = config.with_overrides(_overrides(*settings) | {"model.metric": metric})
        if candidates.trial.model.target_transform == "log":
            config = config.with_overrides({"model.target_transform": "log"})
    return Tuned(rows[0], rows, config, table.metric.name, sizes, *edges)


def _overrides(kernel: Any, bandwidth: float | None, ridge: float) -> dict[str, Any]:
    """Return kernel, bandwidth and ridge as overrides of settings.

    The bandwidth is "auto" if the description of the kernel contains it, or if it has none.
    """
    model = notation.in_settings(kernel, bandwidth)
    if model["bandwidth"] != "auto":
        model["bandwidth"] = float(f"{model['bandwidth']:.6g}")
    return {**{f"model.{name}": value for name, value in model.items()}, "solver.ridge": ridge}


def _loss_class(config: RunConfig) -> type[Loss] | None:
    """Return the class of the loss that is minimised; None for the squared error."""
    loss = config.model.loss
    return None if loss == SQUARES else loss_class(loss)


def _identity(candidates: Candidates, data: Data) -> dict[str, Any]:
    """Return the JSON values that must not change when a search is resumed.

    These are all settings except the searched ones, and the data, but not the evaluation metric.
    """
    settings = candidates.trial.identity()
    settings["data"].pop("train", None)  # a store is identified by its content, not its address
    for section, key in (("model", "kernel"), ("model", "bandwidth"), ("solver", "ridge")):
        settings[section].pop(key, None)
    # Versions without this setting behaved as with "none".
    if settings["model"]["target_transform"] == "none":
        del settings["model"]["target_transform"]
    sample = {"rows": len(candidates.sample.X), "parts": candidates.n_parts}
    metrics = known_metrics(data.source.classes is not None, _loss_class(candidates.trial))
    losses = sorted({metric.loss for metric in metrics.values()})
    identity: dict[str, Any] = {
        "settings": settings,
        "data": data.source.describe(),
        "sample": sample,
    }
    model, distances = candidates.trial.model, candidates.distances
    if distances is not None or model.metric not in METRICS:
        d = int(candidates.sample.X[0].size)
        identity["metric"] = array_identity(
            open_metric(candidates.trial, d) if distances is None else distances
        )
    if isinstance(model.loss, Loss):  # identified by its values, since its class may change
        identity["loss"] = recorded_loss(model.loss, data.source.n_outputs)
    return identity | {"losses": losses}
