"""Predictions of a classifier other than labels: values, decisions, probabilities, sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention, render_message
from streamkern.estimator.fitted import FittedAttribute
from streamkern.estimator.labels import HALF, Labels
from streamkern.estimator.predicting import Predicting, from_one_fit
from streamkern.predict.calibration import check_level
from streamkern.predict.prediction_table import needed_calibration
from streamkern.predict.probabilities import Probabilities, Softmax


class _WithProbabilities:
    """A method that an estimator has only if it has probabilities, or is certain to have them.

    Otherwise an AttributeError gives the reason in its own message, not in its cause as
    scikit-learn's `available_if` does: users read the end of a traceback.
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
    known = fitted.calibration
    if known is None or known.probabilities is None:
        raise AttributeError(f"predict_proba needs {render_message(estimator._lacking)}")
    made: Probabilities = known.probabilities
    return made


class ClassAnswers(Predicting):
    """Predictions of a model with classes, or with several labels for a row."""

    classes_ = FittedAttribute()

    @property
    def _known_labels(self) -> Labels:
        labels = self._state.schema.labels
        assert labels is not None
        return labels

    def _check_sets(self, interval: float, out: Any) -> None:
        what = None if out is None else "out, as a file has no room for them"
        if self._known_labels.indicator is not None:
            what = "several labels for a row"
        if what is not None:
            raise ConfigError(
                f"{mention('interval', interval)} gives sets of classes, which are not known with "
                f"{what}",
                "leave interval out",
            )

    def _with_sets(self, X: Any, interval: float) -> tuple[Any, Any]:
        """Return labels at once, and the sets of classes."""
        check_level(interval)
        request = f"interval={interval!r}"
        X = self._at_once(X, request)
        known = self._state.calibration
        by_rows = known if known is not None and known.n_rows else None
        calibration = needed_calibration(by_rows, request, self._lacking)
        calibration.intervals.score_quantile(interval)  # raises for a level out of reach
        F = self._values(X)
        sets = self._known_labels.sorted(calibration.intervals.sets(F, interval))
        return self._formed(self._labels(F), X, "_labels"), self._formed(sets, X, "_sets")

    @_WithProbabilities
    @from_one_fit
    def predict_proba(
        self, X: Any, *, out: Any = None, overwrite: bool = False, order: str = "source"
    ) -> Any:
        """Return probabilities of the classes; see `calibrate` for the rows they are fitted to.

        A fit with default settings has them; `calibrate` documents which others do. The most
        probable class need not be the one that `predict` returns: see docs/howto/probabilities.md.

        Parameters
        ----------
        X, out, overwrite, order : as in `predict`; files have a probability for each class.

        Returns
        -------
        p : (n, c) float64, rows sum to 1; None with `out`. Lazy if `predict` is.
        """
        if out is not None:
            options = {"overwrite": overwrite, "order": order, "values": True}
            return self._write(X, out, proba=True, **options)
        return self._answer(X, "_probabilities")

    @_WithProbabilities
    @from_one_fit
    def predict_log_proba(self, X: Any) -> Any:
        """Return the logarithm of `predict_proba`."""
        return self._answer(X, "_log_probabilities")

    def _probabilities(self, F: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        return self._known_labels.sorted(_probabilities_of(self)(F))

    def _log_probabilities(self, F: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        known = _probabilities_of(self)
        if isinstance(known, Softmax):
            return self._known_labels.sorted(known.log(F))
        with np.errstate(divide="ignore"):  # probability 0: a class of no calibration row
            return np.log(self._probabilities(F))

    @from_one_fit
    def predict_values(self, X: Any) -> Any:
        """Return f(X), (n, c): about 1 for the class of a row, or its labels, and 0 for the others.

        Lazy if `predict` is.
        """
        return self._answer(X, "_as_they_are")

    @from_one_fit
    def decision_function(self, X: Any) -> Any:
        """Return f(X), (n, c), or the difference of the two values, (n,), for two classes.

        For several labels f(X) - 1/2, (n, L), which is above 0 for the labels of a row. Lazy if
        `predict` is.
        """
        return self._answer(X, "_decisions")

    def _labels(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        known = self._known_labels
        if known.indicator is not None:
            return (F > HALF).astype(known.indicator)
        labels: npt.NDArray[Any] = known.classes[known.sorted(F).argmax(axis=1)]
        return labels

    def _as_they_are(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._known_labels.sorted(F)

    def _decisions(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self._known_labels.indicator is not None:
            return F - HALF
        F = self._as_they_are(F)
        return F[:, 1] - F[:, 0] if F.shape[1] == 2 else F

    def _names_of(self, method: str) -> Sequence[Any] | None:
        known = self._known_labels
        if method == "_labels" or known.indicator is not None:
            return super()._names_of(method)
        classes = list(known.classes)
        return classes[1:] if method == "_decisions" and len(classes) == 2 else classes
