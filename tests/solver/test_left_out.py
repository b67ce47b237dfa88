"""Check leave-one-out predictions against fits to all other rows in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.backend.batch import Batch
from streamkern.kernels.fourier import frequencies
from streamkern.solver.direct_step import DirectSolver
from streamkern.solver.left_out import groups_with_centers
from tests import reference as ref
from tests import solver_problems

N = 60


def leave_one_out(
    X: np.ndarray, Y: np.ndarray, w: np.ndarray | None, Z: np.ndarray, ridge: float,
    features: str = "kernel",
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Return the result of `DirectSolver.leave_one_out` for a fit to all rows."""
    op = solver_problems.featured(solver_problems.operator(precision="float64"), features, len(Z))
    points = op.points(Z, left=True, right=True)
    solver = DirectSolver(op, points, ridge=ridge, n_outputs=Y.shape[1], max_batch=len(X))
    state = solver.init()
    solver.step(state, Batch(X, Y, np.arange(len(X)), w))
    return solver.leave_one_out(state, X, Y, w)


def refit_without(
    K: np.ndarray, norm: np.ndarray, Y: np.ndarray, w: np.ndarray, rows: list[int],
    centers: list[int], ridge: float,
) -> np.ndarray:  # fmt: skip
    """Return predictions of `rows` by a fit without them and the centers.

    The ridge is that of n rows.
    """
    n, p = K.shape
    fitted_rows, other_centers = np.delete(np.arange(n), rows), np.delete(np.arange(p), centers)
    G, root = K[np.ix_(fitted_rows, other_centers)], np.sqrt(w[fitted_rows])[:, None]
    A = (root * G).T @ (root * G) / n + ridge * norm[np.ix_(other_centers, other_centers)]
    alpha = np.linalg.solve(A, (root * G).T @ (root * Y[fitted_rows]) / n)
    return K[np.ix_(rows, other_centers)] @ alpha


@given(seed=st.integers(0, 1000), ridge=st.floats(1e-6, 1), weighted=st.booleans())
def test_loo_prediction_equals_refit_without_row_and_center(
    seed: int, ridge: float, weighted: bool
) -> None:
    """Check 20 centers, of which 12 are rows, and weights that may be 0."""
    rng = np.random.default_rng(seed)
    X, Y = rng.normal(size=(N, 3)), rng.normal(size=(N, 2))
    Z = np.concatenate((X[rng.permutation(N)[:12]], rng.normal(size=(8, 3))))
    w = rng.integers(0, 3, N) * 0.5 if weighted else np.ones(N)
    F, targets, weights, origins = leave_one_out(X, Y, w if weighted else None, Z, ridge)
    rows_with_weight = np.flatnonzero(w)
    np.testing.assert_array_equal(targets, Y[rows_with_weight])
    np.testing.assert_allclose(weights, w[rows_with_weight])
    np.testing.assert_array_equal(origins, np.arange(len(rows_with_weight)))
    K, norm = ref.laplace(X, Z, 2.0), ref.laplace(Z, Z, 2.0)
    for location, row in enumerate(rows_with_weight):
        equal_centers = np.flatnonzero((X[row] == Z).all(axis=1)).tolist()
        truth = refit_without(K, norm, Y, w, [row], equal_centers, ridge)
        # A prediction without its row may be far outside of the targets, where errors are relative.
        np.testing.assert_allclose(F[location : location + 1], truth, rtol=1e-6, atol=1e-6)


def test_copies_and_equal_centers_are_left_out_together() -> None:
    """Check that equal rows with other targets are no copies, and keep their center."""
    rng = np.random.default_rng(1)
    X, Y = rng.normal(size=(N, 3)), rng.normal(size=(N, 2))
    X[10:20], Y[10:20] = X[:10], Y[:10]
    X[20:22] = X[22:24]
    Z = np.concatenate((X[:5], X[10:13], X[20:23], X[30:35]))
    F, _, _, origins = leave_one_out(X, Y, None, Z, 1e-3)
    K, norm = ref.laplace(X, Z, 2.0), ref.laplace(Z, Z, 2.0)
    norm[np.diag_indices(len(Z))] *= 1 + 1e-12  # because equal centers make it singular
    for rows, centers in (
        ([0, 10], [0, 5]), ([3, 13], [3]), ([8, 18], []), ([20], []), ([22], []),
        ([30], [11]), ([40], []),
    ):  # fmt: skip
        truth = refit_without(K, norm, Y, np.ones(N), rows, centers, 1e-3)
        np.testing.assert_allclose(F[rows], truth, rtol=0, atol=1e-5, err_msg=str(rows))
        assert set(np.flatnonzero(origins == origins[rows[0]])) == set(rows)


def test_fourier_features_have_no_centers_among_rows() -> None:
    rng = np.random.default_rng(2)
    X, Y = rng.normal(size=(N, 3)), rng.normal(size=(N, 2))
    plain = solver_problems.operator(precision="float64")
    op, Z = solver_problems.featured(plain, "fourier", 16), frequencies(plain.kernel, 3, 16, 3)
    F = leave_one_out(X, Y, None, Z, 1e-2, "fourier")[0]
    features = op.matrix(op.points(X, left=True), op.points(Z, left=True, right=True))
    for row in (0, 7, 59):
        truth = refit_without(features, np.eye(16), Y, np.ones(N), [row], [], 1e-2)
        np.testing.assert_allclose(F[row : row + 1], truth, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ridge", [0.0, 1e-12])
def test_undetermined_rows_have_finite_loo_predictions(ridge: float) -> None:
    """Check as many centers as rows with a tiny ridge, so that each row is fitted exactly."""
    rng = np.random.default_rng(3)
    X, Y = rng.normal(size=(N, 3)), rng.normal(size=(N, 2))
    F = leave_one_out(X, Y, None, rng.normal(size=(N, 3)), ridge)[0]
    assert np.isfinite(F).all()
    K = ref.laplace(X, X, 2.0)
    inverse = np.linalg.inv(K)
    truth = Y - inverse @ Y / inverse.diagonal()[:, None]
    np.testing.assert_allclose(leave_one_out(X, Y, None, X, ridge)[0], truth, rtol=0, atol=1e-4)


def test_groups_contain_coinciding_rows_and_centers() -> None:
    X = np.array([[0.0], [1], [0], [2], [3], [2]])
    Y = np.array([[1.0], [2], [1], [5], [4], [6]])
    groups = groups_with_centers(X, np.array([[3.0], [0], [2], [7], [3]]), Y)
    group_sets = {
        tuple(map(int, rows)): sorted(map(int, centers))
        for group in groups
        for rows, centers in zip(group.rows, group.centers, strict=True)
    }
    assert group_sets == {(0, 2): [1], (1,): [], (3,): [], (5,): [], (4,): [0, 4]}
