"""Compare residual scales with refits without each row, and with known noise."""

from __future__ import annotations

from typing import Any

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


# The noise of a row depends on its first feature. Only the second kernel uses this feature.
NOISE_X = rng.normal(size=(200, 2))
NOISE = np.abs(rng.normal(size=(200, 1)))
VARYING_NOISE = NOISE * np.exp(NOISE_X[:, :1])
KERNELS = {1.0: laplace_kernel(NOISE_X[:, 1:], NOISE_X[:, 1:]),
           2.0: laplace_kernel(NOISE_X[:, :1], NOISE_X[:, :1])}  # fmt: skip


@pytest.mark.parametrize(
    ("residuals", "n_rows", "bandwidths", "expected"),
    [
        (VARYING_NOISE, 200, (1.0, 2.0), 2.0),
        (NOISE, 200, (1.0, 2.0), None),
        (np.zeros((200, 1)), 200, (2.0,), None),
        (VARYING_NOISE, 19, (2.0,), None),
        (VARYING_NOISE, 200, (), None),
    ],
    ids=["two kernels", "equal noise", "no residuals", "few rows", "no kernel"],
)
def test_residual_scale_has_bandwidth_that_predicts_noise(
    residuals: Floats, n_rows: int, bandwidths: Any, expected: float | None
) -> None:
    """Check that a kernel is chosen, or that no scale is fitted (None)."""
    kernels = {bandwidth: KERNELS[bandwidth][:n_rows, :n_rows] for bandwidth in bandwidths}
    scale = fit_residual_scale(NOISE_X[:n_rows], kernels, residuals[:n_rows], None)
    assert (scale.bandwidth if len(scale.points) else None) == expected


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


SPREAD = rng.uniform(1, 3, (40, 2))
RESIDUALS = np.abs(rng.normal(size=(40, 2)))
SCALE = ResidualScale(
    np.ones((3, 4), np.float32), np.ones((3, 2)), -np.ones(2), np.ones(2), 0.5
)  # fmt: skip


def calibrations() -> tuple[Calibration, Calibration]:
    """Return a calibration of intervals of one width, and the same with normalised intervals."""
    calibration = Calibration(Intervals.from_scores(RESIDUALS, None))
    return calibration, calibration.with_normalised(SCALE, RESIDUALS, SPREAD, np.arange(40.0))


def test_normalised_intervals_are_restored_from_arrays() -> None:
    """Check also arrays of older models, which have no residual scale."""
    one_width, normalised = calibrations()
    restored = Calibration.from_arrays(normalised.arrays() | {"alpha": np.ones(3)})
    assert restored is not None
    assert restored.arrays().keys() == normalised.arrays().keys()
    for name, array in normalised.arrays().items():
        np.testing.assert_array_equal(restored.arrays()[name], array)
    without_scale = Calibration.from_arrays(one_width.arrays())
    assert without_scale is not None
    assert (without_scale.normalised, without_scale.residual_scale) == (None, None)


def test_normalised_intervals_are_wide_where_spread_is_large() -> None:
    _, calibration = calibrations()
    assert calibration.normalised is not None
    half_width = calibration.normalised.score_quantile(0.9) * SPREAD
    figures = CalibratedFigures(calibration)
    figures.add(np.zeros((40, 2)), RESIDUALS, None, SPREAD)
    metrics = figures.result()
    assert metrics["normalised_coverage"] == pytest.approx((half_width >= RESIDUALS).mean())
    assert metrics["normalised_width"] == pytest.approx(2 * half_width.mean())


def test_eight_rows_give_no_normalised_intervals() -> None:
    one_width, _ = calibrations()
    few = one_width.with_normalised(SCALE, RESIDUALS[:8], SPREAD[:8], None)
    assert not CalibratedFigures(few).needs_scale
