"""Compare the output of a training on a terminal, in a pipe and in a notebook with recordings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from streamkern import ingest_store
from tests.journey.recording import check_recording, on_a_terminal

FIT = """
import numpy as np
import streamkern

rng = np.random.default_rng(0)
X = rng.standard_normal((20_000, 8), dtype=np.float32)
model = streamkern.KernelRegressor(n_centers=500, epochs=20, verbose=1)
model.fit(X, np.sin(X[:, 0]));
"""
SOONER = """
import sys
from streamkern.cli.main import run_command
from streamkern.basics.progress import ProgressLine

ProgressLine.PERIODS_S["pipe"] = 0.3  # of 30 s
sys.exit(run_command(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the arguments of a command that trains, without the name of the program."""
    folder = tmp_path_factory.mktemp("recorded")
    rng = np.random.default_rng(0)
    X = rng.standard_normal((20_000, 8), dtype=np.float32)
    for name, rows in (("train", X), ("test", X[:1000])):
        ingest_store(rows, folder / f"{name}.zarr", y=np.sin(rows[:, 0]))
    return [
        "train", "--train", str(folder / "train.zarr"), "--test", str(folder / "test.zarr"),
        "--epochs", "20", "--set", "model.n_centers=500", "--set", "run.evaluate_every=200_000",
    ]  # fmt: skip


@pytest.mark.full
def test_terminal_output_equals_recording(train: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streamkern", *train, "--run-dir", str(tmp_path / "run")]
    check_recording("terminal", on_a_terminal(command).replace(str(tmp_path), "FOLDER"))


@pytest.mark.full
def test_pipe_output_equals_recording(train: list[str], tmp_path: Path) -> None:
    """Train without a metric, so that kernel and bandwidth are searched separately."""
    train = [*train, "--set", "model.metric=none"]
    command = [sys.executable, "-c", SOONER, *train, "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    check_recording("pipe", done.stderr)


@pytest.mark.full
def test_notebook_output_equals_recording(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel")
    client = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(FIT)])
    client.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = notebook.cells[0].outputs
    (output,) = [each for each in outputs if each.get("name") != "stderr"]
    check_recording("notebook", output["data"]["text/plain"])
