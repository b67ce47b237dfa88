"""Runs whose models are read by several files of tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamkern.cli import main
from streamkern.ingest.ingest import ingest
from streamkern.train.saved_model import load_model
from tests.city_rows import CITY, DIGITS, PRICE, X, features, write_csv
from tests.runs import Array

SETTINGS = [
    "model.kernel=laplace", "model.bandwidth=3", "model.n_centers=60", "data.batch_size=60",
    "run.calibrate=true",
]  # fmt: skip


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with runs trained on a table with the target city, on one with price, and on
    arrays."""
    folder = tmp_path_factory.mktemp("runs")
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    for name, target in (("city", CITY), ("price", PRICE)):
        table = write_csv(folder / f"{name}.csv", features() | {name: target})
        ingest(table, folder / f"{name}.zarr", y=name, chunk_mb=1000 / 2**20)
    ingest(X, folder / "digit.zarr", y=DIGITS, chunk_mb=1000 / 2**20)
    for name in ("city", "price", "digit"):
        arguments = ["--train", folder / f"{name}.zarr", "--run-dir", folder / name, "--epochs", 3]
        arguments += ["--memory", "1 GiB", *sets]
        assert main.run_command(["train", *map(str, arguments)]) == 0
    return folder


@pytest.fixture(scope="session")
def model_values(place: Path) -> dict[str, Array]:
    """Return f(X) in float64 from the centers and weights of each run, with its own scaling."""
    values = {}
    for name in ("city", "price", "digit"):
        model = load_model(place / name, device="cpu", threads=1)
        with model.backend:
            values[name] = model.values(X).astype(np.float64)
    return values
