"""Check runs that are continued after a kill, a stop, damage or a change of libraries."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from streamkern.rundir import checksums
from streamkern.rundir.run_directory import RunDirectory
from tests.commands import BY_STEPS, DONE, FAILED, TRY_AGAIN, USAGE, error_line, train_run
from tests.runs import Run, assert_same_bits, newest
from tests.store_damage import flip_bit, remove

pytestmark = pytest.mark.usefixtures("one_blas_thread")


def test_different_libraries_are_reported_in_one_line(
    run: Run, stores: Path, tmp_path: Path
) -> None:
    location = train_run(stores, tmp_path, run, "--set", "run.checkpoint_every=10")
    for manifest in location.glob("checkpoints/*30.json"):
        manifest.unlink()
    for checkpoint in location.glob("checkpoints/*.json"):
        saved = checksums.unseal("checkpoint", checkpoint.read_bytes())
        saved["meta"]["versions"]["numpy"] = "1.0"
        checkpoint.write_bytes(checksums.seal("checkpoint", saved))
    arguments = ("--run-dir", location, "--epochs", 3, *BY_STEPS, "--test", stores / "test.zarr")
    code, _, err = run("train", "--train", stores / "train.zarr", *arguments)
    assert code == DONE
    warned = [line for line in err.splitlines() if "warning" in line]
    assert len(warned) == 1
    assert "resumed with other libraries: " in warned[0]
    assert "numpy" in warned[0]


def test_older_checkpoint_is_never_used_silently(run: Run, stores: Path, tmp_path: Path) -> None:
    """Check that the commands say if they use an older checkpoint."""
    location = train_run(stores, tmp_path, run, "--set", "run.checkpoint_every=10")
    manifest = max(location.glob("checkpoints/*.json"))
    flip_bit(location, f"checkpoints/{manifest.name}", -30)
    code, out, err = run("evaluate", location, stores / "test.zarr", "--json")
    assert code == DONE
    (message,) = json.loads(out)["skipped"]
    assert f"{manifest.name} is damaged" in message
    assert f"warning: {message}" in err
    code, _, err = run("predict", location, stores / "test.zarr", tmp_path / "out.npy")
    assert code == DONE
    assert f"warning: {message}" in err
    code, out, _ = run("info", location)
    assert f"note: {message}" in out
    arguments = ("--run-dir", location, "--epochs", 3, *BY_STEPS, "--test", stores / "test.zarr")
    code, out, err = run("train", "--train", stores / "train.zarr", *arguments, "--json")
    assert code == DONE
    assert json.loads(out)["skipped"] == [message]
    assert f"warning: {message}" in err
    code, out, err = run("evaluate", location, stores / "test.zarr", "--json")
    assert "skipped" not in json.loads(out)
    assert err == ""


def test_run_with_missing_run_json_is_recovered(run: Run, stores: Path, tmp_path: Path) -> None:
    """Check that other data is still refused, and that `info` still recognises the run."""
    location = train_run(stores, tmp_path, run, "--set", "run.checkpoint_every=10")
    (location / "run.json").unlink()
    arguments = ("--run-dir", location, "--epochs", 3, *BY_STEPS)
    code, _, err = run("train", "--train", stores / "test.zarr", *arguments)
    assert code == USAGE
    assert "holds a run that differs: data" in err
    code, out, _ = run("info", location)
    assert code == DONE
    assert "run.json is missing" in out


@pytest.mark.parametrize("damage", [flip_bit, remove])
def test_chunk_lost_during_run_can_be_restored(
    run: Run, stores: Path, store: Path, tmp_path: Path, monkeypatch: Any, damage: Any
) -> None:
    arguments = ("--epochs", 4, *BY_STEPS, "--set", "run.checkpoint_every=10")
    tested = ("--test", stores / "test.zarr")
    chunk_bytes = (store / "X/c/2/0").read_bytes()

    def damage_chunk(record: dict[str, Any]) -> None:
        if record["step"] == 10:
            damage(store, "X/c/2/0")

    monkeypatch.setattr("streamkern.cli.runs.show_evaluation", damage_chunk)
    location = ("--run-dir", tmp_path / "run")
    message = error_line(run("train", "--train", store, *tested, *location, *arguments), FAILED)
    assert "X/c/2/0" in message
    assert str(store) in message
    saved = RunDirectory(tmp_path / "run", writable=False).load_latest()
    assert saved is not None
    assert saved.step >= 10
    assert json.loads(run("info", tmp_path / "run", "--json")[1])["state"].startswith("stopped")
    monkeypatch.undo()
    (store / "X/c/2/0").write_bytes(chunk_bytes)
    assert run("train", "--train", store, *tested, *location, *arguments)[0] == DONE
    full = ("--run-dir", tmp_path / "whole")
    assert run("train", "--train", store, *tested, *full, *arguments)[0] == DONE
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def assert_same_weights(a: Path, b: Path) -> None:
    """Check that the newest checkpoints of two runs have the same arrays and position."""
    first, second = newest(a), newest(b)
    assert first.step == second.step
    assert first.meta["position"] == second.meta["position"]
    assert_same_bits(first.arrays, second.arrays)


LONG = [
    *("--epochs", "40", *BY_STEPS),
    *("--set", "run.checkpoint_every=100", "--set", "data.batch_size=10"),
    *("--set", "model.kernel=laplace", "--set", "model.bandwidth=3", "--set", "solver.ridge=1e-3"),
]
STEPS = 40 * 50


def start(store: Path, location: Path, *more: str) -> subprocess.Popen[str]:
    """Start the run in a process of its own."""
    arguments = [sys.executable, "-m", "streamkern", "train", "--train", str(store)]
    return subprocess.Popen(
        [*arguments, "--run-dir", str(location), *LONG, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


def wait_for_step(process: subprocess.Popen[str], location: Path, step: int) -> None:
    """Wait until a checkpoint of at least `step` is published."""
    directory = RunDirectory(location, writable=False)
    give_up = time.monotonic() + 60
    while max(directory.steps(), default=-1) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.002)


def wait_for_exit(process: subprocess.Popen[str], code: int) -> str:
    """Return the stderr of a process that ends with `code`."""
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return err


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit, as Linux has it")
def test_run_survives_kill_stop_and_full_disk(run: Run, stores: Path, tmp_path: Path) -> None:
    store, location = stores / "train.zarr", tmp_path / "run"
    process = start(store, location)
    wait_for_step(process, location, 100)
    process.kill()
    assert wait_for_exit(process, -signal.SIGKILL) == ""

    process = start(store, location)
    wait_for_step(process, location, 600)
    process.send_signal(signal.SIGTERM)
    err = wait_for_exit(process, TRY_AGAIN)
    assert re.fullmatch(
        "streamkern: stopped by SIGTERM after [0-9]+ samples and saved; run the same command "
        "again to continue\n",
        err,
    )
    stopped = newest(location).step
    assert 600 <= stopped < STEPS

    process = start(store, location)
    wait_for_step(process, location, stopped + 200)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100, 100))
    err = wait_for_exit(process, FAILED)
    assert err.count("\n") == 1
    # Either the log or the checkpoint fails first, or both fail.
    log = f"run log {location / 'log.jsonl'}: {os.strerror(errno.EFBIG)}"
    checkpoint = (
        rf"the checkpoint of step \d+ could not be written to {re.escape(str(location))}\b.*"
    )
    both_errors = f"{re.escape(log)}; and the last checkpoint failed: {checkpoint}"
    assert re.fullmatch(rf"streamkern: ({re.escape(log)}|{checkpoint}|{both_errors})\n", err)
    assert stopped + 200 <= newest(location).step < STEPS

    # More reading threads do not change the order of the samples.
    wait_for_exit(start(store, location, "--set", "data.prefetch_threads=3"), DONE)
    uninterrupted = ("--run-dir", tmp_path / "whole", *LONG)
    assert run("train", "--train", store, *uninterrupted)[0] == DONE
    assert newest(location).step == STEPS
    assert_same_weights(location, tmp_path / "whole")
