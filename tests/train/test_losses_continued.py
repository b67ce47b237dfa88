"""Check continued runs, partial_fit and warm starts of losses other than squares."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

import streamkern as sk
from streamkern.losses.base import Loss
from streamkern.losses.losses import saved_loss
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.calibration_split import MIN_CALIBRATED_ROWS
from tests.loss_targets import (
    FOR_CLASSES,
    LABELS,
    VALUES,
    N,
    P,
    X,
    loss_settings,
    loss_source,
)
from tests.runs import (
    CLASSES,
    array_source,
    assert_resume_gives_same_bits,
    finished,
    lost,
    settings,
)

RIDGE = 1e-2
OF_SOLVERS: dict[str, dict[str, Any]] = {
    "block": {},
    "eigenpro4": {"solver.name": "eigenpro4", "solver.n_nystrom": 40, "solver.level": 10},
    "falkon": {"solver.name": "falkon", "solver.ridge": RIDGE, "data.epochs": 4},
}


def config(location: Path | None, name: str, **overrides: Any) -> Any:
    """Return the settings of a run with the loss."""
    return settings(location, **loss_settings(name, **overrides))


def setup_of(location: Path) -> dict[str, Any]:
    """Return the facts of the setup of a run."""
    with RunDirectory(location, writable=False) as run:
        setup = run.load_setup()
    assert setup is not None
    return dict(setup.meta["setup"])


@pytest.mark.parametrize(("name", "solver"), [
    ("log_loss", "block"), ("squared_hinge", "block"), ("quantile", "block"),
    ("log_loss", "eigenpro4"), ("quantile", "falkon"), ("log_loss", "falkon"),
])  # fmt: skip
def test_continued_run_starts_with_old_function_and_parameters(
    name: str, solver: str, tmp_path: Path
) -> None:
    """Check also rows with other means and standard deviations."""
    classes = name in FOR_CLASSES
    paths = [tmp_path / name for name in "abc"]
    options = OF_SOLVERS[solver]
    before = finished(config(paths[0], name, **options), source=loss_source(name))
    answers = before.model.predict(loss_source(name))
    rows, test = loss_source(name, slice(0, 60)), loss_source(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamkern.train.loop.step_loop.StepLoop.take", lost)
        with pytest.raises(ValueError, match="the process is gone"):
            finished(config(paths[1], name, **options), source=rows, continues=paths[0])
    started_model = sk.load(paths[1])
    actual = started_model.predict_values(X) if classes else started_model.predict(X)[:, None]
    np.testing.assert_array_equal(actual, answers)
    shutil.rmtree(paths[0])
    finished(config(paths[1], name, **options), source=rows, test=test, continues=paths[0])
    finished(config(paths[2], name, **options), source=rows, test=test, continues=paths[1])
    assert setup_of(paths[2])["loss"] == before.meta["setup"]["loss"]
    ages = [setup_of(path)["loss_age"] for path in paths[1:]]
    epochs = options.get("data.epochs", 2)
    assert ages == [epochs * N / P, epochs * (N + 60) / P]


@pytest.mark.parametrize(("old", "name", "solver"), [
    ("log_loss", "log_loss", "block"), ("quantile", "quantile", "block"),
    ("squared_error", "log_loss", "block"), ("squared_error", "log_loss", "falkon"),
    ("quantile", "quantile", "falkon"), ("huber", "huber", "eigenpro4"),
])  # fmt: skip
def test_killed_continuation_ends_with_same_bits(
    old: str, name: str, solver: str, tmp_path: Path
) -> None:
    rows, options, overrides = (
        loss_source(name),
        {"continues": tmp_path / "old"},
        OF_SOLVERS[solver],
    )
    finished(config(tmp_path / "old", old, **overrides), source=rows)
    overrides = loss_settings(name, **overrides)
    assert_resume_gives_same_bits(tmp_path, (5,), overrides, rows, **options)


class Penalised:
    """The objective of a loss of values, or of the log loss, in float64."""

    def __init__(
        self, loss: Loss, targets: TargetScale, Z: Any, Y: Any, ridge: float = RIDGE
    ) -> None:
        self.loss, self.targets, self.Y, self.ridge = loss, targets, Y, ridge
        self.K, self.of_centers = (np.exp(-cdist(a, np.float64(Z)) / 3.0) for a in (X, Z))

    def __call__(self, alpha: Any) -> float:
        return self.with_slope(alpha)[0]

    def with_slope(self, alpha: Any) -> tuple[float, Any]:
        alpha, gain = np.float64(alpha).reshape(-1, self.Y.shape[1]), self.targets.scale
        z = self.targets.mean + gain * (self.K @ alpha)
        of_alpha = self.of_centers @ alpha
        scale = float(np.mean(self.loss.curvature * gain**2))
        value = self.loss.values(np, z, self.Y).mean() / scale
        gradient = self.loss.gradient(np, self.loss.predict(np, z) - self.Y, self.Y)
        slope = self.K.T @ (gain * gradient) / (N * scale) + self.ridge * of_alpha
        return float(value + self.ridge / 2 * (alpha * of_alpha).sum()), slope.reshape(-1)

    def least_loss(self) -> float:
        start = np.zeros(len(self.of_centers) * self.Y.shape[1])
        options = {"maxiter": 3000, "maxfun": 10**6, "ftol": 1e-14, "gtol": 1e-9}
        actual = minimize(self.with_slope, start, jac=True, method="L-BFGS-B", options=options)
        return float(actual.fun)


FULL = {
    "solver.ridge": RIDGE, "solver.block_size": P, "solver.average": False,
    "run.precision": "float64", "data.batch_size": N,
}  # fmt: skip


@pytest.mark.parametrize("solver", ["block", "falkon"])
@pytest.mark.parametrize("start", ["warm", "continued"])
@pytest.mark.parametrize("name", ["log_loss", "huber", "expectile"])
def test_start_from_squared_error_reaches_minimum_of_loss(
    name: str, start: str, solver: str, tmp_path: Path
) -> None:
    """Compare with SciPy's minimum, and check the loss at the beginning."""
    rows, Y = loss_source(name), VALUES[:, None]
    if name in FOR_CLASSES:
        Y = np.eye(3)[LABELS]
    full = FULL
    if solver == "falkon":
        unset = {"solver.block_size": "auto", "solver.average": True}
        full = FULL | OF_SOLVERS["falkon"] | unset | {"data.epochs": 20}
    finished(config(tmp_path / "old", "squared_error", **full), source=rows)
    options: dict[str, Any] = {"continues": tmp_path / "old"}
    overrides = full | {"data.epochs": 100, "run.evaluate_every": 1}
    if start == "warm":
        options, overrides = {}, overrides | {"solver.warm_start": str(tmp_path / "old")}
    result = finished(config(None, name, **overrides), source=rows, test=rows, **options)
    assert result.model.loss is not None
    objective = Penalised(result.model.loss, result.model.targets, result.Z, Y)
    least_loss, reached_loss = objective.least_loss(), objective(result.model.weights)
    loss_of_zero = objective(np.zeros_like(result.model.weights))
    assert least_loss - 1e-7 <= reached_loss <= least_loss + 0.01 * (loss_of_zero - least_loss)
    figures = [record[f"test_{result.model.loss.figure}"] for record in result.history]
    zero = result.model.loss.values(np, result.model.targets.mean + 0 * Y, Y).mean()
    assert figures[0] - figures[-1] < 0.5 * (zero - figures[-1])


