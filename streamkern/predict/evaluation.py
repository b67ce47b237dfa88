"""Metrics of a model on a data set.

    mse       mean over rows and outputs of (f(x) - y)^2, in squared units of the targets; for the
              log loss, f(x) are the probabilities and y the one-hot targets
    r2        1 - sum (f(x) - y)^2 / sum (y - mean)^2, unweighted mean over the outputs (regression)
    accuracy  share of the rows for which the output of their class is the largest (classification)
    the mean loss, under the name `Loss.figure`, for a model of a loss other than the squared error

A calibrated model also has some of these; coverage and width of several quantiles need no
calibration:

    log_loss  mean of -log p of the class of a row
    brier     mean of sum_k (p_k - [class k])^2, half of it for two classes
    ece       expected calibration error: rows are put into 15 bins by their largest p; weighted
              mean over the bins of |accuracy - mean p|
    coverage  share of the targets in their 90 % intervals, or of the rows whose class is in its set
    width     mean width of these intervals, in units of the targets; for several quantiles,
              coverage and width refer to the interval from the smallest to the largest quantile
    normalised_coverage, normalised_width  the same for intervals scaled by the residual scale
    set_size  mean number of classes in these sets

All are weighted if rows have sample weights. The prefix of a public key names the data: `test_mse`
is measured on data.test, `held_out_mse` on the rows that `tune` holds out, and `train_mse` on the
latest window of training steps, each batch being evaluated before the step that learns from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend
from streamkern.basics.array_types import Floats
from streamkern.basics.errors import DataError
from streamkern.basics.warning import warn
from streamkern.losses.base import Loss
from streamkern.predict.calibration import Calibration, Intervals, interval_ends, interval_scores
from streamkern.predict.probabilities import log_losses
from streamkern.store.statistics import ColumnMoments

EVALUATION_LEVEL = 0.9
"""Level of the intervals and sets that are evaluated."""
ECE_BINS = 15
"""Number of bins of the expected calibration error."""


class EvaluationMetrics:
    """Metrics of a model, from sums over rows in float64; see the module docstring.

    backend : backend of the rows
    n_outputs : number of outputs c
    classes : whether the targets are classes
    loss : the loss of the model; None for the squared error
    """

    def __init__(
        self, backend: Backend, n_outputs: int, classes: bool, loss: Loss | None = None
    ) -> None:
        self._backend, self._classes, self._loss = backend, classes, loss
        quantiles = None if loss is None or loss.levels is None else loss.quantiles
        self._several_quantiles = quantiles is not None and len(quantiles) > 1
        self._squared = np.zeros(n_outputs)
        self._targets = ColumnMoments(n_outputs)
        self._weight = self._n_correct = self._loss_sum = self._n_covered = self._widths = 0.0

    def add(self, F: Array, Y: Array, w: npt.NDArray[Any] | None = None) -> None:
        """Add values F and targets Y (m, c) on the device, w (m,) on the host or None."""
        xp, to_host = self._backend.xp, self._backend.to_host
        if self._loss is not None:
            losses = to_host(self._loss.values(xp, F, Y))
            self._loss_sum += float(losses.sum() if w is None else w @ losses)
            if self._classes:
                F = self._loss.predict(xp, F.copy())
        errors = xp.square(F - Y, dtype=np.float64)
        if w is not None:
            errors *= self._backend.asarray(w)[:, None]
        self._squared += to_host(errors.sum(axis=0))
        self._weight += len(F) if w is None else float(w.sum(dtype=np.float64))
        if self._several_quantiles:
            is_covered = to_host((F[:, :1] <= Y[:, :1]) & (Y[:, :1] <= F[:, -1:]))[:, 0]
            width = to_host(F[:, -1] - F[:, 0])
            self._n_covered += float(is_covered.sum() if w is None else w @ is_covered)
            self._widths += float(width.sum() if w is None else w @ width)
        if self._classes:
            is_correct = to_host(F.argmax(axis=1) == Y.argmax(axis=1))
            self._n_correct += float(
                is_correct.sum() if w is None else w[is_correct].sum(dtype=np.float64)
            )
        else:
            self._targets.add(to_host(Y), w)

    def result(self) -> dict[str, float]:
        """Return mse, r2 or accuracy, the mean loss, and for several quantiles coverage and width.

        The loss has the name that it defines; for values it is averaged over outputs, too. Raises
        DataError if all weights are 0.
        """
        if not self._weight > 0:
            raise DataError(
                "all rows to evaluate have sample weight 0", "give some of them a weight above 0"
            )
        squared = self._squared / self._weight
        mse = {"mse": float(squared.mean())}
        if self._classes:
            figures = mse | {"accuracy": self._n_correct / self._weight}
        else:
            figures = mse | {"r2": r2(squared, self._targets.variance())}
        if self._loss is not None:
            outputs = 1 if self._classes else len(squared)
            figures[self._loss.figure] = self._loss_sum / self._weight / outputs
        if self._several_quantiles:
            figures["coverage"] = self._n_covered / self._weight
            figures["width"] = self._widths / self._weight
        return figures


def _has_enough_rows(intervals: Intervals | None) -> bool:
    """Return whether there are enough calibration rows for intervals at `EVALUATION_LEVEL`."""
    return intervals is not None and (len(intervals.scores) + 1) * (1 - EVALUATION_LEVEL) >= 1


class CalibratedFigures:
    """Metrics of a calibrated model, from sums over rows; see the module docstring.

    calibration : the calibration, which is evaluated
    needs_scale : whether `add` needs the residual scale of the rows
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._evaluates_intervals = calibration.shifts is None and _has_enough_rows(
            calibration.intervals
        )
        self.needs_scale = _has_enough_rows(calibration.normalised)
        self._sums: dict[str, float] = {}
        self._bins = np.zeros((3, ECE_BINS))  # from `reliability_sums`
        self._weight = 0.0

    def add(
        self, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: npt.NDArray[Any] | None,
        residual_scale: Floats | None = None,
    ) -> None:  # fmt: skip
        """Add values F and targets Y (m, c), weights w (m,) or None, on the host.

        residual_scale : residual scale of the rows (m, c), if `needs_scale`
        """
        w = np.ones(len(F)) if w is None else w.astype(np.float64)
        self._weight += float(w.sum())
        if self._calibration.probabilities is None:
            self._add_values(F, Y, w, residual_scale)
        else:
            self._add_classes(self._calibration.probabilities(F), F, Y, w)

    def _add(self, name: str, value: Any) -> None:
        """Add a value to a sum by its name."""
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def _add_values(
        self, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Floats, residual_scale: Floats | None
    ) -> None:
        """Add the coverage and the width of the intervals of the rows."""
        normalised, unit = self._calibration.normalised, self._calibration.unit
        residuals = interval_scores(F, Y, unit)

        def add(name: str, half_width: Floats) -> None:
            low, high = interval_ends(F, half_width, unit)
            self._add(f"{name}coverage", w @ (residuals <= half_width).mean(axis=1))
            self._add(f"{name}width", w @ (high - low).mean(axis=1))

        if self._evaluates_intervals:
            add("", self._calibration.intervals.score_quantile(EVALUATION_LEVEL))
        if self.needs_scale and normalised is not None and residual_scale is not None:
            add("normalised_", normalised.score_quantile(EVALUATION_LEVEL) * residual_scale)

    def _add_classes(self, p: Floats, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Floats) -> None:
        """Add log loss, Brier score, bins of the ece, and sets. p : (m, c) probabilities"""
        labels = Y.argmax(axis=1)
        one_hot = np.arange(p.shape[1]) == labels[:, None]
        self._add("log_loss", w @ log_losses(p, labels))
        squares = np.square(p - one_hot).sum(axis=1)
        self._add("brier", w @ squares / (2 if p.shape[1] == 2 else 1))
        self._bins += reliability_sums(p, labels, w)
        if self._evaluates_intervals:
            sets = self._calibration.intervals.prediction_sets(F, EVALUATION_LEVEL)
            self._add("coverage", w @ sets[np.arange(len(F)), labels])
            self._add("set_size", w @ sets.sum(axis=1))

    def result(self) -> dict[str, float]:
        """Return the metrics by name; at least one row must have a weight above 0."""
        figures = {name: total / self._weight for name, total in self._sums.items()}
        if self._calibration.probabilities is None:
            return figures
        _, largest, correct = self._bins
        figures["ece"] = float(np.abs(largest - correct).sum()) / self._weight
        order = ("log_loss", "brier", "ece", "coverage", "set_size")
        return {name: figures[name] for name in order if name in figures}


