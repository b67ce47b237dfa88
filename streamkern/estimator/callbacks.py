"""Support for the callbacks of scikit-learn 1.9 and newer, which `set_callbacks` sets.

A `Callback` of streamkern calls them. In their terms a `fit` is a task, and each epoch a subtask.
With older versions of scikit-learn there is no `set_callbacks`, only the parameter `callbacks`.
"""

from __future__ import annotations

from typing import Any

from streamkern.estimator.fitted import FittedModel, Schema
from streamkern.train.loop.callbacks import Callback, EpochEnd, TrainStart

try:
    from sklearn.callback import CallbackSupportMixin as CallbackSupport
    from sklearn.callback import with_callbacks
except ImportError:

    class CallbackSupport:  # type: ignore[no-redef]
        """Placeholder without methods, before scikit-learn 1.9."""

    def with_callbacks(method: Any) -> Any:
        """Return the method unchanged."""
        return method


__all__ = ["CallbackSupport", "ScikitLearnCallbacks", "with_callbacks"]


class ScikitLearnCallbacks(Callback):
    """Calls the scikit-learn callbacks of an estimator in its `fit`, and ends it if one asks to.

    schema : schema of the training data
    data : arguments of the callbacks' methods by name: X, y and metadata
    """

    def __init__(self, estimator: Any, schema: Schema, **data: Any) -> None:
        self._estimator, self._schema, self._data = estimator, schema, data
        self._fit_task: Any = None
        self._epoch_task: Any = None

    @staticmethod
    def are_set(estimator: Any) -> bool:
        """Return whether the estimator has callbacks of scikit-learn."""
        return hasattr(estimator, "_skl_callbacks") or hasattr(estimator, "_parent_callback_ctx")

    def begin(self, run: TrainStart) -> None:
        """Begin the task of the fit, and the task of the first remaining epoch."""
        epochs = max(0, run.epochs - run.epoch)
        self._fit_task = self._estimator._init_callback_context(max_subtasks=epochs)
        self._fit_task.call_on_fit_task_begin(estimator=self._estimator, **self._data)
        if epochs:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Begin the task of an epoch."""
        self._epoch_task = self._fit_task.subcontext(task_name="pass")
        self._epoch_task.call_on_fit_task_begin(estimator=self._estimator, **self._data)

    def pass_ended(self, passed: EpochEnd) -> bool:
        """End the task of an epoch, and return whether a callback asks to end the fit."""
        stop = self._epoch_task.call_on_fit_task_end(
            estimator=self._estimator,
            **self._data,
            reconstruction_attributes=lambda: {
                "_fitted_": FittedModel.from_result(passed.result(), self._schema)
            },
        )
        self._epoch_task = None
        if not (stop or passed.last):
            self._begin_epoch()
        return bool(stop)

    def end_fit(self, fitted: FittedModel) -> None:
        """End the task of the fit. fitted : the result, which the estimator gets afterwards"""
        if self._epoch_task is not None:  # its epoch did not take place
            self._epoch_task.call_on_fit_task_end(estimator=self._estimator)
        self._fit_task.call_on_fit_task_end(
            estimator=self._estimator, **self._data, reconstruction_attributes={"_fitted_": fitted}
        )
