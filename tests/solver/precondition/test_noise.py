"""Compare the estimated noise of targets with fits without each row, and with known noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from streamkern.backend.devices import get_backend
from streamkern.kernels.builtin import get_kernel
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.noise import (
    FIRST_NOISE_EXPONENT,
    MAX_GROWTH_ROW_RATIO,
    MAX_NOISE_EXPONENT,
    NOISE_ROWS,
    Noise,
    distinct_origins,
    find_noise,
    left_out_values,
    mean_difference_in_se,
    or_the_mean,
    row_errors,
)
from streamkern.solver.precondition.samples import MIN_REPEATS_PER_ROW, SampleRows, merge_equal_rows


@contextmanager
def prepare_rows(
    X: np.ndarray, Y: np.ndarray, w: np.ndarray | None, bandwidth: float = 2
) -> Iterator[tuple[KernelOperator, Points, SampleRows]]:
    """Yield an operator, a point, and the rows with equal ones merged."""
    with get_backend("cpu", 1, "none") as backend:
        kernel = get_kernel({"kernel": "laplace", "bandwidth": bandwidth})
        op = KernelOperator(kernel, backend, "float64")
        Z = op.points(X[:1], left=True, right=True)
        yield op, Z, merge_equal_rows(backend, SampleRows(X, Y, None if w is None else np.sqrt(w)))


def estimate(
    X: np.ndarray, Y: np.ndarray, w: np.ndarray | None = None, bandwidth: float = 2,
    min_penalty: float = 0.0,
) -> Noise:  # fmt: skip
    """Return the noise of targets Y (n, c) at the rows X (n, d)."""
    with prepare_rows(X, Y, w, bandwidth) as (op, Z, rows):
        return find_noise(op, Z, rows, min_penalty=min_penalty)


def kernel_matrix(X: np.ndarray, bandwidth: float = 2) -> np.ndarray:
    """Return the Laplace kernel matrix (n, n) of the rows."""
    distances = np.sqrt(((X[:, None] - X[None]) ** 2).sum(axis=2))
    return np.exp(-distances / bandwidth)


def squares_without_each_row(
    X: np.ndarray, Y: np.ndarray, w: np.ndarray, kappa: float
) -> np.ndarray:
    """Return (n,) weighted squared errors of rows, each by a fit to all others."""
    K, squares = kernel_matrix(X), []
    for i in range(len(X)):
        fitted = np.delete(np.arange(len(X)), i)
        noise = np.diag(kappa / w[fitted])
        f = K[i, fitted] @ np.linalg.solve(K[np.ix_(fitted, fitted)] + noise, Y[fitted])
        squares.append(w[i] * ((Y[i] - f) ** 2).sum())
    return np.array(squares)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("distinct", "rel"), [(40, 1e-8), (9, 1e-6)])
def test_loo_error_equals_refits_without_each_row(
    distinct: int, rel: float, weighted: bool
) -> None:
    """Check all rows before merging; equal rows predict each other, and round more."""
    rng = np.random.default_rng(4)
    index = rng.integers(0, distinct, 40) if distinct < 40 else np.arange(40)
    X = rng.standard_normal((distinct, 3))[index]
    Y = rng.standard_normal((40, 2)) + X[:, :1] * (distinct < 40)
    w = rng.uniform(0.2, 3, 40) if weighted else np.ones(40)
    with prepare_rows(X, Y, w if weighted else None) as (op, Z, rows):
        noise = find_noise(op, Z, rows)
        errors, zero_errors, _ = row_errors(op, Z, rows, noise)
    assert len(noise.trials) >= 3
    squares = {kappa: squares_without_each_row(X, Y, w, kappa) for kappa, _ in noise.trials}
    for kappa, error in noise.trials:
        assert error == pytest.approx(squares[kappa].mean(), rel=rel), kappa
    np.testing.assert_allclose(errors, squares[noise.kappa_of_least_error], rtol=1e-6)
    np.testing.assert_allclose(zero_errors, w * (Y**2).sum(axis=1), rtol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_compressed_outputs_give_same_noise(weighted: bool) -> None:
    """Check more than twice as many outputs as rows, which are compressed."""
    rng = np.random.default_rng(1)
    X, Y = rng.standard_normal((30, 3)), rng.standard_normal((30, 100))
    w = rng.uniform(0.2, 3, 30) if weighted else None
    all_outputs, parts = estimate(X, Y, w), [estimate(X, Y[:, k : k + 50], w) for k in (0, 50)]
    for kappa, error in all_outputs.trials:
        expected = [dict(part.trials)[kappa] for part in parts if kappa in dict(part.trials)]
        if len(expected) == 2:
            assert error == pytest.approx(sum(expected), rel=1e-9)
    assert len(all_outputs.trials) >= 3


@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_noise_of_gaussian_process_is_estimated(noise: float) -> None:
    """Check a factor of 1.6: powers of ten are tried, and a parabola refines the best."""
    rng = np.random.default_rng(1)
    X = rng.standard_normal((600, 2))
    f = np.linalg.cholesky(kernel_matrix(X) + 1e-10 * np.eye(600)) @ rng.standard_normal((600, 4))
    variance = estimate(X, f + math.sqrt(noise) * rng.standard_normal(f.shape)).variance
    assert noise / 1.6 < variance < noise * 1.6


def test_noise_free_targets_give_largest_harmless_noise() -> None:
    X = np.random.default_rng(2).standard_normal((300, 2))
    noise = estimate(X, np.abs(X[:, :1]))
    smallest_error = min(error for _, error in noise.trials)
    harmless = [kappa for kappa, error in noise.trials if error <= 1.001 * smallest_error]
    assert (noise.variance, noise.grows) == (max(harmless), False)
    assert noise.variance < 1e-2
    assert noise.penalty(1e6) == noise.variance / 1e6


@pytest.mark.parametrize("min_penalty", [1e-12, 1e-5, 1e-2, 1e9])
def test_minimum_penalty_bounds_search(min_penalty: float) -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((200, 2))
    Y = X.sum(axis=1, keepdims=True)
    without_minimum = estimate(X, Y, bandwidth=20)
    with_minimum = estimate(X, Y, bandwidth=20, min_penalty=min_penalty)
    # k(x, x) is 1; powers of ten are tried, and none above a million
    assert min(kappa for kappa, _ in with_minimum.trials) >= min(200 * min_penalty / 10**0.5, 1e6)
    assert with_minimum.error >= without_minimum.error
    if min_penalty <= 1e-12:
        assert dict(without_minimum.trials).items() <= dict(with_minimum.trials).items()
    assert (with_minimum.error > 1.2 * without_minimum.error) == (min_penalty > 1e-5)


def test_pure_noise_is_smoothed_away() -> None:
    rng = np.random.default_rng(3)
    assert estimate(rng.standard_normal((300, 2)), rng.standard_normal((300, 1))).variance > 1


def test_noise_of_too_few_rows_is_the_default() -> None:
    assert estimate(np.zeros((1, 2)), np.ones((1, 1))).variance == 10.0**FIRST_NOISE_EXPONENT


@pytest.mark.parametrize("weighted", [False, True])
def test_loo_values_equal_refits_without_each_row(weighted: bool) -> None:
    rng = np.random.default_rng(7)
    X = rng.standard_normal((30, 3))
    Y = rng.standard_normal((30, 2)) + X[:, :1]
    w = rng.uniform(0.2, 3, 30) if weighted else np.ones(30)
    with prepare_rows(X, Y, w if weighted else None) as (op, Z, rows):
        noise = find_noise(op, Z, rows)
        values = left_out_values(op, Z, rows, noise)
    kappa, K = noise.kappa_of_least_error, kernel_matrix(X)
    for i in range(30):
        fitted = np.arange(30) != i
        alpha = np.linalg.solve(K[fitted][:, fitted] + kappa * np.diag(1 / w[fitted]), Y[fitted])
        np.testing.assert_allclose(values[i], K[i, fitted] @ alpha, rtol=1e-6, atol=1e-9)


def test_two_large_targets_do_not_determine_noise() -> None:
    """Check that the mean is predicted if the model is better on two rows and worse on 38.

    The seed gives such heavy-tailed targets.
    """
    rng = np.random.default_rng([39, 5])
    X = rng.standard_t(1.5, (1000, 4))
    y = np.exp(np.tanh(X[:, 0]) + rng.normal(size=1000))
    X, Y = X[:40] / X[:40].std(axis=0), (y - y[:40].mean())[:40, None]
    with prepare_rows(X, Y, None, bandwidth=1.7) as (op, Z, rows):
        noise = find_noise(op, Z, rows)
        assert noise.variance < 1
        assert or_the_mean(op, Z, rows, noise).variance == pytest.approx(10.0**MAX_NOISE_EXPONENT)
        learnable_rows = rows._replace(Y=X[:, :1])
        learnable = find_noise(op, Z, learnable_rows)
        assert or_the_mean(op, Z, learnable_rows, learnable) is learnable


def test_mean_difference_in_se_equals_paired_t_statistic() -> None:
    a, b = np.random.default_rng(8).exponential(size=(2, 50))
    assert mean_difference_in_se(a, b) == pytest.approx(ttest_rel(a, b).statistic)
    assert mean_difference_in_se(a, a) == 0


# -- equal rows and copies -----------------------------------------------------------------------


@pytest.mark.parametrize("words", [2, 3, 8, 40])
@pytest.mark.parametrize("scatter", [0.0, 0.3])
def test_unrelated_words_keep_their_mean_targets(words: int, scatter: float) -> None:
    """Check words that do not predict each other, for which every noise has the same error."""
    rng = np.random.default_rng(words)
    word = rng.permutation(np.arange(words * 24) % words)
    Y = (rng.standard_normal(words)[word] + scatter * rng.standard_normal(len(word)))[:, None]
    noise = estimate(np.eye(words)[word], Y)
    # Each word has 24 rows. Ridge regression keeps this share of its mean's distance to the mean.
    kept_share = 24 / (24 + noise.variance)
    assert kept_share > 0.9 / (1 + scatter**2 / 24)


def test_scatter_of_equal_rows_bounds_noise() -> None:
    """Check 499 equal rows with noise of variance 1, and another row with the target 50.

    With this estimate, ridge regression predicts more than 40 for the other row.
    """
    rng = np.random.default_rng(0)
    X, Y = np.zeros((500, 3)), rng.standard_normal((500, 1))
    X[7], Y[7] = [1, 2, 3], 50
    noise = estimate(X, Y, bandwidth=1)
    assert 50 / (1 + noise.variance) > 40


def test_copies_differ_from_repeated_measurements() -> None:
    rng = np.random.default_rng(5)
    X = rng.standard_normal((50, 2))
    Y = X[:, :1] + rng.standard_normal((50, 1))

    def may_be_copies(X: np.ndarray, Y: np.ndarray) -> bool:
        with get_backend("cpu", 1, "none") as backend:
            repeats = merge_equal_rows(backend, SampleRows(X, Y)).repeats
        assert repeats is not None
        return repeats.may_be_copies()

    assert may_be_copies(np.repeat(X, 6, axis=0), np.repeat(Y, 6, axis=0))
    assert not may_be_copies(np.repeat(X, 6, axis=0), rng.standard_normal((300, 1)))
    assert not may_be_copies(
        np.repeat(X, MIN_REPEATS_PER_ROW, axis=0), np.repeat(Y, MIN_REPEATS_PER_ROW, axis=0)
    )


@given(st.integers(1, 50), st.lists(st.integers(0, 400), min_size=1, max_size=60, unique=True))
def test_copies_of_a_stored_row_are_used_once(n_stored: int, numbers: list[int]) -> None:
    rows = np.array(numbers)
    index = distinct_origins(rows % n_stored)
    origins = rows[index] % n_stored
    assert len(set(origins.tolist())) == len(origins) == len({k % n_stored for k in numbers})
    assert (np.diff(index) > 0).all()


def test_at_most_1024_rows_are_used() -> None:
    assert len(distinct_origins(np.arange(5000))) == NOISE_ROWS == 1024


def test_penalty_decreases_with_rows() -> None:
    """Check that it falls like 1 / sqrt(n) at first, and then like 1 / n."""
    noise = Noise(0.5, 1000)
    assert noise.penalty(500) == 0.5 / 500
    assert noise.penalty(4000) == pytest.approx(2 * 0.5 / 4000)
    assert noise.penalty(1e8) == pytest.approx(math.sqrt(MAX_GROWTH_ROW_RATIO) * 0.5 / 1e8)
    assert Noise().penalty(10) == 0
