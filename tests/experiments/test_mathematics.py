"""Check the mathematics of experiments against closed forms, brute force and other libraries."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from experiments import exact, falkon_leverage, falkon_rates, falkon_steps
from experiments import lecture_feature_error as random_features
from experiments import lecture_kernel_pca as components
from experiments import lecture_nystrom_error as nystrom
from experiments import lecture_stacked as stacked

rng = np.random.default_rng(0)
X, Z = rng.standard_normal((60, 5)), rng.standard_normal((12, 5))
Y = rng.standard_normal((60, 2))


@pytest.mark.parametrize(
    ("name", "of_distance"),
    [
        ("laplace", lambda D: np.exp(-D)),
        ("gaussian", lambda D: np.exp(-(D**2) / 2)),
        ("cauchy", lambda D: 1 / (1 + D**2)),
    ],
)
def test_kernels_equal_their_formulas(name: str, of_distance: object) -> None:
    expected = of_distance(cdist(X, Z))  # type: ignore[operator]
    np.testing.assert_allclose(exact.KERNELS[name](X, Z), expected, atol=1e-12)


def test_ridge_and_nystrom_weights_minimise_their_losses() -> None:
    K, ridge = exact.gaussian(X, X), 0.01
    np.testing.assert_allclose((K + 60 * ridge * np.eye(60)) @ exact.ridge_weights(K, Y, ridge), Y)
    K_nm, K_mm = exact.gaussian(X, Z), exact.gaussian(Z, Z)
    alpha = exact.nystrom_weights(K_nm, K_mm, Y, ridge)
    gradient = K_nm.T @ (K_nm @ alpha - Y) + 60 * ridge * K_mm @ alpha
    assert np.abs(gradient).max() < 1e-9


def test_nystrom_with_all_centers_equals_kernel_ridge() -> None:
    K, ridge = exact.laplace(X, X), 0.01
    np.testing.assert_allclose(
        K @ exact.nystrom_weights(K, K, Y, ridge), K @ exact.ridge_weights(K, Y, ridge), atol=1e-8
    )


# -------------------------------------------------------------------------------------- FALKON


def test_falkon_preconditioner_equals_its_definition() -> None:
    """Check B B^T = (n / M K_MM^2 + lambda n K_MM)^-1, the proposal of the slides."""
    K_mm, n, ridge = exact.gaussian(Z, Z), 60, 0.01
    B = falkon_steps.preconditioner(K_mm, n, ridge)(np.eye(12))
    expected = np.linalg.inv(n / 12 * K_mm @ K_mm + ridge * n * K_mm)
    np.testing.assert_allclose(B @ B.T, expected, rtol=1e-6)


def test_conjugate_gradient_converges_in_dimension_steps() -> None:
    A = exact.gaussian(Z, Z) + np.eye(12)
    b = rng.standard_normal((12, 3))
    *_, last = falkon_steps.conjugate(A, b, 12)
    np.testing.assert_allclose(last, np.linalg.solve(A, b), atol=1e-10)
    *_, slow = falkon_steps.descend(A, b, 400)
    np.testing.assert_allclose(slow, np.linalg.solve(A, b), atol=1e-10)


@pytest.mark.parametrize("s", [1, 2])
def test_spline_kernels_have_theoretical_eigenvalues(s: int) -> None:
    """Compare with the sum k(x, z) = 1 + 2 sum_i i^(-2 s) cos(2 pi i (x - z))."""
    x, z = rng.uniform(size=20), rng.uniform(size=8)
    i = np.arange(1, 20_001)
    angles = 2 * np.pi * (x[:, None] - z)[..., None] * i
    expected = 1 + 2 * (np.cos(angles) * i ** (-2.0 * s)).sum(axis=-1)
    np.testing.assert_allclose(falkon_rates.kernel(x, z, s), expected, atol=2e-4)


def test_leverage_scores_from_all_rows_are_exact() -> None:
    K, ridge = exact.gaussian(X, X), 1e-3
    near = falkon_leverage.approximate_scores(X, X, np.ones(60), ridge)
    far = np.diag(K @ np.linalg.inv(K + 60 * ridge * np.eye(60)))
    np.testing.assert_allclose(near, far, atol=1e-8)


# ------------------------------------------------------------------------------------- lecture


@pytest.mark.parametrize("label", list(random_features.WAYS))
def test_random_features_are_unbiased(label: str) -> None:
    """Check that the mean of many draws is the kernel."""
    A = X[:10]
    total = np.zeros((10, 10))
    for seed in range(40):
        angles = random_features.WAYS[label](A, 256, np.random.default_rng(seed))
        F = random_features.features(angles)
        total += F @ F.T / 40
    np.testing.assert_allclose(total, exact.gaussian(A, A), atol=0.03)


@pytest.mark.parametrize("kind", list(stacked.KINDS))
def test_stacked_frequencies_approximate_their_kernels(kind: str) -> None:
    F = stacked.features(X[:10], (kind,), 60_000, 0)
    np.testing.assert_allclose(F @ F.T, exact.KERNELS[kind](X[:10], X[:10]), atol=0.03)


@pytest.mark.parametrize("label", list(nystrom.WAYS))
def test_nystrom_error_vanishes_with_all_columns(label: str) -> None:
    G = exact.gaussian(X, X)
    assert nystrom.nystrom_trace(G, np.arange(60), 60) == pytest.approx(0, abs=1e-6)
    chosen = nystrom.WAYS[label](X, G, 20, np.random.default_rng(0))
    assert len(set(chosen.tolist())) == len(chosen) <= 20
    error = nystrom.nystrom_trace(G, chosen, 20)
    C, W = G[:, chosen], G[np.ix_(chosen, chosen)]
    assert error == pytest.approx(
        np.trace(G - C @ np.linalg.pinv(W, rcond=1e-10) @ C.T) / np.trace(G), rel=1e-6
    )
    values = np.linalg.eigvalsh(G)[::-1]
    assert error >= values[20:].sum() / values.sum()


def test_streamed_components_of_all_rows_equal_kernel_pca() -> None:
    from sklearn.decomposition import KernelPCA

    features = components.Nystrom(X)
    mean, covariance = components.streamed_moments(X, features)
    own = np.linalg.eigvalsh(covariance)[::-1][:5] * 60
    theirs = KernelPCA(5, kernel="precomputed").fit(exact.gaussian(X, X)).eigenvalues_
    np.testing.assert_allclose(own, theirs, rtol=1e-6)
    np.testing.assert_allclose(mean, features(X).mean(axis=0), atol=1e-12)


def test_first_correlation_equals_classical_cca() -> None:
    """Check that without damping it is the largest singular value of the angles, on the training
    rows."""
    A = rng.standard_normal((200, 3))
    B = A @ rng.standard_normal((3, 4)) + rng.standard_normal((200, 4))
    A, B = A - A.mean(axis=0), B - B.mean(axis=0)
    Q, R = np.linalg.qr(A)[0], np.linalg.qr(B)[0]
    expected = np.linalg.svd(Q.T @ R, compute_uv=False)[0]
    moments = np.cov(np.concatenate([A, B], axis=1).T, bias=True)
    found = components.first_correlation(A, B, moments, 3)
    assert found == pytest.approx(expected, rel=2e-3)
