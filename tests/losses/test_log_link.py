"""Check losses with a log link: derivatives, values, and the bounds that steps rely on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import mean_gamma_deviance, mean_poisson_deviance

from streamkern.backend.devices import get_backend
from streamkern.basics.errors import DataError
from streamkern.losses.log_link import Gamma, LogLink, Poisson
from streamkern.losses.scaled import MAX_STEP_MOVE, ScaledLoss

LOSSES: dict[str, tuple[type[LogLink], Any]] = {
    "poisson": (Poisson, mean_poisson_deviance),
    "gamma": (Gamma, mean_gamma_deviance),
}


def random_case(
    name: str, seed: int, m: int, c: int, scale: float
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return a loss, outputs (m, c) of this scale, and targets, some of them 0 if it allows 0."""
    rng = np.random.default_rng(seed)
    z = scale * rng.standard_normal((m, c))
    Y = rng.poisson(2.0, (m, c)) * rng.exponential(size=(m, c))
    loss = LOSSES[name][0](unit=[1.0] * c)
    return loss, z, Y if name == "poisson" else Y + 0.1


for_random_cases = given(
    st.sampled_from(sorted(LOSSES)), st.integers(0, 2**32 - 1), st.integers(1, 4),
    st.integers(1, 3), st.floats(0.01, 4.0),
)  # fmt: skip


def half_deviance(loss: Any, z: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """Return half of the deviances of the rows."""
    return loss.values(np, loss.predict(np, z.copy()), Y) / 2


@for_random_cases
def test_gradient_is_derivative_of_half_the_deviance(
    name: str, seed: int, m: int, c: int, scale: float
) -> None:
    loss, z, Y = random_case(name, seed, m, c, scale)
    F, h = loss.predict(np, z.copy()), 1e-6
    gradient = loss.gradient(np, F - Y, Y)
    np.testing.assert_allclose(loss.slope(np, F.copy(), Y), gradient, rtol=1e-9, atol=1e-9)
    for k in range(c):
        move = h * np.eye(c)[k]
        rise = half_deviance(loss, z + move, Y) - half_deviance(loss, z - move, Y)
        np.testing.assert_allclose(rise / (2 * h), gradient[:, k], rtol=1e-4, atol=1e-4)


@for_random_cases
def test_single_row_step_is_bounded_and_reduces_loss(
    name: str, seed: int, m: int, c: int, scale: float
) -> None:
    loss, z, Y = random_case(name, seed, m, c, scale)
    F = loss.predict(np, z.copy())
    move = loss.slope(np, F.copy(), Y) / loss.row_curvature(np, F, Y)[:, None]
    assert (np.abs(move) <= 1 + 1e-12).all()
    assert (half_deviance(loss, z - move, Y) <= half_deviance(loss, z, Y) + 1e-9).all()


@pytest.mark.parametrize("name", LOSSES)
def test_values_equal_scikit_learn(name: str) -> None:
    loss, z, Y = random_case(name, 0, 50, 1, 1.0)
    F = loss.predict(np, z)
    expected = LOSSES[name][1](Y[:, 0], F[:, 0])
    assert loss.values(np, F, Y).mean() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_predictions_are_finite_and_positive(dtype: type) -> None:
    for name in LOSSES:
        F = LOSSES[name][0]().predict(np, np.array([[-1e6], [1e6]], dtype))
        assert np.isfinite(F).all()
        assert (F > 0).all()


@pytest.mark.parametrize(("name", "small"), [("poisson", -1.0), ("gamma", 0.0)])
def test_targets_that_are_too_small_are_refused(name: str, small: float) -> None:
    loss = LOSSES[name][0]()
    Y, rows = np.array([[2.0], [small], [1.0]]), np.array([7, 8, 9])
    loss.check_targets(Y[::2], rows[::2])
    with pytest.raises(DataError, match=f"loss='{name}' needs .* row 8 has {small:g}"):
        loss.check_targets(Y, rows)
    with pytest.raises(DataError, match="the mean of target 1 is 0"):
        loss.check_means(np.array([1.0, 0.0]))


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_weights_times_residuals(name: str) -> None:
    loss, f, Y = random_case(name, 5, 6, 2, 1.0)
    unit, gain = np.array([3.0, 0.5]), np.array([2.0, 4.0])
    loss, mean = loss.in_unit(unit), np.log(unit) + 0.2
    with get_backend("cpu") as backend:
        scaled = ScaledLoss(loss, backend, np.float64, mean.copy(), gain)
        errors = scaled.errors(f.copy(), Y / unit)
        F = np.exp(mean + gain * f)
        np.testing.assert_allclose(errors, (F - Y) / unit)
        np.testing.assert_allclose(scaled.of_zero, np.exp(mean) / unit)
        r, w = scaled.residual(errors, Y / unit, 0.0)
        assert w is not None
        slope = loss.slope(np, F / unit, Y / unit)
        np.testing.assert_allclose(w[:, None] * r, slope / gain)
        for move, limit in ((0.1, 1.0), (-3.0, MAX_STEP_MOVE / (4 * 3))):
            largest = scaled.largest_move(np.full((6, 2), move))
            assert largest == pytest.approx(4 * abs(move))
            assert scaled.limit(largest) == pytest.approx(limit)
        assert scaled.largest_move(np.empty((0, 2))) == 0
