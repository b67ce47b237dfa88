"""Check that scratch files have their own folder, and that no other file is deleted."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest

from streamkern.basics.errors import ConfigError, DataError
from streamkern.estimator.files import ingest_temporarily
from streamkern.filesystem import abandoned
from streamkern.filesystem.abandoned import (
    FIT_PREFIX,
    LOCK_FILE,
    RANKS_PREFIX,
    create_locked_folder,
    remove_locked,
)
from streamkern.filesystem.scratch import Scratch, scratch_folder
from streamkern.ingest.ingest import ingest
from streamkern.store.store import open_store
from tests.store_damage import tree

SMALL: dict[str, Any] = {"chunk_mb": 2**-6, "memory": 1 << 18}


def write_table(folder: Path, n: int = 3000) -> Path:
    """Write a file of n rows and their targets; return its path."""
    rng = np.random.default_rng(0)
    X = rng.integers(0, 255, (n, 64), dtype=np.uint8)
    np.savez(folder / "data.npz", X=X, y=np.arange(n) % 10)
    return folder / "data.npz"


def put_foreign_files(folder: Path) -> dict[str, bytes]:
    """Put files of another program into a folder; return the content of all its files."""
    (folder / "sub").mkdir(parents=True)
    for name in ("notes.txt", "state.json", "scratch.json", "0.rows", "000000000000.rows"):
        (folder / name).write_text(f"{name} of mine")
        (folder / "sub" / name).write_text(f"{name} of mine")
    return tree(folder)


@pytest.mark.parametrize("spilled", [True, False])
def test_scratch_folder_keeps_foreign_files(tmp_path: Path, spilled: bool) -> None:
    data, folder = write_table(tmp_path), tmp_path / "scratch"
    files_before = put_foreign_files(folder)
    settings = SMALL if spilled else {}
    ingest(data, tmp_path / "a.zarr", scratch=folder, **settings)
    with pytest.raises(DataError, match="no array 'Z'"):
        ingest(data, tmp_path / "b.zarr", scratch=folder, x="Z", **settings)
    assert tree(folder) == files_before
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["sub"]


def test_foreign_scratch_folder_is_refused(tmp_path: Path) -> None:
    """Check a foreign folder with the same name, next to the output or in the given folder."""
    data = write_table(tmp_path)
    for parent in (None, tmp_path / "p"):
        files_before = put_foreign_files(scratch_folder(tmp_path / "a.zarr", parent))
        with pytest.raises(DataError, match="which streamkern did not write; move it away"):
            ingest(data, tmp_path / "a.zarr", scratch=parent, **SMALL)
        assert tree(scratch_folder(tmp_path / "a.zarr", parent)) == files_before
        assert not (tmp_path / "a.zarr").exists()


def test_foreign_files_in_own_scratch_folder_are_kept(tmp_path: Path) -> None:
    data, folder = write_table(tmp_path), scratch_folder(tmp_path / "a.zarr")
    with Scratch(folder) as scratch:
        scratch.restore("another")
        scratch.append("0.rows", np.zeros(9))
        scratch.save(None, wait=True)
    (folder / "notes.txt").write_text("mine")
    (folder / "0.rows.txt").write_text("mine")
    ingest(data, tmp_path / "a.zarr", **SMALL)
    assert tree(folder) == {"notes.txt": b"mine", "0.rows.txt": b"mine"}


def test_concurrent_ingests_share_scratch_parent(tmp_path: Path) -> None:
    """Check that another output has another folder, and that the same output is locked."""
    data, shared = write_table(tmp_path), tmp_path / "shared"
    ingest(data, tmp_path / "whole.zarr", **SMALL)

    def ingest_meanwhile(phase: str, n_done: int, total: int | None) -> None:
        if phase == "write" and n_done < 500:
            ingest(data, tmp_path / "b.zarr", scratch=shared, **SMALL)
            with pytest.raises(DataError, match="in use by another call for the same output"):
                ingest(data, tmp_path / "a.zarr", scratch=shared, overwrite=True, **SMALL)

    ingest(data, tmp_path / "a.zarr", scratch=shared, progress=ingest_meanwhile, **SMALL)
    stores = [open_store(tmp_path / f"{name}.zarr") for name in ("a", "b", "whole")]
    assert len({store.spec.fingerprint for store in stores}) == 1
    assert not list(shared.iterdir())


def test_repeated_command_clears_scratch_left_after_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a call that was killed between publishing and deleting its scratch files."""
    data, out = write_table(tmp_path), tmp_path / "a.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(Scratch, "discard", lambda self: None)  # as if killed before it
        spec = ingest(data, out, **SMALL)
    assert tree(scratch_folder(out))
    times_before = {name: (out / name).stat().st_mtime_ns for name in tree(out)}
    assert ingest(data, out, **SMALL).fingerprint == spec.fingerprint
    assert not scratch_folder(out).exists()
    assert times_before == {name: (out / name).stat().st_mtime_ns for name in tree(out)}
    different = {"seed": 1, "chunk_mb": 2**-7, "compress": "none", "dtype": "float32"}
    for name, value in different.items():
        with pytest.raises(DataError, match="already holds a store"):
            ingest(data, out, **SMALL | {name: value})
    write_table(tmp_path, 2999)
    with pytest.raises(DataError, match="already holds a store"):
        ingest(data, out, **SMALL)


