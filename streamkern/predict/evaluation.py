"""Metrics of a model on a data set, with the same meaning wherever they are shown.

    mse       mean over rows and outputs of (f(x) - y)^2, in squares of the user's units
    r2        1 - sum (f(x) - y)^2 / sum (y - mean)^2 of each output, their plain mean (regression)
    accuracy  share of the rows whose largest output is that of their class (classification)

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
from streamkern.basics.errors import DataError
from streamkern.basics.warning import warn
from streamkern.store.statistics import ColumnMoments

Sums = npt.NDArray[np.float64]


class EvaluationMetrics:
    """Sums over the rows of an evaluation, in float64; see the module docstring."""

    def __init__(self, backend: Backend, n_outputs: int, classes: bool) -> None:
        self._backend, self._classes = backend, classes
        self._squared = np.zeros(n_outputs)
        self._targets = ColumnMoments(n_outputs)
        self._weight = self._hits = 0.0

    def add(self, F: Array, Y: Array, w: npt.NDArray[Any] | None = None) -> None:
        """Add values F and targets Y (m, c) on the device, w (m,) on the host or None."""
        xp, to_host = self._backend.xp, self._backend.to_host
        errors = xp.square(F - Y, dtype=np.float64)
        if w is not None:
            errors *= self._backend.asarray(w)[:, None]
        self._squared += to_host(errors.sum(axis=0))
        self._weight += len(F) if w is None else float(w.sum(dtype=np.float64))
        if self._classes:
            right = to_host(F.argmax(axis=1) == Y.argmax(axis=1))
            self._hits += float(right.sum() if w is None else w[right].sum(dtype=np.float64))
        else:
            self._targets.add(to_host(Y), w)

    def result(self) -> dict[str, float]:
        """Return mse, and r2 or accuracy; raise DataError if all weights are 0."""
        if not self._weight > 0:
            raise DataError(
                "all rows to evaluate have sample weight 0; give some of them a weight above 0"
            )
        squared = self._squared / self._weight
        found = {"mse": float(squared.mean())}
        if self._classes:
            return found | {"accuracy": self._hits / self._weight}
        return found | {"r2": r2(squared, self._targets.variance())}


def r2(squared: Sums, variance: Sums) -> float:
    """Return R2 from the mean squared error and the variance of each output, (c,).

    The plain mean over the outputs, as in scikit-learn; a constant output counts 1 if it is
    predicted exactly, otherwise 0.
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
