"""Run directories that an earlier version made open, and go on, in this one.

`recorded_runs.zip` holds two finished runs of 77e0c82c. A record with another entry than that
version wrote would be one of another version.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.cli.run_info import run_overview

RUNS = Path(__file__).with_name("recorded_runs.zip")
X = np.random.default_rng(0).normal(size=(60, 3)).round(3)
Y = (X[:, 0] + X[:, 1] ** 2).round(3)
OPTIONS: dict[str, Any] = {
    "random_state": 0, "kernel": "gaussian", "bandwidth": 2.0, "metric": "none", "ridge": 1e-3,
    "threads": 1,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "direct": {}, "block": {"solver": "block", "n_centers": 10, "epochs": 2}
}  # fmt: skip
PREDICTED = {
    "direct": [0.08466387330691016, 0.47684287442962325, 2.0770207995096843],
    "block": [0.6985673361937205, 0.9728181117693583, 1.1565373295466106],
}


@pytest.mark.parametrize("name", PREDICTED)
def test_run_of_earlier_version_opens(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(RUNS) as archive:
        archive.extractall(tmp_path)
    loaded = sk.load(tmp_path / name)
    np.testing.assert_allclose(loaded.predict(X[:3]), PREDICTED[name], rtol=1e-4)
    assert run_overview(tmp_path / name)["step"] > 0


@pytest.mark.filterwarnings("ignore")  # other libraries than at that time are told
@pytest.mark.parametrize("name", PREDICTED)
def test_repeated_command_recognises_finished_run(name: str, tmp_path: Path) -> None:
    """Check that it is not taken for another run, which would need another folder."""
    with zipfile.ZipFile(RUNS) as archive:
        archive.extractall(tmp_path)
    model = sk.KernelRegressor(**OPTIONS, **OWN[name], run_dir=tmp_path / name).fit(X, Y)
    np.testing.assert_allclose(model.predict(X[:3]), PREDICTED[name], rtol=1e-4)
