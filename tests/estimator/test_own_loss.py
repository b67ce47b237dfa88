"""Check a user-defined loss, from the estimator and from a run file to a loaded model."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

import streamkern as sk
from streamkern.cli.main import run_command
from streamkern.config.toml import run_file_text
from tests.losses.own_losses import Distance, LogCosh

N = 300
RNG = np.random.default_rng(3)
X = RNG.standard_normal((N, 3)).astype(np.float32)
TRUTH = np.sin(2 * X[:, 0]) + X[:, 1]
Y = TRUTH + 0.3 * RNG.standard_normal(N)
Y[RNG.random(N) < 0.05] += 20  # outliers
SETTINGS: dict[str, Any] = {
    "n_centers": 40, "epochs": 2,
    "kernel": "laplace", "bandwidth": 2.0, "ridge": 1e-3,
}  # fmt: skip
DistanceRun = tuple[Path, dict[str, Any], Distance]
LOG_COSH_REFERENCE = "tests.losses.own_losses:LogCosh"


def mean_log_cosh(predicted: np.ndarray, width: float) -> float:
    """Return the mean LogCosh(width) loss of predictions of Y."""
    r = (predicted - Y) / width
    return float(np.mean(width**2 * (np.logaddexp(r, -r) - np.log(2))))  # log cosh r


def test_user_loss_is_robust_to_outliers() -> None:
    squared, robust = (
        np.abs(sk.KernelRegressor(loss=loss, bandwidth=3.0).fit(X, Y).predict(X) - TRUTH).mean()
        for loss in ("squared_error", LogCosh(0.3))
    )
    assert robust < 0.5 * squared


def test_loss_class_reference_and_object_train_the_same_model() -> None:
    predictions = [
        sk.KernelRegressor(loss=loss, **SETTINGS).fit(X, Y).predict(X)
        for loss in (
            LogCosh(),
            LogCosh,
            LOG_COSH_REFERENCE,
            {"kind": LOG_COSH_REFERENCE, "width": 1.0},
        )
    ]
    for predicted in predictions[1:]:
        np.testing.assert_array_equal(predicted, predictions[0])


def test_saved_model_loads_where_loss_class_exists(tmp_path: Path) -> None:
    model = sk.KernelRegressor(loss=LogCosh(0.5), **SETTINGS).fit(X, Y)
    model.save(tmp_path / "saved")
    loaded = sk.load(tmp_path / "saved")
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    assert isinstance(loaded.loss, LogCosh)
    assert loaded.loss.width == 0.5
    figures = sk.evaluate(tmp_path / "saved", X, Y)
    assert figures["log_cosh"] == pytest.approx(mean_log_cosh(model.predict(X), 0.5), rel=1e-6)
    refitted = clone(loaded).set_params(**SETTINGS).fit(X, Y)
    np.testing.assert_array_equal(refitted.predict(X), model.predict(X))


@pytest.mark.slow
def test_model_predicts_without_loss_class(tmp_path: Path) -> None:
    """Check that predictions do not need the class, but its metric and another fit do, and that no
    code of a run directory is imported."""
    model = sk.KernelRegressor(loss=LogCosh(0.5), **SETTINGS).fit(X, Y)
    model.save(tmp_path / "saved")
    np.savez(tmp_path / "rows.npz", X=X, Y=Y)
    code = f"""
import numpy as np, streamkern as sk, sys
rows = np.load({str(tmp_path / "rows.npz")!r})
model = sk.load({str(tmp_path / "saved")!r})
np.save({str(tmp_path / "predicted.npy")!r}, model.predict(rows["X"]))
print(sorted(sk.evaluate(model, rows["X"], rows["Y"])), "tests" in sys.modules)
model.fit(rows["X"], rows["Y"])
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    np.testing.assert_array_equal(np.load(tmp_path / "predicted.npy"), model.predict(X))
    assert process.stdout == "['mse', 'r2'] False\n"
    assert (
        f"loss was of the class '{LOG_COSH_REFERENCE}', which is not kept on disk; give it again"
        in (process.stderr)
    )


def test_estimators_with_user_loss_support_clone_pickle_and_search() -> None:
    model = sk.KernelRegressor(loss=LogCosh(0.5), **SETTINGS)
    assert clone(model).loss.width == 0.5
    fitted = pickle.loads(pickle.dumps(model.fit(X, Y)))
    np.testing.assert_array_equal(fitted.predict(X), model.predict(X))
    assert "loss=LogCosh(width=0.5)" in repr(model)
    losses = [LogCosh(0.1), LogCosh(10.0), "squared_error"]
    search = GridSearchCV(model, {"loss": losses}, cv=2, scoring="neg_median_absolute_error")
    assert search.fit(X, Y).best_params_["loss"] in losses
    with pytest.raises(
        sk.ConfigError, match=r"loss__width cannot be set by name, because it is a\b"
    ):
        model.set_params(loss__width=2.0)


def test_run_resumes_with_same_loss_only(tmp_path: Path) -> None:
    def fit(loss: Any) -> Any:
        return sk.KernelRegressor(loss=loss, run_dir=tmp_path / "run", **SETTINGS).fit(X, Y)

    first_fit = fit(Distance)
    np.testing.assert_array_equal(fit(Distance()).predict(X), first_fit.predict(X))
    with pytest.raises(sk.ResumeMismatchError, match=r"model\.loss"):
        fit(LogCosh)


