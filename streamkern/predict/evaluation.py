"""Metrics of a model on a data set, with the same meaning wherever they are shown.

    mse       mean over rows and outputs of (f(x) - y)^2, in squares of the user's units; of a
              model of the log loss, the probabilities are compared with the one-hot targets
    r2        1 - sum (f(x) - y)^2 / sum (y - mean)^2 of each output, their plain mean (regression)
    accuracy  share of the rows for which the output of their class is the largest (classification)

A calibrated model has these as well:

    log_loss  mean of -log p of the class of a row
    brier     mean of sum_k (p_k - [class k])^2, half of it for two classes
    ece       expected calibration error: rows are put into 15 bins by their largest p; weighted
              mean over the bins of |accuracy - mean p|
    coverage  share of the targets in their 90 % intervals, or of the rows whose class is in its set
    width     mean width of these intervals, in the units of the targets; of several quantiles, both
              are of the interval from the smallest to the largest one
    normalised_coverage, normalised_width  the same for intervals scaled by the residual scale
    set_size  mean number of classes in these sets

All are weighted if rows have sample weights. The prefix of a public key names the data:
`test_mse` is of data.test, `train_mse` of the latest window of training steps, each batch evaluated
before the model learned from it, `held_out_mse` of the rows that `tune` holds out.
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
from streamkern.predict.calibration import Calibration, Intervals, distances, interval_ends
from streamkern.predict.probabilities import log_losses
from streamkern.store.statistics import ColumnMoments

LEVEL = 0.9
"""Level of the intervals and sets that are evaluated."""
BINS = 15


class EvaluationMetrics:
    """Sums over the rows of an evaluation, in float64; see the module docstring.

    loss : the loss of the model, whose predictions are compared with the targets; None: squares
    """

    def __init__(
        self, backend: Backend, n_outputs: int, classes: bool, loss: Loss | None = None
    ) -> None:
        self._backend, self._classes, self._loss = backend, classes, loss
        quantiles = None if loss is None or loss.levels is None else loss.quantiles
        self._several_quantiles = quantiles is not None and len(quantiles) > 1
        self._squared = np.zeros(n_outputs)
        self._targets = ColumnMoments(n_outputs)
        self._weight = self._n_correct = self._loss_sum = self._n_inside = self._widths = 0.0

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
            inside = to_host((F[:, :1] <= Y[:, :1]) & (Y[:, :1] <= F[:, -1:]))[:, 0]
            width = to_host(F[:, -1] - F[:, 0])
            self._n_inside += float(inside.sum() if w is None else w @ inside)
            self._widths += float(width.sum() if w is None else w @ width)
        if self._classes:
            right = to_host(F.argmax(axis=1) == Y.argmax(axis=1))
            self._n_correct += float(right.sum() if w is None else w[right].sum(dtype=np.float64))
        else:
            self._targets.add(to_host(Y), w)

    def result(self) -> dict[str, float]:
        """Return mse, r2 or accuracy, and the mean loss under the name that the loss defines.

        The loss of values is averaged over outputs, too. Raises DataError if all weights are 0.
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
            figures["coverage"] = self._n_inside / self._weight
            figures["width"] = self._widths / self._weight
        return figures


def _has_enough_rows(intervals: Intervals | None) -> bool:
    """Return whether there are enough rows for intervals at `LEVEL`."""
    return intervals is not None and (len(intervals.scores) + 1) * (1 - LEVEL) >= 1


