"""Check that a run directory on a disk has one writer: a run ends if its directory is moved or
taken over."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import RunLockedError, RunLostError
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_log import read_log
from tests.runs import (
    STEPS,
    array_source,
    assert_same_bits,
    final,
    finished,
    process,
    settings,
    stream,
)
from tests.store_damage import flip_bit


def test_moved_run_directory_ends_the_run(tmp_path: Path) -> None:
    """Check that the run ends with exit code 3, and that nothing is created at the old path."""
    path = tmp_path / "run"

    def move(record: dict[str, Any]) -> None:
        if record["step"] == 6:
            path.rename(tmp_path / "elsewhere")

    config = settings(path, **{"run.checkpoint_every": 2, "run.evaluate_every": 1})
    with pytest.raises(RunLostError, match="was moved or deleted") as caught:
        finished(config, source=stream(), test=array_source(10, 5), on_evaluation=move)
    assert caught.value.exit_code == 3
    assert not path.exists()
    (tmp_path / "elsewhere").rename(path)
    finished(config, source=stream(), test=array_source(10, 5))
    finished(settings(tmp_path / "whole", **{"run.evaluate_every": 1}), source=stream())
    assert_same_bits(final(path), final(tmp_path / "whole"))


@pytest.mark.parametrize("act", ["save", "save_setup", "write_config", "open_log", "log"])
def test_nothing_is_written_to_removed_run_directory(act: str, tmp_path: Path) -> None:
    """Check that no operation writes to the old path."""
    path, a = tmp_path / "run", {"a": np.zeros(3)}
    directory = RunDirectory(path)
    with directory, directory.open_log() as log:
        directory.save(1, a, {})
        shutil.rmtree(path)
        acts: dict[str, Callable[[], object]] = {
            "save": lambda: directory.save(2, a, {}),
            "save_setup": lambda: directory.save_setup(a, {}),
            "write_config": lambda: directory.write_config({}),
            "open_log": directory.open_log,
            "log": lambda: log.write(step=1, epoch=0, samples=1),
        }
        with pytest.raises(RunLostError, match="was moved or deleted"):
            acts[act]()
    assert not path.exists()


def test_run_taken_by_second_writer_ends(tmp_path: Path) -> None:
    """Delete run.lock and start another process: only one of the two ends with success."""
    path, second = tmp_path / "run", RunDirectory(tmp_path / "run")

    def take(record: dict[str, Any]) -> None:
        if record["step"] == 6:
            (path / "run.lock").unlink()
            second.acquire()

    # No save is under way when the run is taken over, because both writers would fail.
    config = settings(path, **{"run.checkpoint_every": 4, "run.evaluate_every": 1})
    with second:
        second.close()
        with pytest.raises(RunLostError, match=r"was taken over by process .* run\.lock") as caught:
            finished(config, source=stream(), test=array_source(10, 5), on_evaluation=take)
        assert caught.value.exit_code == 3
        steps = second.steps()
        assert max(steps, default=0) < STEPS
        second.save(max(steps, default=0) + 1, {"a": np.zeros(1)}, {})  # it still holds the run
        with pytest.raises(RunLockedError, match="is being written by"):
            RunDirectory(path).acquire()


def train_alone(path: str, go: str) -> None:
    """Train a run that creates the file `go` as soon as it is evaluated."""
    config = settings(Path(path), **{"run.checkpoint_every": 1, "run.evaluate_every": 1})

    def wait(record: dict[str, Any]) -> None:
        Path(go).touch()
        threading.Event().wait(0.05)

    finished(config, source=stream(), test=array_source(10, 5), on_evaluation=wait)


def test_two_writers_never_both_succeed(tmp_path: Path) -> None:
    """Delete run.lock of the first of two real processes."""
    path, go = str(tmp_path / "run"), tmp_path / "go"
    first_process = process(train_alone, path, str(go))
    while not go.exists():
        assert first_process.is_alive()
        threading.Event().wait(0.01)
    os.unlink(tmp_path / "run" / "run.lock")
    second = process(train_alone, path, str(go))
    codes = []
    for child in (first_process, second):
        child.join(120)
        codes.append(child.exitcode)
    # Or the first was done before the second had begun, which then found nothing to do.
    finished_samples = [
        r["samples"] for r in read_log(tmp_path / "run" / "log.jsonl") if r["event"] == "start"
    ]
    assert codes == [3, 0], finished_samples


def test_damaged_writer_note_ends_the_run_and_is_reported(tmp_path: Path) -> None:
    """Check that the run ends, because the holder of the run is unknown."""
    directory = RunDirectory(tmp_path / "run")
    with directory:
        directory.write_config({})
        flip_bit(tmp_path / "run", "writer.json", 30)
        assert "writer.json is damaged" in (directory.holder() or "")
        with pytest.raises(RunLostError, match=r"writer\.json is damaged"):
            directory.save(1, {}, {})
        (tmp_path / "run" / "writer.json").unlink()
        (tmp_path / "run" / "writer.json").mkdir()
        with pytest.raises(RunLostError, match="be read any more: is a directory; solve this"):
            directory.save(1, {}, {})
        (tmp_path / "run" / "writer.json").rmdir()
        (tmp_path / "run" / "writer.json").touch()
    with RunDirectory(tmp_path / "run") as directory:
        directory.save(1, {}, {})
