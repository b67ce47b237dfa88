"""Evaluation metrics of the held-out rows, by which a search compares settings.

    mse                mean over rows and outputs of (f(x) - y)^2; y is one-hot for classes
    mae, r2            for numeric targets: mean absolute error, and R2, averaged over the outputs
    accuracy           share of the rows whose class has the largest output
    balanced_accuracy  mean over the classes of the accuracy on their rows
    log_loss           mean of -log p(class of the row), with p of `probabilities`

The names are taken from scikit-learn. A model that minimises another loss than squares also has the
mean of this loss, under the name of its figure.

Each metric is a weighted mean of losses of single rows, or one minus such a mean. The difference of
two models on the same rows therefore has a standard error, and all metrics follow from the losses
of the rows, which are recorded in float32.
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
LOSS_FLOOR = 1e-3
"""Smallest probability, relative to 1 / c. A few thousand rows cannot measure smaller ones."""


@dataclass(frozen=True)
class Metric:
    """An evaluation metric.

    name : name of the metric
    loss : name of the loss of a row whose mean it is
    gain : whether the metric is one minus this mean
    balanced : whether all classes have the same total weight
    """

    name: str
    loss: str
    gain: bool = False
    balanced: bool = False

    def loss_of(self, figure: float) -> float:
        """Return the figure as a quantity to minimise."""
        return 1 - figure if self.gain else figure


def _named(*metrics: Metric) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


MSE = Metric("mse", "mse")
OF_VALUES = _named(MSE, Metric("mae", "mae"), Metric("r2", "r2", gain=True))
OF_CLASSES = _named(
    Metric("accuracy", "error", gain=True),
    Metric("balanced_accuracy", "error", gain=True, balanced=True),
    Metric("log_loss", "log_loss"),
    MSE,
)


def known_metrics(classes: bool, loss: type[Loss] | None = None) -> dict[str, Metric]:
    """Return the metrics by name; the figure of the loss, if any, is the first.

    classes : whether the targets are classes
    loss : class of the loss that is minimised; None for squares
    """
    known = OF_CLASSES if classes else OF_VALUES
    figure = {} if loss is None else _named(Metric(loss.figure, loss.figure))
    return figure | known | figure


def find_metric(name: str, classes: bool, loss: type[Loss] | None = None) -> Metric:
    """Return the metric with a name; raise ConfigError if it is not defined for the targets.

    name : "auto" is the figure of the loss; for squares, the accuracy of classes, or the mse
    """
    known = known_metrics(classes, loss)
    if name == "auto":
        return next(iter(known.values()))
    if name in known:
        return known[name]
    what = "classes" if classes else "values"
    other = OF_VALUES if classes else OF_CLASSES
    rule = f"is not defined for {what}, which the data has" if name in other else "is not known"
    raise ConfigError(f"{mention('metric', name)} {rule}", f'take "auto", {", ".join(known)}')


def probabilities(F: npt.NDArray[Any]) -> Rows:
    """Return class probabilities (n, c) from outputs f(X) of least squares on one-hot targets.

    The outputs estimate probabilities, but may lie outside of [0, 1]. They are raised to at least
    `LOSS_FLOOR` / c, and divided by their sum.
    """
    P: Rows = np.maximum(np.float64(1) * F, LOSS_FLOOR / F.shape[1])
    P /= P.sum(axis=1, keepdims=True)
    return P


def losses(
    F: npt.NDArray[Any], Y: npt.NDArray[Any], variance: Rows | None, loss: Loss | None = None
) -> dict[str, Rows]:
    """Return the losses of each row, (n,), by name.

    F : (n, c) predictions f(X)
    Y : (n, c) numeric targets, or one-hot classes
    variance : (c,) variance of each target over all held-out rows; None for classes
    loss : loss of the model; None for squares
    """
    F, Y = np.asarray(F, np.float64), np.asarray(Y, np.float64)
    if loss is None:
        return _losses(F, Y, variance)
    own = loss.values(np, F, Y) / (1 if variance is None else F.shape[1])
    predicted = F if variance is not None else loss.predict(np, F.copy())
    return _losses(predicted, Y, variance) | {loss.figure: own}


def _losses(F: Rows, Y: Rows, variance: Rows | None) -> dict[str, Rows]:
    """Return the losses of predictions by name; see `losses`."""
    squared = np.square(F - Y)
    found: dict[str, Rows] = {"mse": squared.mean(axis=1)}
    if variance is None:
        true = Y.argmax(axis=1)
        p = np.take_along_axis(probabilities(F), true[:, None], axis=1)[:, 0]
        wrong: Rows = (F.argmax(axis=1) != true).astype(np.float64)
        return found | {"error": wrong, "log_loss": -np.log(p)}
    # An output with constant targets adds nothing to the loss of R2.
    part = np.divide(squared, variance, out=np.zeros_like(squared), where=variance > 0)
    return found | {"mae": np.abs(F - Y).mean(axis=1), "r2": part.mean(axis=1)}


def row_weights(
    metric: Metric, y: npt.NDArray[Any], sample_weight: npt.NDArray[Any] | None
) -> Rows:
    """Return the weights (n,) of the rows in a metric, with sum 1. y : class ids, or values"""
    v: Rows = np.ones(len(y))
    if sample_weight is not None:
        v = np.asarray(sample_weight, np.float64)
    if metric.balanced:
        totals = np.bincount(y, v)[y]
        v = np.divide(v, totals, out=np.zeros(len(v)), where=totals > 0)
    return np.asarray(v / v.sum())


def squared_error(difference: Rows, weights: Rows) -> float:
    """Return the squared standard error of the weighted mean of a difference.

    difference, weights : (n,); the weights have the sum 1
    """
    n = np.count_nonzero(weights)
    spread = np.square(weights * (difference - weights @ difference)).sum()
    return float(spread * n / (n - 1)) if n > 1 else float("inf")


def packed_predictions(values: Rows) -> str:
    """Return the values as text, in float32."""
    return base64.b64encode(zlib.compress(np.asarray(values, "<f4").tobytes(), 1)).decode()


def unpacked(text: str) -> Rows:
    """Return the values from the text of `packed_predictions`."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f4").astype(np.float64)
