"""Check that an interrupted or failed fit leaves a consistent estimator."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from streamkern import Callback, DataError, KernelClassifier, KernelRegressor, StreamkernError, load
from streamkern.basics.errors import ConfigError, TrainingInterrupted

SETTINGS: dict[str, Any] = {
    "threads": 1, "solver": "block", "epochs": 2, "n_centers": 12, "kernel": "gaussian",
    "bandwidth": 2.0, "metric": "none", "ridge": 0.0, "accelerator": "none",
}  # fmt: skip
rng = np.random.default_rng(0)
ROWS = rng.normal(size=(40, 2))
SIDE = ROWS[:, 0] > 0
DATA = [
    (ROWS, np.where(SIDE, "a", "b")),
    (pd.DataFrame(50 + 9 * ROWS, columns=["p", "q"]), np.where(SIDE, "y", "x")),
    (ROWS[::-1] - 5, np.where(SIDE, 3, np.where(ROWS[:, 1] > 0, 1, 2))),
]
"""Pairs (X, y) with different columns, scales, classes and numbers of classes."""
PROBE = ROWS[:7]


class RaiseAfterEpoch(Callback):
    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def pass_ended(self, passed: Any) -> bool:
        raise self._error


INTERRUPT, OUT_OF_MEMORY = RaiseAfterEpoch(KeyboardInterrupt), RaiseAfterEpoch(MemoryError)
FAILING_FITS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a missing value": lambda m, X, y: m.fit(X * np.nan, y),
    "a row too many": lambda m, X, y: m.fit(X, y[1:]),
    "a negative weight": lambda m, X, y: m.fit(X, y, -np.ones(len(y))),
    "a missing label": lambda m, X, y: m.fit(X, np.where(np.arange(len(y)), y, None)),
    "a test of other rows": lambda m, X, y: m.fit(X, y, test=(np.ones((3, 5)), y[:3])),
    "an epoch too few": lambda m, X, y: m.set_params(epochs=-1).fit(X, y),
    "no memory": lambda m, X, y: m.set_params(memory=1 << 20).fit(X, y),
    "a wrong bandwidth": lambda m, X, y: m.set_params(bandwidth=-1.0).fit(X, y),
    "a block that lacks a value": lambda m, X, y: m.partial_fit(X * np.nan, y),
    "classes that lack one": lambda m, X, y: m.partial_fit(X, y, classes=y[:1]),
    "an interrupt": lambda m, X, y: m.set_params(callbacks=[INTERRUPT]).fit(X, y),
    "no more memory": lambda m, X, y: m.set_params(callbacks=[OUT_OF_MEMORY]).fit(X, y),
}
FIT_ERRORS = (StreamkernError, KeyboardInterrupt, MemoryError)


def answers(model: Any) -> tuple[bytes, bytes]:
    """Return values and labels of PROBE, to compare their bits."""
    return np.asarray(model.predict_values(PROBE)).tobytes(), labels(model)


def labels(model: Any) -> bytes:
    """Return the predicted labels of PROBE, to compare them."""
    return ",".join(map(str, model.predict(PROBE))).encode()


@pytest.mark.parametrize("name", ["dual_coef_", "centers_", "intercept_", "classes_"])
def test_fitted_arrays_are_read_only(name: str) -> None:
    """Check copies of estimators too, because predictions would not follow a write."""
    X = np.random.default_rng(0).normal(size=(90, 3))
    model = KernelClassifier(kernel="laplace", n_centers=20).fit(X, X[:, 0] > 0)
    for one in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with pytest.raises(ValueError, match="read-only"):
            getattr(one, name)[:1] = 0
        np.testing.assert_array_equal(one.predict(X[:2]), model.predict(X)[:2])
    model.fit(X, X[:, 1] > 0)  # training is still possible


@pytest.mark.filterwarnings("ignore:X (has|does not have valid) feature names")
def test_chosen_settings_are_fitted_attributes(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(90, 3))
    y = np.stack((np.sin(X[:, 0]), X[:, 1]), axis=1)
    fixed_ridge = KernelRegressor(ridge=1e-3, solver="block", n_centers=20, epochs=1).fit(
        X, y[:, 0]
    )
    assert (fixed_ridge.ridge_, fixed_ridge.solver_, fixed_ridge.n_centers_) == (1e-3, "block", 20)
    assert fixed_ridge.report_["ridge"] == 1e-3
    estimated = KernelRegressor().fit(X, y[:, 0])
    assert estimated.ridge_ == estimated.report_["ridge"] > 0
    assert (estimated.solver_, estimated.n_centers_) == (
        estimated.report_["solver"],
        len(estimated.centers_),
    )
    two_targets = KernelRegressor(solver="direct").fit(X, y)
    assert two_targets.ridge_.shape == (2,)
    two_targets.save(tmp_path / "each")
    np.testing.assert_array_equal(load(tmp_path / "each").ridge_, two_targets.ridge_)
    with pytest.raises(AttributeError, match="ridge_"):
        _ = KernelRegressor().ridge_


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_failed_fit_leaves_estimator_unchanged() -> None:
    (X, y), (X_words, words) = DATA[0], DATA[1]
    model = KernelClassifier(**SETTINGS).fit(X, y)
    answers_before, fitted = answers(model), vars(model)["_fitted_"]
    for name, fail in FAILING_FITS.items():
        with pytest.raises(FIT_ERRORS):
            fail(model, X_words, words)
        model.set_params(**SETTINGS, memory="auto", callbacks=())
        assert answers(model) == answers_before, name
        assert vars(model)["_fitted_"] is fitted, name
        assert model.n_features_in_ == 2
        assert not hasattr(model, "feature_names_in_"), name
        assert model.score(X, y) > 0.9


@pytest.mark.parametrize("kind", [KernelClassifier, KernelRegressor])
def test_failed_first_fit_leaves_estimator_unfitted(kind: Any, tmp_path: Path) -> None:
    X, y = ROWS, SIDE.astype(float)
    model = kind(**SETTINGS)
    with pytest.raises(StreamkernError):
        model.fit(X, np.where(np.arange(40) == 3, np.nan, y))
    assert vars(model).keys() == vars(kind(**SETTINGS)).keys()
    uses: list[Callable[[], Any]] = [
        lambda: model.predict(X), lambda: model.score(X, y), lambda: model.save(tmp_path / "m"),
        lambda: model.feature_importances_, lambda: check_is_fitted(model),
        lambda: model.predict(X, out=tmp_path / "p.npy"),
    ]  # fmt: skip
    if kind is KernelClassifier:
        uses += [lambda: model.predict_values(X), lambda: model.decision_function(X)]
    for use in uses:
        with pytest.raises(NotFittedError):
            use()
    for name in ("centers_", "n_features_in_", "classes_", "report_"):
        assert not hasattr(model, name)
    fitted = model.fit(X, y)
    check_is_fitted(fitted)
    check_is_fitted(fitted, "centers_")
    assert any(name.endswith("_") and not name.startswith("__") for name in vars(fitted))
    unpickled = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(unpickled.predict(X), fitted.predict(X))
    assert not hasattr(clone(fitted), "centers_")


class InterruptAfterFirstEpoch(Callback):
    def pass_ended(self, passed: Any) -> None:
        if passed.epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)


def test_interrupted_fit_leaves_saved_model(tmp_path: Path) -> None:
    X, y = ROWS, np.where(SIDE, "a", "b")
    model = KernelClassifier(**SETTINGS | {"epochs": 3}).fit(*DATA[2])
    model.set_params(run_dir=tmp_path / "run", callbacks=[InterruptAfterFirstEpoch()])
    with pytest.raises(TrainingInterrupted):
        model.fit(X, y)
    saved = load(tmp_path / "run")
    assert answers(model) == answers(saved)
    assert (model.n_iter_, list(model.classes_)) == (1, ["a", "b"])
    model.set_params(callbacks=()).fit(X, y)
    uninterrupted = KernelClassifier(**SETTINGS | {"epochs": 3}).fit(X, y)
    assert (model.n_iter_, answers(model)) == (3, answers(uninterrupted))


def test_concurrent_partial_fits_are_both_learned() -> None:
    X, y = ROWS, ROWS[:, 0]
    blocks = [(X[10:25], y[10:25]), (X[25:], y[25:])]
    model = KernelRegressor(**SETTINGS | {"n_centers": 8}).partial_fit(X[:10], y[:10])
    orders = []
    for order in (blocks, blocks[::-1]):
        one = pickle.loads(pickle.dumps(model))
        for block in order:
            one.partial_fit(*block)
        orders.append(one.predict(X).tobytes())
    threads = [threading.Thread(target=model.partial_fit, args=block) for block in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.predict(X).tobytes() in orders


class FitMachine(RuleBasedStateMachine):
    """Fits of all kinds, while a thread predicts. Every prediction must be that of a completed fit.

    blocks : indices in `DATA` of the blocks that `partial_fit` has trained on
    answers : answers of the model after the last completed fit; None before the first
    lacks_solver_state : whether the model was loaded, and has no state for `partial_fit`
    loaded : whether the model was loaded, and nothing was trained since
    valid_answers : answers of all completed fits
    predictions : everything that the thread has predicted
    """

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = KernelClassifier(**SETTINGS)
        self.bandwidth, self.blocks = 2.0, list[int]()
        self.answers: tuple[bytes, bytes] | None = None
        self.lacks_solver_state = False
        self.loaded = False
        self.valid_answers = set[tuple[bytes, bytes]]()
        self.folder = tempfile.TemporaryDirectory()
        self.predictions: set[bytes] = set()
        self.errors: list[BaseException] = []
        self.stop = threading.Event()
        self.reader = threading.Thread(target=self.predict_repeatedly, name="reader")
        self.reader.start()

    def predict_repeatedly(self) -> None:
        while not self.stop.wait(0.001):
            try:
                self.predictions.add(np.asarray(self.model.predict_values(PROBE)).tobytes())
                self.predictions.add(labels(self.model))
            except NotFittedError:
                pass
            except BaseException as error:
                self.errors.append(error)

    def settings(self) -> dict[str, Any]:
        return SETTINGS | {"bandwidth": self.bandwidth}

    def check_equals(self, truth: Any) -> None:
        """Check that the model equals `truth`, which was trained separately."""
        self.answers = answers(truth)
        self.valid_answers.add(self.answers)
        assert answers(self.model) == self.answers

    @rule(k=st.sampled_from(range(3)))
    def fit(self, k: int) -> None:
        self.blocks, self.lacks_solver_state, self.loaded = [], False, False
        self.model.fit(*DATA[k])
        self.check_equals(KernelClassifier(**self.settings()).fit(*DATA[k]))

    @rule(k=st.sampled_from(range(3)), name=st.sampled_from(sorted(FAILING_FITS)))
    def fail(self, k: int, name: str) -> None:
        is_unfitted = self.answers is None
        if name == "classes that lack one" and self.blocks:
            k = self.blocks[0]
        with pytest.raises(FIT_ERRORS):
            FAILING_FITS[name](self.model, *DATA[k])
        self.model.set_params(**self.settings(), memory="auto", callbacks=())
        if is_unfitted:
            assert not hasattr(self.model, "classes_")
        else:
            assert answers(self.model) == self.answers

    @rule(k=st.sampled_from(range(3)))
    def fit_block(self, k: int) -> None:
        k = self.blocks[0] if self.blocks else k
        X, y = DATA[k]
        if self.lacks_solver_state:
            refused = r"without the state|none of the|was trained with"
            with pytest.raises((ConfigError, DataError), match=refused):
                self.model.partial_fit(X, y)
            assert answers(self.model) == self.answers
            return
        if self.blocks and self.bandwidth != self.first_block_bandwidth:
            with pytest.raises(ConfigError, match="is set, but the model that partial_fit con"):
                self.model.partial_fit(X, y)
            assert answers(self.model) == self.answers
            return
        self.model.partial_fit(X, y)
        self.loaded = False
        self.blocks.append(k)
        truth = KernelClassifier(**SETTINGS | {"bandwidth": self.first_bandwidth()})
        for _ in self.blocks:
            truth.partial_fit(X, y)
        self.check_equals(truth)

    def first_bandwidth(self) -> float:
        """Return the bandwidth that the first block of rows determined."""
        if len(self.blocks) == 1:
            self.first_block_bandwidth = self.bandwidth
        return self.first_block_bandwidth

    @rule(bandwidth=st.sampled_from([1.0, 2.0]))
    def set_bandwidth(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.model.set_params(bandwidth=bandwidth)

    @rule()
    def save_and_load(self) -> None:
        if self.answers is None:
            return
        path = Path(self.folder.name) / str(time.monotonic_ns())
        self.model.save(path)
        self.model = load(path).set_params(**self.settings())
        # A loaded model is saved without the state of its solver.
        self.lacks_solver_state = not self.blocks or self.loaded
        self.loaded = True
        assert answers(self.model) == self.answers

    @rule()
    def pickle_and_load(self) -> None:
        self.model = pickle.loads(pickle.dumps(self.model))

    def teardown(self) -> None:
        self.stop.set()
        self.reader.join()
        self.folder.cleanup()
        assert not self.errors
        assert self.predictions <= {answer for state in self.valid_answers for answer in state}


@pytest.mark.filterwarnings("ignore:X (has|does not have valid) feature names")
@pytest.mark.filterwarnings("ignore:partial_fit does not continue from fit")
class TestFits(FitMachine.TestCase):
    settings = hypothesis_settings(max_examples=6, stateful_step_count=8, deadline=None)


class WriteAfterFirstEpoch(Callback):
    """Overwrites bytes of a file of training data after the first epoch, as another program may."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pass_ended(self, passed: Any) -> None:
        if passed.epoch == 1:
            with open(self._path, "r+b") as file:
                file.seek(128)
                file.write(b"\0" * 64)