class CalibratedFigures:
    """Sums over the rows of an evaluation, for the metrics of a calibrated model.

    asks_spread : whether `add` needs the residual scale of the rows
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._evaluates_intervals = calibration.shifts is None and _has_enough_rows(
            calibration.intervals
        )
        self.asks_spread = _has_enough_rows(calibration.normalised)
        self._sums: dict[str, float] = {}
        self._bins = np.zeros((2, BINS))
        self._weight = 0.0

    def add(
        self, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: npt.NDArray[Any] | None,
        spread: Floats | None = None,
    ) -> None:  # fmt: skip
        """Add values F and targets Y (m, c), weights w (m,) or None, on the host.

        spread : residual scale of the rows (m, c), if `asks_spread`
        """
        w = np.ones(len(F)) if w is None else w.astype(np.float64)
        self._weight += float(w.sum())
        if self._calibration.probabilities is None:
            self._add_values(F, Y, w, spread)
        else:
            self._add_classes(self._calibration.probabilities(F), F, Y, w)

    def _add(self, name: str, value: Any) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def _add_values(
        self, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Floats, spread: Floats | None
    ) -> None:
        """Add the coverage and the width of the intervals of the rows."""
        normalised, unit = self._calibration.normalised, self._calibration.unit
        residuals = distances(F, Y, unit)

        def add(name: str, reach: Floats) -> None:
            low, high = interval_ends(F, reach, unit)
            self._add(f"{name}coverage", w @ (residuals <= reach).mean(axis=1))
            self._add(f"{name}width", w @ (high - low).mean(axis=1))

        if self._evaluates_intervals:
            add("", self._calibration.intervals.reach(LEVEL))
        if self.asks_spread and normalised is not None and spread is not None:
            add("normalised_", normalised.reach(LEVEL) * spread)

    def _add_classes(self, p: Floats, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Floats) -> None:
        """Add log loss, Brier score, bins of ece, and sets. p : (m, c) probabilities."""
        labels = Y.argmax(axis=1)
        truth = np.arange(p.shape[1]) == labels[:, None]
        self._add("log_loss", w @ log_losses(p, labels))
        squares = np.square(p - truth).sum(axis=1)
        self._add("brier", w @ squares / (2 if p.shape[1] == 2 else 1))
        largest, right = p.max(axis=1), p.argmax(axis=1) == labels
        bins = np.minimum((largest * BINS).astype(np.int64), BINS - 1)
        self._bins[0] += np.bincount(bins, w * largest, BINS)
        self._bins[1] += np.bincount(bins, w * right, BINS)
        if self._evaluates_intervals:
            sets = self._calibration.intervals.sets(F, LEVEL)
            self._add("coverage", w @ sets[np.arange(len(F)), labels])
            self._add("set_size", w @ sets.sum(axis=1))

    def result(self) -> dict[str, float]:
        """Return the figures by name; at least one row must have a weight."""
        figures = {name: total / self._weight for name, total in self._sums.items()}
        if self._calibration.probabilities is None:
            return figures
        figures["ece"] = float(np.abs(self._bins[0] - self._bins[1]).sum()) / self._weight
        order = ("log_loss", "brier", "ece", "coverage", "set_size")
        return {name: figures[name] for name in order if name in figures}


def r2(squared: Floats, variance: Floats) -> float:
    """Return R2 from the mean squared error and the variance of each output, (c,).

    It is the unweighted mean over the outputs, as in scikit-learn; a constant output counts as 1 if
    it is predicted exactly, otherwise as 0.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = 1 - squared / variance
    return float(np.where(variance > 0, scores, squared == 0).mean())


def with_defined_r2(figures: dict[str, float], n_rows: int | None) -> dict[str, float]:
    """Return figures with an R2 of NaN, and warn, if there is only one row."""
    if "r2" not in figures or n_rows != 1:
        return figures
    warn("R^2 score is not well-defined with less than two samples.")
    return figures | {"r2": float("nan")}


def prefixed(data: str, figures: Mapping[str, float]) -> dict[str, float]:
    """Prefix each key with the data set: prefixed("test", {"mse": 1.0}) has "test_mse"."""
    return {f"{data}_{name}": value for name, value in figures.items()}


def format_metrics(figures: Mapping[str, Any]) -> str:
    """Format prefixed figures, such as "test mse 0.17, accuracy 0.98"."""
    shown, before = [], ""
    for key, value in figures.items():
        data, _, name = key.rpartition("_")
        words = f"{data.replace('_', ' ')} " if data and data != before else ""
        shown.append(f"{words}{name.upper() if name == 'r2' else name} {value:.5g}")
        before = data
    return ", ".join(shown)
