"""Check the benchmarks on tables: the implementations for comparison, and a few runs of each."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks import newcomer, tables
from tests import reference as ref


def small_table(n: int = 300) -> dict[str, object]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 3)) * [1, 10, 100] + 5
    y = np.sin(X[:, 0]) + X[:, 1] / 10 + 0.3 * rng.normal(size=n)
    return {"X": X, "y": y, "task": "regression"}


def test_exact_model_is_best_of_the_ridges() -> None:
    problem = tables.make_problem(small_table(), 40, seed=1)
    assert problem.X.shape == (240, 3)
    assert problem.Z.shape == (40, 3)
    np.testing.assert_allclose(problem.X.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(problem.X.std(axis=0), 1, atol=1e-6)
    K, N, T = (
        ref.laplace(A, problem.Z, problem.bandwidth) for A in (problem.X, problem.Z, problem.X_test)
    )
    errors = []
    for ridge in tables.RIDGES:
        alpha = np.linalg.solve(K.T @ K / 240 + ridge * N, K.T @ problem.Y / 240)
        errors.append(np.mean((T @ alpha - problem.Y_test) ** 2))
    assert tables.exact_error(problem) == pytest.approx(min(errors), rel=1e-5)


def test_classes_and_given_test_rows_are_used() -> None:
    data = small_table() | {"task": "classes", "y": np.arange(300) % 3}
    data["test_mask"] = np.arange(300) < 50
    problem = tables.make_problem(data, 40, seed=1)
    assert problem.Y_test.shape == (50, 3)
    np.testing.assert_array_equal(problem.Y_test.argmax(axis=1), np.arange(50) % 3)


def test_folder_of_tables_is_measured(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", **small_table())
    loaded = tables.load_tables(tmp_path)
    assert list(loaded) == ["one"]
    args = argparse.Namespace(seeds=2, centers=30)
    records = tables.measure(loaded["one"], ["direct", "block p/4"], [1], args)
    assert len(records) == 4
    assert {r["solver"] for r in records} == {"direct", "block"}
    direct = [r["ratio"] for r in records if r["method"] == "direct"]
    assert max(direct) < 1.1
    text = tables.summary({"one": records})
    assert "block p/4, 1" in text
    assert text.splitlines()[-1].startswith("worst")
    with pytest.raises(SystemExit, match=r"holds no \.npz file"):
        tables.load_tables(tmp_path / "none")


@pytest.mark.full(all_but_every=3)
@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_random_user_data_are_handled_without_faults(number: int) -> None:
    assert newcomer.judge(newcomer.draw(number)).faults == []


@pytest.mark.full
@pytest.mark.slow
def test_tables_of_few_distinct_rows_get_mean_of_equal_rows() -> None:
    verdicts = {number: newcomer.judge(newcomer.draw_table(number)) for number in range(60)}
    assert {number: v.faults for number, v in verdicts.items() if v.faults} == {}
    assert sum(v.cells is not None for v in verdicts.values()) >= 3


def test_model_worse_than_the_mean_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in map(newcomer.draw, range(50)) if case.name == "diabetes")
    monkeypatch.setattr(
        newcomer.sk.KernelRegressor, "predict", lambda self, X: np.full(len(X), 1e3)
    )
    assert any("times that of the mean" in fault for fault in newcomer.judge(case).faults)
