"""Check the planned time of a run: every solver has one, and the parts add up."""

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
    wide = {"n_features": 60} if features == "fourier" else {}
    in_place = solver in ("sgd", "eigenpro1", "eigenpro2") and features == "kernel"
    n = {} if in_place or wide else {"n_centers": 60}
    return RunConfig.from_tables(
        {
            "data": {"epochs": 4},
            "model": {"features": features, **n, **wide},
            "solver": {"name": solver},
            "run": {"device": "cpu", **settings},
        }
    )


@pytest.mark.parametrize(
    ("solver", "features"),
    [(s, "kernel") for s in SOLVERS] + [("eigenpro1", "nystrom"), ("sgd", "fourier")],
)
def test_parts_of_planned_time_add_up(
    solver: str, features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds, "MEASURED_S", 0.0)
    run = open_run(config(solver, features), RunInputs(source=SOURCE))
    with run.backend:
        times = expected_times(run, SOURCE)
        passes = run.method.n_epochs(run.problem)
    parts = (times.setup, times.epoch, times.evaluation)
    assert all(0 < part < math.inf for part in parts)
    full = times.setup + passes * (times.epoch + times.evaluation)
    assert times.whole == pytest.approx(full)
    assert all(0 < speed < math.inf for speed in times.speeds.values())


def test_scheduled_evaluations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "MEASURED_S", 0.0)
    every = config("block", evaluate_every=2, evaluate_at=[100, 200])
    run = open_run(every, RunInputs(source=SOURCE))
    with run.backend:
        times = expected_times(run, SOURCE)
        steps = 4 * math.ceil(900 / run.sizes.batch_size)
    evaluations = steps // 2 + 1 + 2
    rest = times.whole - times.setup - 4 * times.epoch
    assert rest == pytest.approx(evaluations * times.evaluation)


def test_flops_equal_op_counts() -> None:
    run = open_run(config("block"), RunInputs(source=SOURCE))
    with run.backend:
        counts, flops = planned_op_counts(run), planned_flops(run)
    assert list(counts) == list(flops)
    assert flops["training"] == counts["training"].flops(run.problem)
    assert list(flops)[-2:] == ["setup", "training"]
