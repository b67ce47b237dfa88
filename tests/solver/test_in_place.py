"""Check SGD and EigenPro 1 on all training rows against the papers' iterations in a few lines."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg

import streamkern as sk
from streamkern.backend.batch import Batch
from streamkern.solver.precondition.low_rank import build_extended_low_rank
from tests import reference as ref
from tests.plans import solver_settings
from tests.runs import METHODS, array_source, arrays, brute_force, finished, settings
from tests.solver_problems import (
    Case,
    both,
    close,
    computed,
    make_case,
    operator,
    rows,
    small_sizes,
)

KERNEL = ref.make_kernel("laplace", 2.0)


def exact_case(name: str, n: int = 120, bandwidth: float = 2.0, **options: float) -> Case:
    """Return a case with every row in the sample and in the probe.

    Nystrom's extension is then exact, and the step safe.
    """
    op, X, Y = operator(bandwidth=bandwidth), rows(0, n, 3), rows(3, n, 2)
    sizes = small_sizes(solver=name, level=12, n_sample=n, n_probe=n)
    case_options = solver_settings(average=False, **options)
    setup = computed(op, X, X, X, sizes, case_options)
    return Case(op, sizes, case_options, X, Y, X, X, X, setup, np.arange(n))


@pytest.mark.parametrize("ridge", [0.0, 0.05])
def test_sgd_equals_three_line_reference(ridge: float) -> None:
    case = make_case(operator(), "sgd", options=solver_settings(ridge=ridge))
    solver, alpha = case.solver(), np.zeros((240, 2))
    state, average = solver.init(), np.zeros((240, 2))
    K = KERNEL(case.X, case.X)
    for t in range(20):
        batch = case.batch(t)
        eta = solver.rules()[0].eta(len(batch))
        g = K[batch] @ alpha - case.Y[batch]
        alpha *= 1 - eta * ridge
        alpha[batch] -= eta / len(batch) * g
        average = ref.running_average(average, alpha, t + 1)
        assert case.step(solver, state, t) == pytest.approx((g**2).sum() / len(batch), rel=1e-9)
        close(state.alpha, alpha)
        close(state.average, average)


def test_sgd_step_size_equals_kernel_bound() -> None:
    """Check that the bound is exact on all rows; a ridge counts as signal and as noise."""
    case = exact_case("sgd")
    top = np.linalg.eigvalsh(KERNEL(case.X, case.X) / len(case.X))[-1]
    [rule] = case.solver().rules()
    assert rule.leverage == pytest.approx(1)
    assert top * (1 - 1e-10) <= rule.lambda_1 <= 1.01 * top
    [damped] = exact_case("sgd", ridge=0.2).solver().rules()
    assert damped.lambda_1 == pytest.approx(rule.lambda_1 + 0.2)
    assert damped.leverage == pytest.approx(1 + damped.lambda_1)


@pytest.mark.parametrize("tau", [1.0, 0.25])
def test_eigenpro1_equals_published_iteration(tau: float) -> None:
    """Check alpha -= eta P (K alpha - y) for P = I - sum (1 - tau lam_q+1 / lam_i) e_i e_i^T.

    With the exact eigenvectors e_i of K, which the sample of all rows gives.
    """
    case = exact_case("eigenpro1", damping=tau)
    n, q = len(case.X), case.setup.meta["level"]
    K = KERNEL(case.X, case.X)
    lam, e = (part[..., ::-1] for part in np.linalg.eigh(K))
    P = np.eye(n) - (e[:, :q] * (1 - tau * lam[q] / lam[:q])) @ e[:, :q].T
    solver, alpha = case.solver(), np.zeros((n, 2))
    state = solver.init()
    assert solver.name == "eigenpro1"
    for t in range(15):
        batch = case.batch(t)
        g = np.zeros((n, 2))
        g[batch] = K[batch] @ alpha - case.Y[batch]
        alpha -= solver.rules()[0].eta(len(batch)) / len(batch) * P @ g
        case.step(solver, state, t)
        close(state.alpha, alpha, 1e-8)


def test_eigenpro1_from_a_sample_interpolates() -> None:
    op = operator(bandwidth=0.5)
    X, sample = rows(0, 240, 3), np.arange(0, 240, 4)
    case = make_case(op, "eigenpro1", batch_size=60)
    assert case.m == 60  # not cut to the critical batch
    solver = case.solver()
    state = solver.init()
    for epoch in range(200):
        order = np.random.default_rng([1, epoch]).permutation(240)
        for batch in np.split(order, 4):
            solver.step(state, Batch(X[batch], case.Y[batch], batch))
    K = ref.laplace(X, X, 0.5)
    close(K @ state.alpha, case.Y, 1e-6)
    assert len(sample) == len(case.X_s)


@pytest.mark.parametrize("s", [14, 40, 240])
def test_extended_eigenfunctions_are_orthonormal(s: int) -> None:
    """Check that they span Nystrom's extension, are orthonormal, and have the Ritz values lam_i."""
    op, X = operator(), rows(0, 240, 3)
    P = build_extended_low_rank(op, both(op, X), both(op, X[:s]), both(op, X), level=12)
    q = P.E.shape[1]
    K, n = KERNEL(X, X), len(X)
    np.testing.assert_allclose(P.E.T @ K @ P.E, np.eye(q), atol=1e-9)
    # The covariance in the span of the extension, by a Cholesky factor instead.
    lam, e = (part[..., ::-1] for part in np.linalg.eigh(K[:s, :s] / s))
    A = K[:, :s] @ e[:, : q + 1]
    L = np.linalg.cholesky(A.T @ K @ A)
    F = scipy.linalg.solve_triangular(L, (K @ A).T, lower=True)
    ritz = np.linalg.eigvalsh(F @ F.T / n)[::-1]
    close(P.D, 1 - ritz[-1] / ritz[:-1], 1e-7)
    close(np.sort(((K @ P.E) ** 2).sum(axis=0) / n)[::-1], ritz[:-1], 1e-7)
    # P = I - sum D psi psi^T has no eigenvalue below the damping that was asked for.
    root = scipy.linalg.sqrtm(K).real
    full = np.eye(n) - root @ P.E * P.D @ P.E.T @ root
    assert np.linalg.eigvalsh(full)[0] > 0
    # Closer to the eigenvalues of all rows than those of the sample alone.
    truth = np.linalg.eigvalsh(K / n)[::-1][:q]
    if s < n:
        assert np.abs(ritz[:-1] - truth).sum() < np.abs(lam[:q] - truth).sum()


