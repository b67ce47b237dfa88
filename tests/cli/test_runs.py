"""What `train` keeps and says of a run, and what `info`, `runs` and `report` show of it later."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import streamkern as sk
from streamkern.cli import runs
from streamkern.cli.main import run_command

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


def test_a_run_of_more_than_a_minute_is_kept_where_no_place_was_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--train", "rides.zarr", "--epochs", "1", *QUICK]
    assert run_command(words) == 0
    assert "without --run-dir the model is not saved" in capsys.readouterr().err
    assert not Path("runs").exists()
    monkeypatch.setattr(runs, "_expected_seconds", lambda *_: 3600.0)
    for place in ("runs/rides", "runs/rides-2"):
        assert run_command(words) == 0
        assert f"it is saved in {place}" in capsys.readouterr().err.replace("\n", " ")
        assert len(sk.load(place).centers_) == 30
    assert run_command([*words, "--run-dir", "runs/rides"]) == 0  # the command that the note names
    assert "was already finished" in capsys.readouterr().err


def test_a_run_that_takes_one_pass_is_whole_after_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--train", "rides.zarr", "--run-dir", "run", "--solver", "direct", *QUICK]
    assert run_command(words) == 0
    capsys.readouterr()
    assert run_command(["info", "run"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["epoch"].endswith("1 of 1")
    assert lines["samples"].endswith("300 of 300")
    assert "another pass would bring the same" in lines["ended"]
    assert float(lines["train_mse"].split()[1]) < 0.5 * X[:, 0].var()  # of the model, not of zero
    assert run_command(["runs", "."]) == 0
    assert "100%" in capsys.readouterr().out
    assert run_command(["report", "run"]) == 0
    differ = Path("report.html").read_text().partition("Settings that differ")[2]
    shown = differ.partition("<details")[0]
    assert "model.n_centers" in shown
    assert "data.epochs" not in shown
    assert "run.calibrate" not in shown


def test_seconds_are_those_of_all_calls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--train", "rides.zarr", "--run-dir", "run", "--epochs", "1", *QUICK]
    assert run_command([*words, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    worked = runs._seconds_before(sk.RunConfig().with_overrides({"run.run_dir": "run"}), "9999")
    assert 0 < worked <= first["seconds"]
    assert run_command([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] >= worked


@pytest.mark.parametrize(("solver", "columns", "who"), [
    ("block", 1, "all compute the setup"),
    ("block", 2, "all compute the setup"),
    ("falkon", 1, "one of them computes the setup"),
    ("eigenpro4", 2, "rank 0 computes the setup"),
])  # fmt: skip
def test_plan_says_which_ranks_need_memory_for_the_setup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], solver: str, columns: int, who: str
) -> None:
    X = np.random.default_rng(0).standard_normal((600, 4)).astype(np.float32)
    sk.ingest_store(X, tmp_path / "s.zarr", y=X[:, 0])
    words = ["plan", "--train", tmp_path / "s.zarr", "--set", "model.bandwidth=1.0", "--solver",
             solver, "--ranks", 2, "--center-ranks", columns, "--no-measure"]  # fmt: skip
    assert run_command([str(word) for word in words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"within the memory given for train; {who}" in out
