"""Gradient steps on a metric: their derivatives against differences, and where they lead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.backend.base import Backend
from streamkern.kernels.categorical import CategoricalFeatures
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.samples import SampleRows
from streamkern.train.setup import metric_steps
from streamkern.train.setup.held_out_models import HeldOutModel
from streamkern.train.setup.metric_steps import error_derivatives, metrics_of_steps
from tests.solver_problems import Array, rows

N, M, D, C = 30, 50, 4, 2
RIDGE = 0.03
SHIFT = np.array([0.3, -0.2, 0.0, 1.0])
PROFILES: dict[str, tuple[Any, Callable[[Array], Array]]] = {
    "laplace": (sk.Laplace, lambda s: np.exp(-np.sqrt(s))),
    "gaussian": (sk.Gaussian, lambda s: np.exp(-s / 2)),
    "matern32": (sk.Matern32, lambda s: (1 + np.sqrt(3 * s)) * np.exp(-np.sqrt(3 * s))),
}
METRICS = {
    "scales": np.array([0.5, 2.0, 1.0, 0.3]),
    "matrix": rows(4, D, 3) + np.eye(D)[:, :3],
    "square": rows(5, D, D),
}


def sample_rows(n: int, seed: int, weighted: bool) -> SampleRows:
    """Return rows with two targets, which depend on three features."""
    X = rows(seed, n, D)
    Y = np.stack([np.sin(2 * X[:, 0]), X[:, 1] * X[:, 2]], axis=1)
    root = np.random.default_rng(seed).uniform(0, 2, n) if weighted else None
    return SampleRows(X, Y, root)


def squared_distances(A: Array, B: Array) -> Array:
    """Return the squared distances of all pairs."""
    return np.asarray(((A[:, None] - B) ** 2).sum(axis=2))


def held_out_error(
    phi: Callable[[Array], Array], metric: Array, bandwidth: float, log_ridge: float,
    fit: SampleRows, predicted: SampleRows, categorical: CategoricalFeatures = (),
) -> float:  # fmt: skip
    """Return the held-out error by its definition."""
    a, b = ((R.X * metric if metric.ndim == 1 else R.X @ metric) for R in (fit, predicted))
    steps = [sum((w * (R.X[:, None, j] != fit.X[:, j]) for j, w in categorical), np.zeros(()))
             for R in (fit, predicted)]  # fmt: skip
    pairs = zip((a, b), steps, strict=True)
    K, K_others = (phi((squared_distances(u, a) + step) / bandwidth**2) for u, step in pairs)
    w, v = (np.ones(len(R.X)) if R.root is None else R.root**2.0 for R in (fit, predicted))
    # min sum w (f - y)^2 + lam |f|^2 is (W K + lam I) alpha = W Y.
    alpha = np.linalg.solve(w[:, None] * K + np.exp(log_ridge) * np.eye(N), w[:, None] * fit.Y)
    return float((v[:, None] * (K_others @ alpha - predicted.Y) ** 2).sum() / v.sum() / C)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("categorical", [(), ((1, 0.7), (3, 2.0))], ids=["plain", "categorical"])
@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
@pytest.mark.parametrize(("kernel", "phi"), PROFILES.values(), ids=PROFILES)
def test_metric_derivatives_equal_finite_differences(
    kernel: Any, phi: Callable[[Array], Array], metric: Array, categorical: CategoricalFeatures,
    weighted: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(metric_steps, "MAX_RELATIVE_RESIDUAL", np.inf)
    fit, predicted = sample_rows(N, 0, weighted), sample_rows(M, 1, weighted)
    for sample in (fit, predicted):
        for column, _ in categorical:
            sample.X[:, column] = np.rint(sample.X[:, column])
    predicted.X[3] = fit.X[5]  # equal rows, at which some kernels have no derivative
    metric_kernel = kernel(1.7, metric=metric).with_categorical(categorical)
    op = KernelOperator(metric_kernel, Backend(1), "float64", SHIFT)
    actual = error_derivatives(op, fit, predicted, RIDGE)
    assert actual is not None
    h = 1e-6

    def difference(by: Array, by_ridge: float) -> float:
        upper_error, lower_error = (
            held_out_error(
                phi, metric + k * by, 1.7, np.log(RIDGE) + k * by_ridge, fit, predicted, categorical
            )
            for k in (h, -h)
        )
        return (upper_error - lower_error) / (2 * h)

    units = np.eye(metric.size).reshape(metric.size, *metric.shape)
    expected = np.array([difference(unit, 0.0) for unit in units]).reshape(metric.shape)
    np.testing.assert_allclose(actual[0], expected, atol=2e-6 * np.abs(expected).max())
    assert actual[1] == pytest.approx(difference(0 * metric, 1.0), rel=1e-5)


def test_large_residual_is_clipped() -> None:
    """Check that a very distant target does not change the derivatives."""
    fit, predicted = sample_rows(N, 0, False), sample_rows(M, 1, False)
    op = KernelOperator(sk.Laplace(1.7, metric=np.ones(D)), Backend(1), "float64", SHIFT)
    actual = []
    for magnitude in (1e3, 1e6):
        predicted.Y[7] = magnitude
        result = error_derivatives(op, fit, predicted, RIDGE)
        assert result is not None
        actual.append(result[0])
    np.testing.assert_allclose(actual[0], actual[1], rtol=1e-3)


def test_singular_factor_gives_no_slopes() -> None:
    fit = sample_rows(N, 0, False)
    fit.X[1:] = fit.X[0]
    op = KernelOperator(sk.Laplace(1.0, metric=np.ones(D)), Backend(1), "float64", SHIFT)
    assert error_derivatives(op, fit, sample_rows(M, 1, False), 0.0) is None


def model_with(kernel: sk.Kernel) -> HeldOutModel:
    """Return a model from which steps can start: only its kernel and bandwidth are used."""
    op = KernelOperator(kernel, Backend(1), "exact", np.zeros(D))
    none = np.zeros(0)
    return HeldOutModel(1.0, none, none, 0, -2, op, None, None)


def metric_of_steps(model: HeldOutModel, rows: SampleRows, kind: str, seed: int) -> Array | None:
    """Return the metric of the first stage of steps; None if no steps are taken."""
    return next((kernel.metric for kernel, _ in metrics_of_steps(model, rows, kind, seed)), None)


def rows_of_one_direction(weighted: bool = False) -> SampleRows:
    """Return rows whose target depends on one direction."""
    X = np.random.default_rng(0).normal(size=(500, D)).astype(np.float32)
    Y = np.sin(1.5 * X @ np.array([1.0, -1.0, 0.5, 0.0]))[:, None]
    root = np.where(np.arange(500) % 3, 1.0, 0.0).astype(np.float32) if weighted else None
    return SampleRows(X, Y.astype(np.float32), root)


def test_relevant_direction_is_found() -> None:
    A = metric_of_steps(model_with(sk.Laplace(3.0)), rows_of_one_direction(), "", 0)
    assert A is not None
    assert A.shape == (D, D)
    assert np.sum(A**2) == pytest.approx(D)
    U, lam, _ = np.linalg.svd(A)
    assert lam[0] ** 2 > 0.9 * D
    assert abs(U[:, 0] @ np.array([1.0, -1.0, 0.5, 0.0])) / 1.5 > 0.99


def test_diagonal_metric_stays_diagonal() -> None:
    A = metric_of_steps(model_with(sk.Laplace(3.0)), rows_of_one_direction(), "diagonal", 0)
    assert A is not None
    assert A.shape == (D,)
    assert np.abs(A).argmin() == 3


def test_zero_weight_rows_are_ignored() -> None:
    original, changed = rows_of_one_direction(True), rows_of_one_direction(True)
    changed.Y[::3] = 7.0
    actual = [
        metric_of_steps(model_with(sk.Matern32(3.0)), rows_of_sample, "full", 0)
        for rows_of_sample in (original, changed)
    ]
    assert actual[0] is not None
    np.testing.assert_array_equal(actual[0], actual[1])


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_nearly_constant_feature_gains_little_weight(kind: str) -> None:
    """Check that rounding errors of its gradients do not give it a weight."""
    original = rows_of_one_direction()
    X = original.X.astype(np.float64)
    X[:, 3] = 0.7
    metric = np.array([1.0, 1.0, 1.0, 1.0])
    A = metric_of_steps(model_with(sk.Laplace(3.0, metric=metric)), original._replace(X=X), kind, 0)
    assert A is not None
    assert not A[3].any()
    X[5, 3] = 1.0  # varies in one row, which most steps do not contain
    metric[3] = 0.0
    A = metric_of_steps(model_with(sk.Laplace(3.0, metric=metric)), original._replace(X=X), kind, 0)
    assert A is not None
    assert np.sum(A[3] ** 2) < 5e-3 * D


@pytest.mark.parametrize("kernel", [sk.LaplaceL1(2.0), sk.Polynomial(2)])
def test_unsupported_kernels_are_not_stepped(kernel: sk.Kernel) -> None:
    assert metric_of_steps(model_with(kernel), rows_of_one_direction(), "", 0) is None


def test_large_full_metrics_are_not_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_steps, "MAX_FULL_METRIC_FEATURES", D - 1)
    start, few = model_with(sk.Laplace(3.0, metric=rows(1, D, D))), rows_of_one_direction()
    assert metric_of_steps(start, few, "", 0) is None
    assert metric_of_steps(model_with(sk.Laplace(3.0)), few, "full", 0) is None
    scales = metric_of_steps(model_with(sk.Laplace(3.0)), few, "", 0)
    assert scales is not None
    assert scales.shape == (D,)
