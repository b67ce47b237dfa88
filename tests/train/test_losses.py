"""Test losses other than the squared error, from the setting to the predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.metrics import mean_pinball_loss

import streamkern as sk
from streamkern.losses.losses import saved_loss
from tests.loss_targets import VALUES, N, P, X, loss_settings, loss_source
from tests.losses.own_losses import LogCosh
from tests.runs import assert_resume_gives_same_bits, finished, settings, stopped


@pytest.mark.slow
@pytest.mark.parametrize("quantile", [0.05, 0.5, 0.9])
def test_quantiles_of_heteroscedastic_noise_are_found(quantile: float) -> None:
    """Compare with boosting, and check the share of rows below them."""
    rng = np.random.default_rng(1)
    X = rng.standard_normal((4000, 2)).astype(np.float32)
    y = np.sin(2 * X[:, 0]) + 0.5 * np.exp(X[:, 1] / 2) * rng.standard_normal(4000)
    options: dict[str, Any] = {"loss": "quantile", "quantile": quantile}
    ours = sk.KernelRegressor(n_centers=300, metric="none", **options)
    models = ours, HistGradientBoostingRegressor(**options)
    F, other = (model.fit(X[:2000], y[:2000]).predict(X[2000:]) for model in models)
    losses = [mean_pinball_loss(y[2000:], values, alpha=quantile) for values in (F, other)]
    assert losses[0] <= 1.1 * losses[1]
    assert (y[2000:] <= F).mean() == pytest.approx(quantile, abs=0.03)


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("name", ["huber", "absolute_error"])
def test_outliers_barely_affect_robust_model(name: str) -> None:
    rng = np.random.default_rng(2)
    X = rng.standard_normal((2000, 3)).astype(np.float32)
    truth = np.sin(2 * X[:, 0]) + X[:, 1]
    y = truth + 0.3 * rng.standard_normal(2000)
    y[rng.random(2000) < 0.05] += 20 * rng.standard_normal()
    errors = {
        loss: np.sqrt(np.mean((sk.KernelRegressor(loss=loss, n_centers=300).fit(X[:1000], y[:1000])
                               .predict(X[1000:]) - truth[1000:]) ** 2))
        for loss in ("squared_error", name)
    }  # fmt: skip
    assert errors[name] < 0.6 * errors["squared_error"]


@pytest.mark.parametrize(
    "name", ["quantile", "huber", "squared_hinge", "tests.losses.own_losses:Distance"]
)
def test_resumed_run_ends_with_same_bits(name: str, tmp_path: Path) -> None:
    overrides = loss_settings(name)
    result = assert_resume_gives_same_bits(tmp_path, (5,), overrides, loss_source(name))
    assert result.model.loss is not None


def test_resume_refuses_changed_user_loss(tmp_path: Path) -> None:
    def settings_with(factor: float) -> Any:
        """Return settings with a loss of the user, multiplied by a factor."""

        class Mine(LogCosh):
            def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
                return factor * super().gradient(xp, errors, Y)

            def values(self, xp: Any, F: Any, Y: Any) -> Any:
                return factor * super().values(xp, F, Y)

        return settings(tmp_path, **{"model.loss": Mine, "model.n_centers": P})

    rows = sk.ArraySource(X, VALUES)
    stopped(settings_with(0.9), 5, source=rows, test=rows)
    with pytest.raises(sk.ConfigError, match="has changed since the model was trained"):
        finished(settings_with(0.8), source=rows)
    finished(settings_with(0.9), source=rows)


def test_quantiles_of_repeated_rows_are_those_of_their_targets() -> None:
    """Check that the quantiles are not those of the means of equal rows, from which the noise is
    estimated."""
    rng = np.random.default_rng(1)
    X = rng.integers(0, 5, (1500, 1)).astype(np.float32)
    y = X[:, 0] + rng.exponential(size=1500)
    F = sk.KernelRegressor(loss="quantile", quantile=0.9).fit(X, y).predict(X)
    shares = [(y <= F)[X[:, 0] == value].mean() for value in range(5)]
    np.testing.assert_allclose(shares, 0.9, atol=0.06)


def test_noise_free_targets_are_learned() -> None:
    y = np.sin(X[:, 0])
    assert sk.KernelRegressor(loss="absolute_error").fit(X, y).score(X, y) > 0.999
    few = sk.KernelRegressor(loss="huber").fit(X[:20], X[:20, 0])
    assert few.score(X[:20], X[:20, 0]) > 0.9


def test_separable_classes_are_not_divergence() -> None:
    for seed in range(6):
        rows = np.random.default_rng(seed).standard_normal((200, 2))
        model = sk.KernelClassifier(loss="squared_hinge").fit(rows, rows[:, 0] > 0)
        assert model.score(rows, rows[:, 0] > 0) > 0.99


@pytest.mark.parametrize("quantile", [0.1, 0.9])
def test_constant_target_is_not_divergence(quantile: float) -> None:
    Y = np.column_stack([VALUES, np.full(N, 2e6)])
    F = sk.KernelRegressor(loss="quantile", quantile=quantile).fit(X, Y).predict(X)
    np.testing.assert_allclose(F[:, 1], 2e6, rtol=1e-9)
    assert np.ptp(F[:, 0]) > 1


def test_quantile_without_intercept_is_fitted_by_kernels() -> None:
    model = sk.KernelRegressor(loss="quantile", quantile=0.9, fit_intercept=False, n_centers=P)
    assert not model.fit(X, 5 + VALUES).intercept_.any()


def test_early_stopping_uses_the_loss() -> None:
    """Check an outer quantile, whose loss rises while the error of the mean falls."""
    model = sk.KernelRegressor(
        loss="quantile", quantile=0.95, n_centers=P, early_stopping=True, n_iter_no_change=3,
        epochs=30, solver="block",
    ).fit(X, VALUES)  # fmt: skip
    losses = [record["validation_pinball_loss"] for record in model.history_]
    best = int(np.argmin(losses))
    assert len(losses) == best + 4
    assert f"the model keeps the weights of epoch {best + 1}" in model.report_["ended"]


def test_evaluations_include_loss_metric(tmp_path: Path) -> None:
    model = sk.KernelRegressor(loss="quantile", quantile=0.8, n_centers=P, run_dir=tmp_path / "run")
    model.fit(X, VALUES)
    sk.ingest_store(X, tmp_path / "rows.zarr", y=VALUES)
    figures = sk.evaluate(tmp_path / "run", tmp_path / "rows.zarr")
    predicted = sk.load(tmp_path / "run").predict(X)
    np.testing.assert_array_equal(predicted, model.predict(X))
    expected = mean_pinball_loss(VALUES, predicted, alpha=0.8)
    assert figures["pinball_loss"] == pytest.approx(expected, rel=1e-6)
    meta = sk.load(tmp_path / "run")._state.meta
    assert saved_loss(meta) is not None
    assert meta["setup"]["loss"]["quantile"] == 0.8


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"loss": "huber", "quantile": 0.5}, "quantile=0.5 is not used by loss='huber'"),
        (
            {"loss": "quantile", "quantile": 1.5},
            "quantile=1.5 must be a number above 0 and below 1",
        ),
        ({"loss": "hinge"}, "loss='hinge' must be one of"),
        ({"loss": "squared_hinge"}, "is for rows of one class each"),
        (
            {"loss": "huber", "solver": "falkon", "ridge": 0.0},
            "may have no minimum without a ridge",
        ),
        (
            {"loss": "huber", "solver": "direct", "ridge": 0.0},
            "may have no minimum without a ridge",
        ),
        ({"loss": "huber", "solver": "direct", "epochs": 1}, "whose first epoch takes no step"),
    ],
)
def test_invalid_settings_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(sk.ConfigError, match=message):
        sk.KernelRegressor(**parameters).fit(X, VALUES)
