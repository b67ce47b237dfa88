"""U6: the command line and the estimators have the same defaults, resolved in the same place."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.config.names import PARAMETER_SETTINGS
from streamkern.config.run_config import RunConfig
from streamkern.estimator.base import KernelEstimator
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.train.resolve import training_data
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.resolve.training_data import auto_epochs
from streamkern.train.train import train
from tests.runs import stopped

X = np.random.default_rng(0).standard_normal((400, 3)).astype(np.float32)
Y = X[:, :1] ** 2

# What an object can be and a file cannot, or says in another word.
OTHER = {"warm_start": (False, None)}


def run_default(path: str) -> Any:
    """Return the default of a setting."""
    section, _, key = path.partition(".")
    config = RunConfig.from_tables({"data": {"train": "a"}})
    return getattr(getattr(config, section), key)


@pytest.mark.parametrize("name", inspect.signature(KernelEstimator.__init__).parameters)
def test_estimators_and_run_files_share_defaults(name: str) -> None:
    if name in ("self", "verbose", "callbacks"):  # parameters that are not settings of a run
        return
    default = inspect.signature(KernelEstimator.__init__).parameters[name].default
    path = "data.transforms" if name == "transforms" else PARAMETER_SETTINGS[name]
    assert (default, run_default(path)) in ((default, default), OTHER.get(name))


def test_class_weight_and_memory_share_defaults() -> None:
    parameters = sk.KernelClassifier().get_params()
    assert parameters["class_weight"] is run_default("data.class_weight")
    assert parameters["memory"] == run_default("run.device_memory")


@pytest.mark.parametrize(
    ("n_rows", "epochs"), [(1, 20), (5000, 20), (40_000, 3), (100_000, 1), (10**8, 1)]
)
def test_auto_epochs_depend_on_rows(n_rows: int, epochs: int) -> None:
    assert auto_epochs(small_run(), n_rows) == epochs
    log_loss = {"model.loss": "log_loss", "solver.ridge": 1e-3}
    for iterates in ({"solver.name": "falkon"}, {"solver.name": "direct", **log_loss}):
        assert auto_epochs(small_run().with_overrides(iterates), n_rows) == 20


def small_run(tmp_path: Path | None = None, **data: Any) -> RunConfig:
    """Return the settings of a small run, with a checkpoint of each step if it has a folder."""
    run_dir = {} if tmp_path is None else {"run_dir": str(tmp_path / "run"), "checkpoint_every": 1}
    return RunConfig.from_tables(
        {
            "data": {"batch_size": 50, **data},
            "model": {"n_centers": 40},
            "solver": {"name": "block"},
            "run": {"threads": 1, "memory": "1 GiB", **run_dir},
        }
    )


@pytest.mark.parametrize(("copies", "epochs"), [(1, 20), (100, 3), (1000, 1)])
def test_auto_epochs_count_copies(copies: int, epochs: int) -> None:
    run = open_run(small_run(), RunInputs(AugmentedSource(ArraySource(X, Y), copies)))
    run.backend.close()
    assert (run.config.data.n_epochs, run.problem.epochs) == (epochs, epochs)


def test_both_front_ends_train_on_same_number_of_samples() -> None:
    result = train(small_run(), source=ArraySource(X, Y))
    result.model.backend.close()
    model = sk.KernelRegressor(n_centers=40, solver="block", batch_size=50, threads=1).fit(X, Y)
    assert result.samples == model.report_["samples"] == 20 * 400


@pytest.mark.slow
def test_resumed_run_keeps_its_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also an "auto" that has another meaning since."""
    source = ArraySource(X, Y)
    stopped(small_run(tmp_path), 3, source=source, test=source)
    monkeypatch.setattr(training_data, "MAX_AUTO_EPOCHS", 3)
    result = train(small_run(tmp_path), source=source)
    result.model.backend.close()
    assert result.samples == 20 * 400
