"""Check the kind of a path's content, and the error for wrong content."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

import streamkern as sk
from streamkern.cli.main import run_command
from streamkern.filesystem.path_kinds import content_kind, enclosing
from streamkern.train.saved_model import load_model

X = np.random.default_rng(0).normal(size=(60, 3))
USAGE = 2


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    sk.ingest_store(X, "data.zarr", y=X[:, 0])
    model = sk.KernelRegressor(n_centers=20, epochs=1, metric="none", bandwidth=2.0, ridge=1e-3)
    model.fit(X, X[:, 0]).save("runs/first")
    np.savez("rows.npz", X=X, y=X[:, 0])
    with tarfile.open("rows.tar", "w") as archive:
        archive.add("rows.npz")
    # What many projects have, and no run of ours.
    Path("project/checkpoints").mkdir(parents=True)
    Path("project/run.json").write_text("{}")
    return tmp_path


def test_path_kind_is_detected(places: Path) -> None:
    kinds = {
        "data.zarr": "store", "runs/first": "run", "runs": "runs", "rows.npz": "file",
        "rows.tar": "archive", "project": "folder", "nothing": "nothing", "s3://b/k": "remote",
    }  # fmt: skip
    assert {name: content_kind(name) for name in kinds} == kinds


def test_wrong_path_kind_is_named_in_error(places: Path) -> None:
    runs = {
        "data.zarr": "which is a zarr store", "runs": "is a folder of runs; give one of them",
        "project": "there is no run in", "rows.npz": "which is a file",
    }  # fmt: skip
    for name, message in runs.items():
        for load in (sk.load, load_model):
            with pytest.raises(sk.StreamkernError) as caught:
                load(name)
            assert message in str(caught.value), (name, str(caught.value))
    stores = {
        "runs/first": "is a run directory, not a zarr store", "rows.tar": "unpack it",
        "rows.npz": "make a store from it with streamkern ingest", "runs": "is a folder of runs",
        "project": "a folder of other files",
    }  # fmt: skip
    for name, message in stores.items():
        with pytest.raises(sk.DataError) as failed:
            sk.open_store(name)
        assert message in str(failed.value), (name, str(failed.value))


def test_stores_and_run_directories_refuse_other_outputs(places: Path) -> None:
    before = sorted(str(path) for path in places.rglob("*"))
    within = ["data.zarr/p", "data.zarr/X/p", "runs/first/p", "runs/first/checkpoints/p"]
    commands = [("predict", "runs/first", "rows.npz"), ("ingest", "rows.npz"),
                ("augment", "data.zarr")]  # fmt: skip
    for command in commands:
        for location in [f"{name}.zarr" for name in within] + ["-"]:
            assert run_command([*command, location]) == USAGE
    for name in within:
        assert run_command(["predict", "runs/first", "rows.npz", f"{name}.csv"]) == USAGE
    assert sorted(str(path) for path in places.rglob("*")) == before
    assert enclosing("data.zarr/X/p.csv") == (places / "data.zarr", "store")
    for free in ("project/p.csv", "runs/p.csv"):  # beside runs, and in a folder of somebody else's
        assert run_command(["predict", "runs/first", "rows.npz", free]) == 0
