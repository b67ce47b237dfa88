"""Metrics of the held-out rows that judge settings, under scikit-learn's names.

    mse                mean over rows and outputs of (f(x) - y)^2; for classes y is one-hot
    mae, r2            of values: mean absolute error; R2, the plain mean over the outputs
    accuracy           share of the rows whose largest output is that of their class
    balanced_accuracy  mean over the classes of the accuracy on the rows of each
    log_loss           mean of -log p(class of the row), p as in `probabilities`

A model of a loss other than squares has the mean of that loss as well, under its figure's name, and
predicts by it.

Each is a weighted mean of losses of single rows, or one minus it. So a difference between two
models on the same rows has a standard error, and the recorded losses, in float32 per row, determine
every metric afterwards.
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
LOSS_FLOOR = 1e-3  # of the mean probability: a few thousand rows detect no smaller one


@dataclass(frozen=True)
class Metric:
    """A metric of the held-out rows.

    loss : name of the row loss that it is a mean of
    gain : whether it is one minus that mean
    balanced : whether every class has the same weight
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
    """Return the metrics of classes or values by name, with the figure of the loss as the first.

    loss : the class of the loss that is minimised; None: squares
    """
    known = OF_CLASSES if classes else OF_VALUES
    figure = {} if loss is None else _named(Metric(loss.figure, loss.figure))
    return figure | known | figure


def find_metric(name: str, classes: bool, loss: type[Loss] | None = None) -> Metric:
    """Return the metric of this name, or raise ConfigError.

    "auto" is the figure of the loss, for squares accuracy, or mse of values.
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
    """Return class probabilities (n, c) from values f(X): at least a thousandth of 1/c, sum 1.

    Least squares on one-hot targets estimates probabilities directly, but for values outside 0 ...
    1.
    """
    P: Rows = np.maximum(np.float64(1) * F, LOSS_FLOOR / F.shape[1])
    P /= P.sum(axis=1, keepdims=True)
    return P


def losses(
    F: npt.NDArray[Any], Y: npt.NDArray[Any], variance: Rows | None, loss: Loss | None = None
) -> dict[str, Rows]:
    """Return the losses of each row, (n,), by name.

    F : f(X), (n, c)
    Y : values, or one-hot classes
    variance : of each output over all held-out rows; None for classes
    loss : the loss of the model; None: squares
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
    # A constant output adds nothing to the row losses of R2.
    part = np.divide(squared, variance, out=np.zeros_like(squared), where=variance > 0)
    return found | {"mae": np.abs(F - Y).mean(axis=1), "r2": part.mean(axis=1)}


def row_weights(
    metric: Metric, y: npt.NDArray[Any], sample_weight: npt.NDArray[Any] | None
) -> Rows:
    """Return the share of each row in the metric, (n,). y : class ids, or values."""
    v: Rows = np.ones(len(y))
    if sample_weight is not None:
        v = np.asarray(sample_weight, np.float64)
    if metric.balanced:
        totals = np.bincount(y, v)[y]
        v = np.divide(v, totals, out=np.zeros(len(v)), where=totals > 0)
    return np.asarray(v / v.sum())


def squared_error(difference: Rows, weights: Rows) -> float:
    """Return the squared standard error of sum weights * difference, whose weights sum to 1."""
    n = np.count_nonzero(weights)
    spread = np.square(weights * (difference - weights @ difference)).sum()
    return float(spread * n / (n - 1)) if n > 1 else float("inf")


def packed_predictions(values: Rows) -> str:
    """Return the values as text, in float32."""
    return base64.b64encode(zlib.compress(np.asarray(values, "<f4").tobytes(), 1)).decode()


def unpacked(text: str) -> Rows:
    """Return the values from the text of `packed_predictions`."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f4").astype(np.float64)
