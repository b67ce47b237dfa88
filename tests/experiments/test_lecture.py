"""Check the lecture's claims: features, Nystrom's error, averages, kernel k-means, verdicts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.linalg

from experiments import lecture_averaging as averaging
from experiments import lecture_feature_error as random_features
from experiments import lecture_kernel_pca as components
from experiments import lecture_kmeans as clusters
from experiments import lecture_nystrom_error as nystrom
from experiments import lecture_precomputed as strings
from experiments import lecture_svm as machines
from experiments import lecture_tensorsketch as sketches
from experiments.exact import gaussian
from experiments.experiment import Verdict
from experiments.results import Array
from tests.experiments.measured import results

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((60, 5)), RNG.standard_normal((60, 2))


# -------------------------------------------------------------------------------- random features


def test_fastfood_equals_product_of_its_matrices() -> None:
    """Compare with S H G P H B, multiplied out with the same draws."""
    d, m, size = 5, 20, 8
    found = random_features.fastfood(X, m, np.random.default_rng(3))
    rng, groups = np.random.default_rng(3), []
    H = scipy.linalg.hadamard(size).astype(np.float64)
    for _ in range(3):
        B, G = np.diag(rng.choice([-1.0, 1.0], size)), rng.standard_normal(size)
        P = np.eye(size)[rng.permutation(size)]
        S = np.sqrt(rng.chisquare(size, size)) / np.linalg.norm(G)
        groups.append(np.diag(S) @ H @ np.diag(G) @ P @ H @ B / np.sqrt(size))
    V = np.concatenate(groups)[:m, :d]
    np.testing.assert_allclose(found, X @ V.T, atol=1e-12)


def test_orthogonal_frequencies_are_orthogonal_in_groups() -> None:
    W = random_features.orthogonal(12, 5, np.random.default_rng(0))
    for group in (W[:5], W[5:10], W[10:]):
        products = group @ group.T
        np.testing.assert_allclose(products, np.diag(np.diag(products)), atol=1e-12)


@pytest.mark.parametrize(("d", "size"), [(1, 1), (2, 2), (5, 8), (64, 64), (65, 128)])
def test_rows_are_padded_to_a_power_of_two(d: int, size: int) -> None:
    assert random_features.padded(d) == size


@pytest.mark.parametrize("label", list(sketches.WAYS))
def test_features_of_polynomial_kernels_are_unbiased(label: str) -> None:
    A = X[:8] / np.linalg.norm(X[:8], axis=1, keepdims=True)
    total = np.zeros((8, 8))
    for seed in range(60):
        F = sketches.WAYS[label](A, 512, np.random.default_rng(seed))
        total += F @ F.T / 60
    # The error of one draw is about sqrt(15 / 512) for signs, so a standard error of .02.
    np.testing.assert_allclose(total, (A @ A.T) ** sketches.DEGREE, atol=0.1)


def feature_errors(slope: float, fastfood: float, orthogonal: float = 0.5) -> bool | None:
    """Return the outcome for errors that fall by a power of D."""
    return feature_verdict(slope, fastfood, orthogonal).confirmed


def feature_verdict(slope: float, fastfood: float, orthogonal: float = 0.5) -> Verdict:
    """Return the verdict for errors that fall by a power of D."""
    experiment = random_features
    scale = {"independent": 1.0, "orthogonal": orthogonal, "Sobol": 1.0, "Fastfood": fastfood}
    rows = [
        (figure, label, float(D), scale[label] * float(D) ** slope)
        for figure in (experiment.ERROR_OF_K, experiment.LARGEST)
        for label in experiment.WAYS
        for D in experiment.SIZES
    ]
    return experiment.judge(results(*rows))


def test_random_feature_verdict_uses_all_its_parts() -> None:
    assert feature_errors(-0.5, 1.2)
    assert "20 % larger, clearly" in feature_verdict(-0.5, 1.2).numbers
    assert "0 % larger, not clearly" in feature_verdict(-0.5, 1.0).numbers
    assert not feature_errors(-0.3, 1.2)
    assert not feature_errors(-0.5, 1.5)
    assert not feature_errors(-0.5, 1.2, orthogonal=1.0)


# ---------------------------------------------------------------------------------------- Nystrom


def test_fixed_rank_error_equals_explicit_matrix() -> None:
    """Compare with G_nys = C W_k^+ C^T, by the pseudo-inverse of the best approximation of rank
    k."""
    G, chosen, k = gaussian(X, X), np.arange(25), nystrom.RANK
    values, U = np.linalg.eigh(G[:25, :25])
    W_k = (U[:, -k:] * values[-k:]) @ U[:, -k:].T
    near = G[:, :25] @ np.linalg.pinv(W_k, rcond=1e-8) @ G[:25]
    V, s, _ = np.linalg.svd(G)
    best = (V[:, :k] * s[:k]) @ V[:, :k].T
    expected = np.linalg.norm(G - near) - np.linalg.norm(G - best)
    found = nystrom.excess(G, chosen, np.linalg.eigvalsh(G)[::-1])
    assert found == pytest.approx(expected / np.linalg.norm(G), rel=1e-6)
    assert nystrom.excess(G, np.arange(60), s) == pytest.approx(0, abs=1e-9)


def test_ten_clusters_have_an_eigengap_after_ten() -> None:
    values = np.linalg.eigvalsh(gaussian(*2 * [nystrom.clustered(800, RNG)]))[::-1]
    ratios = values[:20] / values[1:21]
    assert ratios[nystrom.RANK - 1] > 2
    assert ratios.argmax() == nystrom.RANK - 1


# --------------------------------------------------------------------------------------- averages


def test_shard_weights_minimise_shard_loss() -> None:
    W = averaging.weights(X, Y)
    gradient = X.T @ (X @ W - Y) + averaging.RIDGE * 60 * W
    assert np.abs(gradient).max() < 1e-10


def test_averaging_verdict_compares_with_one_shard() -> None:
    def verdict_for(shared: float, own: float) -> bool | None:
        rows = [
            ("error", label, float(m), value)
            for m in averaging.SHARDS
            for label, value in (
                (averaging.SHARED, shared), (averaging.OWN, own), (averaging.SHARD, 5.0),
                (averaging.WHOLE, 1.0),
            )
        ]  # fmt: skip
        return averaging.judge(results(*rows)).confirmed

    assert verdict_for(2.0, 2.0)
    assert not verdict_for(5.0, 2.0)
    assert not verdict_for(2.0, 6.0)


# ---------------------------------------------------------------------------------------- k-means


def brute_objective(F: Array, labels: Array) -> float:
    """Return the mean squared distance of features to the mean of their cluster."""
    return sum(
        float(((F[labels == k] - F[labels == k].mean(axis=0)) ** 2).sum()) for k in set(labels)
    ) / len(F)


def test_kernel_k_means_objective_equals_that_of_features() -> None:
    labels = RNG.integers(0, 4, 60)
    assert clusters.objective(X @ X.T, labels) == pytest.approx(brute_objective(X, labels))


def test_lloyd_on_kernel_equals_k_means_on_features() -> None:
    from sklearn.cluster import KMeans

    labels = RNG.integers(0, 3, 60)
    start = np.array([X[labels == k].mean(axis=0) for k in range(3)])
    theirs = KMeans(3, init=start, n_init=1, tol=0, algorithm="lloyd").fit(X).labels_
    np.testing.assert_array_equal(clusters.lloyd(X @ X.T, labels, 3), theirs)


def test_lloyd_never_raises_objective() -> None:
    K = gaussian(X, X)
    labels = RNG.integers(0, 3, 60)
    found = clusters.lloyd(K, labels, 5)
    assert clusters.objective(K, found) <= clusters.objective(K, labels)
    assert set(found) <= {0, 1, 2}


def test_k_means_of_few_rows_equals_exhaustive_search() -> None:
    rows = np.array([[0.0], [0.1], [0.2], [5.0], [5.1], [9.0]])
    ways = itertools.product(range(2), repeat=6)
    least = min(brute_objective(rows, np.array(way)) for way in ways)
    starts = (np.random.default_rng(seed).integers(0, 2, 6) for seed in range(10))
    K = rows @ rows.T
    found = min(clusters.objective(K, clusters.lloyd(K, start, 2)) for start in starts)
    assert found == pytest.approx(least)


def test_k_means_verdict_uses_largest_number_of_rows() -> None:
    def verdict_for(ratio: float) -> bool | None:
        rows = [
            (figure, label, c, value)
            for c, value in ((8.0, 1.5), (64.0, ratio))
            for figure in (clusters.OBJECTIVE, clusters.RAND)
            for label in (clusters.FEATURES, clusters.WHOLE, clusters.LINEAR)
        ]
        return clusters.judge(results(*rows)).confirmed

    assert verdict_for(1.005)
    assert not verdict_for(1.02)


# ---------------------------------------------------------------------------- support vectors, PCA


def test_svm_verdict_compares_with_dual_solution() -> None:
    def verdict_for(ours: float) -> bool | None:
        values = {machines.OURS: ours, machines.SQUARES: 9.0, machines.SVC: 2.0}
        return machines.judge(
            results(*(("error", k, 10.0, v) for k, v in values.items()))
        ).confirmed

    assert verdict_for(2.0)
    assert not verdict_for(3.0)


def test_streamed_components_verdict_compares_with_all_rows_and_linear_cca() -> None:
    def verdict_for(streamed: float, kernel: float) -> bool | None:
        return components.judge(
            results(
                (components.EXPLAINED, components.STREAMED, 8.0, streamed),
                (components.EXPLAINED, components.WHOLE, 8.0, 50.0),
                (components.CORRELATION, components.KERNEL, 8.0, kernel),
                (components.CORRELATION, components.LINEAR, 8.0, 0.7),
            )
        ).confirmed

    assert verdict_for(49.8, 0.9)
    assert not verdict_for(49.0, 0.9)
    assert not verdict_for(49.8, 0.6)


# ------------------------------------------------------------------------------ kernels of strings


def brute_subsequences(a: Array, b: Array) -> float:
    """Return the sum over all pairs of three places with equal letters, by trying all."""
    i, j = (np.array(list(itertools.combinations(range(len(word)), 3))) for word in (a, b))
    equal = (a[i][:, None] == b[j]).all(axis=2)
    spans = (i[:, 2] - i[:, 0])[:, None] + (j[:, 2] - j[:, 0])
    return float((equal * strings.DECAY**spans).sum())


def test_string_kernel_counts_common_subsequences() -> None:
    A, _ = strings.strings(3, np.random.default_rng(0))
    raw = np.array([[brute_subsequences(a, b) for b in A[:2]] for a in A])
    own = np.array([brute_subsequences(a, a) for a in A])
    np.testing.assert_allclose(
        strings.subsequences(A, A[:2]), raw / np.sqrt(np.outer(own, own[:2])), rtol=1e-12
    )


def test_string_classes_do_not_depend_on_letter_counts() -> None:
    A, classes = strings.strings(500, np.random.default_rng(0))
    for letter in range(3):
        assert (np.equal(A, letter).sum(axis=1) == 1).all()
    order = (A == 0).argmax(axis=1) < (A == 2).argmax(axis=1)
    np.testing.assert_array_equal(order, classes == 0)


def test_products_of_root_equal_matrix() -> None:
    K = gaussian(X, X)
    F, F_test = strings.root(K[:40, :40], K[40:, :40])
    np.testing.assert_allclose(F @ F.T, K[:40, :40], atol=1e-8)
    # The matrix has full rank, so that the products with new objects are exact as well.
    np.testing.assert_allclose(F_test @ F.T, K[40:, :40], atol=1e-8)


def test_given_matrix_verdict_uses_predictions_and_errors() -> None:
    def verdict_for(gap: float, ours: float) -> bool | None:
        return strings.judge(
            results(
                (strings.GAP, strings.OURS, 50.0, gap),
                (strings.WRONG, strings.OURS, 50.0, ours),
                (strings.WRONG, strings.LETTERS, 50.0, 50.0),
            )
        ).confirmed

    assert verdict_for(1e-6, 10.0)
    assert not verdict_for(1e-2, 10.0)
    assert not verdict_for(1e-6, 50.0)
