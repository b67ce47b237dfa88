"""Evaluation metrics of the held-out rows, by which a search compares settings.

    mse                mean over rows and outputs of (f(x) - y)^2; y is one-hot for classes
    mae, r2            for numeric targets: mean absolute error, and R2, averaged over the outputs
    accuracy           share of the rows whose class has the largest output
    balanced_accuracy  mean over the classes of the accuracy on their rows
    log_loss           mean of -log p(class of the row), with p of `clipped_probabilities`

The names are those of scikit-learn. A model that minimises another loss than the squared error also
has the mean of this loss, under the name that the loss defines (`Loss.figure`).

Each metric is a weighted mean of losses of single rows, or one minus such a mean. So all metrics
follow from the losses of the rows, which are recorded in float32, and the difference of two models
on the same rows has a standard error.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.losses.base import Loss

Rows = npt.NDArray[np.float64]
MIN_PROBABILITY = 1e-3
"""Smallest probability, relative to 1 / c. A few thousand rows cannot measure smaller ones."""


@dataclass(frozen=True)
class Metric:
    """An evaluation metric.

    name : name of the metric
    loss : name of the loss of a row whose mean determines the metric
    higher_is_better : whether the metric is one minus the mean loss, instead of the mean loss
    balanced : whether all classes have the same total weight
    """

    name: str
    loss: str
    higher_is_better: bool = False
    balanced: bool = False

    def to_loss(self, value: float) -> float:
        """Return a value of the metric as a mean loss, or a mean loss as a value of the metric."""
        return 1 - value if self.higher_is_better else value


def _by_name(*metrics: Metric) -> dict[str, Metric]:
    """Return metrics by their names."""
    return {metric.name: metric for metric in metrics}


MSE = Metric("mse", "mse")
REGRESSION_METRICS = _by_name(MSE, Metric("mae", "mae"), Metric("r2", "r2", higher_is_better=True))
CLASS_METRICS = _by_name(
    Metric("accuracy", "error", higher_is_better=True),
    Metric("balanced_accuracy", "error", higher_is_better=True, balanced=True),
    Metric("log_loss", "log_loss"),
    MSE,
)


def known_metrics(classes: bool, loss: type[Loss] | None = None) -> dict[str, Metric]:
    """Return the metrics by name; the metric of the loss, if any, is the first.

    classes : whether the targets are classes
    loss : class of the loss that is minimised; None for the squared error
    """
    metrics = CLASS_METRICS if classes else REGRESSION_METRICS
    loss_metric = {} if loss is None else _by_name(Metric(loss.figure, loss.figure))
    return loss_metric | metrics | loss_metric  # the first to be first, the last to replace another


def find_metric(name: str, classes: bool, loss: type[Loss] | None = None) -> Metric:
    """Return the metric with a name; raise ConfigError if it is not defined for the targets.

    name : "auto" is the metric of the loss; for the squared error, accuracy for classes or mse
    """
    metrics = known_metrics(classes, loss)
    if name == "auto":
        return next(iter(metrics.values()))
    if name in metrics:
        return metrics[name]
    targets = "classes" if classes else "values"
    other_metrics = REGRESSION_METRICS if classes else CLASS_METRICS
    problem = f"is not defined for {targets}" if name in other_metrics else "is not known"
    raise ConfigError(f"{mention('metric', name)} {problem}", f'take "auto", {", ".join(metrics)}')


def clipped_probabilities(F: npt.NDArray[Any]) -> Rows:
    """Return class probabilities (n, c) from outputs F (n, c) of least squares on one-hot targets.

    The outputs estimate probabilities, but may lie outside of [0, 1]. They are raised to at least
    `MIN_PROBABILITY` / c, and divided by their sum.
    """
    P: Rows = np.maximum(np.float64(1) * F, MIN_PROBABILITY / F.shape[1])
    P /= P.sum(axis=1, keepdims=True)
    return P


def row_losses(
    F: npt.NDArray[Any], Y: npt.NDArray[Any], variance: Rows | None, loss: Loss | None = None
) -> dict[str, Rows]:
    """Return the losses of each row, (n,), by name.

    F : (n, c) predictions f(X)
    Y : (n, c) numeric targets, or one-hot classes
    variance : (c,) variance of each target over all held-out rows; None for classes
    loss : loss of the model; None for the squared error
    """
    F, Y = np.asarray(F, np.float64), np.asarray(Y, np.float64)
    if loss is None:
        return _prediction_losses(F, Y, variance)
    model_losses = loss.values(np, F, Y) / (1 if variance is None else F.shape[1])
    predicted = F if variance is not None else loss.predict(np, F.copy())
    return _prediction_losses(predicted, Y, variance) | {loss.figure: model_losses}


def _prediction_losses(F: Rows, Y: Rows, variance: Rows | None) -> dict[str, Rows]:
    """Return the losses of predictions by name; see `row_losses`."""
    squared = np.square(F - Y)
    by_name: dict[str, Rows] = {"mse": squared.mean(axis=1)}
    if variance is None:
        labels = Y.argmax(axis=1)
        p = np.take_along_axis(clipped_probabilities(F), labels[:, None], axis=1)[:, 0]
        is_wrong: Rows = (F.argmax(axis=1) != labels).astype(np.float64)
        return by_name | {"error": is_wrong, "log_loss": -np.log(p)}
    # An output with constant targets does not contribute to the loss of R2.
    relative = np.divide(squared, variance, out=np.zeros_like(squared), where=variance > 0)
    return by_name | {"mae": np.abs(F - Y).mean(axis=1), "r2": relative.mean(axis=1)}


def row_weights(
    metric: Metric, y: npt.NDArray[Any], sample_weight: npt.NDArray[Any] | None
) -> Rows:
    """Return the weights (n,) of the rows in a metric, with sum 1. y : class ids, or values"""
    weights: Rows = np.ones(len(y))
    if sample_weight is not None:
        weights = np.asarray(sample_weight, np.float64)
    if metric.balanced:
        totals = np.bincount(y, weights)[y]
        weights = np.divide(weights, totals, out=np.zeros(len(weights)), where=totals > 0)
    return np.asarray(weights / weights.sum())


def squared_standard_error(difference: Rows, weights: Rows) -> float:
    """Return the squared standard error of the weighted mean of a difference.

    It is infinite if at most one row has a weight.

    difference : (n,) difference of each row
    weights : (n,) weights with the sum 1
    """
    n = np.count_nonzero(weights)
    variance = np.square(weights * (difference - weights @ difference)).sum()
    return float(variance * n / (n - 1)) if n > 1 else float("inf")


def pack_losses(values: Rows) -> str:
    """Return values as text: compressed float32, in base64."""
    return base64.b64encode(zlib.compress(np.asarray(values, "<f4").tobytes(), 1)).decode()


def unpack_losses(text: str) -> Rows:
    """Return the values from the text of `pack_losses`."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f4").astype(np.float64)