LOW_RANK = {"n_nystrom": 40, "level": 10}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "solver", "ridge"), [
    ("log_loss", {}, RIDGE), ("huber", {}, RIDGE), ("expectile", {}, RIDGE),
    ("huber", {"solver": "eigenpro3", "batch_size": 20} | LOW_RANK, 0.0),
    ("expectile", {"solver": "eigenpro4", "batch_size": 20} | LOW_RANK, 0.0),
    ("log_loss", {"solver": "eigenpro1", "features": "nystrom"} | LOW_RANK, RIDGE),
    ("huber", {"solver": "sgd", "features": "nystrom"}, RIDGE),
])  # fmt: skip
def test_partial_fit_approaches_minimum_of_loss(
    name: str, solver: dict[str, Any], ridge: float
) -> None:
    """Check the loss of all rows, which arrive in four parts again and again."""
    options: dict[str, Any] = {
        "n_centers": P, "kernel": "laplace", "bandwidth": 3.0, "metric": "none", "scale": "none",
        "loss": name, "precision": "float64", "batch_size": 50, "threads": 1,
        "quantile": loss_settings(name).get("model.quantile"), **solver,
    }  # fmt: skip
    if ridge:
        options["ridge"] = ridge
    classes = name in FOR_CLASSES
    y, Y = (LABELS, np.eye(3)[LABELS]) if classes else (VALUES, VALUES[:, None])
    model = (sk.KernelClassifier if classes else sk.KernelRegressor)(**options)
    for part in 20 * [slice(k, None, 4) for k in range(4)]:
        if classes:
            model.partial_fit(X[part], y[part], classes=[0, 1, 2])
        else:
            model.partial_fit(X[part], y[part])
    state = model._fitted_
    assert state is not None
    loss, scale = saved_loss(state.meta), state.targets.scale
    assert loss is not None
    objective = Penalised(loss, state.targets, model.centers_, Y, ridge)
    alpha = np.reshape(model.dual_coef_, (P, -1)) / scale
    least_loss, reached_loss = objective.least_loss(), objective(alpha)
    assert (
        least_loss - 1e-7 <= reached_loss <= least_loss + 0.05 * (objective(0 * alpha) - least_loss)
    )


