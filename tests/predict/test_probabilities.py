"""Compare fitted probabilities with optima of SciPy and fits of scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize, minimize_scalar
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from streamkern.predict.probabilities import (
    MIN_ROWS_OF_ISOTONIC,
    Softmax,
    fit_isotonic,
    fit_probabilities,
    fit_temperature,
    fit_vector,
    probabilities_from_arrays,
)

rng = np.random.default_rng(0)


def draw_rows(
    m: int, c: int, slope: float = 6.0, shift: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return values with classes drawn from softmax(slope f + shift k), and weights."""
    F = rng.normal(0.3, 0.4, (m, c))
    p = Softmax(np.full(c, slope), shift * np.arange(c))(F)
    labels = (p.cumsum(axis=1) < rng.random((m, 1))).sum(axis=1)
    return F, np.minimum(labels, c - 1), rng.uniform(0.5, 2, m)


def loss(F: np.ndarray, labels: np.ndarray, w: np.ndarray, slope: object, shift: object) -> float:
    """Return the log loss of the rows and of one additional uniform row, by its definition."""
    m = len(F)
    z = F * slope + shift
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    log_scores = log_p[np.arange(m), labels] * m + log_p.mean(axis=1)
    return float(-(w * log_scores).sum() / w.sum() / (m + 1))


@pytest.mark.parametrize("c", [2, 5])
def test_temperature_equals_scipy_optimum(c: int) -> None:
    F, labels, w = draw_rows(300, c)
    fitted = fit_temperature(F, labels, w)
    best = minimize_scalar(
        lambda t: loss(F, labels, w, np.exp(t), 0.0), bounds=(-3, 5), method="bounded",
        options={"xatol": 1e-10},
    )  # fmt: skip
    np.testing.assert_allclose(fitted.slope, np.exp(best.x), rtol=1e-5)
    assert fitted.method == "temperature"


def test_vector_scaling_equals_scipy_optimum() -> None:
    F, labels, w = draw_rows(400, 3, shift=1.0)
    fitted = fit_vector(F, labels, w)
    best = minimize(lambda t: loss(F, labels, w, t[:3], t[3:]), np.ones(6), tol=1e-12)
    assert loss(F, labels, w, fitted.slope, fitted.shift) <= best.fun + 1e-9
    optimum = Softmax(best.x[:3], best.x[3:])
    np.testing.assert_allclose(fitted(F), optimum(F), atol=1e-4)
    assert fitted.method == "vector"


def test_isotonic_calibration_equals_scikit_learn() -> None:
    F, labels, w = draw_rows(400, 3)
    F = F.round(2)  # with ties
    m = len(F)
    expected = np.stack(
        [
            IsotonicRegression(y_min=1 / (m + 2), y_max=1 - 1 / (m + 2), out_of_bounds="clip")
            .fit(F[:, k], labels == k, w)
            .predict(F[:, k] + 0.004)
            for k in range(3)
        ],
        axis=1,
    )
    probabilities = fit_isotonic(F, labels, w)(F + 0.004)
    np.testing.assert_allclose(
        probabilities, expected / expected.sum(axis=1, keepdims=True), atol=1e-9
    )


def test_perfect_rows_do_not_give_certain_probabilities() -> None:
    labels = np.arange(40) % 4
    p = fit_temperature(np.eye(4)[labels], labels, np.ones(40))(np.eye(4))
    assert 0.97 < p.max() < 1 - 1e-3
    misleading = fit_temperature(-np.eye(4)[labels], labels, np.ones(40))
    np.testing.assert_allclose(misleading(np.eye(4)), 0.25)


def test_simpler_method_is_chosen_unless_significantly_worse() -> None:
    F, labels, _ = draw_rows(1500, 3)
    assert fit_probabilities(F, labels).method == "temperature"
    F, labels, _ = draw_rows(1500, 3, shift=1.5)
    assert fit_probabilities(F, labels).method == "vector"
    assert fit_probabilities(F[:400], labels[:400]).method == "temperature"
    F = rng.uniform(-1, 1, (2 * MIN_ROWS_OF_ISOTONIC, 1))
    steps = np.array([0.1, 0.9, 0.95, 0.05])[np.clip(F[:, 0] * 2 + 2, 0, 3).astype(int)]
    steps = np.sort(steps)[np.argsort(np.argsort(F[:, 0]))]  # which no softmax follows
    labels = (rng.random(len(F)) < steps).astype(int)
    assert fit_probabilities(np.hstack((1 - F, F)), labels).method in ("vector", "isotonic")


def test_probabilities_roundtrip_through_arrays() -> None:
    F, labels, w = draw_rows(300, 3)
    for fit in (fit_temperature, fit_vector, fit_isotonic):
        fitted = fit(F, labels, w)
        restored = probabilities_from_arrays(fitted.arrays())
        assert restored is not None
        np.testing.assert_array_equal(restored(F), fitted(F))
        np.testing.assert_allclose(fitted(F).sum(axis=1), 1)
    assert probabilities_from_arrays({}) is None


def test_vector_scaling_of_two_classes_is_logistic_regression() -> None:
    F, labels, _ = draw_rows(600, 2)
    d = (F[:, 1] - F[:, 0])[:, None]
    expected = LogisticRegression(C=np.inf, tol=1e-10).fit(d, labels).predict_proba(d)
    values = np.hstack((0 * d, d))
    probabilities = fit_vector(values, labels, np.ones(600))(values)
    # The additional row of `fit_vector` changes them a little.
    np.testing.assert_allclose(probabilities, expected, atol=5e-3)
