"""Check the messages of `train` and `plan`, and the display of runs by `info`, `runs`, `report`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import streamkern as sk
from streamkern.cli import runs
from tests.runs import Printed, Run

X = np.random.default_rng(0).normal(size=(300, 3))
QUICK = [
    *("--set", "model.metric=none", "--set", "model.n_centers=30"),
    *("--set", "model.bandwidth=2.0"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    sk.ingest_store(X, "rides.zarr", y=X[:, 0])
    return tmp_path


def test_train_warns_that_model_is_not_saved_without_run_dir(
    folder: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    arguments = ["train", "--train", "rides.zarr", "--epochs", "1", *QUICK]
    code, _, err = run(*arguments)
    assert code == 0
    assert "without --run-dir the model is not saved" in err
    assert not Path("runs").exists()
    monkeypatch.setattr(runs, "_estimate_seconds", lambda *_: 3600.0)
    for location in ("runs/rides", "runs/rides-2"):
        assert f"it is saved in {location}" in run(*arguments)[2].replace("\n", " ")
        assert len(sk.load(location).centers_) == 30
    # The message names --run-dir, with which the run is found again.
    assert "was already finished" in run(*arguments, "--run-dir", "runs/rides")[2]


def test_one_pass_run_is_complete_after_one_epoch(folder: Path, printed: Printed) -> None:
    arguments = ["train", "--train", "rides.zarr", "--run-dir", "run", "--solver", "direct", *QUICK]
    printed(*arguments)
    lines = {line.split()[0]: line for line in printed("info", "run").splitlines() if line.strip()}
    assert lines["epoch"].endswith("1 of 1")
    assert lines["samples"].endswith("300 of 300")
    assert "another epoch would change nothing" in lines["ended"]
    assert (
        float(lines["train_mse"].split()[1]) < 0.5 * X[:, 0].var()
    )  # the model's error, not that of predicting zero
    assert "100%" in printed("runs", ".")
    printed("report", "run")
    differ = Path("report.html").read_text().partition("Settings that differ")[2]
    shown = differ.partition("<details")[0]
    assert "model.n_centers" in shown
    assert "data.epochs" not in shown
    assert "run.calibrate" not in shown


def test_seconds_add_up_over_resumed_calls(folder: Path, printed: Printed) -> None:
    arguments = ["train", "--train", "rides.zarr", "--run-dir", "run", "--epochs", "1", *QUICK]
    first_result = json.loads(printed(*arguments, "--json"))
    earlier_seconds = runs._sum_earlier_seconds(
        sk.RunConfig().with_overrides({"run.run_dir": "run"}), "9999"
    )
    assert 0 < earlier_seconds <= first_result["seconds"]
    assert json.loads(printed(*arguments, "--json"))["seconds"] >= earlier_seconds


@pytest.mark.parametrize(("solver", "columns", "rank_name"), [
    ("block", 1, "all compute the setup"),
    ("block", 2, "all compute the setup"),
    ("falkon", 1, "one of them computes the setup"),
    ("eigenpro4", 2, "rank 0 computes the setup"),
])  # fmt: skip
def test_plan_names_ranks_that_need_setup_memory(
    tmp_path: Path, printed: Printed, solver: str, columns: int, rank_name: str
) -> None:
    X = np.random.default_rng(0).standard_normal((600, 4)).astype(np.float32)
    sk.ingest_store(X, tmp_path / "s.zarr", y=X[:, 0])
    arguments = ["plan", "--train", tmp_path / "s.zarr", "--set", "model.bandwidth=1.0", "--solver",
             solver, "--ranks", 2, "--center-ranks", columns, "--no-measure"]  # fmt: skip
    assert f"within the memory given for train; {rank_name}" in " ".join(
        printed(*arguments).split()
    )
