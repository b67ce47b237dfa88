"""Small searches for tests: their settings, and a problem whose best bandwidth is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist

from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.stream.sources.arrays import ArraySource
from tests.runs import settings

Array = npt.NDArray[Any]


DONE, USAGE, TRY_AGAIN = 0, 2, 75
"""Exit codes of the commands."""


QUICK: dict[str, Any] = {"bandwidths": [1.0, 3.0, 9.0], "ridges": [0.0], "refine": 0, "epochs": 2}
"""Settings for a search that takes a second: 108 rows to fit, 27 held out, 3 trainings."""


def config(**overrides: Any) -> RunConfig:
    """Return the settings of a small run, whose bandwidth `QUICK` contains."""
    return settings(**{"solver.ridge": 0.0, "data.batch_size": "auto", **overrides})


OPEN_SETTINGS: dict[str, Any] = {"model.bandwidth": "auto", "solver.ridge": "auto"}


def record_trials(report: list[dict[str, Any]]) -> Callable[[str, dict[str, Any]], None]:
    """Return a `report` function that appends the fields of each trial to a list."""
    return lambda event, fields: report.append(fields) if event == "trial" else None


def gaussian_process(n: int, width: float, noise: float) -> tuple[Array, Array]:
    """Return X (n, 2) and a sample of the process with a Gaussian kernel of this bandwidth, with
    noise."""
    rng = np.random.default_rng(4)
    X = rng.uniform(-1, 1, (n, 2))
    K = np.exp(-cdist(X, X, "sqeuclidean") / (2 * width**2))
    lam, E = np.linalg.eigh(K)
    f = E @ (np.sqrt(np.maximum(lam, 0)) * rng.standard_normal(n))
    return X.astype(np.float32), (f + noise * rng.standard_normal(n)).astype(np.float32)


def smooth_problem(bandwidth: float, ridge: float) -> tuple[RunConfig, ArraySource]:
    """Return a problem whose best bandwidth is 0.3; float32 allows half of the usual step."""
    run = config(
        **{
            "model.kernel": "gaussian", "model.n_centers": "auto", "solver.step_scale": 0.5,
            "model.bandwidth": bandwidth, "solver.ridge": ridge,
        }
    )  # fmt: skip
    return run, ArraySource(*gaussian_process(600, 0.3, 0.5))


def write_run_file(folder: Path) -> Path:
    """Write a store of two classes and a run file for it; return the path of the run file."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((600, 5)).astype(np.float32)
    ingest(X, folder / "train.zarr", y=(X[:, 0] > 0).astype(int))
    path = folder / "run.toml"
    path.write_text(
        f"[data]\ntrain = {json.dumps(str(folder / 'train.zarr'))}\n"
        '[model]\nkernel = "laplace"\nn_centers = 60\n[run]\nthreads = 1\ndevice = "cpu"\n'
    )
    return path
