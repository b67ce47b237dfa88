"""Check top eigenpairs against LAPACK in float64, and the low-rank preconditioner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.basics.errors import ConfigError
from streamkern.solver.precondition import low_rank
from streamkern.solver.precondition.low_rank import build_low_rank, top_eigenpairs
from tests import reference as ref
from tests.solver_problems import Array, both, operator, rows

S = 700


@pytest.fixture
def krylov(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use block Krylov for any size whose Krylov space is at most half of the full space."""
    monkeypatch.setattr(low_rank, "DENSE_ROWS", 0)


def gram(kernel: str, bandwidth: float, X: Array, precision: str) -> Array:
    """Return K(X, X) / n."""
    op = operator(kernel, bandwidth, precision)
    return np.asarray(op.gram(both(op, X)) / len(X))


def checked_eigenpairs(A: Array, k: int, *, seed: int = 0) -> tuple[Array, Array, Array]:
    """Return k eigenpairs after checks that hold for any matrix, and all true eigenvalues."""
    truth = np.linalg.eigvalsh(A.astype(np.float64))[::-1]
    eps = float(np.finfo(A.dtype).eps)
    lam, E = top_eigenpairs(Backend(1), A.copy(), k, seed)
    assert lam.shape == (k,)
    assert E.shape == (len(A), k)
    assert lam.dtype == E.dtype == A.dtype
    # LAPACK's MRRR algorithm promises orthogonality to O(n eps) only.
    orthogonal = 100 * eps * (1 if low_rank._is_large(len(A), k) else len(A))
    np.testing.assert_allclose(E.T @ E, np.eye(k), rtol=0, atol=orthogonal)
    assert (E[np.abs(E).argmax(axis=0), np.arange(k)] > 0).all()
    rounding = 20 * eps * truth[0]
    assert (np.diff(lam[:-1]) <= rounding).all()
    assert (lam[:-1] <= truth[: k - 1] + rounding).all()
    assert lam[-1] >= truth[k - 1] - rounding
    return lam, E, truth


def largest_sine(E: Array, A: Array) -> float:
    """Return the sine of the largest angle between span E and the true top eigenvectors."""
    n, k = E.shape
    _, V = scipy.linalg.eigh(A.astype(np.float64), subset_by_index=(n - k, n - 1))
    Q, _ = np.linalg.qr(E.astype(np.float64))
    return float(np.linalg.norm(V - Q @ (Q.T @ V), 2))


@pytest.mark.usefixtures("krylov")
@pytest.mark.parametrize("k", [1, 12, 60])
@pytest.mark.parametrize(("kernel", "bandwidth"), [("laplace", 2.0), ("gaussian", 3.0)])
@pytest.mark.parametrize("precision", ["exact", "float64"])
def test_decaying_spectra_are_accurate(
    kernel: str, bandwidth: float, k: int, precision: str
) -> None:
    A = gram(kernel, bandwidth, rows(0, S, 3), precision)
    lam, E, truth = checked_eigenpairs(A, k)
    rounding = 10 * float(np.finfo(A.dtype).eps) * truth[0]
    np.testing.assert_allclose(lam[:-1], truth[: k - 1], rtol=0, atol=rounding + 1e-10 * truth[0])
    np.testing.assert_allclose(lam[-1], truth[k - 1], rtol=1e-4, atol=rounding)
    # Rounding turns the eigenvectors by its ratio to the gap, if there is one.
    assert largest_sine(E, A) <= 2e-4 + rounding / (truth[k - 1] - truth[k])


@pytest.mark.usefixtures("krylov")
def test_spectrum_without_a_gap_is_accurate() -> None:
    """Check a slow decay: in 60 dimensions all rows are equally far from each other."""
    A = gram("laplace", 8.0, rows(0, S, 60), "exact")
    lam, E, truth = checked_eigenpairs(A, 20)
    np.testing.assert_allclose(lam[:-1], truth[:19], rtol=0.02)
    assert lam[-1] <= 1.05 * truth[19]
    # The remainder of A without its eigenvectors is nearly as small as with exact eigenvectors.
    remainder = A.astype(np.float64) - (E * (E * (A @ E)).sum(axis=0)) @ E.T
    assert np.linalg.norm(remainder, 2) <= 1.05 * truth[20]


def symmetric(values: Array) -> Array:
    """Return a matrix with these eigenvalues, in a random basis."""
    basis, _ = np.linalg.qr(rows(0, S, S))
    A = (basis * values) @ basis.T
    return np.asarray((A + A.T) / 2)


