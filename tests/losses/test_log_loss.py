"""Check the log loss: its gradient against differences, and its bounds of curvature."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamkern.losses.log_loss import LogLoss

LOSS = LogLoss()


def random_case(seed: int, m: int, c: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs (m, c) of this scale, and one-hot targets."""
    rng = np.random.default_rng(seed)
    return scale * rng.standard_normal((m, c)), np.eye(c)[rng.integers(c, size=m)]


def gradient_at(z: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """Return the gradient at outputs z."""
    return LOSS.gradient(np, LOSS.predict(np, z.copy()) - Y, Y)


for_random_cases = given(
    st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(2, 6), st.floats(0.01, 30.0)
)


@for_random_cases
def test_gradient_equals_finite_differences(seed: int, m: int, c: int, scale: float) -> None:
    z, Y = random_case(seed, m, c, scale)
    gradient, h = gradient_at(z, Y), 1e-5
    for k in range(c):
        move = h * np.eye(c)[k]
        rise = LOSS.values(np, z + move, Y) - LOSS.values(np, z - move, Y)
        np.testing.assert_allclose(rise / (2 * h), gradient[:, k], atol=1e-7)


@for_random_cases
def test_curvature_bound_holds_in_every_direction(seed: int, m: int, c: int, scale: float) -> None:
    z, Y = random_case(seed, m, c, scale)
    h, direction = 1e-4, np.random.default_rng(seed + 1).standard_normal((m, c))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    gradient_ahead, gradient_behind = (gradient_at(z + s * h * direction, Y) for s in (1, -1))
    curvature = ((gradient_ahead - gradient_behind) * direction).sum(axis=1) / (2 * h)
    assert (curvature <= LOSS.curvature + 1e-6).all()
    assert (curvature >= -1e-6).all()


def test_curvature_bound_is_reached_by_two_equal_classes() -> None:
    h, direction = 1e-4, np.array([[1.0, -1.0]]) / np.sqrt(2)
    gradients = [gradient_at(s * h * direction, np.zeros((1, 2))) for s in (1, -1)]
    curvature = ((gradients[0] - gradients[1]) * direction).sum() / (2 * h)
    np.testing.assert_allclose(curvature, LOSS.curvature, rtol=1e-6)


def test_large_outputs_give_finite_values_and_predictions() -> None:
    z = np.array([[1000.0, 0.0], [0.0, 1000.0]], np.float32)
    Y = np.array([[1.0, 0.0], [1.0, 0.0]], np.float32)
    np.testing.assert_allclose(LOSS.values(np, z, Y), [0.0, 1000.0])
    np.testing.assert_array_equal(LOSS.predict(np, z.copy()), [[1, 0], [0, 1]])


def test_curvatures_bound_the_hessian() -> None:
    for c in (2, 3, 7):
        z, Y = random_case(0, 20, c, 3.0)
        probabilities = LOSS.predict(np, z)
        curvatures = LOSS.curvatures(np, probabilities - Y, Y) * LOSS.curvature
        for p, bound in zip(probabilities, curvatures, strict=True):
            hessian = np.diag(p) - np.outer(p, p)
            assert np.linalg.eigvalsh(np.diag(bound) - hessian)[0] > -1e-12
