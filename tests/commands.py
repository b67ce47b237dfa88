"""Commands in tests: exit codes, settings of short runs, rows, and answers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from tests.runs import Run

DONE, USAGE, FAILED, TRY_AGAIN = 0, 2, 3, 75
SETTINGS = ("model.n_centers=40", "data.batch_size=50", "run.threads=1", "run.device=cpu")
FAST = [word for setting in SETTINGS for word in ("--set", setting)]
BY_STEPS = [*FAST, "--solver", "block"]

_rng = np.random.default_rng(0)
X = _rng.normal(size=(600, 5)).astype(np.float32)
Y = np.array(["a", "b", "c"])[np.digitize(X[:, 0] + X[:, 1], [-0.6, 0.6])]

# Lines that may precede an error.
_NOTE_OR_PROGRESS = re.compile(r"^streamkern: note: \S| samples  ")


def error_line(answer: tuple[int, str, str], code: int) -> str:
    """Return the single line on stderr of a command that ended with `code`."""
    assert answer[0] == code, answer
    *notes, line = answer[2].splitlines()
    assert [note for note in notes if not _NOTE_OR_PROGRESS.search(note)] == []
    assert line.startswith("streamkern: ")
    return line.removeprefix("streamkern: ")


def train_run(stores: Path, folder: Path, run: Run, *more: object) -> Path:
    """Train a run in `folder` with more arguments, and return its directory."""
    arguments = ("--test", stores / "test.zarr", "--run-dir", folder / "run", "--epochs", 3)
    assert run("train", "--train", stores / "train.zarr", *arguments, *BY_STEPS, *more)[0] == DONE
    return folder / "run"