@pytest.mark.parametrize("is_locked", [False, True])
def test_finished_call_clears_unlocked_scratch_folder(tmp_path: Path, is_locked: bool) -> None:
    data, out = write_table(tmp_path), tmp_path / "o.zarr"
    ingest(data, out, **SMALL)
    folder = scratch_folder(out)
    folder.mkdir()
    lock = filelock.FileLock(folder / ".streamkern.lock")
    with lock if is_locked else contextlib.nullcontext():
        ingest(data, out, **SMALL)
        assert folder.is_dir() == is_locked


def test_finished_call_keeps_scratch_of_other_settings(tmp_path: Path) -> None:
    """Check that an interrupted overwrite with other settings can resume from its scratch files."""

    def stop(phase: str, n_done: int, total: int | None) -> None:
        if phase == "write":
            raise InterruptedError

    data, out = write_table(tmp_path), tmp_path / "a.zarr"
    ingest(data, out, **SMALL)
    with pytest.raises(InterruptedError):
        ingest(data, tmp_path / "b.zarr", seed=1, progress=stop, scratch=tmp_path / "s", **SMALL)
    # The files are those of an overwrite that was stopped before its first chunk.
    scratch_folder(tmp_path / "b.zarr", tmp_path / "s").rename(scratch_folder(out))
    files_before = tree(scratch_folder(out))
    ingest(data, out, **SMALL)
    assert tree(scratch_folder(out)) == files_before


@pytest.mark.parametrize("mapped", [False, True], ids=["in memory", "mapped"])
def test_array_changed_in_its_middle_is_ingested_again(tmp_path: Path, mapped: bool) -> None:
    np.save(tmp_path / "X.npy", np.zeros((2000, 3)))
    X = np.load(tmp_path / "X.npy", mmap_mode="c" if mapped else None)
    y = np.zeros(2000, int)
    first_fingerprint = ingest(X, tmp_path / "a.zarr", y=y).fingerprint
    if mapped:  # identified only by its ends, so an ingest of it is never skipped
        with pytest.raises(DataError, match="already holds a store"):
            ingest(X, tmp_path / "a.zarr", y=y)
    else:
        second_spec = ingest(np.asfortranarray(X), tmp_path / "a.zarr", y=y)
        assert second_spec.fingerprint == first_fingerprint
    X[1000] = 1
    with pytest.raises(DataError, match="already holds a store"):
        ingest(X, tmp_path / "a.zarr", y=y)
    assert ingest(X, tmp_path / "a.zarr", y=y, overwrite=True).fingerprint != first_fingerprint


def test_foreign_scratch_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s/scratch.json").write_text(json.dumps({"identity": "t", "sizes": {}}))
    with Scratch(tmp_path / "s") as scratch, pytest.raises(DataError, match="did not write"):
        scratch.restore("t")


@pytest.mark.parametrize("location", ["a file", "below a file", "/proc"])
def test_unwritable_scratch_parent_is_refused_before_writing(tmp_path: Path, location: str) -> None:
    (tmp_path / "file").touch()
    parents = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "x"}
    if location == "/proc" and not Path(location).is_dir():
        pytest.skip("needs /proc, as Linux has it")
    scratch = parents.get(location, Path(location))
    with pytest.raises(ConfigError, match=r"scratch='.*' cannot be written to"):
        ingest(np.zeros((9, 2), "f4"), tmp_path / "o.zarr", scratch=scratch)
    assert not (tmp_path / "o.zarr").exists()


def stop_ingest(folder: Path) -> tuple[Path, Path]:
    """Stop an ingest when rows are in scratch files; return its data and its output."""
    data, out = write_table(folder), folder / "a.zarr"

    def stop(phase: str, n_done: int, total: int | None) -> None:
        if phase == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(data, out, progress=stop, **SMALL)
    return data, out


