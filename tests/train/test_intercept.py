"""Check fits with an intercept: solvers fit targets minus their mean, and models add it again.

The tests compare with least squares in float64, on targets from which NumPy subtracted the mean.
`tests/train/resolve/test_target_moments.py` checks the mean itself.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern import KernelClassifier, KernelRegressor
from streamkern.basics.errors import ConfigError, DataError
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.saved_model import load_model
from tests import reference as ref
from tests.runs import (
    METHODS,
    assert_resume_gives_same_bits,
    brute_force,
    final,
    finished,
    settings,
)
from tests.solver_problems import Array

BANDWIDTH, RIDGE = 3.0, 1e-3


def data(n: int = 200, seed: int = 0) -> tuple[Array, Array]:
    """Return X (n, 5) float64 and two smooth, noisy functions of it (n, 2) with means far from 0.

    X and y have few bits, so that float32 holds them, and sums with whole numbers round nothing.
    """
    rng = np.random.default_rng([seed, 23])
    X = np.round(rng.standard_normal((n, 5)) * 256) / 256
    y = np.stack([np.sin(X[:, 0]), X[:, 1] * X[:, 2]], axis=1) + 0.1 * rng.normal(size=(n, 2))
    return X, np.round(y * 1024) / 1024 + [40.0, -7.0]


def least_squares(
    X: Array, y: Array, Z: Array, ridge: float = RIDGE, w: Array | None = None, mean: Any = None
) -> tuple[Array, Array]:
    """Return the mean of y, given or weighted, and the weights of ridge regression without it."""
    w = np.ones(len(X)) if w is None else w / w.mean()
    mean = (w[:, None] * y).mean(axis=0) if mean is None else mean
    K = ref.laplace(X, Z, BANDWIDTH)
    A = K.T @ (w[:, None] * K) / len(X) + ridge * ref.laplace(Z, Z, BANDWIDTH)
    return mean, np.linalg.solve(A, K.T @ (w[:, None] * (y - mean)) / len(X))


def estimator(cls: Any = KernelRegressor, **changes: Any) -> Any:
    """Return an estimator in float64 with solver "direct", unless `changes` say otherwise."""
    defaults = {
        "kernel": "laplace",
        "bandwidth": BANDWIDTH,
        "centers": data(30, 1)[0],
        "solver": "direct",
        "ridge": RIDGE,
        "precision": "float64",
        "memory": "256 MiB",
        "device": "cpu",
        "scale": "none",
    }
    return cls(**defaults | changes)


# -- all solvers -----------------------------------------------------------------------------------

METHODS_FOR_VALUES = [name for name in METHODS if "model.loss" not in METHODS[name]]


@pytest.mark.parametrize("method", METHODS_FOR_VALUES)
def test_affine_targets_give_affine_predictions(method: str) -> None:
    """Check a float32 run whose first target is about 1e40, and whose second is about 1e-24."""
    X, y = data(135)
    unit, constant = 2.0 ** np.array([130, -100]), np.array([0.0, 2.0**20])
    predictions = []
    for targets in (y, (y + constant) * unit):
        result = finished(settings(**METHODS[method]), source=ArraySource(np.float32(X), targets))
        predictions.append(result.model.values(np.float32(data(50, 2)[0])))
    # The float64 means differ in their last bits, and the float32 steps depend on them.
    np.testing.assert_allclose(predictions[1] / unit - constant, predictions[0], rtol=0, atol=2e-4)


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("method", METHODS_FOR_VALUES)
def test_unit_of_targets_does_not_change_weights(method: str) -> None:
    """Check the same bits in two units whose ratio is a power of two; the scale absorbs it."""
    X, y = data(135)
    config = settings(**METHODS[method], **{"model.fit_intercept": False})
    first, second = (
        finished(config, source=ArraySource(np.float32(X), y * unit)).model for unit in (1, 2.0**70)
    )
    np.testing.assert_array_equal(first.weights, second.weights)
    np.testing.assert_array_equal(first.targets.scale * 2.0**70, second.targets.scale)


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("method", METHODS_FOR_VALUES)
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_prediction_far_from_centers_is_intercept(fit_intercept: bool, method: str) -> None:
    X, y = data(135)
    config = settings(**METHODS[method], **{"model.fit_intercept": fit_intercept})
    model = finished(config, source=ArraySource(np.float32(X), y)).model
    mean = y.mean(axis=0) if fit_intercept else np.zeros(2)
    np.testing.assert_allclose(model.targets.mean, mean, rtol=1e-14)
    if "fourier" in method or "nystrom" in method:
        return  # such features are not 0 far from all rows, as kernel values are
    far_point = np.full((1, 5), 200.0, np.float32)
    # Without an intercept, the targets are far from 0, so the weights are larger.
    atol = 1e-3 if fit_intercept else 1e-2
    np.testing.assert_allclose(model.values(far_point), mean[None], atol=atol)


@pytest.mark.parametrize("solver", ["direct", "falkon", "block"])
def test_solvers_reach_least_squares_of_centred_targets(solver: str) -> None:
    X, y = data()
    options: dict[str, Any] = {"tolerance": 1e-10} if solver == "falkon" else {}
    epochs = 40 if solver in ("direct", "falkon") else 400
    fitted = estimator(solver=solver, epochs=epochs, batch_size=200, random_state=1, **options).fit(
        X, y
    )
    mean, alpha = least_squares(X, y, data(30, 1)[0], RIDGE)
    np.testing.assert_allclose(fitted.intercept_, mean, rtol=1e-14)
    test = data(60, 2)[0]
    exact = mean + ref.laplace(test, data(30, 1)[0], BANDWIDTH) @ alpha
    # Solver "block" has not converged entirely after 400 epochs.
    atol = {"direct": 1e-9, "falkon": 1e-7}.get(solver, 2e-3)
    np.testing.assert_allclose(fitted.predict(test), exact, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.filterwarnings("ignore:batch_size=")  # lowered, as EigenPro says
@pytest.mark.parametrize("solver", ["sgd", "eigenpro1", "eigenpro2", "eigenpro3", "eigenpro4"])
def test_solvers_on_all_rows_reach_centred_kernel_regression(solver: str) -> None:
    X, y = data(80)
    ridge = 0.02 if solver == "sgd" else 0.0
    fitted = estimator(
        solver=solver, centers="all", ridge=ridge, epochs=600, batch_size=80, average=False
    ).fit(X, y)
    K = ref.laplace(X, X, BANDWIDTH)
    alpha = np.linalg.solve(K + len(X) * ridge * np.eye(len(X)), y - y.mean(axis=0))
    test = data(60, 2)[0]
    exact = y.mean(axis=0) + ref.laplace(test, X, BANDWIDTH) @ alpha
    np.testing.assert_allclose(fitted.predict(test), exact, rtol=0, atol=5e-3)


# -- weights and classes ---------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["direct", "falkon"])
def test_sample_weights_are_used_in_the_mean(solver: str) -> None:
    X, y = data()
    w = np.float32(np.random.default_rng(3).integers(0, 4, len(X)))
    options: dict[str, Any] = {"tolerance": 1e-10} if solver == "falkon" else {}
    fitted = estimator(solver=solver, epochs=60, **options).fit(X, y, sample_weight=w)
    mean, alpha = least_squares(X, y, data(30, 1)[0], RIDGE, np.float64(w))
    np.testing.assert_allclose(fitted.intercept_, mean, rtol=1e-14)
    np.testing.assert_allclose(fitted.dual_coef_, alpha, rtol=0, atol=1e-6 * np.abs(alpha).max())


@pytest.mark.parametrize("class_weight", [None, "balanced", {"1": 3.0}])
def test_class_means_use_weighted_counts(class_weight: Any) -> None:
    """Check three classes with 5, 20 and 75 % of the rows."""
    X, rng = data()[0], np.random.default_rng(4)
    labels = rng.choice(3, len(X), p=[0.05, 0.2, 0.75])
    fitted = estimator(KernelClassifier, class_weight=class_weight).fit(X, labels)
    counts = np.bincount(labels)
    class_factors = {"balanced": len(X) / (3 * counts)}.get(str(class_weight), np.ones(3))
    if isinstance(class_weight, dict):
        class_factors = np.array([1.0, 3.0, 1.0])
    mean, alpha = least_squares(X, np.eye(3)[labels], data(30, 1)[0], RIDGE, class_factors[labels])
    np.testing.assert_allclose(fitted.intercept_, mean, rtol=1e-12)
    np.testing.assert_allclose(fitted.dual_coef_, alpha, rtol=0, atol=1e-7 * np.abs(alpha).max())
    far_point = np.full((1, 5), 500.0)
    np.testing.assert_allclose(fitted.predict_values(far_point), mean[None], atol=1e-12)


# -- precision and extreme values ------------------------------------------------------------------


def test_fit_without_intercept_equals_least_squares() -> None:
    X, y = data()
    fitted = estimator(fit_intercept=False).fit(X, y)
    _, alpha = least_squares(X, y, data(30, 1)[0], mean=0)
    np.testing.assert_array_equal(fitted.intercept_, [0, 0])
    np.testing.assert_allclose(fitted.dual_coef_, alpha, rtol=0, atol=1e-8 * np.abs(alpha).max())


@pytest.mark.parametrize("constant", [1e3, 1e5, 1e6])
def test_float32_error_of_shifted_targets_is_their_rounding(constant: float) -> None:
    """Check targets plus a large constant, which float32 rounds."""
    X, y = data()
    test = np.float32(data(60, 2)[0])
    shifted = np.float32(y + constant)
    from_targets, from_shifted, from_rounded = (
        estimator(precision="exact").fit(np.float32(X), targets).predict(test)
        for targets in (y, shifted, np.float64(shifted) - constant)
    )
    assert from_shifted.dtype == np.float64
    # The centred targets are equal to rounding, so the float32 products are, too.
    np.testing.assert_allclose(from_shifted - constant, from_rounded, rtol=0, atol=1e-5)
    # The fit is linear in the targets: it changes by at most a few times their rounding errors.
    assert (
        np.abs(from_shifted - constant - from_targets).max()
        <= 3 * np.abs(shifted - constant - y).max() + 1e-5
    )


def test_outputs_of_any_size_are_fitted_equally() -> None:
    """Check float32, whose largest number is 3e38 and whose smallest is 1e-38."""
    X, y = data()
    unit = np.array([1e39, 1e-45])
    fitted, plain = (
        estimator(precision="exact").fit(np.float32(X), targets) for targets in (y * unit, y)
    )
    test = np.float32(data(60, 2)[0])
    np.testing.assert_allclose(fitted.predict(test) / unit, plain.predict(test), rtol=1e-5)
    K = ref.laplace(np.float64(test), fitted.centers_, BANDWIDTH)
    np.testing.assert_allclose(
        (fitted.intercept_ + K @ fitted.dual_coef_) / unit, plain.predict(test), rtol=1e-4
    )
    assert fitted.score(np.float32(X), y * unit) == pytest.approx(plain.score(X, y), abs=1e-6)


def test_target_variance_beyond_float64_is_refused() -> None:
    X, y = data()
    with pytest.raises(DataError, match="variance of target 1 overflows float64; give the targets"):
        estimator().fit(X, y * [1, 1e200])


@pytest.mark.parametrize("solver", ["direct", "falkon", "block"])
@pytest.mark.parametrize("value", [0.0, 0.1, -1e30])
def test_constant_target_is_learned_by_the_intercept(solver: str, value: float) -> None:
    X, _ = data()
    fitted = estimator(solver=solver, precision="exact", epochs=2).fit(X, np.full(len(X), value))
    np.testing.assert_allclose(fitted.predict(X[:9]), value, rtol=1e-12)


@pytest.mark.slow
def test_logged_figures_are_finite(tmp_path: Path) -> None:
    """Check targets of 1e39, whose squares exceed float32: JSON has no infinity."""
    X, y = data()
    config = settings(
        tmp_path / "run",
        **METHODS["blocks"] | {"data.epochs": 40, "run.checkpoint_every": 30, "data.batch_size": 5},
    )
    source = ArraySource(np.float32(X), y * 1e39)
    result = finished(config, source=source, test=ArraySource(*(a[:50] for a in (X, y * 1e39))))
    text = (tmp_path / "run" / "log.jsonl").read_text()
    for record in map(json.loads, text.splitlines()):
        assert np.isfinite([v for v in record.values() if isinstance(v, float)]).all()
    window = final(tmp_path / "run")["window"]
    assert np.isfinite(window).all()
    errors = (result.model.values(np.float32(X[:50])) - y[:50] * 1e39) / 1e39
    assert result.metrics["test_mse"] / 1e78 == pytest.approx(float((errors**2).mean()))


def test_errors_far_from_zero_are_computed_in_float64() -> None:
    X, y = data()
    losses = []
    for constant in (0, 1e8):
        source = ArraySource(np.float32(X), y + constant)
        result = finished(settings(**METHODS["direct"]), source=source, test=source)
        errors = result.model.values(np.float32(X)) - (y + constant)
        losses.append(result.metrics["test_mse"])
        assert losses[-1] == pytest.approx(float((errors**2).mean()), rel=1e-12)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# -- partial_fit, warm starts and resumed runs -----------------------------------------------------


def test_partial_fit_keeps_mean_of_first_block() -> None:
    """Check that `partial_fit` learns the difference of later rows from the first mean."""
    X, y = data()
    y[100:] += 5
    fitted = estimator()
    fitted.partial_fit(X[:100], y[:100]).partial_fit(X[100:], y[100:])
    mean = y[:100].mean(axis=0)
    np.testing.assert_allclose(fitted.intercept_, mean, rtol=1e-14)
    _, alpha = least_squares(X, y, data(30, 1)[0], mean=mean)
    np.testing.assert_allclose(fitted.dual_coef_, alpha, rtol=0, atol=1e-7 * np.abs(alpha).max())


@pytest.mark.parametrize("solver", ["block", "eigenpro3", "eigenpro4"])
def test_warm_start_keeps_function_with_new_mean(solver: str) -> None:
    """Check that with tiny steps the second fit equals the first one."""
    X, y = data()
    fitted = estimator(solver=solver, ridge=0, epochs=5, warm_start=True, average=False).fit(X, y)
    test = data(60, 2)[0]
    before, mean = fitted.predict(test), fitted.intercept_
    fitted.set_params(step_scale=1e-9).fit(X, 3 * y + 1000)
    np.testing.assert_array_equal(fitted.intercept_, mean)
    np.testing.assert_allclose(fitted.predict(test), before, rtol=0, atol=1e-4)


def test_warm_start_from_a_run_keeps_its_mean(tmp_path: Path) -> None:
    X, y = data()
    shared: dict[str, Any] = {"solver": "falkon", "epochs": 60, "tolerance": 1e-10}
    first = estimator(**shared, run_dir=str(tmp_path / "a")).fit(X, y)
    warm = estimator(**shared, warm_start=str(tmp_path / "a")).fit(X, y + 1)
    np.testing.assert_array_equal(warm.intercept_, first.intercept_)
    _, alpha = least_squares(X, y + 1, data(30, 1)[0], mean=y.mean(axis=0))
    np.testing.assert_allclose(warm.dual_coef_, alpha, rtol=0, atol=1e-5 * np.abs(alpha).max())


def test_changed_warm_start_is_refused_at_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check also a run in which only the weights differ."""
    X, y = data()
    start = estimator(solver="block", epochs=1, run_dir=str(tmp_path / "a")).fit(X, y)
    warm_model = estimator(
        solver="block", epochs=1, run_dir=str(tmp_path / "b"), warm_start=str(tmp_path / "a")
    )
    with monkeypatch.context() as patch:  # an end between the setup and the first checkpoint
        patch.setattr(ParentRun, "weights_for", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            warm_model.fit(X, y)
    shutil.move(tmp_path / "a", tmp_path / "aside")
    estimator(solver="block", epochs=1, ridge=0.5, run_dir=str(tmp_path / "a")).fit(X, y)
    with pytest.raises(ConfigError, match="has been replaced, or trained on, since the setup"):
        warm_model.fit(X, y)
    shutil.rmtree(tmp_path / "a")
    shutil.move(tmp_path / "aside", tmp_path / "a")
    np.testing.assert_array_equal(warm_model.fit(X, y).intercept_, start.intercept_)


def test_warm_start_with_other_intercept_setting_is_refused(tmp_path: Path) -> None:
    X, y = data()
    shared: dict[str, Any] = {"solver": "block", "epochs": 2}
    estimator(**shared, run_dir=str(tmp_path / "a"), fit_intercept=False).fit(X, y)
    with pytest.raises(ConfigError, match="was trained with fit_intercept=false; give this run"):
        estimator(**shared, warm_start=str(tmp_path / "a")).fit(X, y)
    fitted = estimator(**shared, warm_start=True).fit(X, y)
    with pytest.raises(ConfigError, match="was trained with fit_intercept=true"):
        fitted.set_params(fit_intercept=False).fit(X, y)


@pytest.mark.parametrize("method", ["block", "eigenpro4", "direct", "falkon", "sgd"])
def test_resumed_run_keeps_mean_and_bits(method: str, tmp_path: Path) -> None:
    X, y = data(135)
    source = ArraySource(np.float32(X), y)
    result = assert_resume_gives_same_bits(tmp_path, (4,), METHODS[method], source)
    loaded = load_model(tmp_path / "whole", device="cpu")
    test = np.float32(data(40, 2)[0])
    with loaded.backend:
        np.testing.assert_array_equal(loaded.values(test), result.model.values(test))
        np.testing.assert_array_equal(loaded.targets.mean, result.model.targets.mean)
    np.testing.assert_allclose(loaded.values(test), brute_force(result, test), atol=1e-4)
