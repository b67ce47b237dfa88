"""Check every loss against differences of its values, its bounds of curvature and scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import mean_absolute_error, mean_pinball_loss

from streamkern.losses.base import Loss
from streamkern.losses.losses import LOSS_CLASSES, SQUARES, make_loss, saved_loss

GRADIENT_FACTORS = {"squared_hinge": 8.0, "absolute_error": 2.0}
"""Loss -> factor by which the derivative of `values` exceeds `gradient`, if it is not 1."""
LOSSES_OF_ERRORS = sorted(set(LOSS_CLASSES) - {"log_loss", "poisson", "gamma"})
"""Losses of the error in each output; for the others see `test_log_loss` and `test_log_link`."""


def random_case(
    name: str, seed: int, m: int, c: int, size: float
) -> tuple[Loss, np.ndarray, np.ndarray]:
    """Return a fitted loss, outputs (m, c) of this size, and targets."""
    rng = np.random.default_rng(seed)
    loss_class: Any = LOSS_CLASSES[name]
    quantile = tuple(np.linspace(0.1, 0.8, c).tolist()) if seed % 2 and c > 1 else 0.8
    loss = loss_class(quantile=quantile) if loss_class.takes_quantile else loss_class()
    z, Y = size * rng.standard_normal((m, c)), rng.standard_normal((m, c))
    if loss_class.log_link:
        z, Y = np.abs(z), np.abs(Y)
    if loss_class.for_classes:
        Y = np.eye(c)[rng.integers(c, size=m)]
    return loss.fitted(rng.standard_normal((50, c)), np.ones(c)), z, Y


for_random_cases = given(
    st.sampled_from(LOSSES_OF_ERRORS), st.integers(0, 2**32 - 1), st.integers(1, 4),
    st.integers(1, 3), st.floats(0.01, 30.0),
)  # fmt: skip


@for_random_cases
def test_gradient_equals_finite_differences(
    name: str, seed: int, m: int, c: int, size: float
) -> None:
    loss, z, Y = random_case(name, seed, m, c, size)
    gradient, h = loss.gradient(np, z - Y, Y), 1e-6
    is_smooth = np.abs(z - Y) > getattr(loss, "width", -1.0)  # not in the ramp of a quantile
    for k in range(c):
        move = h * np.eye(c)[k]
        rise = (loss.values(np, z + move, Y) - loss.values(np, z - move, Y)) / (2 * h)
        expected = GRADIENT_FACTORS.get(name, 1.0) * gradient[:, k]
        error = np.abs(rise - expected)[is_smooth[:, k]]
        assert (error <= 1e-5 * (1 + size)).all()


@for_random_cases
def test_curvature_bound_holds_for_every_output(
    name: str, seed: int, m: int, c: int, size: float
) -> None:
    loss, z, Y = random_case(name, seed, m, c, size)
    z_after = z + np.random.default_rng(seed + 1).standard_normal(z.shape)
    rise = loss.gradient(np, z_after - Y, Y) - loss.gradient(np, z - Y, Y)
    slope = rise / (z_after - z)
    assert (slope <= np.asarray(loss.curvature) * (1 + 1e-9) + 1e-9).all()
    assert (slope >= -1e-9).all()


def test_quantile_ramp_narrows_with_age() -> None:
    loss, _, _ = random_case("quantile", 0, 1, 1, 1.0)
    late = loss.at(np.inf)
    assert late.curvature == pytest.approx(10 * loss.at(0).curvature)
    for ramp in (loss, late):
        ends = ramp.gradient(np, np.array([[-100.0], [100.0]]), None)
        np.testing.assert_allclose(ends.ravel(), [-0.8, 0.2])


@pytest.mark.parametrize("name", ["quantile", "expectile"])
def test_several_quantiles_are_sorted(name: str) -> None:
    F = np.array([[1.0, 3.0, 2.0], [0.0, 1.0, 2.0]])
    several = make_loss(name, (0.1, 0.5, 0.9))
    median = make_loss(name, 0.5)
    assert several is not None
    assert median is not None
    assert np.array_equal(median.ordered(np, F.copy()), F)
    assert several.ordered(np, F).tolist() == [[1.0, 2.0, 3.0], [0.0, 1.0, 2.0]]


def test_values_equal_scikit_learn() -> None:
    z, y = np.random.default_rng(0).standard_normal((2, 50, 1))
    quantile = make_loss("quantile", 0.9)
    absolute = make_loss("absolute_error")
    assert quantile is not None
    assert absolute is not None
    assert quantile.values(np, z, y).mean() == pytest.approx(mean_pinball_loss(y, z, alpha=0.9))
    assert absolute.values(np, z, y).mean() == pytest.approx(mean_absolute_error(y, z))


@pytest.mark.parametrize("name", [SQUARES, *LOSS_CLASSES])
def test_loss_roundtrips_through_its_record(name: str) -> None:
    if name == SQUARES:
        assert make_loss(name) is None
        assert saved_loss({}) is None
        return
    loss, z, Y = random_case(name, 3, 4, 3, 1.0)
    restored = saved_loss({"loss": name, "setup": {"loss": loss.parameters()}})
    assert restored is not None
    np.testing.assert_array_equal(restored.gradient(np, z - Y, Y), loss.gradient(np, z - Y, Y))
    np.testing.assert_array_equal(restored.values(np, z, Y), loss.values(np, z, Y))


@for_random_cases
def test_curvatures_bound_the_loss(name: str, seed: int, m: int, c: int, size: float) -> None:
    loss, z, Y = random_case(name, seed, m, c, size)
    L = np.asarray(loss.curvature)
    h = loss.curvatures(np, z - Y, Y)
    assert (h >= 0).all()
    assert (h <= 1 + 1e-12).all()
    gradient, move = loss.gradient(np, z - Y, Y), 1e-7
    slope = (loss.gradient(np, z + move - Y, Y) - gradient) / move
    same_side = np.sign(z - Y) == np.sign(z + move - Y)
    assert (slope <= h * L + 1e-5)[same_side].all()
    if name in ("huber", "absolute_error", "quantile"):
        # The square touches the loss at e and at its mirror image, and is above it between.
        rise = loss.gradient(np, -(z - Y), Y) - gradient
        np.testing.assert_allclose(rise, -2 * h * L * (z - Y), rtol=1e-9, atol=1e-12)
