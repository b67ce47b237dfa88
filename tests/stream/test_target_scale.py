"""Check the scale of the targets and its inverse, also on a log scale."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.basics.log_scale import symmetric_exp, symmetric_log
from streamkern.store.row_block import RowBlock
from streamkern.stream.feed import prepare
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.target_scale import TargetScale, transform_text

LINEAR = TargetScale(np.array([3.0, -1.0]), np.array([2.0, 0.5]))
LOG_SCALE = TargetScale(
    np.array([1.5, 0.5]), np.array([2.0, 0.25]), np.array([10.0, 1e-3]), np.array([1.2, 0.9])
)


def as_solver_targets(targets: TargetScale, Y: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """Return the targets as a solver gets them."""
    rows = np.arange(len(Y))
    block = RowBlock(np.zeros((len(Y), 1)), Y, None, rows)
    with Backend(threads=1) as backend, backend.active():
        return prepare(
            backend, block, transforms=(), dtype=dtype, seed=0, epoch=0, n_classes=None,
            targets=targets,
        )[1]  # fmt: skip


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_exponential_inverts_logarithm(y: float, unit: float) -> None:
    back = symmetric_exp(np, symmetric_log(np, np.float64(y), unit), unit)
    # A logarithm z has a rounding error of z eps, which the exponential multiplies by y + unit.
    z = np.log1p(abs(y) / unit)
    assert abs(back - y) <= 4 * np.finfo(float).eps * (1 + z) * (abs(y) + unit)


def test_zero_is_exact_and_signs_are_kept() -> None:
    Y = np.array([[0.0], [-7.0], [7.0]])
    Z = symmetric_log(np, Y, np.array([2.0]))
    assert Z[0, 0] == 0 == symmetric_exp(np, Z, 2.0)[0, 0]
    assert Z[1, 0] == -Z[2, 0] == -np.log1p(3.5)


def test_large_outputs_stay_finite() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predictions = LOG_SCALE.in_target_units(np, np.array([[1e4, -1e5]], np.float32), np.float64)
    assert np.isfinite(predictions).all()


@pytest.mark.parametrize("targets", [LINEAR, LOG_SCALE], ids=["linear", "log scale"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_scaling_roundtrips(targets: TargetScale, dtype: type) -> None:
    Y = np.abs(np.random.default_rng(0).standard_normal((50, 2))) * [100, 0.1]
    F = as_solver_targets(targets, Y, dtype)
    assert F.dtype == dtype
    gain = 1.0 if targets.gain is None else targets.gain
    predictions = targets.in_target_units(np, F, np.float64)
    assert predictions.dtype == np.float64
    np.testing.assert_allclose(predictions / gain, Y, rtol=1e-12 if dtype == np.float64 else 1e-5)


@pytest.mark.parametrize("targets", [LINEAR, LOG_SCALE], ids=["linear", "log scale"])
def test_slopes_equal_finite_differences(targets: TargetScale) -> None:
    F, step = np.random.default_rng(1).standard_normal((20, 2)), 1e-6
    predictions_above, predictions_below = (
        targets.in_target_units(np, F + by, np.float64) for by in (step, -step)
    )
    slopes = targets.slopes(targets.in_target_units(np, F, np.float64))
    np.testing.assert_allclose(
        np.broadcast_to(slopes, F.shape),
        (predictions_above - predictions_below) / (2 * step),
        rtol=1e-6,
    )


@pytest.mark.parametrize("targets", [LINEAR, LOG_SCALE], ids=["linear", "log scale"])
def test_squared_errors_equal_those_of_solver(targets: TargetScale) -> None:
    rng = np.random.default_rng(2)
    F, Y = rng.standard_normal((10, 2)), rng.random((10, 2))
    expected = ((F - as_solver_targets(targets, Y)) * targets.scale) ** 2
    errors = targets.squared_errors(targets.in_target_units(np, F, np.float64), Y)
    np.testing.assert_allclose(errors, expected, rtol=1e-9)


def test_log_scale_predictions_are_bounded() -> None:
    """Check outputs of 1000, whose exponential would overflow, and outputs within the bound."""
    bounded = replace(LOG_SCALE, most=np.array([3.0, 4.0]))
    assert bounded.gain is not None
    assert bounded.unit is not None
    limit = bounded.gain * bounded.unit * np.expm1(bounded.most)
    F = np.array([[1e3, 1e3], [-1e3, -1e3]])
    np.testing.assert_allclose(bounded.in_target_units(np, F, np.float64), [limit, -limit])
    within_bound = as_solver_targets(LOG_SCALE, np.array([[1e-3, 1e-4]]))
    np.testing.assert_array_equal(
        bounded.in_target_units(np, within_bound, np.float64),
        LOG_SCALE.in_target_units(np, within_bound, np.float64),
    )
    restored = TargetScale.from_arrays(bounded.arrays())
    np.testing.assert_array_equal(restored.most, bounded.most)
    assert TargetScale.from_arrays(LOG_SCALE.arrays()).most is None


def test_arrays_of_older_versions_are_read() -> None:
    assert set(LINEAR.arrays()) == {"target_mean", "target_scale"}
    assert TargetScale.from_arrays(LINEAR.arrays()).gain is None
    restored = TargetScale.from_arrays(LOG_SCALE.arrays())
    for name in ("mean", "scale", "unit", "gain"):
        np.testing.assert_array_equal(getattr(restored, name), getattr(LOG_SCALE, name))


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"unit": [326.04], "error_ratio": 0.88},
         "log scale (unit 326): squared error of left-out rows, the largest capped, 12% lower"),
        ({"unit": [0.5], "error_ratio": 1.04},
         "log scale (unit 0.5): squared error of left-out rows, the largest capped, 4% higher"),
        ({"unit": [0.5], "error_ratio": 1.001}, "log scale (unit 0.5)"),
        ({"unit": [1.0, 2.0, 3.0, 4.0]}, "log scale (units 1, 2, 3, ...)"),
    ],
)  # fmt: skip
def test_transform_text_describes_facts(facts: dict[str, object], text: str) -> None:
    assert transform_text(facts) == text


def test_largest_targets_are_found_without_reading_features() -> None:
    y = np.random.default_rng(4).standard_normal((50, 2))
    y[37, 0], y[49, 1] = -90.0, 70.0
    X = np.zeros((50, 1), np.float32)
    X[3] = np.nan  # a read of it would be an error
    source = ArraySource(X, y, unit_rows=7)
    np.testing.assert_array_equal(source.largest_targets(), [90.0, 70.0])