@pytest.fixture(scope="module")
def distance_run(tmp_path_factory: pytest.TempPathFactory) -> DistanceRun:
    """Train a run with the loss Distance.

    Returns its directory, the settings of a run that continues it, and its fitted loss.
    """
    folder = tmp_path_factory.mktemp("distance")
    sk.ingest_store(X, folder / "rows.zarr", y=Y)
    data = {"train": str(folder / "rows.zarr"), "epochs": 1}
    tables = {
        "data": data, "model": {"n_centers": 40, "loss": Distance},
        "run": {"run_dir": str(folder / "first")},
    }  # fmt: skip
    loss = sk.train_model(tables).model.loss
    assert isinstance(loss, Distance)
    return folder / "first", {"data": data, "run": {"run_dir": str(folder / "second")}}, loss


@pytest.mark.slow
def test_continued_run_keeps_fitted_loss(distance_run: DistanceRun) -> None:
    first_dir, tables, loss = distance_run
    continued = sk.train_model(tables, continues=first_dir).model.loss
    assert isinstance(continued, Distance)
    assert continued.unit == loss.unit  # the fitted unit is not estimated again


@pytest.mark.slow
def test_continued_run_rejects_another_loss(distance_run: DistanceRun) -> None:
    first_dir, tables, _ = distance_run
    with pytest.raises(sk.ConfigError, match="keeps the model of that run"):
        sk.train_model(tables | {"model": {"loss": LogCosh}}, continues=first_dir)


@pytest.mark.slow
def test_partial_fit_of_loaded_model_keeps_user_loss(tmp_path: Path) -> None:
    model = sk.KernelRegressor(loss=LogCosh(0.5), **SETTINGS).partial_fit(X[:150], Y[:150])
    model.save(tmp_path / "saved")
    assert sk.load(tmp_path / "saved").partial_fit(X[150:], Y[150:]).loss.width == 0.5


@pytest.mark.slow
def test_run_does_not_continue_without_loss_class(distance_run: DistanceRun) -> None:
    first_dir, tables, _ = distance_run
    code = f"""
import streamkern as sk, sys
try:
    sk.train_model({tables!r}, continues={str(first_dir)!r})
finally:
    print("tests" in sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout == "False\n"
    assert "Distance' is a custom class that this process has not defined" in process.stderr


def test_invalid_loss_is_refused_before_writing(tmp_path: Path) -> None:
    class Steep(LogCosh):
        def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
            return 3 * super().gradient(xp, errors, Y)

    model = sk.KernelRegressor(loss=Steep(), run_dir=tmp_path / "run", **SETTINGS)
    with pytest.raises(sk.ConfigError, match=r"loss=Steep.*curvature=1 is not a bound") as raised:
        model.fit(X, Y)
    assert "model.loss" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_early_stopping_uses_user_loss() -> None:
    model = sk.KernelRegressor(loss=LogCosh(0.5), early_stopping=True, **SETTINGS).fit(X, Y)
    figures = [record["validation_log_cosh"] for record in model.history_]
    assert model.validation_scores_ == [-figure for figure in figures]


def test_run_file_with_user_loss_roundtrips(tmp_path: Path) -> None:
    config = sk.RunConfig.from_tables({"model": {"loss": LogCosh(0.5)}})
    (tmp_path / "run.toml").write_text(run_file_text(config))
    reloaded = sk.load_run_file(tmp_path / "run.toml")
    assert isinstance(reloaded.model.loss, LogCosh)
    assert reloaded.identity() == config.identity()


def test_run_file_names_loss_module_and_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(sys.modules[LogCosh.__module__].__file__ or "").read_text()
    (tmp_path / "losses_of_a_run_file.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    sk.ingest_store(X, "rows.zarr", y=Y)
    Path("run.toml").write_text(
        '[data]\ntrain = "rows.zarr"\ntest = "rows.zarr"\nepochs = 2\n'
        '[model]\nn_centers = 40\nloss = {kind = "losses_of_a_run_file:LogCosh", width = 0.5}\n'
        '[run]\nrun_dir = "run"\n'
    )
    for _ in range(2):  # the second time, the run is finished already
        assert run_command(["train", "run.toml"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert run_command(["info", "run"]) == 0
    text = capsys.readouterr().out
    assert "test_log_cosh" in text
    assert "losses_of_a_run_file:LogCosh" in text
    loaded = sk.load("run")
    figures = sk.evaluate(loaded, X, Y)
    assert figures["log_cosh"] == pytest.approx(mean_log_cosh(loaded.predict(X), 0.5), rel=1e-6)


def test_model_predicts_with_changed_loss_class() -> None:
    """Check that only the metric of the loss is missing."""
    model = sk.KernelRegressor(loss=LogCosh(0.5), **SETTINGS).fit(X, Y)
    predictions = model.predict(X)
    record: Any = model._state.meta["loss"]
    # As if the class had been changed after training.
    record["values"] = [2 * value for value in record["values"]]
    np.testing.assert_array_equal(model.predict(X), predictions)
    assert "log_cosh" not in model._evaluate(X, Y)
