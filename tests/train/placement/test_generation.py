"""Test ranks on one machine: the arrays that they receive, and refused settings."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.basics.errors import ConfigError
from streamkern.config.run_config import RunConfig
from streamkern.kernels.builtin import Laplace
from streamkern.train.placement import generation, task
from streamkern.train.placement.task import RankSpec

pytest.importorskip("distributed")
pytest.importorskip("xgboost")
pytestmark = pytest.mark.slow


def test_rank_timeout_exceeds_its_report_interval() -> None:
    """Check that a rank that waits for replies of the scheduler is not taken for a silent one."""
    spec = RankSpec("name", 1, 0, ("a",), 1, 60.0, 60.0, 0.0, b"")
    assert (
        spec.report_interval_s + task._REPLY_TIMEOUT_S
        <= task.MAX_REPORT_GAP_S
        < generation._MAX_SILENCE_S - 3
    )


@pytest.mark.slow
def test_arrays_are_sent_to_ranks(tmp_path: Path) -> None:
    """Compare the model, its metrics and its history with those of one process."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1000, 4)).astype(np.float32)
    y = np.where(np.sin(2 * X[:, 0]) + X[:, 1] > 0, "yes", "no")
    parameters: dict[str, Any] = {
        "n_centers": 100, "epochs": 2, "solver": "block", "precision": "float64",
        "transforms": [sk.GaussianNoise(0.1)], "accelerator": "none", "device": "cpu",
    }  # fmt: skip
    one = sk.KernelClassifier(Laplace(2.0), run_dir=tmp_path / "one", **parameters)
    two = sk.KernelClassifier(Laplace(2.0), run_dir=tmp_path / "two", ranks=2, **parameters)
    for model in (one, two):
        model.fit(X, y, test=(X[:500], y[:500]))
    np.testing.assert_allclose(two.decision_function(X), one.decision_function(X), atol=1e-9)
    assert len(two.history_) == 2
    for actual, expected in zip(two.history_, one.history_, strict=True):
        assert actual == pytest.approx(expected)


class UserKernel(Laplace):
    """Kernel whose description has no name that a run file could give."""

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "kernel": "own"}


class TransformWithLock:
    """Transform that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, xp: Any, X: Any, y: Any) -> Any:
        return X, y


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "message"), [
    ({"run_dir": None}, "ranks=2 needs a run_dir that all ranks can read"),
    ({"solver": "sgd"}, "ranks=2 cannot share the steps of solver='sgd'"),
    ({"callbacks": [sk.Callback()]}, "callbacks cannot be used"),
    ({"transforms": [sk.MixUp(0.2)]}, "ranks=2 cannot divide batches in which mixup pairs"),
    ({"kernel": UserKernel()}, r"kernel=.*ranks=2: it is a function"),
    ({"transforms": [TransformWithLock()]}, "ranks=2: the data or the kernel cannot be sent"),
])  # fmt: skip
def test_unsupported_settings_of_ranks_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    """Check also that the run directory is not created."""
    X = np.random.default_rng(0).normal(size=(300, 2))
    model = sk.KernelRegressor(ranks=2).set_params(**{"run_dir": tmp_path / "run"} | settings)
    with pytest.raises(ConfigError, match=message):
        model.fit(X, X[:, 0])
    assert not (tmp_path / "run").exists()


def test_partial_fit_over_ranks_is_refused() -> None:
    X = np.random.default_rng(0).normal(size=(300, 2))
    with pytest.raises(ConfigError, match="ranks=2 cannot be used with partial_fit"):
        sk.KernelRegressor(ranks=2).partial_fit(X, X[:, 0])


def test_settings_of_ranks_are_validated(tmp_path: Path) -> None:
    """Check settings that have no effect without ranks, and that a cluster needs a path."""
    location = {"data.train": str(tmp_path / "s.zarr"), "run.run_dir": str(tmp_path / "run")}
    config = RunConfig().with_overrides(location)
    for name, value in (("run.cluster", "tcp://h:1"), ("run.min_ranks", 2)):
        with pytest.raises(ConfigError, match=f"{name} is for several ranks"):
            sk.train_model(config.with_overrides({name: value}))
    on_cluster = config.with_overrides({"run.ranks": 2, "run.cluster": "tcp://h:1"})
    for name in ("data.train", "run.run_dir", "data.test"):
        with pytest.raises(ConfigError, match=r"ranks=2 on a cluster: 'there' is a relative path"):
            sk.train_model(on_cluster.with_overrides({name: "there"}))
    with pytest.raises(ConfigError, match=r"min_ranks=3 must not be above run\.ranks=2"):
        sk.train_model(on_cluster.with_overrides({"run.min_ranks": 3}))
    with pytest.raises(ConfigError, match=r"ranks=2 reads rows on the ranks"):
        sk.train_model(on_cluster.with_overrides({"data.dask": "tcp://h:1"}))
    assert not any(tmp_path.iterdir())
