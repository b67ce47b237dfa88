"""Compare losses other than the squared error, by every solver, with minima found by SciPy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from sklearn.metrics import mean_pinball_loss

import streamkern as sk
from streamkern.losses.base import Loss
from streamkern.losses.errors import Quantile
from streamkern.train.train import Result
from tests.loss_targets import LABELS, LOSSES, VALUES, N, P, X, loss_settings, loss_source
from tests.losses.own_losses import Distance, LogCosh
from tests.runs import assert_resume_gives_same_bits, finished, opened, settings

BANDWIDTH = 3.0
LOW_RANK = {"solver.n_nystrom": 100, "solver.level": 10}


def train_run(loss: str, solver: str, epochs: int, **overrides: Any) -> Result:
    """Return the result of a run with full batches in float64."""
    config = settings(**loss_settings(loss, **{
        "solver.name": solver, "data.batch_size": N, "data.epochs": epochs,
        "run.precision": "float64", "model.bandwidth": BANDWIDTH,
    } | overrides))  # fmt: skip
    return finished(config, source=loss_source(loss))


def objective(
    result: Result, ridge: float, w: np.ndarray | None = None
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """Return the mean loss of flat weights divided by (L g^2), with the penalty, and its
    gradient."""
    loss, targets, Z = result.model.loss, result.model.targets, np.float64(result.Z)
    assert loss is not None
    loss = loss.at(np.inf)
    bandwidth = float(result.model.op.kernel.describe()["bandwidth"])
    K, K_ZZ = (np.exp(-cdist(a, Z) / bandwidth) for a in (X, Z))
    Y = np.eye(3)[LABELS] if loss.for_classes else VALUES[:, None]
    scale = np.asarray(loss.curvature) * targets.scale
    weights = np.ones(N) if w is None else w

    def penalised(flat: np.ndarray) -> tuple[float, np.ndarray]:
        alpha = flat.reshape(len(Z), -1)
        z = targets.mean + targets.scale * (K @ alpha)
        gradient = loss.gradient(np, loss.predict(np, z.copy()) - Y, Y) / scale
        value = (weights @ scaled_losses(loss, z, Y, scale * targets.scale)).sum() / N
        slope = K.T @ (weights[:, None] * gradient) / N + ridge * (K_ZZ @ alpha)
        penalty = ridge / 2 * float((alpha * (K_ZZ @ alpha)).sum())
        return float(value) + penalty, slope.reshape(-1)

    return penalised


def scaled_losses(loss: Loss, z: np.ndarray, Y: np.ndarray, scale: np.ndarray) -> Any:
    """Return losses divided by `scale` (c,), whose gradient is that of the loss, with the ramp of a
    quantile."""
    if isinstance(loss, Quantile):
        errors, h = z - Y, np.asarray(loss.width)
        size = np.abs(errors)
        clipped = np.minimum(size, h)
        ramp = clipped * (2 * size - clipped) / (4 * h)
        return (ramp + (0.5 - loss.quantile) * errors) / scale
    sums = loss.values(np, z, Y) / (8.0 if loss.name == "squared_hinge" else 1.0)
    return sums / scale[0]  # one output, or the same scale for all


def relative_excesses(
    results: Sequence[Result], ridge: float, w: np.ndarray | None = None
) -> np.ndarray:
    """Return (objective - minimum) / (objective of weights 0 - minimum) for runs of one objective.

    L-BFGS-B of SciPy finds the minimum from weights 0.
    """
    penalised = objective(results[0], ridge, w)
    weights = [np.asarray(result.model.weights).reshape(-1) for result in results]
    options = {"maxiter": 10000, "maxfun": 10**6, "ftol": 1e-15, "gtol": 1e-9}
    zero = np.zeros_like(weights[0])
    best = minimize(penalised, zero, jac=True, method="L-BFGS-B", options=options).fun
    reached_loss = np.array([penalised(alpha)[0] for alpha in weights])
    return (reached_loss - best) / (penalised(zero)[0] - best)


def relative_excess(result: Result, ridge: float, w: np.ndarray | None = None) -> float:
    """Return `relative_excesses` of one run."""
    return float(relative_excesses([result], ridge, w)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "block_size", "epochs"), [*((loss, P, 400) for loss in LOSSES), ("log_loss", 20, 1000)]
)
def test_block_reaches_minimum_of_penalised_loss(loss: str, block_size: int, epochs: int) -> None:
    overrides = {"solver.block_size": block_size, "solver.ridge": 1e-2, "solver.average": False}
    assert -1e-7 < relative_excess(train_run(loss, "block", epochs, **overrides), 1e-2) < 0.01


@pytest.mark.parametrize(
    ("loss", "model"),
    [(loss, {"model.n_centers": "auto"}) for loss in LOSSES]
    + [("log_loss", {"model.features": "nystrom"})],
)
def test_sgd_reaches_minimum_of_penalised_loss(loss: str, model: dict[str, Any]) -> None:
    overrides = model | {"solver.ridge": 1e-2, "solver.average": False}
    assert -1e-7 < relative_excess(train_run(loss, "sgd", 400, **overrides), 1e-2) < 0.01


@pytest.mark.parametrize("solver", ["eigenpro1", "eigenpro2"])
@pytest.mark.parametrize("loss", ["squared_hinge", "expectile"])
def test_eigenpro_on_all_rows_reaches_zero_loss(solver: str, loss: str) -> None:
    overrides = LOW_RANK | {
        "model.n_centers": "auto",
        "model.bandwidth": 0.3,
        "data.batch_size": 40,
    }
    assert relative_excess(train_run(loss, solver, 60, **overrides), 0.0) < 1e-3


@pytest.mark.parametrize("solver", ["eigenpro3", "eigenpro4"])
@pytest.mark.parametrize("loss", ["log_loss", "huber", "absolute_error"])
def test_eigenpro_on_centers_approaches_least_loss(solver: str, loss: str) -> None:
    """Check the end above the minimum, which the damped projection does not reach."""
    overrides = LOW_RANK | {"model.bandwidth": 1.0, "data.batch_size": 40}
    actual = relative_excesses(
        [train_run(loss, solver, epochs, **overrides) for epochs in (5, 50)], 0.0
    )
    assert actual[1] < min(actual[0], 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["sgd", "eigenpro4", "direct", "falkon"])
def test_resumed_run_ends_with_same_bits(solver: str, tmp_path: Path) -> None:
    """Check the ramp of a quantile, which becomes narrower with the rows that were seen."""
    options = {
        "solver.name": solver,
        "model.loss": "quantile",
        "model.quantile": 0.8,
        "solver.ridge": "auto",
    } | (LOW_RANK | {"solver.period": 3} if solver == "eigenpro4" else {"model.n_centers": "auto"})
    source = sk.ArraySource(X, VALUES)
    assert_resume_gives_same_bits(tmp_path, (1, 7, 13), options, source)


def test_loss_parameters_depend_on_noise() -> None:
    """Check delta of Huber's loss by "eigenpro4", which has no ridge, against "block"."""
    quiet = np.sin(2 * X[:, 0]) + 0.01 * np.random.default_rng(5).standard_normal(N)
    deltas = [
        finished(
            settings(**{"model.loss": "huber", "solver.name": solver}),
            source=sk.ArraySource(X, quiet),
        ).model.loss.parameters()["delta"]
        for solver in ("block", "eigenpro4")
    ]
    np.testing.assert_allclose(*deltas, rtol=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
def test_direct_reaches_minimum_of_penalised_loss(loss: str) -> None:
    result = train_run(loss, "direct", 30, **{"solver.ridge": 1e-2, "data.batch_size": 70})
    assert -1e-9 < relative_excess(result, 1e-2) < 1e-5
    assert result.ended is not None
    assert "to a relative decrement of" in result.ended


@pytest.mark.parametrize("ridge", [1e-2, 1e-4])
@pytest.mark.parametrize("loss", LOSSES)
def test_falkon_reaches_minimum_of_penalised_loss(loss: str, ridge: float) -> None:
    result = train_run(loss, "falkon", 120, **{"solver.ridge": ridge, "data.batch_size": 70})
    assert -1e-8 < relative_excess(result, ridge) < 1e-5
    assert result.ended is not None
    assert "iterations to a relative residual of" in result.ended
    assert result.epochs < (30 if ridge == 1e-2 else 100)


def test_falkon_in_float32_equals_direct() -> None:
    options = {"solver.ridge": 1e-3, "run.precision": "exact"}
    values = [
        train_run("huber", solver, 40, **options).model.values(X) for solver in ("falkon", "direct")
    ]
    np.testing.assert_allclose(*values, atol=2e-3)


@pytest.mark.parametrize("features", ["nystrom", "fourier"])
def test_direct_on_features_equals_converged_slow_solver(features: str) -> None:
    fourier = {"model.kernel": "gaussian", "model.n_features": P, "model.n_centers": "auto"}
    options = {"model.features": features, "solver.ridge": 1e-2, "solver.average": False} | (
        fourier if features == "fourier" else {}
    )
    slow = train_run("huber", "sgd", 400, **options).model.values(X)
    options.pop("solver.average")
    fast = train_run("huber", "direct", 20, **options).model.values(X)
    np.testing.assert_allclose(fast, slow, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["direct", "falkon"])
def test_overshooting_step_is_undone(solver: str) -> None:
    """Check that the loss of the model never increases from epoch to epoch."""
    options = {"model.quantile": 0.99, "solver.ridge": 1e-6, "model.n_centers": 150}
    runs = [train_run("expectile", solver, epochs, **options) for epochs in range(2, 12)]
    actual = relative_excesses(runs, 1e-6)
    assert (np.diff(actual) < 1e-9).all()
    assert (np.diff(actual) == 0).any()
    assert actual[-1] < 0.5 * actual[1]


@pytest.mark.parametrize("solver", ["direct", "falkon"])
def test_newton_steps_use_sample_weights(solver: str) -> None:
    weights = np.arange(N) % 5 / 2.0  # of mean 1
    config = settings(**{
        "solver.name": solver, "model.loss": "huber", "solver.ridge": 1e-2, "data.epochs": 20,
        "run.precision": "float64", "model.n_centers": P,
    })  # fmt: skip
    result = finished(config, source=sk.ArraySource(X, VALUES, sample_weight=weights))
    assert -1e-9 < relative_excess(result, 1e-2, weights) < 1e-5
    assert relative_excess(result, 1e-2) > 1e-3


@pytest.mark.parametrize("solver", ["sgd", "eigenpro4", "direct", "falkon"])
def test_several_quantiles_are_several_outputs(solver: str) -> None:
    rng = np.random.default_rng(3)
    y = np.sin(2 * X[:, 0]) + rng.standard_normal(N)
    model = sk.KernelRegressor(
        loss="quantile", quantile=[0.2, 0.8], solver=solver, metric="none", epochs=20
    ).fit(X, y)
    F = model.predict(X)
    assert F.shape == (N, 2)
    assert (F[:, 0] < F[:, 1]).all()
    np.testing.assert_allclose((y[:, None] <= F).mean(axis=0), [0.2, 0.8], atol=0.1)


def test_solver_that_runs_on_one_rank_is_refused_over_ranks() -> None:
    with pytest.raises(sk.ConfigError, match=r"run.ranks=2 cannot share the steps of solver='sgd'"):
        opened(sk.ArraySource(X, VALUES), **{
            "model.loss": "huber", "solver.name": "sgd", "run.ranks": 2,
            "model.n_centers": "auto",
        })  # fmt: skip


def test_solver_that_needs_all_rows_is_refused_with_partial_fit() -> None:
    direct = sk.KernelRegressor(loss="huber", solver="direct", n_centers=P, metric="none")
    with pytest.raises(sk.ConfigError, match="needs the same rows in every epoch"):
        direct.partial_fit(X, VALUES)


@pytest.mark.parametrize("solver", ["direct", "falkon"])
@pytest.mark.parametrize("loss", [LogCosh(), Distance()])
def test_newton_uses_bound_of_user_loss(loss: Loss, solver: str) -> None:
    """Check that steps by the bound of a loss of the user reach the minimum of solver "block"."""
    Y = np.column_stack([VALUES, VALUES[::-1]])
    shared = {
        "model.loss": loss, "data.batch_size": N, "model.n_centers": P, "solver.ridge": 1e-2,
        "run.precision": "float64",
    }  # fmt: skip
    source = sk.ArraySource(X, Y)
    values = [
        finished(settings(**shared | options), source=source).model.values(X)
        for options in (
            {"solver.name": solver, "data.epochs": 60},
            {"solver.block_size": P, "data.epochs": 200, "solver.average": False},
        )
    ]
    np.testing.assert_allclose(*values, atol=1e-3)


def test_direct_chooses_quantile_ridge_at_the_minimum() -> None:
    """Check that it predicts better than the ridge of "block", which ends before the minimum."""
    rng = np.random.default_rng(8)
    X = rng.standard_normal((4120, 1))
    y = np.sin(3 * X[:, 0]) + rng.standard_normal(len(X))
    options: dict[str, Any] = {
        "loss": "quantile", "quantile": 0.95, "kernel": "laplace", "bandwidth": 1.0,
        "metric": "none", "precision": "float64", "random_state": 0, "verbose": False,
    }  # fmt: skip

    def fit(solver: str, **more: Any) -> sk.KernelRegressor:
        return sk.KernelRegressor(solver=solver, **options, **more).fit(X[:120], y[:120])

    def pinball(model: sk.KernelRegressor) -> float:
        return float(mean_pinball_loss(y[120:], model.predict(X[120:]), alpha=0.95))

    block_ridge = fit("block").report_["ridge"]
    assert pinball(fit("direct")) < 0.95 * pinball(fit("direct", ridge=block_ridge))


@pytest.mark.parametrize("loss", ["huber", "quantile", "poisson", "gamma"])
@pytest.mark.parametrize(("bandwidth", "ridge"), [(6.0, 1e-3), (6.0, 1e-5), (20.0, 1e-5)])
def test_float32_newton_with_wide_kernel_approaches_minimum(
    loss: str, bandwidth: float, ridge: float
) -> None:
    """Check a K(Z, Z) whose rounding errors are larger than most of its eigenvalues."""
    y = np.abs(VALUES) + 0.1
    options: dict[str, Any] = {
        "loss": loss, "solver": "direct", "ridge": ridge, "kernel": "gaussian", "metric": "none",
        "bandwidth": bandwidth, "n_centers": N, "epochs": 30,
    }  # fmt: skip
    narrow, wide = (
        sk.KernelRegressor(precision=precision, **options).fit(X, y)
        for precision in ("exact", "float64")
    )
    assert narrow.n_iter_ <= wide.n_iter_ + 4
    difference = narrow.predict(X) - wide.predict(X)
    assert np.abs(difference).max() < 0.02 * y.std()


@pytest.mark.parametrize("solver", ["direct", "falkon"])
def test_run_that_ends_far_above_minimum_warns(solver: str) -> None:
    """Compare with a run of more epochs, which does not warn."""
    name = f"solver '{solver}' has not converged in 3 epochs"
    with pytest.warns(UserWarning, match=rf"{name}.* give more epochs, such as data\.epochs=15"):
        short = train_run("quantile", solver, 3, **{"solver.ridge": 1e-3})
    with warnings.catch_warnings(action="error"):
        long = train_run("quantile", solver, 60, **{"solver.ridge": 1e-3})
    excess, converged = relative_excesses([short, long], 1e-3)
    assert excess > 10 * max(converged, 1e-4)
