"""Test the planned time of a run: every solver has one, and the parts add up."""

from __future__ import annotations

import math

import numpy as np
import pytest

from streamkern.config.run_config import RunConfig
from streamkern.config.solver import SOLVERS
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.setup import speeds
from streamkern.train.setup.planned import expected_times, planned_flops, planned_op_counts

rng = np.random.default_rng(0)
X = rng.standard_normal((900, 5)).astype(np.float32)
SOURCE = ArraySource(X, X[:, 0])


def config(solver: str, features: str = "kernel", **settings: object) -> RunConfig:
    """Return the settings of a run with a solver and features."""
    feature_settings = {"n_features": 60} if features == "fourier" else {}
    # In-place solvers have all rows as centers, so they take no number of centers.
    in_place = solver in ("sgd", "eigenpro1", "eigenpro2") and features == "kernel"
    center_settings = {} if in_place or feature_settings else {"n_centers": 60}
    return RunConfig.from_tables(
        {
            "data": {"epochs": 4},
            "model": {"features": features, **center_settings, **feature_settings},
            "solver": {"name": solver},
            "run": {"device": "cpu", **settings},
        }
    )


@pytest.fixture
def instant_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure each speed only once, so that planning takes no time."""
    monkeypatch.setattr(speeds, "MEASURED_S", 0.0)


@pytest.mark.usefixtures("instant_speeds")
@pytest.mark.parametrize(
    ("solver", "features"),
    [(s, "kernel") for s in SOLVERS] + [("eigenpro1", "nystrom"), ("sgd", "fourier")],
)
def test_parts_of_planned_time_add_up(solver: str, features: str) -> None:
    run = open_run(config(solver, features), RunInputs(source=SOURCE))
    with run.backend:
        times = expected_times(run, SOURCE)
        epochs = run.method.n_epochs(run.problem)
    parts = (times.setup, times.epoch, times.evaluation)
    assert all(0 < part < math.inf for part in parts)
    expected = times.setup + epochs * (times.epoch + times.evaluation)
    assert times.whole == pytest.approx(expected)
    assert all(0 < speed < math.inf for speed in times.speeds.values())


@pytest.mark.usefixtures("instant_speeds")
def test_scheduled_evaluations_are_counted() -> None:
    scheduled = config("block", evaluate_every=2, evaluate_at=[100, 200])
    run = open_run(scheduled, RunInputs(source=SOURCE))
    with run.backend:
        times = expected_times(run, SOURCE)
        steps = 4 * math.ceil(900 / run.sizes.batch_size)
    evaluations = steps // 2 + 1 + 2  # every 2 steps, at the end, and at samples 100 and 200
    evaluation_time = times.whole - times.setup - 4 * times.epoch
    assert evaluation_time == pytest.approx(evaluations * times.evaluation)


def test_flops_equal_op_counts() -> None:
    run = open_run(config("block"), RunInputs(source=SOURCE))
    with run.backend:
        counts, flops = planned_op_counts(run), planned_flops(run)
    assert list(counts) == list(flops)
    assert flops["training"] == counts["training"].flops(run.problem)
    assert list(flops)[-2:] == ["setup", "training"]
