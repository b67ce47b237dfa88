"""Test that columns whose single values have effects become categorical features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import streamkern as sk
from streamkern.kernels.categorical import MAX_CATEGORICAL
from streamkern.rundir.run_log import read_log
from streamkern.train.setup import choose_categorical
from streamkern.train.setup.choose_categorical import MIN_SCORE, group_score, groups_by_feature
from tests.categorical import LEVEL, panel
from tests.solver_problems import Array


def errors_of(*models: sk.KernelRegressor) -> list[float]:
    """Return the mean squared errors of models of a panel, on other rows."""
    fresh, truth = panel(1000, 1)
    return [float(np.mean((model.predict(fresh) - truth) ** 2)) for model in models]


def categorical_columns(model: Any) -> list[int]:
    """Return the columns of the categorical features of a model."""
    return [column for column, _ in model.kernel_.categorical]


@pytest.mark.slow
def test_given_categorical_features_are_kept_with_learned_metric() -> None:
    X, y = panel(500)
    for bandwidth in ("auto", 5.0):
        kernel = sk.Laplace(bandwidth).with_categorical([(LEVEL, 8.0)])
        model = sk.KernelRegressor(kernel, metric="learn-diagonal", random_state=0).fit(X, y)
        assert model.kernel_.categorical == ((LEVEL, 8.0),)
        assert errors_of(model)[0] < 0.5


@pytest.mark.slow
def test_level_effect_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the error is a quarter of the error without categorical features, and near the
    variance of the noise, 0.09."""
    X, y = panel(600)
    actual = sk.KernelRegressor(random_state=0, run_dir=tmp_path / "run").fit(X, y)
    assert categorical_columns(actual) == [LEVEL]
    monkeypatch.setattr(choose_categorical, "looks_for_categorical", lambda *_: False)
    plain = sk.KernelRegressor(random_state=0).fit(X, y)
    assert categorical_columns(plain) == []
    errors = errors_of(actual, plain)
    assert errors[0] < 0.25 * errors[1]
    assert errors[0] < 0.09 + 0.15
    (line, *other_lines) = [r for r in read_log(tmp_path / "run" / "log.jsonl")
                       if r["event"] == "categorical"]  # fmt: skip
    assert line["feature"] == LEVEL
    assert line["taken"]
    assert line["score"] > MIN_SCORE
    assert line["error"] < 0.5
    assert not any(other["taken"] for other in other_lines)


@pytest.mark.slow
def test_level_effect_is_found_beside_a_metric() -> None:
    X, y = panel(1200)
    actual = sk.KernelRegressor(random_state=0, metric="learn").fit(X, y)
    plain = sk.KernelRegressor(random_state=0, metric="none").fit(X, y)
    assert categorical_columns(actual) == [LEVEL]
    assert actual.kernel_.metric is not None
    assert categorical_columns(plain) == []
    errors = errors_of(actual, plain)
    assert errors[0] < 0.1 * errors[1]
    assert actual.feature_importances_[LEVEL] > 0.02
    assert actual.feature_importances_.sum() == pytest.approx(1)


def numbers(kind: str, n: int = 800) -> tuple[Array, Array]:
    """Return columns of whole numbers without an effect of single values, and their targets."""
    rng = np.random.default_rng(1)
    X = np.column_stack([rng.integers(0, 40, (n, 2)), rng.integers(0, 5, n)]).astype(np.float32)
    noise = rng.normal(size=n)
    if kind == "noise":
        return X, noise
    return X, np.sin(X[:, 0] / 8) + 0.002 * X[:, 1] * X[:, 0] + 0.3 * X[:, 2] + 0.2 * noise


@pytest.mark.parametrize("kind", ["noise", "smooth"])
def test_numeric_features_are_not_categorical(kind: str) -> None:
    model = sk.KernelRegressor(random_state=0).fit(*numbers(kind))
    assert categorical_columns(model) == []


@pytest.mark.slow
def test_classifier_finds_categorical_features() -> None:
    X, y = panel(600)
    labels = np.digitize(y, np.quantile(y, [1 / 3, 2 / 3]))
    model = sk.KernelClassifier(random_state=0).fit(X, labels)
    assert categorical_columns(model) == [LEVEL]


