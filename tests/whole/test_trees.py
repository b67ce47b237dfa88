"""Test commands, losses, intervals and probabilities of runs whose kernel gets trees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import streamkern as sk
from streamkern.cli.main import run_command
from streamkern.train.setup import choose_trees
from tests.trees import step_table

X, Y = step_table(1200)
NEW, NEW_Y = step_table(400, 1)
LABELS = np.where(X[:, 4] > 0.95, "rare", np.where(Y > 1.5, "high", "low"))


def trees_of(model: Any) -> int:
    trees = model.kernel_.trees
    return 0 if trees is None else len(trees)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees") / "run"
    model = sk.KernelRegressor(random_state=0, run_dir=str(folder)).fit(X, Y)
    assert trees_of(model) == 96
    return folder


@pytest.fixture(scope="module")
def model(run: Path) -> Any:
    return sk.load(str(run))


def test_finished_run_is_not_set_up_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("trees were grown again")

    monkeypatch.setattr(choose_trees, "boosted_trees", refuse)
    again = sk.KernelRegressor(random_state=0, run_dir=str(run)).fit(X, Y)
    np.testing.assert_array_equal(again.predict(NEW), sk.load(str(run)).predict(NEW))


def test_commands_show_and_use_trees(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "new.npz", X=NEW, y=NEW_Y)
    assert run_command(["info", str(run)]) == 0
    assert re.search("trees +96", capsys.readouterr().out)
    for arguments in (
        ["evaluate", str(run), str(tmp_path / "new.npz")],
        ["predict", str(run), str(tmp_path / "new.npz"), str(tmp_path / "p.npy")],
        ["report", str(run), "--out", str(tmp_path / "report.html")],
        ["runs", str(run.parent)],
    ):
        assert run_command(arguments) == 0, arguments
    assert "sha256" not in capsys.readouterr().out


@pytest.mark.parametrize("settings", [
    {"n_centers": 300}, {"loss": "huber"}, {"loss": "quantile", "quantile": 0.5},
    {"early_stopping": True, "solver": "block"}, {"effort": "quick"},
], ids=str)  # fmt: skip
def test_losses_and_efforts_take_trees(settings: dict[str, Any]) -> None:
    fitted = sk.KernelRegressor(random_state=0, **settings).fit(X, Y)
    assert trees_of(fitted) == 96
    assert np.mean((fitted.predict(NEW) - NEW_Y) ** 2) < 0.15 * NEW_Y.var()


def test_intervals_cover_new_rows() -> None:
    """Check that the errors of rows from which trees were grown do not narrow the intervals."""
    calibrated = sk.KernelRegressor(random_state=0, calibrate=True).fit(X, Y)
    low, high = calibrated.predict(NEW, interval=0.9)[1].T
    assert 0.85 < np.mean((low <= NEW_Y) & (high >= NEW_Y)) < 0.97


def test_classes_get_trees_and_honest_probabilities() -> None:
    fitted = sk.KernelClassifier(random_state=0).fit(X, LABELS)
    assert trees_of(fitted) == 96
    labels = np.where(NEW[:, 4] > 0.95, "rare", np.where(NEW_Y > 1.5, "high", "low"))
    P, predicted = fitted.predict_proba(NEW), fitted.predict(NEW)
    confidence = P.max(axis=1)
    assert abs(confidence.mean() - np.mean(predicted == labels)) < 0.04


def test_table_with_words_and_codes() -> None:
    frame = pd.DataFrame(X, columns=[f"x{j}" for j in range(8)])
    frame["word"] = np.where(X[:, 5] > 0, "a", "b")
    frame["code"] = np.random.default_rng(0).integers(0, 30, len(X))
    fitted = sk.KernelRegressor(random_state=0).fit(frame, Y)
    assert trees_of(fitted) == 96
    assert np.isfinite(fitted.predict(frame)).all()


def test_compressed_model_keeps_trees(model: Any) -> None:
    small = sk.compress(model, X, n_centers=200)
    assert trees_of(small) == 96
    assert np.mean((small.predict(NEW) - NEW_Y) ** 2) < 0.1 * NEW_Y.var()
