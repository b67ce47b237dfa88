"""Check that no command changes foreign files (requirements D1 and D2)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from streamkern.cli import main
from streamkern.ingest.ingest import ingest
from tests.s3_server import S3Server
from tests.store_damage import tree

# Names that some command gives to its own files, and names that no command gives.
FILE_NAMES = (
    *("notes.txt", "state.json", "scratch.json", "0.rows", "lock", "total", "CACHEDIR.TAG"),
    *("run.json", "log.jsonl", "writer.json", "run.lock", "setup.json", "000000000001.json"),
    *("journal.log", "search.lock", "result.json", "tune.png", "a.json.tmp", "new/0a1b2c"),
    *("checkpoints/notes.txt", "checkpoints/000000000001.json", "lease/000000000001.json"),
    *("setup/zarr.json", "setup/X/c/0/0", "log/000000000001-000001.jsonl", "X/c/0/0"),
    *("values/c/0/0", "x.partial", "1.answers", "mine.npy", "mine.csv", "mine.parquet"),
)
TRAIN = (
    "--set", "model.n_centers=20", "--set", "data.epochs=1", "--set", "run.device=cpu",
    "--set", "run.memory=512 MiB", "--set", "model.metric=none",
)  # fmt: skip
SEARCH = (
    "--bandwidths", "1,2", "--ridges", "0", "--rows", "100", "--centers", "10", "--epochs", "1",
    "--refine", "0",
)  # fmt: skip


@pytest.fixture(scope="module")
def input_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data, a store and a trained run."""
    folder = tmp_path_factory.mktemp("given")
    rng = np.random.default_rng(0)
    X = rng.standard_normal((200, 4)).astype(np.float32)
    np.savez(folder / "d.npz", X=X, y=(X[:, 0] > 0).astype(int))
    assert main.run_command(["ingest", str(folder / "d.npz"), str(folder / "s.zarr")]) == 0
    train = ["train", "--train", str(folder / "s.zarr"), *TRAIN]
    assert main.run_command([*train, "--run-dir", str(folder / "run")]) == 0
    return folder


def commands_by_name(input_folder: Path, location: Path) -> dict[str, list[Any]]:
    """Return the arguments of commands that write to `location`."""
    data, store, run = input_folder / "d.npz", input_folder / "s.zarr", input_folder / "run"
    sibling = location.parent / "beside"
    train, tune = ["train", "--train", store, *TRAIN], ["tune", "--train", store, *TRAIN, *SEARCH]
    return {
        "ingest": ["ingest", data, location],
        "ingest --overwrite": ["ingest", data, location, "--overwrite"],
        "ingest --scratch": ["ingest", data, sibling, "--overwrite", "--scratch", location],
        "augment": ["augment", store, location, "--overwrite"],
        "predict": ["predict", run, store, location, "--overwrite"],
        "predict .npy": ["predict", run, store, location / "mine.npy", "--overwrite"],
        "predict .csv": ["predict", run, store, location / "mine.csv", "--overwrite"],
        "predict .parquet": ["predict", run, store, location / "mine.parquet", "--overwrite"],
        "train --run-dir": [*train, "--run-dir", location],
        "train --cache": [*train, "--cache", location],
        "tune --out": [*tune, "--out", location],
        "tune --write": [*tune, "--out", sibling, "--write", location / "notes.txt"],
    }


def write_texts(folder: Path) -> None:
    """Write text files of another program."""
    for name in FILE_NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of mine")


def write_documents(folder: Path) -> None:
    """Write JSON documents of another program, which mention streamkern."""
    for name in FILE_NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"format": "mine", "project": "streamkern-run"}))


def write_group(folder: Path) -> None:
    """Write a foreign zarr group with an array of our names, next to such files."""
    zarr.create_group(folder, attributes={"note": "hand made"}).create_array(
        "values", data=np.arange(3)
    )
    (folder / "notes.txt").write_text("mine")


