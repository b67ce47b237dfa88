"""Test losses with a log link, from the setting to the predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.metrics import mean_gamma_deviance

import streamkern as sk
from streamkern.losses.log_link import LogLink
from streamkern.train.setup import kernel_and_metric, loss_start
from streamkern.train.setup.loss_ridge import loss_noise
from tests.counts import DEVIANCES, LOSSES, TARGETS, N, P, X, excess_over_minimum, of_loss
from tests.runs import assert_resume_gives_same_bits, finished, settings


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("epochs", "several"), [(60, False), (150, True)])
def test_full_batches_reach_minimum_of_penalised_loss(
    name: str, epochs: int, several: bool
) -> None:
    overrides: dict[str, Any] = {
        "solver.block_size": P, "solver.average": False, "data.batch_size": N,
    }  # fmt: skip
    overrides["data.epochs"] = epochs
    assert -1e-9 <= _excess(name, targets(name, several), 1e-2, overrides) <= 0.01


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("ridge", "several"), [(1e-2, True), (1e-4, False)])
@pytest.mark.parametrize(("solver", "epochs"), [("direct", 20), ("falkon", 50)])
def test_newton_steps_reach_minimum_of_penalised_loss(
    name: str, ridge: float, several: bool, solver: str, epochs: int
) -> None:
    """Check steps whose sums are accumulated over several batches."""
    overrides = {"solver.name": solver, "data.epochs": epochs, "data.batch_size": 64}
    assert -1e-7 <= _excess(name, targets(name, several), ridge, overrides) <= 1e-5


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("solver", "epochs"), [("direct", 40), ("falkon", 100)])
def test_newton_steps_descend_for_skewed_targets(name: str, solver: str, epochs: int) -> None:
    """Check targets for which a first step without limits would raise the largest means to e^20."""
    Y = np.where(np.arange(N) % 20, 1e-3 if name == "gamma" else 0.0, 500.0)[:, None]
    overrides = {"solver.name": solver, "data.epochs": epochs, "data.batch_size": N}
    assert -1e-7 <= _excess(name, Y, 1e-4, overrides) <= 1e-4


@pytest.mark.parametrize("solver", ["falkon", "direct", "eigenpro4"])
def test_solvers_without_intercept_are_refused(solver: str) -> None:
    model = sk.KernelRegressor(loss="poisson", solver=solver, fit_intercept=False, n_centers=P)
    with pytest.raises(sk.ConfigError, match=f"cannot be minimised with solver='{solver}'"):
        model.fit(X, TARGETS["poisson"])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("solver", "epochs", "largest"), [("sgd", 150, 5e-3), ("eigenpro1", 60, 1e-3)]
)
def test_steps_on_nystrom_features_reach_minimum_of_penalised_loss(
    name: str, solver: str, epochs: int, largest: float
) -> None:
    overrides = {
        "solver.name": solver, "model.features": "nystrom", "solver.average": False,
        "data.epochs": epochs, "data.batch_size": N,
    }  # fmt: skip
    excess = _excess(name, targets(name, several=True), 1e-2, overrides)
    assert -1e-9 <= excess <= largest


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("solver", ["eigenpro1", "eigenpro2", "eigenpro3"])
def test_eigenpro_approaches_true_means(name: str, solver: str) -> None:
    """Check methods without a ridge, which are far from the minimum after ten epochs."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((1000, 3)).astype(np.float32)
    means = np.exp(np.sin(2 * inputs[:, 0]) + inputs[:, 1])
    y = (rng.poisson(means) if name == "poisson" else means * rng.gamma(2.0, size=1000) / 2) * 1.0
    train, test = slice(600), slice(600, None)
    model = sk.KernelRegressor(
        loss=name, solver=solver, epochs=10, metric="none", kernel="laplace", bandwidth=3.0,
        n_centers=200 if solver == "eigenpro3" else "auto",
    )  # fmt: skip
    predicted = model.fit(inputs[train], y[train]).predict(inputs[test]).astype(float)
    constant = np.full(400, y[train].mean())
    reached, deviance_of_mean, deviance_of_truth = (
        DEVIANCES[name](y[test], values) for values in (predicted, constant, means[test])
    )
    gap = deviance_of_mean - deviance_of_truth
    assert 0 < reached - deviance_of_truth < 0.4 * gap


