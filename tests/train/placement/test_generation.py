"""A real training, one of whose ranks is killed in the middle."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.stop import StopRequest
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.over_ranks import train_over
from streamkern.train.placement.local import local_cluster
from tests.lives import eventually

pytest.importorskip("distributed")
pytest.importorskip("xgboost")
pytestmark = pytest.mark.slow


def alpha(run_dir: Path) -> np.ndarray[Any, Any]:
    """Return the weights of the newest checkpoint."""
    saved = RunDirectory(run_dir, writable=False).load_latest()
    assert saved is not None
    return np.asarray(saved.arrays["alpha"])


def test_a_training_with_a_kill_ends_with_the_same_bits(tmp_path: Path) -> None:
    """As one of as many ranks without."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 5)).astype(np.float32)
    ingest(X, str(tmp_path / "s.zarr"), y=np.sin(2 * X[:, 0]) + X[:, 1], chunk_mb=16 * 20 / 2**20)
    configs = [
        RunConfig().with_overrides({
            "data.train": str(tmp_path / "s.zarr"), "data.epochs": 15, "data.batch_size": 150,
            "run.run_dir": str(tmp_path / name), "run.ranks": 2, "run.checkpoint_every": 3,
            "run.accelerator": "none", "run.device": "cpu", "model.n_centers": 120,
            "model.kernel": "laplace", "model.bandwidth": 2.0, "solver.block_size": 40,
        }) for name in ("plain", "killed")
    ]  # fmt: skip
    told: list[dict[str, Any]] = []
    with local_cluster(2) as client:
        train_over(configs[0], client, StopRequest(install=False))
        assert alpha(tmp_path / "plain").shape[0] == 120
        pids = client.run(os.getpid)
        victim = pids[max(pids)]

        def later() -> None:
            place = RunDirectory(tmp_path / "killed", writable=False)
            eventually(
                lambda: (tmp_path / "killed").exists() and max(place.steps(), default=0) > 10
            )
            os.kill(victim, signal.SIGKILL)

        killing = threading.Thread(target=later)
        killing.start()
        train_over(configs[1], client, StopRequest(install=False), on_event=told.append)
        killing.join()
    assert [event["event"] for event in told].count("lost") == 1
    np.testing.assert_array_equal(alpha(tmp_path / "killed"), alpha(tmp_path / "plain"))
