"""Check the step rule: its formulas, its bound of the growth of errors, and its eigenvalues."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.solver.precondition.block_factor import LEVERAGE_FRACTION
from streamkern.solver.precondition.step_rule import (
    StepRule,
    fresh_eigenvalue,
    top_eigenvalue,
)
from tests import reference as ref
from tests.solver_problems import Array, rows


@given(st.floats(1e-2, 1e4), st.floats(1e-3, 1e2), st.integers(1, 10**6), st.floats(1e-3, 1.0))
def test_step_rule_equals_reference(leverage: float, lambda_1: float, m: int, scale: float) -> None:
    rule = StepRule(leverage, lambda_1)
    assert rule.eta(m) == pytest.approx(ref.step_size(m, ref.Spectrum(leverage, lambda_1)))
    assert StepRule(leverage, lambda_1, scale).eta(m) == pytest.approx(scale * rule.eta(m))
    assert rule.eta(1) == pytest.approx(1 / leverage)


@given(st.floats(1e-2, 1e4), st.floats(1e-3, 1e2))
def test_step_at_critical_batch_is_half_of_the_limit(leverage: float, lambda_1: float) -> None:
    """Check the formula of eta, which exceeds half of 1 / lambda_1 by lambda_1 / leverage."""
    rule = StepRule(leverage, lambda_1)
    half_limit = 1 / (2 * lambda_1)
    assert rule.eta(rule.critical_batch) / half_limit == pytest.approx(1 + lambda_1 / leverage)


@pytest.mark.parametrize("lambda_1", [0.4, 1.0, 3.0])
def test_weighted_step_at_critical_batch_is_half_of_the_limit(lambda_1: float) -> None:
    rule = StepRule(900.0, lambda_1, damped=True, mean=60.0)
    assert rule.eta(rule.critical_batch) == pytest.approx(rule.eta(10**12) / 2)


@given(st.floats(1e-2, 1e6), st.floats(1e-3, 1e2), st.integers(1, 10**6), st.floats(1e-3, 1.0))
def test_damped_step_is_limited_by_lambda_1_only(
    leverage: float, lambda_1: float, m: int, scale: float
) -> None:
    """Check that the step is at most a Newton step."""
    rule = StepRule(leverage, lambda_1, scale, damped=True)
    assert rule.eta(m) == pytest.approx(scale / max(1, lambda_1))


def growth(phi: Array, share: Array, w: Array, m: int, R: Array) -> tuple[Array, Array]:
    """Return S_w + R and E[(G_w + R)^2], for rows phi (n, d) of weights w with these shares."""
    ell = (phi**2).sum(axis=1)
    S_w = (phi.T * (share * w)) @ phi
    second = (phi.T * (share * w**2 * ell)) @ phi / m + (m - 1) / m * S_w @ S_w
    return S_w + R, second + S_w @ R + R @ S_w + R @ R


GROWTH_CASES: dict[str, Any] = {
    "d": st.integers(1, 6), "n": st.integers(1, 12), "seed": st.integers(0, 10**6),
    "spread": st.floats(0, 4), "m": st.sampled_from([1, 2, 3, 10, 1000]),
    "ridge": st.floats(0, 10),
}  # fmt: skip


def growth_case(
    d: int, n: int, seed: int, spread: float, ridge: float
) -> tuple[Array, Array, Array]:
    """Return rows phi (n, d), their shares (n,), and the Hessian R (d, d) of a ridge."""
    phi = rows(seed, n, d) * np.exp(spread * rows(seed + 1, n, 1))
    share = np.random.default_rng(seed).dirichlet(np.ones(n))
    root = rows(seed + 2, d, d)
    return phi, share, ridge * root @ root.T


def safe_step(phi: Array, share: Array, v: Array, R: Array) -> float:
    """Return 1 / (lambda_1(S_v) + |R|)."""
    return 1 / float(np.linalg.norm((phi.T * (share * v)) @ phi, 2) + np.linalg.norm(R, 2))


def assert_no_growth(
    phi: Array, share: Array, w: Array, m: int, R: Array, eta: float, factor: float,
    tolerance: float,
) -> None:  # fmt: skip
    """Check that factor (S_w + R) - eta E[(G_w + R)^2] has no negative eigenvalue."""
    mean, second_moment = growth(phi, share, w, m, R)
    smallest = np.linalg.eigvalsh(factor * mean - eta * second_moment)[0]
    assert smallest >= -tolerance * max(np.linalg.norm(mean, 2), 1e-300)


@given(**GROWTH_CASES)
def test_leverage_damping_bounds_error_growth(
    d: int, n: int, seed: int, spread: float, m: int, ridge: float
) -> None:
    """Check the theorem of the module for n rows, at eta = 1 / lambda_1(S), for any leverages."""
    phi, share, R = growth_case(d, n, seed, spread, ridge)
    eta = safe_step(phi, share, np.ones(n), R)
    w = 1 / (1 + eta * (phi**2).sum(axis=1) / m)
    assert_no_growth(phi, share, w, m, R, eta, 1, 1e-12)


@given(**GROWTH_CASES, leverage_factor=st.floats(0.75, 10))
def test_leverage_damping_bounds_growth_with_weighted_eigenvalue(
    d: int, n: int, seed: int, spread: float, m: int, ridge: float, leverage_factor: float
) -> None:
    """Check eta = 1 / lambda_1(S_v), with leverages a quarter too small, or too large."""
    phi, share, R = growth_case(d, n, seed, spread, ridge)
    ell = (phi**2).sum(axis=1)
    eta = safe_step(phi, share, np.ones(n), R)
    for k in range(50):  # from a step that is too short
        eta = safe_step(phi, share, 1 / (1 + LEVERAGE_FRACTION * eta * ell / m), R)
        if k in (0, 49):
            w = 1 / (1 + eta * leverage_factor * ell / m)
            assert_no_growth(phi, share, w, m, R, eta, 2, 1e-9)


def matrix_with_spectrum(values: Array, seed: int) -> Array:
    """Return a symmetric matrix of these eigenvalues in a random basis."""
    n = len(values)
    Q, _ = np.linalg.qr(rows(seed, n, n))
    return np.asarray((Q * values) @ Q.T)


@settings(max_examples=40)
@given(
    n=st.integers(1, 60),
    seed=st.integers(0, 10**6),
    decay=st.floats(0.0, 4.0),
    n_steps=st.sampled_from([8, 32, 100]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_top_eigenvalue_is_an_upper_estimate(
    n: int, seed: int, decay: float, n_steps: int, dtype: Any
) -> None:
    A = matrix_with_spectrum(3.0 * np.arange(1.0, n + 1) ** -decay, seed).astype(dtype)
    start = rows(seed + 1, n).astype(dtype)
    values, vectors = np.linalg.eigh(A.astype(np.float64))
    # A start that is orthogonal to the top eigenvector cannot find it; this has probability 0.
    assume(abs(vectors[:, -1] @ start) > 1e-2 * np.linalg.norm(start))
    value, truth = top_eigenvalue(Backend(1), lambda v: A @ v, start, n_steps), float(values[-1])
    rounding = 50 * float(np.finfo(dtype).eps)
    assert value >= truth * (1 - rounding) - (0.0 if n_steps >= 32 else 0.05 * truth)
    # After n steps the Krylov space is the whole space; before, the residual is added.
    assert value <= truth * (1 + (rounding + 2e-6 if n_steps >= n else 0.5))


@pytest.mark.parametrize(
    "values",
    [
        np.r_[5.0, np.zeros(79)],
        np.r_[np.full(3, 5.0), np.full(77, 1e-8)],
        np.r_[5.0, 5.0 - 1e-9, np.full(78, 4.999)],
        np.full(80, 5.0),
        np.r_[5.0 * np.exp(-np.arange(80.0))],
        5.0 - 4.0 * np.linspace(0, 1, 80) ** 2,
    ],
    ids=["rank 1", "rank 3", "nearly equal pair", "identity", "exponential", "dense at the top"],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_top_eigenvalue_of_difficult_spectra_is_accurate(values: Array, dtype: Any) -> None:
    A = matrix_with_spectrum(values, 0).astype(dtype)
    value = top_eigenvalue(Backend(1), lambda v: A @ v, rows(1, 80).astype(dtype), 32)
    assert 5.0 * (1 - 20 * float(np.finfo(dtype).eps)) <= value <= 5.0 * 1.05


def test_top_eigenvalue_of_zero_matrix_is_zero() -> None:
    for n in (1, 10):
        assert top_eigenvalue(Backend(1), np.zeros_like, rows(0, n), 32) == 0.0


@pytest.mark.parametrize("spike", [1.0, 1.5, 3.0, 10.0])
def test_fresh_eigenvalue_excludes_sampling_noise(spike: float) -> None:
    """Check 400 rows of white noise, whose sample covariance has a top eigenvalue near 4."""
    for seed in range(5):
        phi = rows(10 * seed, 400, 400)
        phi[0] *= spike**0.5
        largest, start = float((phi**2).sum(axis=0).max()), rows(seed + 100, 400)
        estimate = fresh_eigenvalue(Backend(1), phi, largest, start)
        # Steps would be unsafe below half of the true eigenvalue.
        assert spike / 1.7 < estimate < 1.5 * max(spike, 1.7)
        assert (
            top_eigenvalue(Backend(1), lambda v, phi=phi: phi @ (phi.T @ v) / 400, start, 32) > 3.7
        )


@pytest.mark.parametrize("row", [3, 350])
def test_fresh_eigenvalue_keeps_direction_of_one_half(row: int) -> None:
    """Check one row far from all others, in either half."""
    phi = np.where(rows(1, 100, 400) > 1, 0.1, 0.0)
    phi[0], phi[0, row] = 0.0, 100.0
    estimate = fresh_eigenvalue(Backend(1), phi, 1e4, rows(2, 100))
    assert estimate >= 1e4 / 400


@pytest.mark.parametrize("h", [1, 2, 3])
def test_fresh_eigenvalue_of_few_rows_is_finite(h: int) -> None:
    for b in (1, 2, 5):
        phi = rows(h, b, h)
        largest = float((phi**2).sum(axis=0).max())
        assert largest / h <= fresh_eigenvalue(Backend(1), phi, largest, rows(9, b)) < np.inf
