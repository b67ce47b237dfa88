"""Test models of a few rows against their equations in float64, and the choice among them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

import streamkern as sk
from streamkern.backend.base import Backend
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.samples import SampleRows
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.setup import held_out_models
from streamkern.train.setup.choose_metric import robust_gain
from streamkern.train.setup.held_out_models import (
    HeldOutModel,
    HeldOutProblem,
    choose_model,
    gain_in_standard_errors,
)
from tests.runs import Array, settings

N, HELD, D, C = 300, 120, 4, 3


def rows(n: int, seed: int, weighted: bool) -> SampleRows:
    """Return rows of C noisy classes, as centred one-hot targets."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, D))
    Y = np.eye(C)[np.abs(X[:, :C] + rng.normal(size=(n, C)) / 2).argmax(axis=1)]
    root = rng.uniform(0, 2, n) if weighted else None
    return SampleRows(X, Y - 1 / C, root)


def laplace(A: Array, B: Array, metric: Array | None, bandwidth: float) -> Array:
    """Return the Laplace kernel matrix of A and B in float64, with scales as metric."""
    A, B = (np.float64(P if metric is None else P * metric) for P in (A, B))
    return np.asarray(np.exp(-np.linalg.norm(A[:, None] - B, axis=2) / bandwidth))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("max_fit_rows", [N, 80])  # centers: all the rows, or the first of them
@pytest.mark.parametrize("metric", [None, np.array([2.0, 1.0, 0.5, 0.1])])
def test_model_solves_its_equations(
    weighted: bool, max_fit_rows: int, metric: Array | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out_models, "METRIC_FIT_ROWS", max_fit_rows)
    monkeypatch.setattr(held_out_models, "EVALUATED_ROWS", 64)
    fit, held_out = rows(N, 0, weighted), rows(HELD, 1, weighted)
    source = sk.ArraySource(fit.X, fit.X[:, 0])
    precise = {"model.n_centers": 50, "run.precision": "float64"}
    run = open_run(settings(**precise), RunInputs(source))
    classes = TargetScale(np.full(C, 1 / C), np.ones(C))
    with run.backend.active():
        problem = HeldOutProblem(run, fit, held_out, classes)
        kernel = sk.Laplace(1.5, metric=metric)
        actual = problem.with_losses(problem.with_kernel(kernel, start_ridge=-2, min_ridge=-3))
    run.backend.close()
    Z = fit.X[:max_fit_rows]
    K = laplace(fit.X, Z, metric, 1.5)
    w = np.ones(N) if fit.root is None else fit.root**2.0
    F = {}
    for ridge in 10.0 ** np.arange(-3, 4):
        A = K.T @ (w[:, None] * K) + ridge * laplace(Z, Z, metric, 1.5)
        alpha = np.linalg.solve(A, K.T @ (w[:, None] * fit.Y))
        F[ridge] = laplace(held_out.X, Z, metric, 1.5) @ alpha
    v = np.ones(HELD) if held_out.root is None else held_out.root**2.0
    errors = {ridge: v * ((f - held_out.Y) ** 2).sum(axis=1) for ridge, f in F.items()}
    best = min(errors, key=lambda ridge: float(errors[ridge].mean()))
    assert 10.0**actual.ridge_log10 == best
    np.testing.assert_allclose(actual.errors, errors[best], rtol=1e-5, atol=1e-8)
    assert actual.error == pytest.approx(errors[best].mean(), rel=1e-6)
    np.testing.assert_allclose(
        actual.log_losses, v * calibrated_losses(F[best], held_out.Y, v), rtol=1e-5
    )
    np.testing.assert_array_equal(actual.losses, actual.log_losses)


def calibrated_losses(F: Array, Y: Array, w: Array) -> Array:
    """Return the log losses of softmax(slope F), with the best slope by SciPy.

    Each row also counts a little for all classes equally, so that the slope is bounded.
    """
    m = len(F)
    labels = Y.argmax(axis=1)
    Q = (m * np.eye(C)[labels] + 1 / C) / (m + 1)

    def total(slope: float) -> float:
        return float(-w @ (Q * log_softmax(slope * F, axis=1)).sum(axis=1))

    slope = minimize_scalar(total, bounds=(0, 100), method="bounded", options={"xatol": 1e-10}).x
    return -np.take_along_axis(log_softmax(slope * F, axis=1), labels[:, None], 1)[:, 0]


def test_gain_in_standard_errors_is_robust() -> None:
    rng = np.random.default_rng(0)
    before = rng.exponential(size=2000)
    gain = rng.normal(0.1, 1.0, 2000)
    limited = np.minimum(gain, -gain.min())
    expected = max(gains.mean() / (gains.std() / np.sqrt(2000)) for gains in (gain, limited))
    assert robust_gain(before, before - gain) == pytest.approx(expected)
    assert robust_gain(before, before) == 0
    assert robust_gain(np.full(2000, np.inf), before) == 0
    assert robust_gain(before, np.full(2000, np.inf)) == 0


def test_single_large_gain_does_not_hide_others() -> None:
    gain = np.random.default_rng(0).normal(0.1, 1.0, 2000)
    usual = robust_gain(gain, np.zeros(2000))
    gain[0] = 500.0
    assert gain_in_standard_errors(gain, np.zeros(2000)) < 1.5
    assert robust_gain(gain, np.zeros(2000)) > 0.9 * usual
    # The same row is not enough if the other rows have no gain.
    gain[1:] -= gain[1:].mean()
    assert robust_gain(gain, np.zeros(2000)) < 1.5


def test_smoother_kernel_must_be_significantly_better() -> None:
    rng, op = np.random.default_rng(0), KernelOperator(sk.Laplace(1.0), Backend(1), "exact", None)

    def model(errors: Array) -> HeldOutModel:
        return HeldOutModel(float(errors.mean()), errors, None, 0, 0, op, None, None)

    rough = model(rng.exponential(size=500))
    slightly_better, much_better = model(0.98 * rough.errors), model(0.8 * rough.errors)
    extreme = rough.errors.copy()
    extreme[0] += 200.0  # the rough model fails at one row, and has most of its error there
    failing, level = model(extreme), model(rough.errors + 0.01 * rng.normal(size=500))
    assert level.error < 0.8 * failing.error
    assert choose_model([rough, slightly_better]) is rough
    assert choose_model([rough, slightly_better, much_better]) is much_better
    assert choose_model([rough, much_better, slightly_better]) is much_better
    assert choose_model([failing, level]) is failing
    without_factor = model(np.full(500, np.inf))
    assert choose_model([without_factor, level]) is level
    assert choose_model([without_factor, without_factor]) is without_factor
