"""Folders of killed processes are removed, those of living ones are not."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from streamkern.estimator.files import ingested
from streamkern.filesystem import abandoned
from streamkern.filesystem.abandoned import (
    FIT,
    LOCK_FILE,
    RANKS_PREFIX,
    locked_folder,
    remove_locked,
)


def test_only_folders_that_nobody_holds_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = [locked_folder(prefix) for prefix in (FIT, RANKS_PREFIX)]
    for prefix in (FIT, RANKS_PREFIX):
        (tmp_path / f"{prefix}killed").mkdir()
        (tmp_path / f"{prefix}killed" / LOCK_FILE).touch()
        (tmp_path / f"{prefix}of_others").mkdir()
    np.savez(tmp_path / "a.npz", X=np.eye(3), y=np.arange(3.0))
    source = ingested(
        str(tmp_path / "a.npz"), None, None, targets="values", seed=0, memory="auto"
    )  # fmt: skip
    names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert {folder.name for folder, _ in held} < names
    assert {f"{FIT}of_others", f"{RANKS_PREFIX}of_others"} < names
    assert not any("killed" in name for name in names)
    assert len(names) == 5
    del source
    gc.collect()
    for folder, lock in held:
        remove_locked(folder, lock)
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {f"{FIT}of_others", f"{RANKS_PREFIX}of_others"}


def test_the_folder_of_a_killed_process_is_removed_without_another_command(
    tmp_path: Path,
) -> None:
    """By a shell that outlives it; one of a process that lives stays."""
    text = (
        "import sys; from streamkern.filesystem.abandoned import RANKS_PREFIX, locked_folder; "
        "folder, lock = locked_folder(RANKS_PREFIX); (folder / 'a').mkdir(); "
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


@pytest.mark.skipif(os.name != "posix", reason="the guard is a shell")
def test_the_guard_ends_though_another_process_holds_its_pipe() -> None:
    folder, lock = locked_folder(FIT)
    guard = abandoned._guards[folder]
    assert guard.stdin is not None
    held = os.dup(guard.stdin.fileno())  # as a forked process has it
    try:
        remove_locked(folder, lock)
        assert guard.returncode == 0
    finally:
        os.close(held)
    assert not folder.exists()
