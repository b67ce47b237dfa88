"""Check that the table of runs lists every run of a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.train import train
from tests.runs import Run
from tests.store_damage import flip_bit, tree

pytestmark = pytest.mark.usefixtures("one_blas_thread")

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 3)).astype(np.float32)
Y = X[:, :1] ** 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three runs, a store, a file, and an empty folder."""
    folder = tmp_path_factory.mktemp("runs")
    tables = {
        "data": {"epochs": 2, "batch_size": 50},
        "model": {"n_centers": 50, "kernel": "laplace", "bandwidth": 2.0},
        "solver": {"name": "block"},
        "run": {"run_dir": str(folder / "b-first"), "device": "cpu", "threads": 1},
    }
    rows = ArraySource(X, Y)
    train(RunConfig.model_validate(tables), source=rows, test=rows).model.backend.close()
    for name in ("a-second", "c-third"):
        shutil.copytree(folder / "b-first", folder / name)
    ingest(X, folder / "store.zarr", y=Y)
    (folder / "empty").mkdir()
    (folder / "file.txt").write_text("x")
    return folder


def test_runs_lists_runs_by_name(run: Run, folder: Path) -> None:
    files = tree(folder)
    with RunDirectory(folder / "c-third"):
        code, out, err = run("runs", folder)
    assert (code, err) == (0, "")
    head, _, *rows = out.splitlines()
    assert [row.split()[0] for row in rows] == ["a-second", "b-first", "c-third"]
    assert [row.split()[1] for row in rows] == ["finished", "finished", "running"]
    assert "train mse" in head
    assert {k: v for k, v in tree(folder).items() if not k.startswith("c-third/")} == {
        k: v for k, v in files.items() if not k.startswith("c-third/")
    }


def test_runs_json_equals_info_json(run: Run, folder: Path) -> None:
    info = json.loads(run("info", folder / "b-first", "--json")[1])
    for location in (folder, folder / "b-first"):  # a run itself, too
        code, out, _ = run("runs", location, "--json")
        rows = {row["name"]: row for row in json.loads(out)["runs"]}
        row = rows["b-first"]
        assert (code, row["held_out"]) == (0, info["metrics"])
        assert [row[key] for key in ("run_dir", "samples", "step", "epoch")] == [
            info[key] for key in ("run_dir", "samples", "step", "epoch")
        ]
        assert (row["solver"], row["centers"], row["planned_samples"]) == ("block", 50, 600)
        assert row["started"] <= row["last_seen"]


@pytest.mark.parametrize("n_deleted", [1, 2])
def test_runs_and_info_agree_on_a_run_without_its_newest_checkpoints(
    run: Run, folder: Path, tmp_path: Path, n_deleted: int
) -> None:
    """Check that a stopped run is at its checkpoint, although its log knows later steps."""
    shutil.copytree(folder / "b-first", tmp_path / "run")
    steps = sorted(path.stem for path in (tmp_path / "run" / "checkpoints").glob("*.json"))
    for step in steps[-n_deleted:]:
        (tmp_path / "run" / "checkpoints" / f"{step}.json").unlink()
    info = json.loads(run("info", tmp_path / "run", "--json")[1])
    (row,) = json.loads(run("runs", tmp_path, "--json")[1])["runs"]
    assert row["state"] == "stopped"
    assert [row[key] for key in ("samples", "step", "epoch", "held_out")] == [
        info[key] for key in ("samples", "step", "epoch", "metrics")
    ]
    assert row["samples"] < 600


def test_damaged_run_does_not_hide_others(run: Run, folder: Path, tmp_path: Path) -> None:
    for name in ("a-second", "b-first"):
        shutil.copytree(folder / name, tmp_path / name)
    for path in (tmp_path / "a-second").glob("checkpoints/*.json"):
        flip_bit(tmp_path / "a-second", f"checkpoints/{path.name}")
    code, out, err = run("runs", tmp_path)
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[2:]] == [
        ["a-second", "stopped"], ["b-first", "finished"],
    ]  # fmt: skip
    assert "is damaged" in err
    assert err.startswith("streamkern: note: ")


def test_runs_reports_folder_without_runs(run: Run, folder: Path) -> None:
    code, out, err = run("runs", folder / "empty")
    assert (code, out) == (0, "")
    assert "there is no run in" in err
    for none in ("nothing", "file.txt"):
        code, _, err = run("runs", folder / none)
        assert code == 2
        assert "cannot be listed" in err
