"""Compare residual scales with refits without each row, and with known noise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from scipy.spatial.distance import cdist

from streamkern.predict.calibration import Calibration, Intervals
from streamkern.predict.evaluation import CalibratedFigures
from streamkern.predict.residual_scale import (
    SCALE_FLOOR,
    SCALE_RIDGES,
    ResidualScale,
    fit_residual_scale,
)

rng = np.random.default_rng(0)
Floats = npt.NDArray[np.float64]


def laplace_kernel(A: Floats, B: Floats, width: float = 2.0) -> Floats:
    """Return the kernel values exp(-distance / width) between two sets of points."""
    K: Floats = np.exp(-cdist(A, B) / width)
    return K


def by_refits(K: Floats, logs: Floats, w: Floats) -> tuple[Floats, float]:
    """Return the leave-one-out values of rows (q,), and the ridge with the lowest error, by
    refits."""
    values_by_ridge = {}
    for ridge in SCALE_RIDGES:
        estimated = np.empty(len(logs))
        for i in range(len(logs)):
            is_other_row = np.arange(len(logs)) != i
            A = K[np.ix_(is_other_row, is_other_row)] + ridge * np.diag(1 / w[is_other_row])
            estimated[i] = K[i, is_other_row] @ np.linalg.solve(A, logs[is_other_row])
        values_by_ridge[ridge] = estimated
    best_ridge = min(
        values_by_ridge, key=lambda ridge: float(w @ (logs - values_by_ridge[ridge]) ** 2)
    )
    return values_by_ridge[best_ridge], best_ridge


@pytest.mark.parametrize("weighted", [False, True])
def test_residual_scale_equals_leave_one_out_refits(weighted: bool) -> None:
    X = rng.normal(size=(60, 2))
    residuals = np.abs(rng.normal(size=(60, 2))) * np.exp(2 * X[:, :1] * (1, -1))
    w = rng.uniform(0.5, 2, 60) if weighted else np.ones(60)
    K = laplace_kernel(X, X)
    scale = fit_residual_scale(X, {0.0: K}, residuals, w if weighted else None)
    assert scale.points is X
    w = w / w.mean()
    for k in range(2):
        logs = np.log(residuals[:, k] + SCALE_FLOOR * np.median(residuals[:, k]))
        logs -= np.average(logs, weights=w)
        estimated, ridge = by_refits(K, logs, w)
        factor = min(w @ (logs * estimated) / (w @ estimated**2), 1)
        weights = factor * np.linalg.solve(K + ridge * np.diag(1 / w), logs)
        np.testing.assert_allclose(scale.weights[:, k], weights, rtol=1e-6, atol=1e-9)
        ends = factor * estimated.min(), factor * estimated.max()
        np.testing.assert_allclose((scale.low[k], scale.high[k]), ends, rtol=1e-7)


def test_residual_scale_chooses_more_informative_kernel() -> None:
    """Check also a first kernel that does not see the difficulty of rows, with equal rows left
    out."""
    X = rng.normal(size=(200, 2))
    noise = rng.normal(size=(200, 1))
    blind, seeing = laplace_kernel(X[:, 1:], X[:, 1:]), laplace_kernel(X[:, :1], X[:, :1])
    hard = np.abs(noise * np.exp(X[:, :1]))
    for kernels, residuals, bandwidth in (
        ({1.0: blind, 2.0: seeing}, hard, 2.0),
        ({1.0: blind, 2.0: seeing}, np.abs(noise), None),
        ({2.0: seeing}, np.zeros((200, 1)), None),
        ({2.0: seeing[:19, :19]}, hard[:19], None),
        ({}, hard, None),
    ):
        scale = fit_residual_scale(X[: len(residuals)], kernels, residuals, None)
        assert (scale.bandwidth if len(scale.points) else None) == bandwidth


def test_residual_scale_follows_known_noise() -> None:
    """Check that the residual scale is proportional to the standard deviation of the noise."""
    X = rng.normal(size=(600, 2))
    spread = np.exp(X[:, :1])
    residuals = np.abs(rng.normal(size=(600, 1)) * spread)
    scale = fit_residual_scale(X, {2.0: laplace_kernel(X, X)}, residuals, None)
    new_rows = rng.normal(size=(500, 2))
    sigma = scale.sigma(laplace_kernel(new_rows, X) @ scale.weights)
    assert np.corrcoef(np.log(sigma[:, 0]), new_rows[:, 0])[0, 1] > 0.9
    far_sigma = scale.sigma(np.array([[50.0], [-50.0]]))
    np.testing.assert_allclose(np.log(far_sigma[:, 0]), (scale.high[0], scale.low[0]))


def test_residual_scale_roundtrips_and_normalises_intervals() -> None:
    residuals, spread = np.abs(rng.normal(size=(40, 2))), rng.uniform(1, 3, (40, 2))
    estimated = ResidualScale(
        np.ones((3, 4), np.float32), np.ones((3, 2)), -np.ones(2), np.ones(2), 0.5
    )
    plain = Calibration(Intervals.from_scores(residuals, None))
    calibration = plain.with_normalised(estimated, residuals, spread, np.arange(40.0))
    restored = Calibration.from_arrays(calibration.arrays() | {"alpha": np.ones(3)})
    assert restored is not None
    assert restored.normalised is not None
    assert restored.arrays().keys() == calibration.arrays().keys()
    for name, array in calibration.arrays().items():
        np.testing.assert_array_equal(restored.arrays()[name], array)
    without_scale = Calibration.from_arrays(plain.arrays())  # as models have it from before
    assert without_scale is not None
    assert (without_scale.normalised, without_scale.residual_scale) == (None, None)
    figures, reach = CalibratedFigures(restored), restored.normalised.score_quantile(0.9)
    figures.add(np.zeros((40, 2)), residuals, None, spread)
    metrics = figures.result()
    assert metrics["normalised_coverage"] == pytest.approx((residuals <= reach * spread).mean())
    assert metrics["normalised_width"] == pytest.approx(2 * (reach * spread).mean())
    few = plain.with_normalised(estimated, residuals[:8], spread[:8], None)
    assert not CalibratedFigures(few).needs_scale
