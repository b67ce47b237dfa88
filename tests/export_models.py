"""The rows and models by which exports to ONNX and to C are tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import streamkern as sk
from benchmarks.exports import COMPILER, CompiledModel

compiled = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

X = np.random.default_rng(0).normal(size=(400, 3))
VALUES = np.sin(2 * X[:, 0]) + X[:, 1] + 100
NEW = np.random.default_rng(1).normal(size=(150, 3))
QUICK: dict[str, Any] = {
    "n_centers": 60, "epochs": 1, "bandwidth": 2.0, "metric": "none", "ridge": 1e-3,
    "random_state": 0,
}  # fmt: skip
SPREAD = float(VALUES.std())
CHANGES: list[dict[str, Any]] = [
    {"metric": [[1.0, 0.5], [0.0, 2.0], [0.3, 0.0]]},
    {"kernel": {"kind": "laplace", "categorical": [[2, 3.0]]}},
    {"features": "fourier", "n_features": 50, "kernel": "gaussian", "n_centers": "auto"},
    {"loss": "quantile", "quantile": [0.1, 0.5, 0.9]},
    {"loss": "poisson"},
    {"target_transform": "log"},
    {"scale": "quantiles"},
]  # fmt: skip
"""Settings besides `QUICK` that change the exported model."""


def with_tails(rows: np.ndarray) -> np.ndarray:
    """Return rows with a heavy-tailed feature, and one of few values."""
    return np.column_stack((rows[:, 0], np.exp(2 * rows[:, 1]), rows[:, 2].round()))


def in_float64(changes: dict[str, Any]) -> sk.KernelRegressor:
    """Return a model in float64 with these settings, fitted to `with_tails(X)`."""
    options = {k: v for k, v in QUICK.items() if k not in changes} | {"precision": "float64"}
    if changes.get("kernel") in ("polynomial", "relu_ntk"):
        del options["bandwidth"]
    return sk.KernelRegressor(**options | changes).fit(with_tails(X), VALUES.round(1) - 90)


def run_exported(
    model: Any, path: Path, feed: Any, dtype: str = "float64"
) -> dict[str, np.ndarray]:
    """Export a model, and return its outputs by name for an array or for inputs by name."""
    model.to_onnx(path, dtype=dtype, overwrite=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    if not isinstance(feed, dict):
        feed = {"X": feed.astype("float64" if dtype == "auto" else dtype)}
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feed), strict=True))


def rows_of(function: CompiledModel, name: str, rows: np.ndarray) -> np.ndarray:
    """Return one output for every row."""
    return np.array([function(row)[name] for row in rows.reshape(len(rows), -1)])
