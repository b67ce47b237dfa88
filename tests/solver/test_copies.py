"""Compare the correlation of copies of a row with data whose noise is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.estimator.estimators import KernelRegressor
from streamkern.kernels.builtin import Laplace
from streamkern.kernels.products import KernelOperator
from streamkern.solver.copies import (
    COPIES,
    MIN_ROWS_OF_COPIES,
    effective_sample_size,
    intraclass_correlation,
)
from streamkern.stream.materialise import materialise
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.transforms import GaussianNoise


def estimate_correlation(
    own_noise: float, common_noise: float, n: int = 600, weights: bool = False
) -> float:
    """Return the correlation of copies whose targets have noise of these variances."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 4)).astype(np.float32)
    y = np.sin(2 * X[:, :1]) + common_noise * rng.normal(size=(n, 1))
    op = KernelOperator(Laplace(2.5), Backend(threads=1), "exact", np.zeros(4, np.float32), None)

    def copy() -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        near_X = X + 0.02 * rng.normal(size=X.shape)
        noisy = y + own_noise * rng.normal(size=y.shape)
        w = np.ones(n, np.float32) if weights else None
        return near_X.astype(np.float32), noisy.astype(np.float32), w

    return intraclass_correlation(op, (copy() for _ in range(COPIES)))


@pytest.mark.parametrize("weights", [False, True])
def test_intraclass_correlation_reflects_shared_noise(weights: bool) -> None:
    assert estimate_correlation(0.0, 0.5, weights=weights) > 0.7
    assert estimate_correlation(1.0, 0.0, weights=weights) < 0.2
    assert 0.1 < estimate_correlation(0.5, 0.5, weights=weights) < 0.9


def test_too_few_rows_have_zero_correlation() -> None:
    assert estimate_correlation(0.0, 0.5, n=MIN_ROWS_OF_COPIES - 1) == 0


def test_unreached_rows_have_zero_correlation() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(200, 4)).astype(np.float32), np.ones((200, 1), np.float32)
    op = KernelOperator(Laplace(1e-3), Backend(threads=1), "exact", np.zeros(4, np.float32), None)
    assert intraclass_correlation(op, ((X + r, y, None) for r in range(COPIES))) == 0


@given(m=st.integers(1, 1000), copies=st.integers(1, 50), rho=st.floats(0, 1))
def test_effective_sample_size_equals_variance_of_mean(m: int, copies: int, rho: float) -> None:
    noise = np.full((copies, copies), rho) + (1 - rho) * np.eye(copies)  # covariance of the copies
    assert effective_sample_size(m, m * copies, rho) == pytest.approx(m / noise.mean())
    assert m * (1 - 1e-9) <= effective_sample_size(m, m * copies, rho) <= m * copies * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["copies", "epochs", "store"])
def test_copies_of_noisy_targets_keep_ridge_of_rows(kind: str, tmp_path: Path) -> None:
    """Check that copies need the ridge of the rows; as many new rows would need a smaller one."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 4)).astype(np.float32)
    y = np.sin(2 * X[:, 0]) + 0.5 * rng.normal(size=600)
    T = rng.normal(size=(2000, 4)).astype(np.float32)

    def fit(source: ArraySource | AugmentedSource | str, epochs: int) -> tuple[float, float]:
        model = KernelRegressor(
            solver="block", kernel="laplace", bandwidth=2.5, epochs=epochs, n_centers=300,
            random_state=0,
        ).fit(source)  # fmt: skip
        error = np.mean((model.predict(T).ravel() - np.sin(2 * T[:, 0])) ** 2)
        return float(error), model.report_["ridge"]

    copies, epochs = {"copies": (20, 1), "epochs": (1, 20), "store": (20, 1)}[kind]
    source = AugmentedSource(ArraySource(X, y), copies, [GaussianNoise(0.02)])
    if kind == "store":
        materialise(source, tmp_path / "copies.zarr")
    error, ridge = fit(str(tmp_path / "copies.zarr") if kind == "store" else source, epochs)
    plain_error, plain_ridge = fit(ArraySource(X, y), 20)
    assert plain_ridge / 3 < ridge < 3 * plain_ridge
    assert error < 1.1 * plain_error


def test_effective_sample_size_is_bounded_by_sources() -> None:
    """Check a mixture whose epochs are shorter than its sources."""
    assert effective_sample_size(60_000, 1000, 1.0) == pytest.approx(1000)
