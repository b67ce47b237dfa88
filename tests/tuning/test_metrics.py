"""Compare metrics of held-out rows, computed from losses of single rows, with scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as truth

from streamkern.losses.errors import AbsoluteError, Quantile
from streamkern.losses.log_loss import LogLoss
from streamkern.tuning.metrics import (
    CLASS_METRICS,
    REGRESSION_METRICS,
    clipped_probabilities,
    find_metric,
    known_metrics,
    pack_losses,
    row_losses,
    row_weights,
    squared_standard_error,
    unpack_losses,
)


@pytest.mark.parametrize("weighted", [False, True])
def test_class_metrics_equal_scikit_learn(weighted: bool) -> None:
    rng = np.random.default_rng(0)
    y = rng.choice(4, 300, p=[0.7, 0.1, 0.1, 0.1])
    F, Y = 0.4 * rng.standard_normal((300, 4)) + np.eye(4)[y], np.eye(4)[y]
    w = rng.integers(0, 4, 300).astype(np.float32) if weighted else None
    losses = row_losses(F, Y, None)
    P, labels = clipped_probabilities(F), F.argmax(axis=1)
    expected = {
        "accuracy": truth.accuracy_score(y, labels, sample_weight=w),
        "balanced_accuracy": truth.balanced_accuracy_score(y, labels, sample_weight=w),
        "log_loss": truth.log_loss(y, P, sample_weight=w),
        "mse": truth.mean_squared_error(Y, F, sample_weight=w),
    }
    for name, metric in CLASS_METRICS.items():
        figure = metric.to_loss(float(row_weights(metric, y, w) @ losses[metric.loss]))
        assert figure == pytest.approx(expected[name], rel=1e-6), name
    assert expected.keys() == CLASS_METRICS.keys()
    np.testing.assert_allclose(P.sum(axis=1), 1)
    assert P.min() > 0
    is_unclipped = (F > 1e-3).all(axis=1)
    ratio = P[is_unclipped] / F[is_unclipped]  # only divided by their sum
    np.testing.assert_allclose(ratio, ratio[:, :1].repeat(4, axis=1))


@pytest.mark.parametrize("weighted", [False, True])
def test_value_metrics_equal_scikit_learn(weighted: bool) -> None:
    rng = np.random.default_rng(0)
    Y = rng.standard_normal((200, 3)) * [1, 10, 100]
    F = Y + rng.standard_normal((200, 3))
    w = rng.random(200) if weighted else None
    v = row_weights(REGRESSION_METRICS["mse"], Y, w)
    losses = row_losses(F, Y, v @ np.square(Y - v @ Y))
    expected = {
        "mse": truth.mean_squared_error(Y, F, sample_weight=w),
        "mae": truth.mean_absolute_error(Y, F, sample_weight=w),
        "r2": truth.r2_score(Y, F, sample_weight=w),
    }
    for name, metric in REGRESSION_METRICS.items():
        figure = metric.to_loss(float(row_weights(metric, Y, w) @ losses[metric.loss]))
        assert figure == pytest.approx(expected[name], rel=1e-9), name


def test_loss_metrics_equal_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    y = rng.choice(3, 200)
    F, Y = 2 * rng.standard_normal((200, 3)), np.eye(3)[y]
    P = np.exp(F) / np.exp(F).sum(axis=1, keepdims=True)
    of_rows = row_losses(F, Y, None, LogLoss())
    assert of_rows["log_loss"].mean() == pytest.approx(truth.log_loss(y, P))
    assert of_rows["mse"].mean() == pytest.approx(truth.mean_squared_error(Y, P))
    assert 1 - of_rows["error"].mean() == truth.accuracy_score(y, P.argmax(axis=1))
    for alpha in (0.1, 0.5):
        of_rows = row_losses(F, Y, np.ones(3), Quantile(alpha))
        expected = truth.mean_pinball_loss(Y, F, alpha=alpha)
        assert of_rows["pinball_loss"].mean() == pytest.approx(expected)
        assert of_rows["mae"].mean() == pytest.approx(truth.mean_absolute_error(Y, F))


def test_squared_standard_error_equals_that_of_a_mean() -> None:
    d = np.random.default_rng(0).standard_normal(50)
    assert squared_standard_error(d, np.full(50, 1 / 50)) == pytest.approx(d.var(ddof=1) / 50)
    assert squared_standard_error(d[:1], np.ones(1)) == np.inf


def test_packed_losses_are_float32() -> None:
    values = np.random.default_rng(0).standard_normal(1000)
    np.testing.assert_array_equal(unpack_losses(pack_losses(values)), np.float32(values))


@pytest.mark.parametrize(
    ("name", "classes", "expected"),
    [
        ("auto", True, "accuracy"),
        ("auto", False, "mse"),
        ("log_loss", True, "log_loss"),
        ("r2", False, "r2"),
    ],
)
def test_metrics_are_found_by_name(name: str, classes: bool, expected: str) -> None:
    assert find_metric(name, classes).name == expected


def test_loss_metric_is_the_first_metric() -> None:
    assert [*known_metrics(False, Quantile)] == ["pinball_loss", "mse", "mae", "r2"]
    assert [*known_metrics(False, AbsoluteError)] == ["mae", "mse", "r2"]
    assert next(iter(known_metrics(True, LogLoss))) == find_metric("auto", True, LogLoss).name
