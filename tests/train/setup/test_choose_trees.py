"""The search for trees whose leaves the kernel compares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.train.setup import choose_trees, kernel_and_metric
from tests.trees import step_table


def error(model: Any, n: int = 2000) -> float:
    X, y = step_table(n, 99)
    return float(np.mean((model.predict(X) - y) ** 2))


@pytest.fixture(scope="module")
def step_model() -> sk.KernelRegressor:
    return sk.KernelRegressor(random_state=0).fit(*step_table(1500))


def test_steps_are_learned_by_trees(
    step_model: sk.KernelRegressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert step_model.kernel_.trees is not None
    monkeypatch.setattr(kernel_and_metric, "looks_for_trees", lambda run: False)
    without = sk.KernelRegressor(random_state=0).fit(*step_table(1500))
    assert without.kernel_.trees is None
    assert error(step_model) < 0.7 * error(without)


def test_smooth_targets_and_noise_get_no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the model is the same as without a search, bit for bit."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(700, 5))
    new = rng.normal(size=(50, 5))
    smooth = np.sin(X[:, 0]) + X[:, 1] * X[:, 2] + 0.05 * rng.normal(size=700)
    for y in (smooth, rng.normal(size=700)):
        model = sk.KernelRegressor(random_state=0).fit(X, y)
        assert model.kernel_.trees is None
        with monkeypatch.context() as patch:
            patch.setattr(kernel_and_metric, "looks_for_trees", lambda run: False)
            without = sk.KernelRegressor(random_state=0).fit(X, y)
        np.testing.assert_array_equal(model.predict(new), without.predict(new))


def test_metric_none_turns_search_off() -> None:
    assert sk.KernelRegressor(metric="none").fit(*step_table(600)).kernel_.trees is None


def test_held_out_rows_are_not_grown_from(
    step_model: sk.KernelRegressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no tree is grown from about a third of the rows."""
    grown: list[np.ndarray] = []
    boosted_trees = choose_trees.boosted_trees

    def record(X: np.ndarray, *arguments: Any) -> Any:
        grown.append(X)
        return boosted_trees(X, *arguments)

    monkeypatch.setattr(choose_trees, "boosted_trees", record)
    model = sk.KernelRegressor(random_state=0).fit(*step_table(1500))
    np.testing.assert_array_equal(model.dual_coef_, step_model.dual_coef_)
    rows = {row.tobytes() for X in grown for row in X}
    centers = np.asarray(model.centers_, np.float32)
    free = np.array([row.tobytes() not in rows for row in centers])
    assert 0.3 < free.mean() < 0.4


def test_predictions_do_not_depend_on_threads(step_model: sk.KernelRegressor) -> None:
    model = sk.KernelRegressor(random_state=0, threads=1).fit(*step_table(1500))
    np.testing.assert_array_equal(model.dual_coef_, step_model.dual_coef_)


def test_sample_weights_count() -> None:
    """Check that rows of weight 0, with other targets, change nothing."""
    X, y = step_table(1200)
    noise = np.random.default_rng(1).normal(size=(600, 8))
    w = np.concatenate([np.full(1200, 2.0), np.zeros(600)])
    rows, targets = np.concatenate([X, noise]), np.concatenate([y, 9 * noise[:, 0]])
    model = sk.KernelRegressor(random_state=0).fit(rows, targets, sample_weight=w)
    assert model.kernel_.trees is not None
    assert error(model) < 0.1


def test_boosting_reduces_error() -> None:
    """Check that the sum of the trees fits the targets, as in gradient boosting."""
    X, y = step_table(600)
    trees = choose_trees.boosted_trees(X.astype(np.float32), y[:, None], None, 0)
    F = y.mean() + choose_trees.LEARNING_RATE * sum(tree.predict(X) for tree in trees)
    assert np.mean((F - y) ** 2) < 0.05 * y.var()
    again = choose_trees.boosted_trees(X.astype(np.float32), y[:, None], np.full(600, 3.0), 0)
    for a, b in zip(trees, again, strict=True):
        np.testing.assert_array_equal(a.tree_.feature, b.tree_.feature)