def reliability_sums(p: Floats, labels: npt.NDArray[Any], w: Floats) -> Floats:
    """Return sums over the rows in each bin of their largest probability, (3, ECE_BINS).

    The sums are of the weights, of the weighted largest probabilities, and of the weights of the
    rows whose most probable class is right.

    p : (m, c) probabilities of the classes
    labels : (m,) ids of the true classes
    w : (m,) weights
    """
    largest, is_correct = p.max(axis=1), p.argmax(axis=1) == labels
    bins = np.minimum((largest * ECE_BINS).astype(np.int64), ECE_BINS - 1)
    values = (w, w * largest, w * is_correct)
    return np.stack([np.bincount(bins, value, ECE_BINS) for value in values])


def r2(squared: Floats, variance: Floats) -> float:
    """Return R2 from the mean squared error and the variance of each output, (c,).

    It is the unweighted mean over the outputs, as in scikit-learn; a constant output counts as 1 if
    it is predicted exactly, otherwise as 0.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = 1 - squared / variance
    return float(np.where(variance > 0, scores, squared == 0).mean())


def with_defined_r2(figures: dict[str, float], n_rows: int | None) -> dict[str, float]:
    """Return the metrics; if there is only one row, warn and replace R2 by NaN."""
    if "r2" not in figures or n_rows != 1:
        return figures
    warn("R^2 score is not well-defined with less than two samples.")
    return figures | {"r2": float("nan")}


def with_data_prefix(data: str, figures: Mapping[str, float]) -> dict[str, float]:
    """Prefix each name with the name of the data, as in {"test_mse": 1.0} for "test"."""
    return {f"{data}_{name}": value for name, value in figures.items()}


def format_metrics(figures: Mapping[str, Any]) -> str:
    """Format prefixed figures, such as "test mse 0.17, accuracy 0.98"."""
    parts, previous = [], ""
    for key, value in figures.items():
        data, _, name = key.rpartition("_")
        prefix = f"{data.replace('_', ' ')} " if data and data != previous else ""
        parts.append(f"{prefix}{name.upper() if name == 'r2' else name} {value:.5g}")
        previous = data
    return ", ".join(parts)