def test_eigenpro1_step_size_is_measured() -> None:
    case = exact_case("eigenpro1")
    K, n = KERNEL(case.X, case.X), len(case.X)
    Q = K @ case.setup.arrays["E"]
    K_P = K - Q * case.setup.arrays["D"] @ Q.T
    [rule] = case.solver().rules()
    assert rule.leverage == pytest.approx(K_P.diagonal().max())
    top = np.linalg.eigvalsh(K_P / n)[-1]
    assert top * (1 - 1e-10) <= rule.lambda_1 <= 1.01 * top


@pytest.mark.parametrize("seed", range(6))
def test_eigenpro1_excludes_functions_at_rounding_level(seed: int) -> None:
    """Check a smooth kernel in float32, for which steps chosen by float64 eigenvalues diverged."""
    X = np.random.default_rng(0).standard_normal((60, 3)).astype(np.float32)
    model = sk.KernelRegressor(
        kernel="gaussian", bandwidth=2.0, solver="eigenpro1", epochs=1, random_state=seed,
    ).fit(X, np.sin(X[:, 0]))  # fmt: skip
    assert model.loss_curve_[-1] < 1


def test_sgd_run_converges_to_kernel_ridge() -> None:
    """Check the path from settings to the model, in float32 and with averaging."""
    overrides = {"solver.ridge": 0.05, "data.epochs": 300, "data.batch_size": 135}
    result = finished(settings(**METHODS["sgd"], **overrides), source=array_source())
    X, y = arrays()
    K, Y = ref.laplace(np.float64(X), np.float64(X), 3.0), np.eye(3)[y]
    mean = Y.mean(axis=0)
    exact = np.linalg.solve(K + 135 * 0.05 * np.eye(135), Y - mean)
    close(brute_force(result, X), mean + K @ exact, 1e-3)