@pytest.mark.parametrize("mapped", ["X", "y"])  # weights are copied
def test_memory_map_that_changes_during_fit_is_refused(tmp_path: Path, mapped: str) -> None:
    arguments: dict[str, Any] = {"X": ROWS, "y": ROWS[:, 0]}
    np.save(tmp_path / "a.npy", arguments[mapped])
    arguments[mapped] = np.load(tmp_path / "a.npy", mmap_mode="r")
    model = KernelRegressor(**SETTINGS).fit(**arguments)
    predictions = model.predict(ROWS)
    scaled = KernelRegressor(**SETTINGS, transforms=[{"kind": "noise", "sigma": 0.1}])
    scaled.fit(**arguments)
    for estimator in (model, scaled):
        estimator.set_params(callbacks=[WriteAfterFirstEpoch(tmp_path / "a.npy")])
        with pytest.raises(DataError, match=r"file .*a\.npy' has changed since training"):
            estimator.fit(**arguments)
        estimator.set_params(callbacks=()).fit(**{k: np.array(v) for k, v in arguments.items()})
    model.fit(**arguments | {mapped: np.array(arguments[mapped])})
    assert not np.array_equal(model.predict(ROWS), predictions)


PICKLED_CLASSES = [
    "backend.ranks.Communicator",
    "config.data.DataConfig",
    "config.model.ModelConfig",
    "config.run_config.ExecutionConfig",
    "config.run_config.RunConfig",
    "config.solver.SolverConfig",
    "estimator.estimators.KernelClassifier",
    "estimator.estimators.KernelRegressor",
    "estimator.fitted.FittedModel",
    "estimator.fitted.Schema",
    "estimator.labels.Labels",
    "estimator.parameter_values.ParameterValue",
    "ingest.columns.RecordedArrays",
    "kernels.builtin.Gaussian",
    "kernels.builtin.Laplace",
    "kernels.builtin.Matern52",
    "kernels.fourier.FourierFeatures",
    "predict.calibration.Calibration",
    "predict.calibration.Intervals",
    "predict.probabilities.Softmax",
    "predict.residual_scale.ResidualScale",
    "rundir.checkpoint_format.Saved",
    "solver.block_sizes.BlockSizes",
    "solver.posterior.Posterior",
    "stream.sources.transforms.Scale",
    "stream.target_scale.TargetScale",
    "train.loop.prometheus.Prometheus",
    "train.loop.sinks.MLflow",
    "train.loop.sinks.TensorBoard",
    "train.online.Online",
    "train.resolve.run_inputs.RunInputs",
    "train.restart.parent_run.ParentRun",
]
"""Classes, by module and name, in pickles of fitted estimators of earlier versions."""


def test_classes_in_earlier_pickles_still_exist() -> None:
    for name in PICKLED_CLASSES:
        module, _, class_name = name.rpartition(".")
        assert hasattr(importlib.import_module(f"streamkern.{module}"), class_name), name