@pytest.mark.parametrize(
    "parameters",
    [
        {"kernel": "laplace"}, {"bandwidth": 3.0}, {"metric": "none"}, {"bandwidth": "median"},
        {"kernel": "gaussian", "features": "fourier", "n_features": 100},
    ],
)  # fmt: skip
def test_given_settings_disable_search(parameters: dict[str, Any]) -> None:
    X, y = panel(400)
    assert categorical_columns(sk.KernelRegressor(random_state=0, **parameters).fit(X, y)) == []


@pytest.mark.slow
def test_rows_count_by_weight() -> None:
    """Check that the noise of rows with small weights hides no effect."""
    X, y = panel(700)
    has_small_weight = np.arange(700) % 2 == 0
    y[has_small_weight] += np.random.default_rng(5).normal(0, 30, has_small_weight.sum())
    model = sk.KernelRegressor(random_state=0).fit(X, y, np.where(has_small_weight, 1e-4, 1.0))
    assert categorical_columns(model) == [LEVEL]


@pytest.mark.slow
def test_target_means_of_words_are_not_examined() -> None:
    """Check that target means are not examined, because other rows have other target means."""
    (X, y), (fresh, _) = panel(1500), panel(200, 1)
    frame, new = (
        pd.DataFrame(rows[:, :3], columns=["a", "b", "c"]).assign(
            level=[f"w{int(level)}" for level in rows[:, LEVEL]]
        )
        for rows in (X, fresh)
    )
    model = sk.KernelRegressor(random_state=0, metric="none").fit(frame, y)
    names = model.get_feature_names_out().tolist()
    assert any("by target" in name for name in names)
    assert not any("by target" in names[column] for column in categorical_columns(model))
    model.predict(new)  # without a warning of unknown values


@pytest.mark.slow
def test_number_of_categorical_features_is_limited() -> None:
    rng = np.random.default_rng(0)
    X = rng.integers(0, 8, (600, MAX_CATEGORICAL + 2)).astype(np.float32)
    effects = rng.normal(size=(MAX_CATEGORICAL + 2, 8))
    y = sum(effect[x.astype(int)] for effect, x in zip(effects, X.T, strict=True))
    model = sk.KernelRegressor(random_state=0).fit(X, y)
    assert len(set(categorical_columns(model))) == MAX_CATEGORICAL


def test_groups_contain_equal_values() -> None:
    rng = np.random.default_rng(0)
    a, binary = rng.integers(0, 30, 500), rng.integers(0, 2, 500)
    few = np.arange(500.0)
    few[:48] = 0.0  # less than a tenth of the rows share a value
    enough = np.arange(500.0)
    enough[:52] = 0.0
    X = np.column_stack([a, 100 - 3 * a, binary, few, rng.normal(size=500), enough, a % 7])
    actual = groups_by_feature(X.astype(np.float32))
    assert list(actual) == [0, 5, 6]  # the second column groups the rows like the first
    for j, group in actual.items():
        np.testing.assert_array_equal(
            group[:, None] == group, X[:, j, None].astype(np.float32) == X[:, j].astype(np.float32)
        )
        assert sorted({*group.tolist()}) == list(range(group.max() + 1))


@pytest.mark.parametrize("c", [1, 3])
def test_score_equals_its_definition(c: int) -> None:
    rng = np.random.default_rng(0)
    r, group = rng.normal(size=(90, c)) @ rng.normal(size=(c, c)), rng.integers(0, 12, 90)
    r += 0.3 * rng.normal(size=(12, c))[group]
    total = variance = 0.0
    C = r.T @ r / np.trace(r.T @ r)
    for i in range(90):
        for j in range(i):
            if group[i] == group[j]:
                total += r[i] @ r[j]
                variance += (r[i] @ r[i]) * (r[j] @ r[j]) * np.trace(C @ C)
    assert group_score(r, group) == pytest.approx(total / np.sqrt(variance))