def test_falkon_without_a_step_is_refused() -> None:
    """Check the number of epochs after which the model would still be the mean."""
    model = sk.KernelRegressor(loss="poisson", solver="falkon", epochs=2, n_centers=P)
    with pytest.raises(sk.ConfigError, match=r"first two epochs take no step, and epochs=2"):
        model.fit(X, TARGETS["poisson"])
    model = model.set_params(epochs=3).fit(X, TARGETS["poisson"])
    assert np.ptp(model.predict(X)) > 0.1


def targets(name: str, several: bool) -> np.ndarray:
    """Return targets for the loss, with one or two outputs."""
    Y = TARGETS[name][:, None]
    return np.hstack([Y, Y[::-1] + 0.5]) if several else Y


def _excess(name: str, Y: np.ndarray, ridge: float, overrides: dict[str, Any]) -> float:
    """Return the objective minus SciPy's minimum in float64, divided by the same difference for the
    mean."""
    overrides = overrides | {"solver.ridge": ridge, "run.precision": "float64"}
    result = finished(settings(**of_loss(name, **overrides)), source=sk.ArraySource(X, Y))
    model, Z = result.model, np.float64(result.Z)
    return excess_over_minimum(model, Z, np.asarray(model.weights), Y, ridge)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_rates_are_predicted_better_than_by_boosting(name: str) -> None:
    rng = np.random.default_rng(1)
    X, h = rng.standard_normal((1600, 4)).astype(np.float32), 800
    rates = np.exp(np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] / 2)
    y = rng.poisson(rates) if name == "poisson" else rates * rng.gamma(2.0, size=len(X))
    boosting = HistGradientBoostingRegressor(loss=name).fit(X[:h], y[:h])
    model = sk.KernelRegressor(loss=name, n_centers=200, metric="none").fit(X[:h], y[:h])
    F, other = (fitted.predict(X[h:]) for fitted in (model, boosting))
    assert DEVIANCES[name](y[h:], F) < DEVIANCES[name](y[h:], other)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("solver", "epochs", "steps"),
    [("block", 2, [5]), ("direct", 2, [5]), ("falkon", 5, [5, 14]), ("eigenpro4", 2, [5])],
)
def test_resumed_run_ends_with_same_bits(
    name: str, solver: str, epochs: int, steps: list[int], tmp_path: Path
) -> None:
    """Stop in the second epoch, of four steps each; FALKON also after its first step."""
    source = sk.ArraySource(X, TARGETS[name])
    overrides = of_loss(name, **{"solver.name": solver, "data.epochs": epochs})
    result = assert_resume_gives_same_bits(tmp_path, steps, overrides, source)
    assert isinstance(result.model.loss, LogLink)


@pytest.mark.parametrize("name", LOSSES)
def test_every_entry_point_predicts_the_mean(name: str, tmp_path: Path) -> None:
    y, run_dir = TARGETS[name], tmp_path / "run"
    plain: dict[str, Any] = {"kernel": "laplace", "bandwidth": 3.0, "scale": "none"}
    model = sk.KernelRegressor(loss=name, n_centers=P, run_dir=run_dir, metric="none", **plain).fit(
        X, y
    )
    F = model.predict(X)
    assert (F > 0).all()
    assert 0.7 < F.mean() / y.mean() < 1.4
    K = np.exp(-cdist(X, model.centers_) / 3.0)
    np.testing.assert_allclose(
        np.log(F), (model.intercept_ + K @ model.dual_coef_)[:, 0], atol=1e-3
    )
    sk.ingest_store(X, tmp_path / "rows.zarr", y=y)
    loaded = sk.load(run_dir)
    np.testing.assert_array_equal(loaded.predict(X), F)
    with loaded._model() as model_of_run:
        model_of_run.predict_to(sk.ArraySource(X, y), tmp_path / "out.npy")
    np.testing.assert_allclose(np.load(tmp_path / "out.npy").reshape(-1), F, rtol=1e-12)
    figures = sk.evaluate(run_dir, tmp_path / "rows.zarr")
    assert figures[f"{name}_deviance"] == pytest.approx(DEVIANCES[name](y, F), rel=1e-5)
    assert figures["mse"] == pytest.approx(np.mean((F - y) ** 2), rel=1e-5)
    assert figures["r2"] == pytest.approx(model.score(X, y), rel=1e-5)


