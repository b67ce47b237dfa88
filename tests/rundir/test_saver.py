"""Check the thread that saves checkpoints while the run continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import CheckpointError, RunError, RunLockedError
from streamkern.rundir import checkpoint_format, run_directory
from streamkern.rundir.run_directory import RunDirectory, SavedGroup
from streamkern.rundir.saver import AsyncSaver
from tests.checkpoints import assert_is_state, meta, state

THREAD = "streamkern-checkpoint"


def saved_steps(path: Path) -> list[int]:
    """Return the steps of the checkpoints in a run directory."""
    return RunDirectory(path, writable=False).steps()


def load_latest(path: Path) -> SavedGroup | None:
    """Return the newest intact checkpoint."""
    return RunDirectory(path, writable=False).load_latest()


class GatedRun(RunDirectory):
    """A run directory that saves once `gate` is set, and fails if two saves run at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.started = threading.Event()
        self.order: list[int] = []
        self.error: BaseException | None = None
        self.running = 0

    def save(
        self,
        step: int,
        arrays: Mapping[str, np.ndarray],
        meta: Mapping[str, object],
        before_publishing: Callable[[], object] | None = None,
    ) -> None:
        self.running += 1
        assert self.running == 1
        self.order.append(step)
        self.started.set()
        assert self.gate.wait(30)
        self.running -= 1
        if self.error is not None:
            raise self.error
        super().save(step, arrays, meta, before_publishing)


def has_no_saver_thread() -> bool:
    """Return whether no thread of an `AsyncSaver` is alive."""
    return all(t.name != THREAD for t in threading.enumerate())


def test_async_saver_has_one_save_in_flight(tmp_path: Path) -> None:
    with GatedRun(tmp_path) as run, AsyncSaver(run) as saver:
        metadata = meta(1)
        saver.submit(1, state(1), metadata)
        metadata["step"] = "changed by the loop"  # the saver has a copy
        assert run.started.wait(30)
        assert saved_steps(tmp_path) == []
        second = threading.Thread(target=saver.submit, args=(2, state(2), meta(2)))
        second.start()
        assert run.order == [1]
        run.gate.set()
        second.join(30)
        saver.wait()
        assert run.order == saved_steps(tmp_path) == [1, 2]
        assert has_no_saver_thread()
        saver.submit(3, state(3), meta(3))
    assert has_no_saver_thread()
    assert_is_state(load_latest(tmp_path), 3)
    with pytest.raises(RunError, match="after close"):
        saver.submit(4, {}, {})


@pytest.mark.parametrize("surfaces_at", ["submit", "wait", "close"])
def test_async_saver_raises_an_error_once(surfaces_at: str, tmp_path: Path) -> None:
    with GatedRun(tmp_path) as run:
        run.gate.set()
        run.error = CheckpointError("disk on fire")
        saver = AsyncSaver(run)
        saver.submit(1, state(1), meta(1))
        calls: dict[str, Callable[[], object]] = {
            "submit": lambda: saver.submit(2, state(2), meta(2)),
            "wait": saver.wait,
            "close": saver.close,
        }
        with pytest.raises(CheckpointError, match="disk on fire"):
            calls[surfaces_at]()
        run.error = None
        saver.wait()
        assert run.order == [1]
        saver.close()
    assert has_no_saver_thread()


def test_async_saver_does_not_hide_error_of_loop(tmp_path: Path) -> None:
    with GatedRun(tmp_path) as run:
        run.gate.set()
        run.error = CheckpointError("disk on fire")
        with pytest.raises(ZeroDivisionError) as info, AsyncSaver(run) as saver:  # noqa: PT012
            saver.submit(1, state(1), meta(1))
            raise ZeroDivisionError
        assert info.value.__notes__ == ["and the last checkpoint failed: disk on fire"]
        with pytest.raises(CheckpointError, match="disk on fire"), AsyncSaver(run) as saver:
            saver.submit(1, state(1), meta(1))
    assert has_no_saver_thread()


def test_closing_the_directory_waits_for_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_started, gate = threading.Event(), threading.Event()
    real = checkpoint_format.publish_checkpoint

    def gated(*args: Any, **more: Any) -> str:
        save_started.set()
        assert gate.wait(30)
        return real(*args, **more)

    monkeypatch.setattr(run_directory, "publish_checkpoint", gated)
    run = RunDirectory(tmp_path)
    run.acquire()
    with AsyncSaver(run) as saver:
        saver.submit(1, state(1), meta(1))
        assert save_started.wait(30)
        closing = threading.Thread(target=run.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        with pytest.raises(RunLockedError, match="is being written by process"):
            RunDirectory(tmp_path).acquire()
        gate.set()
        closing.join(30)
    assert_is_state(load_latest(tmp_path), 1)
    assert has_no_saver_thread()


def test_checkpoint_is_saved_without_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a system that starts no more threads."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with RunDirectory(tmp_path) as directory, AsyncSaver(directory) as saver:
        directory.save(0, {"x": np.arange(3)}, {})  # zarr starts threads of its own once
        monkeypatch.setattr(threading.Thread, "start", refuse)
        saver.submit(1, {"x": np.arange(3)}, {})
        saver.wait()
        monkeypatch.undo()
        assert directory.steps() == [0, 1]
        monkeypatch.setattr(RunDirectory, "save", raising_function(CheckpointError("disk on fire")))
        monkeypatch.setattr(threading.Thread, "start", refuse)
        saver.submit(2, {}, {})
        with pytest.raises(CheckpointError, match="disk on fire"):
            saver.wait()


def raising_function(error: Exception) -> Any:
    """Return a function that raises `error`."""

    def act(*args: Any, **more: Any) -> None:
        raise error

    return act
