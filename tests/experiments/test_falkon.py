"""Check the experiments about FALKON: their formulas, generated data and verdicts."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from experiments import (
    falkon_centers_count,
    falkon_divide,
    falkon_leverage,
    falkon_nytro,
    falkon_rates,
    falkon_steps,
    falkon_tables,
    falkon_yelp,
)
from experiments.data import Data, Split, digits
from experiments.exact import gaussian, ridge_weights
from experiments.results import Array, Results
from tests.experiments.measured import results

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((80, 2)), RNG.standard_normal((80, 3))


def options(**more: object) -> argparse.Namespace:
    """Return the options of a small run."""
    shared = {"rows": 200, "repetitions": 1, "bandwidth": 1.0, "device": "cpu", "quick": True}
    return argparse.Namespace(**shared | more)


def split_of(data: Data, **more: object) -> Split:
    """Return the first split of a small run."""
    return next(data.splits(options(**more)))


# -------------------------------------------------------------------------- preconditioner, steps


def test_error_of_slides_is_difference_of_covariances() -> None:
    """Check B^T H B = I + A^-T T^-T (K_nM^T K_nM / n - K_MM^2 / M) T^-1 A^-1."""
    n, M, ridge = 80, 20, 1e-2
    K_nm, K_mm = gaussian(X, X[:M]), gaussian(X[:M], X[:M])
    B = falkon_steps.preconditioner(K_mm, n, ridge)(np.eye(M))
    E = n * B.T @ (K_nm.T @ K_nm / n - K_mm @ K_mm / M) @ B
    G = falkon_steps.system(K_nm, K_mm, ridge)[2]
    np.testing.assert_allclose(G, np.eye(M) + E, atol=1e-5)


def test_condition_number_is_ratio_of_eigenvalues() -> None:
    Q = np.linalg.qr(RNG.standard_normal((6, 6)))[0]
    H = Q * np.array([1.0, 2, 3, 4, 5, 7]) @ Q.T
    assert falkon_steps.condition((H + H.T) / 2) == pytest.approx(7)


# ----------------------------------------------------------------------------------------- rates


@pytest.mark.parametrize(("s", "r"), falkon_rates.CASES)
def test_target_is_in_range_of_operator_power(s: int, r: float) -> None:
    """Check f = L^r g, where the coefficients of g are those of f divided by eigenvalues^r and
    square-summable."""
    x = (np.arange(4000) + 0.5) / 4000
    f, i = falkon_rates.target(x, s, r), falkon_rates.FREQUENCIES
    found = 2 * np.cos(2 * np.pi * i[:, None] * x) @ f / len(x)
    g = found * i ** (2.0 * s * r)
    # Coefficients are as small as 400^-3.5 = 1e-9 beside values of 1.
    np.testing.assert_allclose(g, g[0] * i**-0.51, rtol=1e-4)
    assert (f**2).mean() == pytest.approx(1)


@pytest.mark.parametrize("s", [1, 2])
def test_capacity_condition_has_exponent_of_spline_order(s: int) -> None:
    """Check N(lambda) = sum_i mu_i / (mu_i + lambda) = O(lambda^(-1 / 2s))."""
    mu = np.repeat(np.arange(1.0, 2e5) ** (-2 * s), 2)
    ridges = np.array([1e-4, 1e-6])
    sizes = [(mu / (mu + ridge)).sum() for ridge in ridges]
    fitted = -np.polyfit(np.log(ridges), np.log(sizes), 1)[0]
    assert fitted == pytest.approx(1 / (2 * s), abs=0.03)


# --------------------------------------------------------------- NYTRO, number of centers, parts


def test_nytro_path_is_gradient_descent_without_penalty() -> None:
    """Compare the closed form with gradient steps in Nystrom features."""
    split = split_of(digits())
    (point,) = falkon_nytro.points(digits(), options())
    found = Results()
    for measurement in point.measure():
        found.add(measurement)
    (figure,) = found.values
    places = found.places(falkon_nytro.NYTRO, figure)
    F, F_test, labels = nystrom_problem(split)
    eta = 1 / np.linalg.norm(F, 2) ** 2
    W = np.zeros((F.shape[1], labels.shape[1]))
    done = 0
    for t in [t for t in places if t < 3000 and t == int(t)]:
        while done < t:
            W -= eta * F.T @ (F @ W - labels)
            done += 1
        assert found.at(falkon_nytro.NYTRO, t, figure) == pytest.approx(split.error(F_test @ W))
    assert done >= 1


def nystrom_problem(split: Split) -> tuple[Array, Array, Array]:
    """Return features of training and test rows, and the noisy targets of the experiment."""
    X, X_test = split.scaled
    n, rng, M = len(X), np.random.default_rng(split.seed), len(X) // 4
    labels = split.targets.copy()
    drawn = rng.uniform(size=n) < falkon_nytro.NOISE
    labels[drawn] = labels[rng.permutation(n)][drawn]
    values, U = np.linalg.eigh(gaussian(X[:M], X[:M]))
    root = U / np.sqrt(np.maximum(values, 1e-12 * values[-1]))
    return gaussian(X, X[:M]) @ root, gaussian(X_test, X[:M]) @ root, labels


def test_nytro_verdict_uses_least_and_last_error() -> None:
    experiment = falkon_nytro

    def verdict_for(best: float, end: float) -> bool | None:
        nytro, ridge = experiment.NYTRO, experiment.RIDGE
        curves = ((nytro, 1, 9.0), (nytro, 2, best), (nytro, 3, end),
                  (ridge, 1, 3.0), (ridge, 2, 2.0), (ridge, 3, 4.0))  # fmt: skip
        return experiment.judge(results(*(("error", *curve) for curve in curves))).confirmed

    assert verdict_for(2.0, 5.0)
    assert not verdict_for(2.5, 5.0)  # worse than the ridge
    assert not verdict_for(2.0, 2.0)  # stopping gains nothing


def test_one_part_equals_model_of_all_rows() -> None:
    experiment, data = falkon_divide, digits()
    point = next(iter(experiment.points(data, options())))
    found = {label: value for _, label, _, value in point.measure()}
    split = split_of(data)
    X, X_test = split.scaled
    alpha = ridge_weights(gaussian(X, X), split.targets, experiment.RIDGE)
    expected = split.error(gaussian(X_test, X) @ alpha)
    assert found[experiment.AVERAGE] == found[experiment.ONE_PART] == pytest.approx(expected)
    assert found[experiment.NYSTROM] == pytest.approx(expected, abs=1)


def test_divide_and_conquer_verdict_compares_part_and_nystrom() -> None:
    experiment = falkon_divide

    def verdict_for(part: float, nystrom: float) -> bool | None:
        rows = [
            ("error", label, float(m), value)
            for m in experiment.PARTS
            for label, value in (
                (experiment.AVERAGE, 3.0), (experiment.ONE_PART, part),
                (experiment.NYSTROM, nystrom),
            )
        ]  # fmt: skip
        return experiment.judge(results(*rows)).confirmed

    assert verdict_for(4.0, 2.0)
    assert verdict_for(4.0, 3.0)
    assert not verdict_for(3.0, 2.0)
    assert not verdict_for(4.0, 3.5)  # the average beats Nystrom


def test_least_number_of_centers_is_compared_with_theory() -> None:
    experiment = falkon_centers_count

    def verdict_for(M: float) -> bool | None:
        return experiment.judge(results((experiment.LEAST, "measured", 100.0, M))).confirmed

    assert verdict_for(46)  # sqrt(100) log 100 = 46.05
    assert not verdict_for(47)


# -------------------------------------------------------------------------- leverage, the tables


def test_two_pass_leverage_scores_approximate_exact_scores() -> None:
    rng = np.random.default_rng(0)
    rows, _, _ = falkon_leverage.problem(rng, 1500)
    n, ridge = len(rows), falkon_leverage.RIDGE
    K = gaussian(rows, rows)
    exact = 1 - ridge * n * np.diag(np.linalg.inv(K + ridge * n * np.eye(n)))
    near = falkon_leverage.two_passes(rows, 500, rng)
    assert np.median(np.abs(np.log(near / exact))) < 0.5  # within a factor of 1.6
    assert np.corrcoef(near, exact)[0, 1] > 0.7


def test_theory_needs_documented_numbers_of_centers() -> None:
    """Check the numbers in its docstring: 190 by the sum of the scores, 1650 by n times the
    largest."""
    n, ridge = falkon_leverage.ROWS, falkon_leverage.RIDGE
    rows = falkon_leverage.problem(np.random.default_rng(0), 2 * n)[0][:n]
    K = gaussian(rows, rows)
    exact = 1 - ridge * n * np.diag(np.linalg.inv(K + ridge * n * np.eye(n)))
    assert exact.sum() == pytest.approx(190, rel=0.1)
    assert n * exact.max() == pytest.approx(1650, rel=0.1)


def test_cluster_error_weights_clusters_equally() -> None:
    residuals, clusters = np.array([[1.0], [1], [1], [3]]), np.array([0, 0, 0, 5])
    assert falkon_leverage.errors_of(residuals, clusters) == {
        falkon_leverage.ERROR_OF_CLUSTERS: 5.0, falkon_leverage.ERROR_OF_ROWS: 3.0
    }  # fmt: skip


@pytest.mark.slow
def test_leverage_ridge_is_best_for_all_rows() -> None:
    """Check that the ridge favours neither way of drawing centers, as its docstring says."""
    errors = []
    ridges = [falkon_leverage.RIDGE * factor for factor in (0.1, 1, 10)]
    for seed in range(3):
        rows, y, of = falkon_leverage.problem(np.random.default_rng(seed), 4000)
        X, X_test = rows[:2000], rows[2000:]
        K, K_test = gaussian(X, X), gaussian(X_test, X)
        gaps = (K_test @ ridge_weights(K, y[:2000], ridge) - y[2000:] for ridge in ridges)
        errors.append(
            [falkon_leverage.errors_of(gap, of[2000:])[falkon_leverage.ERROR_OF_ROWS]
             for gap in gaps]
        )  # fmt: skip
    assert np.mean(errors, axis=0).argmin() == 1


def test_generated_susy_problem_has_known_least_error() -> None:
    data = falkon_tables.made(argparse.Namespace(rows=20_000))
    assert data.X.shape[1] == 18
    assert data.classes == ("0", "1")
    score = falkon_tables.LEAST_ERROR
    X = data.X
    right = X[:, 0] * X[:, 1] + np.sin(2 * X[:, 2]) + X[:, 3] ** 2 - 1 + X[:, 4] * X[:, 12] / 2 > 0
    assert (right != data.y).mean() == pytest.approx(score, abs=0.01)


def test_area_under_curve_is_share_of_ordered_pairs() -> None:
    y, scores = RNG.integers(0, 2, 50), RNG.standard_normal(50)
    pairs = scores[y == 1][:, None] > scores[y == 0]
    assert falkon_tables.area(y, scores) == pytest.approx(pairs.mean())


def test_table_verdict_uses_largest_number_of_rows() -> None:
    experiment = falkon_tables

    def verdict_for(falkon: float, other: float) -> bool | None:
        rows = [
            row
            for label in (
                experiment.FALKON,
                experiment.DEFAULT,
                experiment.EIGENPRO,
                experiment.FOURIER,
            )
            for row in (
                ("error", label, 10.0, 9.0),
                ("error", label, 20.0, falkon if label == experiment.FALKON else other),
                (experiment.SECONDS, label, 20.0, 1.0),
            )
        ]
        return experiment.judge(results(*rows)).confirmed

    assert verdict_for(3.0, 3.0)
    assert not verdict_for(3.0, 2.0)


def test_targets_far_from_zero_are_judged_by_deviations() -> None:
    """Check years near 2000; without their mean every number of centers would look equally good."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((200, 2))
    y = np.sin(3 * rows[:, 0])
    errors = []
    for mean in (0.0, 2000.0):
        data = Data("values", rows, y + mean, None, None, own=True)
        point = list(falkon_centers_count.points(data, options(rows=150)))[-1]
        errors.append([m.value for m in point.measure()])
    np.testing.assert_allclose(errors[1], errors[0], rtol=1e-6)


def test_generated_reviews_are_unit_sparse_rows() -> None:
    X, stars = falkon_yelp.reviews(50, np.random.default_rng(0))
    again, _ = falkon_yelp.reviews(50, np.random.default_rng(0))
    assert X.shape == (50, falkon_yelp.FEATURES)
    assert (again != X).nnz == 0
    assert (X * X).sum(axis=1) == pytest.approx(np.ones(50), rel=1e-5)
    assert np.diff(X.indptr).max() <= 3 * falkon_yelp.LENGTH
    assert stars.min() >= 1
    assert stars.max() <= 5


def test_reviews_of_file_are_log_counts(tmp_path: Path) -> None:
    (tmp_path / "reviews.svm").write_text("4 1:1 7:3\n2 3:1\n")
    X, y = falkon_yelp.read(str(tmp_path / "reviews.svm"))
    expected = np.log([2, 4])
    assert X.toarray()[0, [0, 6]] == pytest.approx(expected / np.linalg.norm(expected))
    assert y.tolist() == [4, 2]