def test_learning_does_not_depend_on_target_unit() -> None:
    models = [
        sk.KernelRegressor(loss="gamma", n_centers=P, metric="none").fit(X, unit * TARGETS["gamma"])
        for unit in (1.0, 2.0**40)
    ]
    F, other = (model.predict(X) for model in models)
    np.testing.assert_allclose(other, 2.0**40 * F, rtol=1e-3)


def test_weight_acts_as_repeated_rows() -> None:
    weights = np.where(X[:, 0] > 0, 3.0, 1.0)
    repeated_rows = np.repeat(np.arange(N), weights.astype(int))
    options: dict[str, Any] = {
        "loss": "poisson", "centers": X[:P], "metric": "none", "bandwidth": 2.0, "ridge": 1e-2,
        "kernel": "laplace", "epochs": 60, "average": False,
        "solver": "block", "scale": "none",
    }  # fmt: skip
    y = TARGETS["poisson"]
    weighted = sk.KernelRegressor(batch_size=N, **options).fit(X, y, sample_weight=weights)
    copied = sk.KernelRegressor(batch_size=len(repeated_rows), **options).fit(
        X[repeated_rows], y[repeated_rows]
    )
    np.testing.assert_allclose(np.log(weighted.predict(X)), np.log(copied.predict(X)), atol=0.03)


def test_model_without_intercept_is_learned() -> None:
    model = sk.KernelRegressor(loss="poisson", fit_intercept=False, n_centers=P)
    assert not model.fit(X, TARGETS["poisson"]).intercept_.any()
    assert model.score(X, TARGETS["poisson"]) > 0.2


def test_repeated_rows_are_predicted_by_their_means() -> None:
    rng = np.random.default_rng(1)
    X = rng.integers(0, 5, (800, 1)).astype(np.float32)
    y = rng.poisson(np.exp(X[:, 0]))
    F = sk.KernelRegressor(loss="poisson").fit(X, y).predict(X)
    for value in range(5):
        rows = X[:, 0] == value
        np.testing.assert_allclose(F[rows], y[rows].mean(), rtol=0.1)


def test_early_stopping_and_intervals_use_the_loss() -> None:
    model = sk.KernelRegressor(loss="poisson", n_centers=P, early_stopping=True, calibrate=True)
    model.fit(X, TARGETS["poisson"])
    assert "validation_poisson_deviance" in model.history_[0]
    F, ends = model.predict(X, interval=0.8)
    low, high = ends.T
    assert (low < F).all()
    assert (high > F).all()


@pytest.mark.parametrize(("name", "small"), [("poisson", -1.0), ("gamma", 0.0)])
def test_too_small_targets_are_refused(name: str, small: float, tmp_path: Path) -> None:
    y, run_dir = TARGETS[name].copy(), tmp_path / "run"
    y[17] = small
    model = sk.KernelRegressor(loss=name, n_centers=P, run_dir=run_dir)
    with pytest.raises(sk.DataError, match=f"loss='{name}' needs targets .* row 17 has {small:g}"):
        model.fit(X, y)
    assert not run_dir.exists()
    sk.ingest_store(X, tmp_path / "rows.zarr", y=y)
    with pytest.raises(sk.DataError, match=f"needs targets .* has {small:g}"):
        model.fit(sk.open_store(tmp_path / "rows.zarr"))
    model.fit(X, TARGETS[name])
    with pytest.raises(sk.DataError, match=f"needs targets .* has {small:g}"):
        sk.evaluate(run_dir, tmp_path / "rows.zarr")


