"""Rows with a city, a digit and a price to predict, for tests of predictions."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.saved_model import load_model

N, D = 240, 4
CITIES = np.array(["Bonn", "Lima", "Oslo"])
NAMES = ("age", "height", "speed", "weight")
X = np.random.default_rng(11).standard_normal((N, D)).astype(np.float32)
IDS = np.abs(X[:, :3]).argmax(axis=1)
CITY = CITIES[IDS]
DIGITS = 3 + 2 * IDS
PRICE = (X @ [1.0, -2.0, 0.5, 3.0]).astype(np.float32)
# Of a row that is a center, float32 has a distance to itself of sqrt(eps), not of 0.
CLOSE = 3e-3


def write_csv(path: Path, columns: dict[str, Any]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(
            zip(*(np.asarray(v).astype(str).tolist() for v in columns.values()), strict=True)
        )
    return path


def features(rows: slice = slice(None), names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    return {name: X[rows, NAMES.index(name)] for name in names}


def model_of(run_dir: Path) -> KernelModel:
    """Return the model of a run, with a closed backend."""
    model = load_model(run_dir, device="cpu", threads=1)
    model.backend.close()
    return model
