"""Compare the errors of ridges from one factor with float64 algebra."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.basics.array_types import Floats
from streamkern.solver.precondition.noise import MAX_NOISE_EXPONENT, NO_NOISE, find_noise
from streamkern.solver.precondition.samples import SampleRows
from streamkern.solver.ridge_curve import (
    RIDGE_TIE,
    SEED,
    combine_outputs,
    conditional_variances,
    cross_validation_errors,
    errors_of_taus,
    known_rows,
    largest_near_optimal,
    noise_of_more_rows,
    noise_rows,
    sorted_rows,
    taus_near,
)
from tests import reference as ref
from tests import solver_problems

N = 150


def exact(K: Floats, Y: Floats, has_weight: Floats, tau: float) -> float:
    """Return the mean squared leave-one-out error from an inverse."""
    weighted = np.flatnonzero(has_weight)
    inverse = np.linalg.inv(K[np.ix_(weighted, weighted)] + tau * np.eye(len(weighted)))
    residuals = inverse @ Y[weighted] / inverse.diagonal()[:, None]
    return float((residuals**2).sum() / len(weighted))


def cross_validation(K: Floats, Y: Floats, has_weight: Floats, tau: float) -> float:
    """Return generalised cross-validation from an inverse."""
    weighted = np.flatnonzero(has_weight)
    inverse = np.linalg.inv(K[np.ix_(weighted, weighted)] + tau * np.eye(len(weighted)))
    return float(len(weighted) * ((inverse @ Y[weighted]) ** 2).sum() / np.trace(inverse) ** 2)


def approximate_errors(
    K: Floats, Y: Floats, counted: Floats, tau: float, taus: Floats, *,
    dtype: type[np.floating] = np.float64, leaves_rows_out: bool = True,
) -> Floats:  # fmt: skip
    """Return the errors of `taus` from a factor for `tau`, for rows with a weight of 0 or 1."""
    A, backend, known = K + np.diag(tau + (counted == 0)), Backend(1), known_rows(len(K))

    def invert(v: Floats) -> Floats:
        return np.linalg.solve(A.astype(dtype), v.astype(dtype)).astype(np.float64)

    if not leaves_rows_out:
        return cross_validation_errors(backend, invert, Y, counted > 0, tau, taus)
    variances = conditional_variances(backend, K[:, known], K.diagonal(), known, tau)
    Y = combine_outputs(backend, Y, np.random.default_rng(SEED))
    rows = sorted_rows(backend, variances, (invert(Y) ** 2).sum(axis=1), counted > 0)
    return errors_of_taus(backend, invert, Y, rows, tau, taus)


@pytest.mark.slow
@given(
    seed=st.integers(0, 39), c=st.sampled_from([1, 3, 20]),
    tau=st.sampled_from([1e-3, 0.1, 10.0]),
    dtype=st.sampled_from([np.float32, np.float64]),
    leaves_rows_out=st.booleans(),
)  # fmt: skip
def test_errors_of_all_ridges_equal_refits(
    seed: int, c: int, tau: float, dtype: type[np.floating], leaves_rows_out: bool
) -> None:
    """Check rows without weight, estimated diagonal entries, and a combination of 20 outputs."""
    rng = np.random.default_rng(seed)
    X, Y = rng.normal(size=(N, 3)), rng.normal(size=(N, c))
    counted = (rng.random(N) < 0.9).astype(float)
    K, Y = ref.laplace(X, X, 2.0) * np.outer(counted, counted), Y * counted[:, None]
    ridges = taus_near(tau, 0.0)
    errors = approximate_errors(
        K, Y, counted, tau, ridges, dtype=dtype, leaves_rows_out=leaves_rows_out
    )
    truth = exact if leaves_rows_out else cross_validation
    expected = np.array([truth(K, Y, counted, ridge) for ridge in ridges])
    # Estimates of so few rows are rough, but alike for all ridges. Forty seeds had ranges of up to
    # .29 (leave-one-out) and .26, and logarithms of up to .30 and .34.
    ratios = errors / expected
    assert np.ptp(ratios) / ratios.mean() < 0.4
    assert abs(np.log(ratios.mean())) < np.log(1.5)


@pytest.mark.parametrize("seed", range(5))
def test_isolated_rows_count_in_errors(seed: int) -> None:
    """Check the ridge of a Gaussian kernel for a dense and a wide class in 20 dimensions.

    The dense class hides the errors of the wide class from generalised cross-validation.
    """
    rng = np.random.default_rng(seed)
    wide = rng.random(600) < 0.5
    X = rng.normal(size=(600, 20)) * np.where(wide, 2.0, 1.0)[:, None]
    X[~wide] += 2 / np.sqrt(20)
    X, Y = X / X.std(axis=0), np.where(wide, 1.0, -1.0)[:, None]
    K = ref.gaussian(X, X, 6.0)
    ones, taus = np.ones(len(X)), 1e-3 * 10 ** np.linspace(-1.5, 1.5, 13)
    expected = np.array([exact(K, Y, ones, tau) for tau in taus])
    errors = approximate_errors(K, Y, ones, 1e-3, taus)
    assert expected[errors.argmin()] <= 1.05 * expected.min()
    misled = approximate_errors(K, Y, ones, 1e-3, taus, leaves_rows_out=False)
    assert expected[misled.argmin()] > 1.5 * expected.min()


@pytest.mark.parametrize("seed", range(4))
def test_few_isolated_rows_count_in_errors(seed: int) -> None:
    """Check the ridge of a smooth function, where the most isolated rows have most of the error."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(600, 5))
    y = np.sin(2 * X[:, :1]) + X[:, 1:2] * X[:, 2:3] + 0.01 * rng.normal(size=(600, 1))
    K, ones = ref.gaussian(X, X, 3.0), np.ones(600)
    taus = 1e-3 * 10 ** np.linspace(-1.5, 1.5, 13)
    expected = np.array([exact(K, y, ones, tau) for tau in taus])
    errors = approximate_errors(K, y, ones, 1e-3, taus)
    assert expected[errors.argmin()] <= 1.1 * expected.min()


