"""The callbacks of scikit-learn 1.9 and newer, given by `set_callbacks`, as one of ours.

A `fit` is a task, and each of its passes one below it. Without scikit-learn's module there is no
`set_callbacks`, and `callbacks` are all there are.
"""

from __future__ import annotations

from typing import Any

from streamkern.estimator.fitted import FittedModel
from streamkern.estimator.schema import Schema
from streamkern.train.callbacks import Callback, EpochEnd, TrainStart

try:
    from sklearn.callback import CallbackSupportMixin as CallbackSupport
    from sklearn.callback import with_callbacks
except ImportError:

    class CallbackSupport:  # type: ignore[no-redef]
        """Of nothing, before scikit-learn 1.9."""

    def with_callbacks(method: Any) -> Any:
        """The method itself."""
        return method


__all__ = ["CallbackSupport", "ScikitLearnCallbacks", "with_callbacks"]


class ScikitLearnCallbacks(Callback):
    """Tells scikit-learn's callbacks of a `fit` of this estimator, and hears whether they stop it.

    schema : of the training data. data : what the hooks are given, by name: X, y and metadata.
    """

    def __init__(self, estimator: Any, schema: Schema, **data: Any) -> None:
        self._estimator, self._schema, self._data = estimator, schema, data
        self._fit: Any = None
        self._pass: Any = None

    @staticmethod
    def wanted(estimator: Any) -> bool:
        """Whether there is anyone to tell."""
        return hasattr(estimator, "_skl_callbacks") or hasattr(estimator, "_parent_callback_ctx")

    def begin(self, run: TrainStart) -> None:
        """The task of the whole fit, and that of the first pass that is left."""
        left = max(0, run.epochs - run.epoch)
        self._fit = self._estimator._init_callback_context(max_subtasks=left)
        self._fit.call_on_fit_task_begin(estimator=self._estimator, **self._data)
        if left:
            self._begin_pass()

    def _begin_pass(self) -> None:
        self._pass = self._fit.subcontext(task_name="pass")
        self._pass.call_on_fit_task_begin(estimator=self._estimator, **self._data)

    def pass_ended(self, passed: EpochEnd) -> bool:
        """Whether one of them wants the fit to end."""
        stop = self._pass.call_on_fit_task_end(
            estimator=self._estimator,
            **self._data,
            reconstruction_attributes=lambda: {
                "_fitted_": FittedModel.of_result(passed.result(), self._schema)
            },
        )
        self._pass = None
        if not (stop or passed.last):
            self._begin_pass()
        return bool(stop)

    def fitted(self, fitted: FittedModel) -> None:
        """Tell them that the fit is over, and what the estimator will have."""
        if self._pass is not None:  # begun, and not needed
            self._pass.call_on_fit_task_end(estimator=self._estimator)
        self._fit.call_on_fit_task_end(
            estimator=self._estimator,
            **self._data,
            reconstruction_attributes={"_fitted_": fitted},
        )
