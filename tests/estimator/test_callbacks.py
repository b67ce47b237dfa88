"""Check callbacks of scikit-learn and of streamkern on the estimators."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from streamkern import Callback, EpochEnd, KernelClassifier, KernelRegressor

rng = np.random.default_rng(0)
X = rng.normal(size=(200, 3))
Y = np.sin(X[:, 0]) + X[:, 1] ** 2
LABELS = np.where(Y > 1, "high", "low")
SMALL: dict[str, Any] = {
    "threads": 1, "n_centers": 40, "epochs": 3, "solver": "block",
    "kernel": "laplace", "bandwidth": 2.0, "ridge": 1e-3,
}  # fmt: skip


def sklearn_callback() -> Any:
    """Return scikit-learn's module of callbacks; skip the test if scikit-learn is too old."""
    try:
        return importlib.import_module("sklearn.callback")
    except ImportError:
        pytest.skip("needs scikit-learn 1.9")


class Recorder:
    """A `FitCallback` of scikit-learn that records its calls as (event, task name, task id).

    last_epoch : number of the epoch after which it asks to stop; 0 for never
    """

    max_propagation_depth = None

    def __init__(self, last_epoch: int = 0) -> None:
        self.last_epoch = last_epoch
        self.calls: list[tuple[str, str, int]] = []
        self.predictions: list[np.ndarray] = []
        self.setups = self.teardowns = 0

    def setup(self, estimator: Any, context: Any) -> None:
        self.setups += 1

    def teardown(self, estimator: Any, context: Any) -> None:
        self.teardowns += 1

    def on_fit_task_begin(self, estimator: Any, context: Any, *, X: Any = None) -> None:
        self.calls.append(("begin", context.task_name, context.task_id))

    def on_fit_task_end(
        self, estimator: Any, context: Any, *, X: Any = None, fitted_estimator: Any = None
    ) -> bool:
        self.calls.append(("end", context.task_name, context.task_id))
        if context.task_name == "pass" and fitted_estimator is not None:
            assert fitted_estimator is not estimator
            self.predictions.append(fitted_estimator.predict(X))
        return context.task_name == "pass" and context.task_id + 1 == self.last_epoch


@pytest.mark.parametrize(("kind", "y"), [(KernelRegressor, Y), (KernelClassifier, LABELS)])
def test_callback_receives_every_epoch_as_task(kind: Any, y: Any) -> None:
    recorder = Recorder()
    assert isinstance(recorder, sklearn_callback().FitCallback)
    model = kind(**SMALL).set_callbacks(recorder).fit(X, y)
    # scikit-learn calls an epoch a "pass".
    epochs = [(event, "pass", k) for k in range(3) for event in ("begin", "end")]
    assert recorder.calls == [("begin", "fit", 0), *epochs, ("end", "fit", 0)]
    assert (recorder.setups, recorder.teardowns) == (1, 1)
    np.testing.assert_array_equal(recorder.predictions[-1], model.predict(X))
    after_one_epoch = kind(**SMALL | {"epochs": 1}).fit(X, y)
    np.testing.assert_array_equal(recorder.predictions[0], after_one_epoch.predict(X))


def test_callback_can_stop_fit() -> None:
    sklearn_callback()
    recorder = Recorder(last_epoch=2)
    model = KernelRegressor(**SMALL).set_callbacks(recorder).fit(X, Y)
    assert model.n_iter_ == 2
    assert model.report_["ended"] == "ScikitLearnCallbacks asked for no further epoch"
    two = KernelRegressor(**SMALL | {"epochs": 2}).fit(X, Y)
    np.testing.assert_array_equal(model.predict(X), two.predict(X))


def test_failed_fit_tears_callbacks_down() -> None:
    sklearn_callback()

    class FailingRecorder(Recorder):
        def on_fit_task_end(self, *args: Any, **values: Any) -> bool:
            raise ZeroDivisionError

    recorder = FailingRecorder()
    with pytest.raises(ZeroDivisionError):
        KernelRegressor(**SMALL).set_callbacks(recorder).fit(X, Y)
    assert recorder.teardowns == 1


def test_early_stopped_epoch_ends_its_task() -> None:
    sklearn_callback()
    recorder = Recorder()
    settings = SMALL | {"epochs": 40, "early_stopping": True, "n_iter_no_change": 1, "ridge": 0.0}
    model = KernelRegressor(**settings).set_callbacks(recorder).fit(X, Y)
    assert model.n_iter_ < 40
    begun_tasks, ended_tasks = (
        [t for t in recorder.calls if t[0] == event] for event in ("begin", "end")
    )
    assert len(begun_tasks) == len(ended_tasks) == model.n_iter_ + 1


def test_scikit_learn_scoring_monitor_scores_every_epoch() -> None:
    module = sklearn_callback()
    monitor = module.ScoringMonitor(scoring="r2")
    model = KernelRegressor(**SMALL).set_callbacks(monitor).fit(X, Y)
    log = monitor.get_logs()
    rows = (log if isinstance(log, list) else [log])[0].data
    scores = [row["r2"] for row in rows if row["task_name"] == "pass"]
    assert len(scores) == 3
    assert scores[-1] == pytest.approx(model.score(X, Y))


def test_callbacks_reach_estimator_inside_pipeline_and_search() -> None:
    sklearn_callback()
    recorder = Recorder()
    pipeline = make_pipeline(StandardScaler(), KernelRegressor(**SMALL))
    pipeline.set_callbacks(recorder).fit(X, Y)
    assert ("end", "pass", 2) in recorder.calls
    search_recorder = Recorder()
    search = GridSearchCV(KernelRegressor(**SMALL), {"ridge": [0.0, 1e-3]}, cv=2)
    search.set_callbacks(search_recorder).fit(X, Y)
    # 2 ridges in 2 folds, and the fit of the best one.
    assert search_recorder.calls.count(("end", "pass", 2)) == 5


class EpochCounter(Callback):
    """A callback of streamkern that records the epochs; it can be pickled and cloned."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def pass_ended(self, passed: EpochEnd) -> None:
        self.epochs.append(passed.epoch)


def test_streamkern_callbacks_are_an_estimator_parameter() -> None:
    counter = EpochCounter()
    model = KernelRegressor(**SMALL, callbacks=[counter]).fit(X, Y)
    assert counter.epochs == [1, 2, 3]
    assert pickle.loads(pickle.dumps(model)).callbacks[0].epochs == [1, 2, 3]
    clone(model).fit(X, Y)
    assert counter.epochs == [1, 2, 3]  # the clone has its own
    np.testing.assert_array_equal(model.predict(X), KernelRegressor(**SMALL).fit(X, Y).predict(X))


@pytest.mark.slow
def test_estimators_work_without_scikit_learn_callbacks() -> None:
    code = (
        "import sys; sys.modules['sklearn.callback'] = None\n"
        "import numpy as np\n"
        "from streamkern import KernelRegressor\n"
        "X = np.random.default_rng(0).normal(size=(50, 2))\n"
        "model = KernelRegressor(early_stopping=True, threads=1, solver='block').fit(X, X[:, 0])\n"
        "print(hasattr(model, 'set_callbacks'), len(model.validation_scores_) == model.n_iter_)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == ["False", "True"]