@pytest.mark.parametrize("seed", range(5))
def test_errors_of_heavy_tails_equal_refits(seed: int) -> None:
    """Check features and targets of which a few large values dominate the mean error."""
    rng = np.random.default_rng(seed)
    X = rng.standard_t(2, size=(500, 3))
    Y = (X[:, :1] ** 2 + rng.standard_t(2, size=(500, 1))) / 10
    K, ones, taus = ref.matern32(X, X, 4.0), np.ones(500), taus_near(0.1, 0.0)
    expected = np.array([exact(K, Y, ones, tau) for tau in taus])
    errors = approximate_errors(K, Y, ones, 0.1, taus)
    assert expected[errors.argmin()] <= 1.05 * expected.min()
    np.testing.assert_allclose(errors, expected, rtol=0.1)


def test_cross_validation_has_recorded_errors() -> None:
    """Check the errors of 20 outputs, as a run begun by an earlier version must keep its ridge.

    The earlier version computed the recorded numbers.
    """
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(N, 3)), rng.normal(size=(N, 20))
    taus = taus_near(0.1, 0.0)[::4]
    errors = approximate_errors(
        ref.laplace(X, X, 2.0), Y, np.ones(N), 0.1, taus, leaves_rows_out=False
    )
    recorded = [29.27105689, 27.118769902, 22.821751357, 21.056909251]
    np.testing.assert_allclose(errors, recorded, rtol=1e-9)


def test_ridges_near_surround_the_given_ridge() -> None:
    ridges = taus_near(1e-3, 0.0)
    assert ridges[0] == pytest.approx(1e-3 / 10**1.5)
    assert ridges[-1] == pytest.approx(1e-3 * 10**1.5)
    assert 1e-3 in ridges
    assert taus_near(1e-3, 1e-4)[0] >= 1e-4
    assert taus_near(1e-3, 1.0)[0] == 1e-3  # a ridge below the rounding is kept or raised


def test_largest_good_ridge_is_chosen() -> None:
    ridges = np.array([1.0, 2.0, 3.0, 4.0])
    assert largest_near_optimal(ridges, np.array([1.0, 1.0, 1 + RIDGE_TIE / 2, 1.2])) == 3.0
    assert largest_near_optimal(ridges, np.array([3.0, 1.0, 1.2, 1.2])) == 2.0


def test_noise_rows_increase_with_centers() -> None:
    problem = solver_problems.problem_of(solver_problems.rows(0, 9000, 3), 1, cycled=9000)
    for p, n in ((10, 1024), (3072, 1024), (6000, 2000), (10**6, 4096)):
        assert noise_rows(solver_problems.replace(problem, p=p)) == n
        assert noise_rows(solver_problems.replace(problem, p=p, squares=False)) == 1024
    assert noise_rows(solver_problems.replace(problem, p=9000, n_rows=50)) == 50


@pytest.mark.parametrize("weighted", [False, True])
def test_noise_of_more_rows_has_least_loo_error(weighted: bool) -> None:
    """Check about the least error, also from a distant noise of few rows."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(400, 2))
    y = np.sin(3 * X[:, :1]) + 0.1 * rng.normal(size=(400, 1))
    root = rng.uniform(0.5, 2, 400) if weighted else None
    rows, op = SampleRows(X, y, root), solver_problems.operator(precision="float64")
    exact = find_noise(op, None, rows)
    K = ref.laplace(X, X, 2.0)
    w = np.ones(400) if root is None else root
    A, b = K * np.outer(w, w), y * w[:, None]

    def left_out_error(tau: float) -> float:
        inverse = np.linalg.inv(A + tau * np.eye(400))
        return float(((inverse @ b / inverse.diagonal()[:, None]) ** 2).sum())

    smallest_error = min(map(left_out_error, np.geomspace(1e-6, 10, 60)))
    for factor in (0.01, 1.0, 100.0):
        few_rows_noise = dataclasses.replace(exact, variance=factor * exact.variance, n_rows=50)
        estimate = noise_of_more_rows(op, None, rows, few_rows_noise)
        assert estimate.n_rows == 400
        assert left_out_error(estimate.variance) <= 1.05 * smallest_error
    nothing = dataclasses.replace(exact, exponent=MAX_NOISE_EXPONENT)
    for noise in (NO_NOISE, nothing):
        assert noise_of_more_rows(op, None, rows, noise) is noise
    twice = SampleRows(np.repeat(X[:200], 2, axis=0), np.repeat(y[:200], 2, axis=0))
    no_factor = dataclasses.replace(exact, variance=1e-300)
    assert noise_of_more_rows(op, None, twice, no_factor) is no_factor
