"""Predictions of a classifier: labels, values, decision functions, probabilities and sets.

Also their accuracy, if a row has several labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention, render_message
from streamkern.estimator.fitted import FittedAttribute
from streamkern.estimator.labels import LABEL_THRESHOLD, Labels
from streamkern.estimator.predicting import PredictionMixin, on_snapshot
from streamkern.predict.calibration import check_level
from streamkern.predict.prediction_table import require_calibration
from streamkern.predict.probabilities import Probabilities, Softmax
from streamkern.stream.sources.base import BaseSource
from streamkern.train.model.kernel_model import KernelModel


class _WithProbabilities:
    """Decorator of a method that exists only if the estimator has probabilities, or will have them.

    Otherwise an AttributeError gives the reason. Unlike in scikit-learn's `available_if`, the
    reason is in the message of the error itself and not in its cause, because users read the end of
    a traceback.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method, self.__doc__ = method, method.__doc__

    def __get__(self, estimator: Any, owner: type | None = None) -> Any:
        if estimator is None:
            return self._method
        if estimator._fitted_ is not None:
            _probabilities_of(estimator)
        elif estimator.calibrate is not True:
            raise AttributeError(
                f"{self._method.__name__} needs a fitted model; call fit first, with "
                "calibrate=True to be sure of probabilities"
            )
        return MethodType(self._method, estimator)


def _probabilities_of(estimator: Any) -> Probabilities:
    """Return the probability map of a fitted estimator; AttributeError if it has none."""
    fitted = estimator._state
    if fitted.schema.labels.indicator is not None:
        raise AttributeError(
            "predict_proba is for rows of one class each, and this model was trained on several "
            "labels for a row; use predict_values"
        )
    calibration = fitted.calibration
    if calibration is None or calibration.probabilities is None:
        raise AttributeError(
            f"predict_proba needs {render_message(estimator._needed_calibration_text)}"
        )
    probabilities: Probabilities = calibration.probabilities
    return probabilities


class ClassPredictionMixin(PredictionMixin):
    """Predictions of a model with classes, or with several labels for a row."""

    classes_ = FittedAttribute()

    @property
    def _trained_labels(self) -> Labels:
        """The labels of the training data."""
        labels = self._state.schema.labels
        assert labels is not None
        return labels

    def _check_sets(self, interval: float, out: Any) -> None:
        """Raise ConfigError if sets of classes cannot be returned."""
        obstacle = None if out is None else "out, because the files cannot hold them"
        if self._trained_labels.indicator is not None:
            obstacle = "several labels for a row"
        if obstacle is not None:
            raise ConfigError(
                f"{mention('interval', interval)} gives sets of classes, which are not available "
                f"with {obstacle}",
                "leave interval out",
            )

    def _predict_sets(self, X: Any, interval: float) -> tuple[Any, Any]:
        """Return labels, (n,), and sets of classes, (n, c) bool, for rows that are not lazy."""
        check_level(interval)
        request = f"interval={interval!r}"
        X = self._check_not_lazy(X, request)
        fitted_map = self._state.calibration
        # A softmax without calibration rows gives probabilities, but no sets.
        usable_map = fitted_map if fitted_map is not None and fitted_map.n_rows else None
        calibration = require_calibration(usable_map, request, self._needed_calibration_text)
        # Raises if the level needs more calibration rows, before the rows are predicted.
        calibration.intervals.score_quantile(interval)
        F = self._values(X)
        sets = self._trained_labels.sort_outputs(calibration.intervals.prediction_sets(F, interval))
        labels = self._in_container(self._labels(F), X, "_labels")
        return labels, self._in_container(sets, X, "_sets")

    @_WithProbabilities
    @on_snapshot
    def predict_proba(
        self, X: Any, *, out: Any = None, overwrite: bool = False, order: str = "source"
    ) -> Any:
        """Return probabilities of the classes.

        They are fitted to rows that `calibrate` sets aside, or are those of the log loss; that
        parameter documents which fits have them. The most probable class may differ from the result
        of `predict`, see docs/howto/probabilities.md.

        Parameters
        ----------
        X, out, overwrite, order : as in `predict`; files have a probability for each class.

        Returns
        -------
        probabilities : (n, c) float64, rows sum to 1; None with `out`. Lazy if `predict` is.

        Raises
        ------
        AttributeError
            The estimator has no probabilities.
        ConfigError, DataError
            As in `predict`.
        """
        if out is not None:
            return self._write(X, out, proba=True, overwrite=overwrite, order=order, values=True)
        return self._predict(X, "_probabilities")

    @_WithProbabilities
    @on_snapshot
    def predict_log_proba(self, X: Any) -> Any:
        """Return the logarithm of `predict_proba`."""
        return self._predict(X, "_log_probabilities")

    # `_predict` calls these methods by name, with the outputs F (n, c) of the model. They return
    # (n, c) with the columns in the order of `classes_`.

    def _probabilities(self, F: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        return self._trained_labels.sort_outputs(_probabilities_of(self)(F))

    def _log_probabilities(self, F: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        probabilities = _probabilities_of(self)
        if isinstance(probabilities, Softmax):
            return self._trained_labels.sort_outputs(probabilities.log(F))
        with np.errstate(divide="ignore"):  # a class without calibration rows has probability 0
            return np.log(self._probabilities(F))

    @on_snapshot
    def predict_values(self, X: Any) -> Any:
        """Return f(X), (n, c), which is about 1 for the class or labels of a row, and 0 for others.

        With the log loss, it is the logits: their softmax are the probabilities of the loss. The
        columns are in the order of `classes_`. Lazy if `predict` is.
        """
        return self._predict(X, "_sorted_values")

    @on_snapshot
    def decision_function(self, X: Any) -> Any:
        """Return f(X), (n, c); for two classes the second value minus the first one, (n,).

        With several labels for a row it is f(X) - 1/2, (n, L), which is above 0 for the labels that
        `predict` returns. Lazy if `predict` is.
        """
        return self._predict(X, "_decisions")

    def _labels(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the label of the largest output (n,), or for several labels 0 and 1, (n, L)."""
        trained = self._trained_labels
        if trained.indicator is not None:
            return (F > LABEL_THRESHOLD).astype(trained.indicator)
        labels: npt.NDArray[Any] = trained.classes[trained.sort_outputs(F).argmax(axis=1)]
        return labels

    @staticmethod
    def _subset_accuracy(model: KernelModel, source: BaseSource) -> float:
        """Return the share of a source's rows for which all labels are predicted correctly."""
        n_correct = 0
        with model.backend.active():
            for _, F, Y in model.stream(source):
                n_correct += int(((F > LABEL_THRESHOLD) == (Y > LABEL_THRESHOLD)).all(axis=1).sum())
        return n_correct / source.n_rows

    def _sorted_values(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return F (n, c) with the columns in the order of `classes_`."""
        return self._trained_labels.sort_outputs(F)

    def _decisions(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the decision function, (n,) for two classes, else (n, c)."""
        if self._trained_labels.indicator is not None:
            return F - LABEL_THRESHOLD
        F = self._sorted_values(F)
        return F[:, 1] - F[:, 0] if F.shape[1] == 2 else F

    def _column_names(self, method: str) -> Sequence[Any] | None:
        """Return the names of the columns that a method returns: the classes, except for labels.

        method : name of the method that `_predict` calls, such as "_labels"
        """
        trained = self._trained_labels
        if method == "_labels" or trained.indicator is not None:
            return super()._column_names(method)
        classes = list(trained.classes)
        return classes[1:] if method == "_decisions" and len(classes) == 2 else classes
