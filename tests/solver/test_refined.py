"""Check conjugate gradient that is preconditioned by a factor in float32."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.array_types import Floats
from streamkern.solver.refined import RESIDUAL_TOLERANCE, conjugate_gradient


def solve(A: Floats, B: Floats, factored_matrix: Floats) -> Floats | None:
    """Solve A X = B with a factor of another matrix in float32."""
    L = np.linalg.cholesky(factored_matrix).astype(np.float32)

    def precondition(R: Floats) -> Floats:
        narrow = R.astype(np.float32)
        return np.linalg.solve(L.T, np.linalg.solve(L, narrow)).astype(np.float64)

    return conjugate_gradient(np, lambda v: A @ v, precondition, B)


def matrix(rng: np.random.Generator, n: int, smallest: float) -> Floats:
    """Return a symmetric matrix with eigenvalues from 1 down to `smallest`."""
    Q = np.linalg.qr(rng.normal(size=(n, n)))[0]
    return Q * np.geomspace(1, smallest, n) @ Q.T


@given(
    seed=st.integers(0, 1000), n=st.integers(1, 40), c=st.integers(1, 3),
    log10_condition=st.floats(0, 5), size=st.sampled_from([1e-30, 1.0, 1e30]),
)  # fmt: skip
def test_residuals_are_small_with_float32_factor(
    seed: int, n: int, c: int, log10_condition: float, size: float
) -> None:
    rng = np.random.default_rng(seed)
    A, B = matrix(rng, n, 10.0**-log10_condition), size * rng.normal(size=(n, c))
    X = solve(A, B, A + 1e-6 * np.eye(n))
    assert X is not None
    norms = np.linalg.norm(B - A @ X, axis=0)
    assert (norms <= 2 * RESIDUAL_TOLERANCE * np.linalg.norm(B, axis=0)).all()


def test_zero_and_early_converged_columns_are_solved() -> None:
    A = matrix(np.random.default_rng(0), 30, 1e-4)
    B = np.stack([np.zeros(30), np.linalg.eigh(A)[1][:, -1], np.ones(30)], axis=1)
    X = solve(A, B, A + 1e-3 * np.eye(30))
    assert X is not None
    np.testing.assert_array_equal(X[:, 0], 0)
    np.testing.assert_allclose(A @ X, B, atol=1e-5)


@pytest.mark.parametrize("eigenvalue", [-1e-2, np.nan])
def test_indefinite_matrix_has_no_solution(eigenvalue: float) -> None:
    A = np.diag([1.0, 1.0, eigenvalue])
    assert solve(A, np.ones((3, 1)), np.eye(3)) is None


def test_useless_factor_gives_no_solution() -> None:
    rng = np.random.default_rng(0)
    A = matrix(rng, 300, 1e-12)
    assert solve(A, rng.normal(size=(300, 1)), np.eye(300)) is None