def test_all_zero_counts_are_refused() -> None:
    with pytest.raises(sk.DataError, match="the mean of target 0 is 0"):
        sk.KernelRegressor(loss="poisson").fit(X, np.zeros(N))


@pytest.mark.parametrize("steepness", [1.0, 3.0])
def test_noise_free_amounts_are_learned(steepness: float) -> None:
    """Check noise below the rounding of the kernel, and targets over many powers of ten."""
    X = np.random.default_rng(0).standard_normal((400, 3))
    y = np.exp(steepness * X[:, 0])
    model = sk.KernelRegressor(loss="gamma", n_centers=100, epochs=5).fit(X[:300], y[:300])
    assert mean_gamma_deviance(y[300:], model.predict(X[300:])) < 0.03


def test_invalid_test_targets_are_refused_before_the_run(tmp_path: Path) -> None:
    counts = TARGETS["poisson"]
    model = sk.KernelRegressor(loss="poisson", n_centers=P, run_dir=tmp_path / "run")
    with pytest.raises(sk.DataError, match=r"of data\.test has -1"):
        model.fit(X, counts, test=(X, counts - 1))


def test_newton_kernel_is_used_if_it_predicts_counts_better() -> None:
    """Check rows with few different logarithms, because most counts are 0."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((1300, 8)).astype(np.float32)
    rates = np.exp(np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] / 2 + np.cos(X[:, 3] + X[:, 4]) / 2)
    y = rng.poisson(rates / rates.mean())
    F = []
    for gain in (kernel_and_metric.LOG_LINK_GAIN_SE, np.inf):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel_and_metric, "LOG_LINK_GAIN_SE", gain)
            model = sk.KernelRegressor(loss="poisson").fit(X[:500], y[:500])
        F.append(model.predict(X[500:]))
    after, before = (DEVIANCES["poisson"](y[500:], f) for f in F)
    assert after < 0.98 * before


def test_given_kernel_is_kept() -> None:
    plain: dict[str, Any] = {"kernel": "laplace", "bandwidth": 3.0, "metric": "none"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_and_metric, "_CrossValidation", None)  # nothing is compared
        model = sk.KernelRegressor(loss="poisson", n_centers=P, **plain).fit(X, TARGETS["poisson"])
    assert model.kernel_.bandwidth == 3.0


@pytest.mark.parametrize("kernel_settings", [
    {"kernel": "laplace", "bandwidth": "median"},
    {"kernel": {"kind": "sum", "parts": ["laplace", "gaussian"]}},
    {"kernel": sk.Laplace("auto"), "bandwidth": "median"}, {"kernel": "laplace", "bandwidth": 2.0},
])  # fmt: skip
def test_metric_is_learned_for_given_kernel(kernel_settings: dict[str, Any]) -> None:
    model = sk.KernelRegressor(loss="poisson", metric="learn", n_centers=P, **kernel_settings)
    y = TARGETS["poisson"]
    assert DEVIANCES["poisson"](y, model.fit(X, y).predict(X)) < 1.6


def test_equal_rows_keep_their_targets_with_learned_metric() -> None:
    """Check that equal rows are not merged to the mean of their logarithms, whose exponential is
    below their mean."""
    rng, used_means = np.random.default_rng(0), list[float]()
    X = rng.standard_normal((250, 5)).astype(np.float32)[rng.integers(0, 250, 2000)]
    y = np.exp(np.sin(3 * X[:, 0]) + X[:, 0]) * rng.gamma(0.3, size=len(X)) / 0.3

    def record_mean(loss: Any, rows: Any, noise: Any, **options: Any) -> Any:
        used_means.append(float(np.average(rows.Y[:, 0], weights=rows.w)))
        return loss_noise(loss, rows, noise, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_start, "loss_noise", record_mean)
        model = sk.KernelRegressor(loss="gamma", metric="learn", n_centers=50, epochs=1).fit(X, y)
    assert model.kernel_.metric is not None
    assert used_means[-1] == pytest.approx(1.0, abs=0.2)  # in units of the mean
