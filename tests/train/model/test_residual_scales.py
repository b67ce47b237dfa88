"""Test normalised intervals against known noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from streamkern.config.run_config import RunConfig
from streamkern.predict.calibration import Calibration
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.model.calibrating import calibrate
from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.model.residual_scales import max_scale_rows
from streamkern.train.train import train

Array = npt.NDArray[Any]
QUICK: dict[str, Any] = {
    "run.threads": 1, "run.accelerator": "none", "model.n_centers": 60, "model.kernel": "gaussian",
    "model.bandwidth": 1.5, "model.metric": "none", "solver.name": "direct", "run.calibrate": False,
}  # fmt: skip


def noisy_rows(n: int, grows: float, seed: int) -> tuple[Array, Array, Array]:
    """Return X (n, 2), targets (n, 2) whose noise grows with x_2 and with -x_2, and the standard
    deviations of the noise (n, 2)."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    spread = 0.2 * np.exp(grows * X[:, 1:] * (1, -1))
    f = np.stack((np.sin(X[:, 0]), 5 * np.cos(X[:, 0])), axis=1)
    return X, f + spread * rng.normal(size=(n, 2)), spread


def fit_model(grows: float, **settings: Any) -> KernelModel:
    """Return a model of rows whose noise grows with a feature."""
    X, Y, _ = noisy_rows(3000, grows, 0)
    config = RunConfig().with_overrides(QUICK | settings)
    return train(config, source=ArraySource(X, Y)).model


def calibrate_model(model: KernelModel, X: Array, Y: Array, w: Array | None = None) -> Calibration:
    """Calibrate a model in place, and return its calibration."""
    actual = calibrate(model, ArraySource(X, Y, sample_weight=w))
    assert actual is not None
    model.calibration = actual
    return actual


def errors_and_half_widths(model: KernelModel, X: Array, Y: Array) -> tuple[Array, Array, Array]:
    """Return the absolute errors of new rows, and the half widths of 90 % intervals, plain and
    normalised."""
    vars(model).pop("_sigma", None)
    assert model.calibration is not None
    assert model.calibration.normalised is not None
    values_and_scale = model.values(X, spread=True)
    plain, normalised = model.calibration.intervals, model.calibration.normalised
    return (
        np.abs(values_and_scale[:, :2] - Y),
        plain.score_quantile(0.9),
        normalised.score_quantile(0.9) * values_and_scale[:, 2:],
    )


@pytest.mark.parametrize("features", ["kernel", "fourier"])
def test_intervals_cover_easy_and_difficult_rows(features: str) -> None:
    """Check that normalised intervals contain 88 to 92 % of all rows, and 86 to 94 % of those with
    little and with much noise, for which plain intervals are too wide and too narrow; and that they
    are narrower."""
    changes = {"model.features": features}
    changes |= {"model.n_centers": "auto", "model.n_features": 200} if features == "fourier" else {}
    model = fit_model(1.0, **changes)
    with model.backend:
        calibrate_model(model, *noisy_rows(1400, 1.0, 1)[:2])
        X, Y, spread = noisy_rows(4000, 1.0, 2)
        errors, plain, normalised = errors_and_half_widths(model, X, Y)
        easy = spread < np.median(spread, axis=0)
        for k in range(2):
            is_inside, is_inside_plain = errors[:, k] <= normalised[:, k], errors[:, k] <= plain[k]
            assert 0.88 < is_inside.mean() < 0.92
            assert 0.88 < is_inside_plain.mean() < 0.92
            parts = easy[:, k], ~easy[:, k]
            assert all(0.86 < is_inside[part].mean() < 0.94 for part in parts)
            assert is_inside_plain[parts[0]].mean() > 0.96
            assert is_inside_plain[parts[1]].mean() < 0.84
            assert normalised[:, k].mean() < plain[k]
            assert normalised[parts[0], k].mean() < 0.6 * plain[k]


def test_uniform_noise_gives_plain_interval_widths() -> None:
    """Check that the intervals are as wide as plain ones, up to the sampling error: the
    quantile of 900 of 1400 rows has a standard deviation of 3 %."""
    model = fit_model(0.0)
    with model.backend:
        calibrate_model(model, *noisy_rows(1400, 0.0, 1)[:2])
        errors, plain, normalised = errors_and_half_widths(model, *noisy_rows(4000, 0.0, 2)[:2])
        np.testing.assert_allclose(normalised.mean(axis=0), plain, rtol=0.08)
        assert (np.ptp(normalised, axis=0) < 0.2 * plain).all()
        assert 0.88 < (errors <= normalised).mean() < 0.92


def test_residual_scale_rows_are_separate_from_calibration_rows() -> None:
    """Check that other targets of the calibration rows change the intervals and not the residual
    scales, and that rows without weight change neither."""
    model = fit_model(1.0)
    X, Y, _ = noisy_rows(400, 1.0, 1)
    with model.backend:
        actual = calibrate_model(model, X, Y)
        assert actual is not None
        points = {tuple(row) for row in actual.residual_scale.points}
        rows = model.transformed_rows(next(iter(ArraySource(X, Y).blocks())))
        scaled = model.backend.to_host(rows)
        is_calibration_row = np.array([tuple(row) not in points for row in scaled])
        assert is_calibration_row.sum() == len(actual.normalised.scores) == 200
        other = Y.copy()
        other[is_calibration_row] += 10
        second = calibrate_model(model, X, other)
        assert second is not None
        np.testing.assert_array_equal(second.residual_scale.weights, actual.residual_scale.weights)
        assert (
            second.normalised.score_quantile(0.9) > 2 * actual.normalised.score_quantile(0.9)
        ).all()
        more = np.concatenate((X, X[:50])), np.concatenate((Y, Y[:50] + 100))
        w = np.repeat((1.0, 0.0), (400, 50))
        weighted = calibrate_model(model, *more, w)
        for name, array in calibrate_model(model, X, Y).arrays().items():
            np.testing.assert_allclose(weighted.arrays()[name], array, rtol=1e-6, atol=1e-9)


def test_number_of_kept_rows_is_bounded() -> None:
    assert max_scale_rows(2000, 10, 4) == 500
    assert max_scale_rows(5000, 10, 4) == 500
    assert max_scale_rows(301, 10, 4) == 150
    assert max_scale_rows(2000, 500_000, 4) == 33  # 64 MiB