def test_late_class_is_learned() -> None:
    """Check the log loss, although the probability of a class without rows is small."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((2000, 2))
    labels = (rows[:, 0] > 0.5) + 2 * (rows[:, 0] < -0.5)
    early = np.flatnonzero(labels != 2)[:400]
    model = sk.KernelClassifier(loss="log_loss", n_centers=P)
    model.partial_fit(rows[early], labels[early], classes=[0, 1, 2])
    for k in range(0, 2000, 200):
        model.partial_fit(rows[k : k + 200], labels[k : k + 200])
    late = labels == 2
    assert model.predict_proba(rows)[late, 2].mean() > 0.6
    assert model.score(rows, labels) > 0.85


@pytest.mark.parametrize("lacks_class", [False, True])
def test_metric_and_trees_are_learned_from_blocks_with_all_classes(lacks_class: bool) -> None:
    rows = np.random.default_rng(1).standard_normal((1100, 3))
    labels = (rows[:, 0] > 0.5).astype(int)
    model = sk.KernelClassifier(n_centers=P)
    model.partial_fit(rows, labels, classes=[0, 1, 2] if lacks_class else [0, 1])
    kernel = model.kernel_
    assert (kernel.metric is None and kernel.trees is None) == lacks_class


def test_partial_fit_continues_run_with_loss(tmp_path: Path) -> None:
    finished(config(tmp_path / "run", "log_loss"), source=loss_source("log_loss"))
    model = sk.load(tmp_path / "run")
    before = model.predict_proba(X)
    model.partial_fit(X, [CLASSES[label] for label in LABELS])
    after = model.predict_proba(X)
    assert 0 < np.abs(after - before).max() < 0.3
    np.testing.assert_allclose(after.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.slow
def test_warm_fits_start_from_previous_fit(tmp_path: Path) -> None:
    """Check starts from the same loss and from squares, also with so many rows that squares set
    some aside."""
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((5000, 2)).astype(np.float32)
    labels = (rows[:, 0] > 0) + (rows[:, 1] > 1)
    options: dict[str, Any] = {
        "n_centers": P, "bandwidth": 2.0, "metric": "none", "solver": "block", "epochs": 1,
        "warm_start": True,
    }  # fmt: skip
    scores = []
    for losses in (["log_loss", "log_loss"], ["squared_error", "log_loss"]):
        model = sk.KernelClassifier(**options)
        for loss in losses:
            scores.append(model.set_params(loss=loss).fit(rows, labels).score(rows, labels))
    assert min(scores) > 0.95
    regressor = sk.KernelRegressor(loss="quantile", quantile=0.8, **options).fit(X, VALUES)
    regressor.fit(X, VALUES)
    assert regressor._fitted_ is not None
    assert regressor._fitted_.meta["setup"]["loss_age"] == N / P


@pytest.mark.parametrize(("changes", "message"), [
    ({"loss": "squared_error"}, "loss='quantile', but this run has loss='squared_error'"),
    ({"loss": "huber", "quantile": None}, "only weights of squares can be the start"),
    ({"quantile": 0.9}, "with quantile=0.8, but this run has quantile=0.9"),
    ({"quantile": None}, "with quantile=0.8, but this run has quantile=0.5"),
])  # fmt: skip
def test_weights_of_another_loss_are_refused(changes: dict[str, Any], message: str) -> None:
    model = sk.KernelRegressor(n_centers=P, loss="quantile", quantile=0.8, warm_start=True)
    before = model.fit(X, VALUES).predict(X)
    with pytest.raises(sk.ConfigError, match=message):
        model.set_params(**{"quantile": None} | changes).fit(X, VALUES)
    np.testing.assert_array_equal(model.predict(X), before)


def test_continuing_another_loss_is_refused(tmp_path: Path) -> None:
    finished(config(tmp_path / "old", "huber"), source=loss_source("huber"))
    with pytest.raises(sk.ConfigError, match=r"model\.loss: was 'huber', now 'absolute_error'"):
        finished(
            settings(**{"model.loss": "absolute_error", "model.n_centers": P}),
            source=loss_source("huber"), continues=tmp_path / "old",
        )  # fmt: skip
    finished(config(tmp_path / "squares", "squared_error"), source=loss_source("log_loss"))
    with pytest.raises(sk.ConfigError, match="is for values, but the targets are classes"):
        finished(
            config(None, "huber"), source=loss_source("log_loss"), continues=tmp_path / "squares"
        )


@pytest.mark.parametrize(("calibrate", "name"), [
    ("auto", "squared_error"), (True, "squared_error"), (True, "log_loss"),
])  # fmt: skip
def test_log_loss_starts_from_run_that_set_calibration_rows_aside(
    calibrate: str | bool, name: str, tmp_path: Path
) -> None:
    """Check a parent run whose centers the new run finds only if it leaves the same rows out, and
    a run that starts from the new one."""
    source, options = array_source(MIN_CALIBRATED_ROWS, unit_rows=500), {"data.batch_size": 500}
    parent_options = options | {"model.loss": name, "run.calibrate": calibrate}
    parent = finished(settings(tmp_path / "0", **parent_options), source=source)
    assert parent.model.calibration is not None
    for i in (1, 2):
        changes = {"model.loss": "log_loss", "solver.warm_start": str(tmp_path / str(i - 1))}
        config = settings(tmp_path / str(i), **options | changes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("streamkern.train.loop.step_loop.StepLoop.take", lost)
            with pytest.raises(ValueError, match="the process is gone"):
                finished(config, source=source)
        resumed = finished(config, source=source)
        np.testing.assert_array_equal(resumed.Z, parent.Z)
        assert resumed.samples == parent.samples


def test_runs_may_start_from_each_other_in_turn(tmp_path: Path) -> None:
    """Check two run directories, each of which is replaced by a run that starts from the other."""
    source, options = array_source(MIN_CALIBRATED_ROWS, unit_rows=500), {"data.batch_size": 500}
    first = finished(settings(tmp_path / "a", **options), source=source)
    for parent, name in ("ab", "ba", "ac"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        config = settings(
            tmp_path / name, **options, **{"solver.warm_start": str(tmp_path / parent)}
        )
        np.testing.assert_array_equal(finished(config, source=source).Z, first.Z)
