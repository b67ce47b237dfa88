"""What a classifier says of new rows beside its labels: values, decisions, probabilities, sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils.metaestimators import available_if

from streamkern.basics.errors import ConfigError
from streamkern.estimator import inputs
from streamkern.estimator.mistakes import brief
from streamkern.estimator.multilabel import HALF
from streamkern.estimator.predicting import Predicting
from streamkern.predict.probabilities import Softmax


def _knows_probabilities(estimator: Any) -> bool:
    """Whether it has probabilities, or is not fitted and surely will have."""
    if not hasattr(estimator, "_targets"):
        return estimator.calibrate is True
    if estimator._indicator is not None:
        raise AttributeError(
            "predict_proba is for rows of one class each, and this model was trained on several "
            "labels for a row; use predict_values"
        )
    known = estimator._calibration
    if known is None or known.probabilities is None:
        raise AttributeError(f"predict_proba needs {estimator._lacking}")
    return True


class ClassAnswers(Predicting):
    """Of a model with classes, or with several labels for a row."""

    classes_: npt.NDArray[Any]
    _indicator: str | None
    _order: npt.NDArray[np.int64] | None = None
    """Which output of the model each of the sorted `classes_` is; None: they are in its order."""

    def _take_classes(self, names: Sequence[str], dtype: Any = None) -> None:
        """The labels of the classes of a source or a model, sorted, as scikit-learn has them."""
        labels = inputs.labels_of(names, dtype)
        order = np.argsort(labels, kind="stable")
        self.classes_ = labels[order]
        self._order = None if np.array_equal(order, np.arange(len(order))) else order

    def _sorted(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(n, c), of the outputs of the model, in the order of `classes_`."""
        return F if self._order is None else F[:, self._order]

    def _check_sets(self, interval: float, out: Any) -> None:
        what = None if out is None else "out, as a file has no room for them"
        if self._indicator is not None:
            what = "several labels for a row"
        if what is not None:
            raise ConfigError(
                f"interval={interval!r} gives sets of classes, which are not known with {what}; "
                "leave interval out"
            )

    @available_if(_knows_probabilities)  # type: ignore[untyped-decorator]
    @brief
    def predict_proba(
        self, X: Any, *, out: Any = None, overwrite: bool = False, order: str = "source"
    ) -> Any:
        """Probabilities of the classes, by the rows that `fit` has set aside; see `calibrate`.

        It is there once rows were set aside, as they are by default of 5000 rows or more. The most
        probable class need not be the one that `predict` says: see docs/howto/probabilities.md.

        Parameters
        ----------
        X, out, overwrite, order : as in `predict`; files have a probability for each class.

        Returns
        -------
        p : (n, c) float64, rows sum to 1; None with `out`. Lazy where `predict` is.
        """
        if out is not None:
            return self._write(X, out, overwrite, order, proba=True, values=True)
        return self._answer(X, "_probabilities")

    @available_if(_knows_probabilities)  # type: ignore[untyped-decorator]
    @brief
    def predict_log_proba(self, X: Any) -> Any:
        """The logarithm of `predict_proba`."""
        return self._answer(X, "_log_probabilities")

    def _probabilities(self, F: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        assert self._calibration is not None
        assert self._calibration.probabilities is not None
        return self._sorted(self._calibration.probabilities(F))

    def _log_probabilities(self, F: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        assert self._calibration is not None
        known = self._calibration.probabilities
        if isinstance(known, Softmax):
            return self._sorted(known.log(F))
        with np.errstate(divide="ignore"):  # of what no row that was set aside has shown
            return np.log(self._probabilities(F))

    @brief
    def predict_values(self, X: Any) -> Any:
        """f(X), (n, c): about 1 for the class of a row, or its labels, and 0 for the others; lazy
        where `predict` is."""
        return self._answer(X, "_as_they_are")

    @brief
    def decision_function(self, X: Any) -> Any:
        """f(X), (n, c); with two classes the difference of their values, (n,); of several labels
        f(X) - 1/2, (n, L), above 0 for those that a row has. Lazy where `predict` is."""
        return self._answer(X, "_decisions")

    def _labels(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self._indicator is not None:
            return (F > HALF).astype(self._indicator)
        labels: npt.NDArray[Any] = self.classes_[self._sorted(F).argmax(axis=1)]
        return labels

    def _as_they_are(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._sorted(F)

    def _decisions(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self._indicator is not None:
            return F - HALF
        F = self._sorted(F)
        return F[:, 1] - F[:, 0] if F.shape[1] == 2 else F

    def _names_of(self, method: str) -> Sequence[Any] | None:
        if method == "_labels" or self._indicator is not None:
            return super()._names_of(method)
        classes = list(self.classes_)
        return classes[1:] if method == "_decisions" and len(classes) == 2 else classes
