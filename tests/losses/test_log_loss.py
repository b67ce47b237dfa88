"""The log loss against differences, and its bound of curvature."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamkern.losses.log_loss import LogLoss

LOSS = LogLoss()


def drawn(seed: int, m: int, c: int, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs (m, c) of this size, and one-hot targets."""
    rng = np.random.default_rng(seed)
    return size * rng.standard_normal((m, c)), np.eye(c)[rng.integers(c, size=m)]


def gradient_at(z: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """Return the gradient at outputs z."""
    return LOSS.gradient(np, LOSS.predict(np, z.copy()) - Y, Y)


CASES = given(
    st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(2, 6), st.floats(0.01, 30.0)
)


@CASES
def test_gradient_equals_finite_differences(seed: int, m: int, c: int, size: float) -> None:
    z, Y = drawn(seed, m, c, size)
    gradient, h = gradient_at(z, Y), 1e-5
    for k in range(c):
        move = h * np.eye(c)[k]
        rise = LOSS.values(np, z + move, Y) - LOSS.values(np, z - move, Y)
        np.testing.assert_allclose(rise / (2 * h), gradient[:, k], atol=1e-7)


@CASES
def test_curvature_bound_holds_in_every_direction(seed: int, m: int, c: int, size: float) -> None:
    z, Y = drawn(seed, m, c, size)
    h, way = 1e-4, np.random.default_rng(seed + 1).standard_normal((m, c))
    way /= np.linalg.norm(way, axis=1, keepdims=True)
    gradient_ahead, gradient_behind = (gradient_at(z + s * h * way, Y) for s in (1, -1))
    bend = ((gradient_ahead - gradient_behind) * way).sum(axis=1) / (2 * h)
    assert (bend <= LOSS.curvature + 1e-6).all()
    assert (bend >= -1e-6).all()


def test_curvature_bound_is_reached_by_two_equal_classes() -> None:
    h, way = 1e-4, np.array([[1.0, -1.0]]) / np.sqrt(2)
    gradients = [gradient_at(s * h * way, np.zeros((1, 2))) for s in (1, -1)]
    bend = ((gradients[0] - gradients[1]) * way).sum() / (2 * h)
    np.testing.assert_allclose(bend, LOSS.curvature, rtol=1e-6)


def test_large_outputs_give_finite_values_and_predictions() -> None:
    z = np.array([[1000.0, 0.0], [0.0, 1000.0]], np.float32)
    Y = np.array([[1.0, 0.0], [1.0, 0.0]], np.float32)
    np.testing.assert_allclose(LOSS.values(np, z, Y), [0.0, 1000.0])
    np.testing.assert_array_equal(LOSS.predict(np, z.copy()), [[1, 0], [0, 1]])


def test_curvatures_bound_the_hessian() -> None:
    rng = np.random.default_rng(0)
    for c in (2, 3, 7):
        z = 3 * rng.standard_normal((20, c))
        Y = np.eye(c)[rng.integers(c, size=20)]
        p = LogLoss().predict(np, z.copy())
        h = LogLoss().curvatures(np, p - Y, Y) * LogLoss().curvature
        for row, of_row in zip(p, h, strict=True):
            hessian = np.diag(row) - np.outer(row, row)
            assert np.linalg.eigvalsh(np.diag(of_row) - hessian)[0] > -1e-12