@pytest.mark.full(all_but_every=5)
@pytest.mark.parametrize("fill", [write_texts, write_documents, write_group])
@pytest.mark.parametrize("command", list(commands_by_name(Path("a"), Path("b/c"))))
def test_no_command_changes_foreign_files(
    command: str, fill: Callable[[Path], None], input_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "place.zarr"
    fill(path)
    files_before = tree(path)
    code = main.run_command([str(word) for word in commands_by_name(input_folder, path)[command]])
    files_after = tree(path)
    assert {name: files_after.get(name) for name in files_before} == files_before
    # A command succeeds if it writes to a new folder or name inside; others leave nothing.
    if code != 0:
        assert (code, files_after.keys()) == (2, files_before.keys())
    else:
        assert command == "ingest --scratch" or (fill is write_group and " ." in command)


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("command", list(commands_by_name(Path("a"), Path("b/c"))))
def test_no_command_changes_foreign_files_in_its_outputs(
    command: str, input_folder: Path, tmp_path: Path
) -> None:
    """Check every folder in which a command replaces, removes or evicts files."""
    target = tmp_path / "place.zarr"
    target.mkdir()
    call = [str(word) for word in commands_by_name(input_folder, target)[command]]
    assert main.run_command(call) == 0
    for folder in [target, *(path for path in target.rglob("*") if path.is_dir())]:
        for name in ("mine.txt", "7.mine", "c/mine", "0.answers", "mine.json", ".mine.streamkern"):
            if not (folder / name).exists() and not folder.joinpath(name).parent.is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text("mine")
    mine = {name: data for name, data in tree(target).items() if data == b"mine"}
    assert main.run_command(call) in (0, 2)
    files_after = tree(target)
    assert {name: files_after.get(name) for name in mine} == mine


@pytest.fixture
def train_with_cache(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Path, int], int]:
    """Return a function that trains on the remote store "one" or "two" with a cache of a size.

    The function returns the exit code.
    """
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        X = rng.standard_normal((4000, 8)).astype(np.float32)
        url = f"s3://{bucket}/{name}.zarr"
        ingest(X, url, y=X[:, :1], chunk_mb=0.02, storage_options=s3.options())
    options = s3.words(monkeypatch)

    def train(name: str, cache: Path, size: int) -> int:
        arguments = ["train", "--train", f"s3://{bucket}/{name}.zarr", *TRAIN, *options]
        return main.run_command([*arguments, "--cache", str(cache), "--cache-size", str(size)])

    return train


@pytest.mark.slow
@pytest.mark.parametrize("fill", [write_texts, write_documents, write_group])
def test_foreign_folder_is_refused_as_cache(
    fill: Callable[[Path], None], train_with_cache: Any, tmp_path: Path
) -> None:
    fill(tmp_path / "cache")
    files_before = tree(tmp_path / "cache")
    assert train_with_cache("two", tmp_path / "cache", 30_000) == 2
    assert tree(tmp_path / "cache") == files_before


@pytest.mark.slow
def test_cache_keeps_foreign_files_when_it_evicts_all_entries(
    train_with_cache: Any, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    assert train_with_cache("one", cache, 1 << 30) == 0
    (store_folder,) = [path for path in cache.iterdir() if len(path.name) == 32]
    entries = {path for path in store_folder.iterdir() if len(path.name) == 64}
    assert len(entries) > 4
    for folder in (cache, cache / "new", store_folder, cache / "mine", cache / ("0" * 32)):
        folder.mkdir(exist_ok=True)
        for name in ("mine.txt", "0a1b", "1"):
            (folder / name).write_text("mine")
            os.utime(folder / name, (0, 0))
    os.utime(store_folder / "used", (0, 0))
    files_before = {name: data for name, data in tree(cache).items() if data == b"mine"}
    assert train_with_cache("two", cache, 30_000) == 0
    files_after = tree(cache)
    assert {name: files_after.get(name) for name in files_before} == files_before
    assert not any(path.exists() for path in entries)
    new_names = {path.name for path in cache.glob("*/*") if len(path.name) == 64}
    assert new_names - {path.name for path in entries}


@pytest.mark.slow
def test_run_on_s3_keeps_foreign_objects(
    s3: S3Server, bucket: str, input_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check foreign keys like names of our files: they are refused, and nothing is written or
    deleted."""
    options = s3.words(monkeypatch)
    client = s3.client()
    for name in ("run.json", "log/1.jsonl", "lease/000000000007.json", "setup/X/c/0", "setup.json"):
        for key in (f"{name}/{name}", f"{name}/000000000001.json", f"{name}/notes.txt"):
            client.put_object(Bucket=bucket, Key=key, Body=b"mine")
        objects_before = read_objects(client, bucket)
        train = ["train", "--train", str(input_folder / "s.zarr"), *TRAIN, *options]
        assert main.run_command([*train, "--run-dir", f"s3://{bucket}/{name}"]) == 2
        assert read_objects(client, bucket) == objects_before


def read_objects(client: Any, bucket: str) -> dict[str, bytes]:
    """Return the contents of all objects of a bucket, by key."""
    listed = client.list_objects_v2(Bucket=bucket)["Contents"]
    keys = [item["Key"] for item in listed]
    return {key: client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}
