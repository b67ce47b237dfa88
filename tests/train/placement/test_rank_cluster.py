"""Test the workers of a cluster on this machine, and their folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from streamkern.cli.main import run_command
from streamkern.filesystem.abandoned import LOCK_FILE, RANKS_PREFIX
from streamkern.train.placement.rank_cluster import _worker_folder
from tests.clusters import ROOT

KILLED = """
import os, signal, tempfile
from streamkern.train.placement.rank_cluster import _worker_folder
with _worker_folder() as folder:
    open(folder + "/spilled", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""

KILLED_AT_WORK = """
import os, signal
from streamkern.train.placement.rank_cluster import local_cluster
if __name__ == "__main__":
    with local_cluster(2, 1) as client:
        print(client.run(os.getenv, "PYTHONWARNINGS"), os.environ.get("PYTHONWARNINGS"), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_killed_driver_prints_no_warning(tmp_path: Path) -> None:
    """Check that the resource tracker, which outlives the driver, prints no warning, and that other
    processes keep their warnings."""
    pytest.importorskip("distributed")
    (tmp_path / "drive.py").write_text(KILLED_AT_WORK)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    process = subprocess.run(  # ends when all processes have closed the pipe
        [sys.executable, str(tmp_path / "drive.py")], env=environment, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert process.returncode == -signal.SIGKILL
    assert process.stdout.count("default") == 3
    assert "ignore" not in process.stdout
    assert "resource_tracker" not in process.stderr


def test_script_without_a_file_starts_no_process() -> None:
    """Check that no process starts, because each would end with a traceback."""
    pytest.importorskip("distributed")
    script = KILLED_AT_WORK.replace("if __name__", "assert __name__ != '__mp_main__'\nif __name__")
    process = subprocess.run(
        [sys.executable, "-"], input=script, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert process.stderr.count("Traceback") == 1
    message = (
        "the processes of 2 ranks import the script that starts them, but <stdin> is not a file"
    )
    assert message in process.stderr


def test_remains_of_killed_driver_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that locked folders, folders without our lock and targets of links stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK_FILE).touch()
    (tmp_path / f"{RANKS_PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{RANKS_PREFIX}foreign").mkdir()
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert run_command(["runs", str(tmp_path)]) == 0  # any command removes them
    assert [path.name for path in tmp_path.iterdir() if (path / "spilled").exists()] == []
    remaining = tmp_path / f"{RANKS_PREFIX}of_a_killed_driver_without_a_guard"
    remaining.mkdir()
    (remaining / LOCK_FILE).touch()
    with _worker_folder() as mine:
        assert not remaining.exists()
        (Path(mine) / "file").touch()
        with _worker_folder() as other:
            assert (Path(mine) / "file").exists()
        assert not Path(other).exists()
    foreign_names = {f"{RANKS_PREFIX}link", f"{RANKS_PREFIX}foreign", "elsewhere"}
    assert {path.name for path in tmp_path.iterdir()} == foreign_names
    assert (elsewhere / LOCK_FILE).exists()
