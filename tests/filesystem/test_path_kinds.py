"""Check the kind of a path's content, and the error for wrong content."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.basics.errors import EXIT_USAGE
from streamkern.cli.main import run_command
from streamkern.filesystem.path_kinds import content_kind, enclosing_store_or_run
from streamkern.train.saved_model import load_model

X = np.random.default_rng(0).normal(size=(60, 3))


@pytest.fixture
def sample_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make one path of each kind, and return their folder, the current one."""
    monkeypatch.chdir(tmp_path)
    sk.ingest_store(X, "data.zarr", y=X[:, 0])
    model = sk.KernelRegressor(n_centers=20, epochs=1, metric="none", bandwidth=2.0, ridge=1e-3)
    model.fit(X, X[:, 0]).save("runs/first")
    np.savez("rows.npz", X=X, y=X[:, 0])
    with tarfile.open("rows.tar", "w") as archive:
        archive.add("rows.npz")
    # A folder that looks like a run directory, but is not.
    Path("project/checkpoints").mkdir(parents=True)
    Path("project/run.json").write_text("{}")
    return tmp_path


def test_path_kind_is_detected(sample_paths: Path) -> None:
    kinds = {
        "data.zarr": "store", "runs/first": "run", "runs": "runs", "rows.npz": "file",
        "rows.tar": "archive", "project": "folder", "nothing": "nothing", "s3://b/k": "remote",
    }  # fmt: skip
    assert {name: content_kind(name) for name in kinds} == kinds


@pytest.mark.parametrize("load", [sk.load, load_model])
def test_loading_a_wrong_path_names_its_kind(
    sample_paths: Path, load: Callable[[str], Any]
) -> None:
    messages = {
        "data.zarr": "which is a zarr store", "runs": "is a folder of runs; give one of them",
        "project": "there is no run in", "rows.npz": "which is a file",
    }  # fmt: skip
    for name, message in messages.items():
        with pytest.raises(sk.StreamkernError) as caught:
            load(name)
        assert message in str(caught.value), (name, str(caught.value))


def test_opening_a_wrong_path_as_store_names_its_kind(sample_paths: Path) -> None:
    messages = {
        "runs/first": "is a run directory, not a zarr store", "rows.tar": "unpack it",
        "rows.npz": "make a store from it with streamkern ingest", "runs": "is a folder of runs",
        "project": "a folder of other files",
    }  # fmt: skip
    for name, message in messages.items():
        with pytest.raises(sk.DataError) as caught:
            sk.open_store(name)
        assert message in str(caught.value), (name, str(caught.value))


def test_stores_and_run_directories_refuse_other_outputs(sample_paths: Path) -> None:
    paths_before = sorted(str(path) for path in sample_paths.rglob("*"))
    inside_outputs = ["data.zarr/p", "data.zarr/X/p", "runs/first/p", "runs/first/checkpoints/p"]
    commands = [("predict", "runs/first", "rows.npz"), ("ingest", "rows.npz"),
                ("augment", "data.zarr")]  # fmt: skip
    for command in commands:
        for location in [f"{name}.zarr" for name in inside_outputs] + ["-"]:
            assert run_command([*command, location]) == EXIT_USAGE, (command, location)
    for name in inside_outputs:
        assert run_command(["predict", "runs/first", "rows.npz", f"{name}.csv"]) == EXIT_USAGE, name
    assert sorted(str(path) for path in sample_paths.rglob("*")) == paths_before
    assert enclosing_store_or_run("data.zarr/X/p.csv") == (sample_paths / "data.zarr", "store")
    for allowed in ("project/p.csv", "runs/p.csv"):  # in a foreign folder, and beside runs
        assert run_command(["predict", "runs/first", "rows.npz", allowed]) == 0
