"""Let the n-th call fail, for every n, and check that the same command then completes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import zarr

from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.store.store import open_store
from tests.nth_failure import run_with_fault

DONE, USAGE, FAILED = 0, 2, 3
SAMPLE = 3
"""Of the calls of a command, in every run; all of them with --full."""

rng = np.random.default_rng(0)
X = rng.standard_normal((240, 20)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
SMALL = [
    word
    for setting in ("model.n_centers=40", "run.threads=1", "run.device=cpu", "run.memory=512 MiB",
                    "run.checkpoint_every=2", "data.batch_size=60", "run.accelerator=none")
    for word in ("--set", setting)
]  # fmt: skip


class Command(NamedTuple):
    """Words of a command in a folder, and the result that a failure must not change."""

    words: Callable[[Path], list[object]]
    result: Callable[[Path, str], Any]


def _store(folder: Path, out: str, name: str = "out.zarr") -> Any:
    store = open_store(folder / name)
    store.verify()
    return store.spec.fingerprint


def _weights(folder: Path, out: str) -> Any:
    with RunDirectory(folder / "out", writable=False) as run:
        saved = run.load_latest()
    assert saved is not None
    assert saved.meta["position"]["done"]
    return {name: array.tobytes() for name, array in saved.arrays.items()}


def _answers(folder: Path, out: str) -> Any:
    group = zarr.open_group(folder / "out.zarr", mode="r")
    return {name: np.asarray(array[...]).tobytes() for name, array in group.arrays()}


def _tuned(folder: Path, out: str) -> Any:
    result = json.loads(out)
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result["table"]]


def _said(folder: Path, out: str) -> Any:
    return out


def _train(*more: object) -> Command:
    return Command(
        lambda at: ["train", "--train", at / "s.zarr", "--run-dir", at / "out", "--epochs", "2",
                    *SMALL, *more],
        _weights,
    )  # fmt: skip


COMMANDS = {
    "ingest": Command(
        lambda at: ["ingest", at / "x.npz", at / "out.zarr", "--chunk-mb", "0.01"], _store
    ),
    "augment": Command(
        lambda at: ["augment", at / "s.zarr", at / "out.zarr", "--copies", "2", "--chunk-mb",
                    "0.01", "--transform", '{kind = "noise", sigma = 0.5}'], _store
    ),
    "append": Command(
        lambda at: ["append", at / "s.zarr", at / "x.npz"], partial(_store, name="s.zarr")
    ),
    "train": _train(),
    "train --continue": Command(
        lambda at: [*COMMANDS["train"].words(at), "--continue", at / "run"], _weights
    ),
    "train eigenpro4": _train("--solver", "eigenpro4", "--set", "solver.level=10"),
    "predict": Command(
        lambda at: ["predict", at / "run", at / "s.zarr", at / "out.zarr"], _answers
    ),
    "evaluate": Command(lambda at: ["evaluate", at / "run", at / "s.zarr", "--json"], _said),
    "info": Command(lambda at: ["info", at / "s.zarr", "--verify", "--json"], _said),
    "tune": Command(
        lambda at: ["tune", "--train", at / "s.zarr", "--out", at / "out", "--bandwidths", "2,4",
                    "--ridges", "0", "--refine", "0", "--centers", "20", "--epochs", "1", "--json",
                    *SMALL[2:]], _tuned
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the input of the commands."""
    at = tmp_path_factory.mktemp("inputs")
    np.savez(at / "x.npz", X=X, y=Y)
    ingest(X, at / "s.zarr", y=Y, chunk_mb=0.005)
    arguments = ["train", "--train", at / "s.zarr", "--run-dir", at / "run", *SMALL]
    assert run_with_fault(arguments, at)[0] == DONE
    return at


def folder_with(inputs: Path, at: Path) -> Path:
    """Return a folder in which nothing was done yet."""
    shutil.rmtree(at, ignore_errors=True)
    shutil.copytree(inputs, at)
    return at


@pytest.mark.full
@pytest.mark.parametrize("kind", ["io", "memory"])
@pytest.mark.parametrize("name", COMMANDS)
def test_command_completes_after_any_failed_call(
    inputs: Path, tmp_path: Path, name: str, kind: str, pytestconfig: pytest.Config
) -> None:
    arguments, result = COMMANDS[name]
    at = folder_with(inputs, tmp_path / "at")
    code, out, err, calls = run_with_fault(arguments(at), at, kind)
    assert code == DONE, err
    uninterrupted = result(at, out)
    every = range(1, calls + 1)
    if not pytestconfig.getoption("--full"):
        failing_calls = (
            np.random.default_rng([len(name), len(kind)]).permutation(calls)[:SAMPLE] + 1
        )
        every = sorted(failing_calls.tolist())
    for n in every:
        at = folder_with(inputs, tmp_path / "at")
        code, out, err, _ = run_with_fault(arguments(at), at, kind, n)
        reported = f"call {n} of {calls}: exit code {code}, {err}"
        assert "this is a bug" not in err, reported
        assert "Traceback" not in err, reported
        if code != DONE:
            assert code == FAILED or (kind == "io" and code == USAGE), reported
            assert err.splitlines()[-1].startswith("streamkern: "), reported
            code, out, err, _ = run_with_fault(arguments(at), at, kind)
            # A store that is there already: the call failed after the last write.
            was_done = code == USAGE and "already holds a store" in err
            assert was_done or code == DONE, f"{reported}; and again: {err}"
        elif "was skipped" in err:  # the run went on from an older checkpoint, and says so
            continue
        assert result(at, out) == uninterrupted, reported