@pytest.mark.usefixtures("krylov")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "A",
    [
        symmetric(np.ones(S)), symmetric(np.r_[np.ones(50), np.zeros(S - 50)]),
        symmetric(np.r_[3.0, 2.0, np.zeros(S - 2)]), np.eye(S), np.ones((S, S)),
        np.diag(np.arange(S) < 5) * 1.0,
        gram("laplace", 2.0, np.repeat(rows(0, S // 7, 3), 7, axis=0), "float64"),
    ],
    ids=["identity", "projector", "rank 2", "no rounding", "constant", "diagonal", "duplicates"],
)  # fmt: skip
def test_repeated_eigenvalues_beyond_block_width_are_found(A: Array, dtype: Any) -> None:
    """Check a Krylov space that is invariant, of fewer different rows than eigenvectors."""
    for k in (30, 110):
        lam, _, truth = checked_eigenpairs(A.astype(dtype), k)
        eps = float(np.finfo(dtype).eps)
        np.testing.assert_allclose(lam[:30], truth[:30], rtol=0, atol=100 * eps * truth[0])


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 400), share=st.floats(0, 1), decay=st.floats(0, 6), seed=st.integers(0, 10**6)
)
def test_any_size_and_decay_is_accurate(n: int, share: float, decay: float, seed: int) -> None:
    """Check sizes k near n, for which LAPACK computes all eigenpairs."""
    k = max(1, round(share * n))
    basis, _ = np.linalg.qr(rows(seed, n, n))
    A = (basis * np.arange(1.0, n + 1) ** -decay) @ basis.T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_rank, "DENSE_ROWS", 0)
        lam, _, truth = checked_eigenpairs((A + A.T) / 2, k, seed=seed)
    np.testing.assert_allclose(lam, truth[:k], rtol=0.1, atol=1e-12)


def test_equal_eigenvalues_are_found() -> None:
    """Check the last two of 33 equal eigenvalues, which LAPACK often does not find."""
    for seed in range(40):
        basis, _ = np.linalg.qr(rows(seed, 33, 33))
        A = basis @ basis.T
        checked_eigenpairs((A + A.T) / 2, 2)


def test_small_matrices_use_lapack() -> None:
    A = gram("laplace", 2.0, rows(0, 300, 3), "float64")
    lam, E, truth = checked_eigenpairs(A, 299)
    np.testing.assert_allclose(lam, truth[:299], rtol=1e-10)
    np.testing.assert_allclose(A @ E, E * lam, rtol=0, atol=1e-13)
    assert low_rank.eigen_flops(4000, 200) == 9 * 4000**3
    assert low_rank.eigen_flops(10_000, 500) < 9 * 10_000**3 / 10
    assert low_rank.eigen_flops(10_000, 5000) == 9 * 10_000**3


@pytest.mark.usefixtures("krylov")
def test_eigenpairs_depend_on_seed_only() -> None:
    A = gram("laplace", 2.0, rows(0, S, 3), "exact")
    results = []
    for threads, seed in ((1, 3), (2, 3), (3, 3), (1, 4)):
        with Backend(threads) as backend:
            results.append(top_eigenpairs(backend, A.copy(), 12, seed))
    for lam, E in results[1:3]:
        np.testing.assert_array_equal(lam, results[0][0])
        np.testing.assert_array_equal(E, results[0][1])
    assert not np.array_equal(results[3][1], results[0][1])
    np.testing.assert_allclose(results[3][0], results[0][0], rtol=1e-4)


# --- the preconditioner -------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 6, 39])
def test_low_rank_eigensystem_equals_the_reference(level: int) -> None:
    op, X_s, probe = operator(), rows(0, 40, 3), rows(1, 150, 3)
    P = build_low_rank(op, both(op, X_s), both(op, probe), level=level)
    kernel = ref.make_kernel("laplace", 2.0)
    eigen = ref.eigensystem(kernel(X_s, X_s), level)
    np.testing.assert_allclose(P.D, eigen.D, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.abs(np.sum(P.E * eigen.E, axis=0)), 1.0, rtol=1e-8)
    scale = np.abs(eigen.Q).max()
    np.testing.assert_allclose((P.E * P.D) @ P.E.T, eigen.Q, rtol=0, atol=1e-10 * scale)
    spectrum = ref.eigenpro_spectrum(kernel, probe, X_s, eigen)
    assert P.rule.leverage == pytest.approx(spectrum.leverage, rel=1e-9)
    assert spectrum.lambda_1 * (1 - 1e-10) <= P.rule.lambda_1 <= spectrum.lambda_1 * 1.01
    g = rows(2, 150, 2)
    np.testing.assert_allclose(
        P.correction(op, both(op, probe), g, np.empty((len(X_s), 2))),
        eigen.Q @ kernel(X_s, probe) @ g,
        rtol=0, atol=1e-9,
    )  # fmt: skip


def test_directions_at_rounding_level_are_excluded() -> None:
    """Check a smooth kernel, with few eigenvalues above the rounding errors of float32."""
    op = operator("gaussian", 3.0, "exact")
    X_s, probe = rows(0, 100, 1), rows(1, 80, 1)
    P = build_low_rank(op, both(op, X_s), both(op, probe), level=60)
    assert 1 <= P.E.shape[1] < 20
    assert P.E.shape == (100, len(P.D))
    assert np.isfinite(P.D).all()
    assert P.D.min() >= 0
    assert 0 < P.rule.lambda_1 < 1e-2


@pytest.mark.parametrize("level", [0, -1, 20, 21])
def test_level_out_of_range_is_refused(level: int) -> None:
    op = operator()
    with pytest.raises(ConfigError, match=f"level={level} must lie between 1 and n_nystrom - 1"):
        build_low_rank(op, both(op, rows(0, 20, 2)), both(op, rows(1, 20, 2)), level=level)