def paths_of_keys(document: Any, *parent_keys: str) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key of nested dictionaries."""
    for name, value in document.items():
        yield (*parent_keys, name)
        if isinstance(value, dict):
            yield from paths_of_keys(value, *parent_keys, name)


def without_key(document: Any, path: tuple[str, ...]) -> Any:
    """Return nested dictionaries without the key at a path."""
    name, *inner_keys = path
    if not inner_keys:
        return {key: value for key, value in document.items() if key != name}
    return document | {name: without_key(document[name], tuple(inner_keys))}


@pytest.mark.parametrize("how", ["schema", "altered"])
def test_invalid_scratch_state_restarts_ingest(how: str, tmp_path: Path) -> None:
    """Check a state of another revision, one with a missing entry, and a damaged one."""
    data, out = stop_ingest(tmp_path)
    expected = ingest(data, tmp_path / "whole.zarr", **SMALL).fingerprint
    name = scratch_folder(out) / "scratch.json"
    uninterrupted = json.loads(name.read_bytes())
    body = json.loads(uninterrupted["body"])
    removable_keys = [
        p for p in paths_of_keys(body) if len(p) == 1 or (p[0] == "state" and p[1] != "leaves")
    ]
    assert ("state", "bits") in removable_keys
    files_before = tree(scratch_folder(out))
    for path in removable_keys:
        with Scratch(scratch_folder(out)) as scratch:
            scratch.restore("another")  # empties the folder
        for file, content in files_before.items():
            (scratch_folder(out) / file).write_bytes(content)
        text = json.dumps(without_key(body, path))
        sealed = {"schema": 0, "crc": zlib.crc32(text.encode())} if how == "schema" else {}
        name.write_text(json.dumps({**uninterrupted, **sealed, "body": text}))
        with Scratch(scratch_folder(out)) as scratch:
            assert scratch.restore(body["identity"]) is None
            assert not scratch.sizes
    name.write_text(json.dumps({**uninterrupted, **sealed, "body": text}))
    assert ingest(data, out, **SMALL).fingerprint == expected
    assert not scratch_folder(out).exists()


def test_only_unlocked_temporary_folders_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    locked_folders = [create_locked_folder(prefix) for prefix in (FIT_PREFIX, RANKS_PREFIX)]
    for prefix in (FIT_PREFIX, RANKS_PREFIX):
        (tmp_path / f"{prefix}killed").mkdir()
        (tmp_path / f"{prefix}killed" / LOCK_FILE).touch()
        (tmp_path / f"{prefix}of_others").mkdir()
    np.savez(tmp_path / "a.npz", X=np.eye(3), y=np.arange(3.0))
    source = ingest_temporarily(
        str(tmp_path / "a.npz"), None, None, targets="values", seed=0, memory="auto"
    )  # fmt: skip
    names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert {folder.name for folder, _ in locked_folders} < names
    assert {f"{FIT_PREFIX}of_others", f"{RANKS_PREFIX}of_others"} < names
    assert not any("killed" in name for name in names)
    assert len(names) == 5
    del source
    gc.collect()
    for folder, lock in locked_folders:
        remove_locked(folder, lock)
    remaining = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert remaining == {f"{FIT_PREFIX}of_others", f"{RANKS_PREFIX}of_others"}


def test_folder_of_killed_process_is_removed_by_its_guard(tmp_path: Path) -> None:
    """Check that a guard removes the folder of a killed process, and no other folder."""
    text = (
        "import sys; "
        "from streamkern.filesystem.abandoned import RANKS_PREFIX, create_locked_folder; "
        "folder, lock = create_locked_folder(RANKS_PREFIX); (folder / 'a').mkdir(); "
        "print(folder, flush=True); sys.stdin.read()"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", text], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().decode().strip())
    assert folder.parent == tmp_path
    assert (folder / "a").is_dir()
    process.kill()
    process.communicate()
    until = time.monotonic() + 30
    while folder.exists():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_folder_without_guard_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create_locked_folder(FIT_PREFIX)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="the guard is a shell")
def test_guard_exits_although_another_process_holds_its_pipe() -> None:
    folder, lock = create_locked_folder(FIT_PREFIX)
    guard = abandoned._guard_processes[folder]
    assert guard.stdin is not None
    inherited_fd = os.dup(guard.stdin.fileno())  # as a forked process has it
    try:
        remove_locked(folder, lock)
        assert guard.returncode == 0
    finally:
        os.close(inherited_fd)
    assert not folder.exists()
