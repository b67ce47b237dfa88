"""Check the estimates for more and more ranks: sizes and memory of the run, seconds of the
model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from streamkern.basics.errors import ConfigError
from streamkern.config.run_config import RunConfig
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.resolve.resolved_run import ResolvedRun, open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.setup import speeds
from streamkern.train.setup.planned import expected_times
from tools.rank_times import estimate
from tools.rank_times.estimate import expected_over_ranks
from tools.rank_times.hardware import HARDWARE
from tools.rank_times.step_model import step_time

rng = np.random.default_rng(0)
X = rng.standard_normal((5000, 5)).astype(np.float32)


def open_closed_run(ranks: int, solver: str = "block", **settings: object) -> ResolvedRun:
    """Return a run of 4000 centers over several ranks, whose backend is closed."""
    tables = {
        "data": {"batch_size": 512},
        "model": {"n_centers": 4000, "kernel": "laplace", "bandwidth": 1.0},
        "solver": {"name": solver, **settings},
        "run": {"device": "cpu", "ranks": ranks, "memory": "4 GiB"},
    }
    run = open_run(RunConfig.from_tables(tables), RunInputs(source=ArraySource(X, X[:, 0])))
    run.backend.close()
    return run


@pytest.mark.parametrize("profile", HARDWARE)
def test_table_rows_equal_model(profile: str) -> None:
    run = open_closed_run(6, block_size=1000, ridge=1e-6)
    found = expected_over_ranks(run, profile, None)
    assert found is not None
    assert [row["ranks"] for row in found["rows"]] == [1, 2, 4, 6]
    machine = HARDWARE[profile].machine(d=5, c=1, outputs=17, itemsize=4, fast=False)
    step = estimate._step(run, run.sizes)
    for row in found["rows"]:
        assert row["step_s"] == step_time(step, machine, row["ranks"]).seconds
        assert row["epoch_s"] == pytest.approx(10 * row["step_s"])
        assert sum(row["shares"].values()) == pytest.approx(1)
    assert found["rows"][0]["efficiency"] == 1


def test_memory_of_a_rank_equals_its_plan() -> None:
    run = open_closed_run(4, block_size=1000, ridge=1e-6)
    found = expected_over_ranks(run, "h100-ib", None)
    assert found is not None
    for row in found["rows"]:
        own = open_closed_run(row["ranks"], block_size=1000, ridge=1e-6)
        assert row["memory_bytes"] == own.buffers.total("train")
        assert row["fits"]
    before = max(run.buffers.total(phase) for phase in run.buffers.phases if phase != "train")
    assert found["setup_bytes"] == before


def test_blocks_grow_with_memory_of_more_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = open_closed_run(2, block_size=1000, ridge=1e-6)
    tiny = replace(HARDWARE["h100-ib"], memory_bytes=run.buffers.peak)
    monkeypatch.setitem(estimate.HARDWARE, "h100-ib", tiny)
    found = expected_over_ranks(run, "h100-ib", None)
    assert found is not None
    assert {row["best_block_size"] for row in found["rows"]} <= {1000, 500, 250}
    monkeypatch.setitem(estimate.HARDWARE, "h100-ib", replace(tiny, memory_bytes=1 << 20))
    found = expected_over_ranks(run, "h100-ib", None)
    assert found is not None
    assert {row["best_block_size"] for row in found["rows"]} == {None}
    assert not any(row["fits"] for row in found["rows"])


def test_slow_network_prefers_larger_blocks() -> None:
    found = expected_over_ranks(open_closed_run(256, block_size=250, ridge=1e-6), "cpu-10gbe", None)
    assert found is not None
    best = [row["best_block_size"] for row in found["rows"]]
    assert min(best) > 250


def test_rows_are_distributed_by_units_if_sufficient() -> None:
    """Check the division of the loader: a block of 5000 rows has at most 5 units here."""
    run = open_closed_run(2, block_size=1000, ridge=1e-6)
    assert estimate._step(run, run.sizes).dealt == run.data.source.n_units // 8


@pytest.mark.slow
def test_local_machine_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "MEASURED_S", 0.0)
    run = open_closed_run(2, block_size=1000, ridge=1e-6)
    with run.backend:
        measured = expected_times(run, None).speeds
    found = expected_over_ranks(run, "this", measured)
    assert found is not None
    assert found["rank_bytes"] == 4 << 30
    first, second = found["rows"]
    assert first["step_s"] >= 512 * 4000 / measured["kept"]
    assert 0 < second["efficiency"] < 1


def test_other_solvers_are_not_modelled() -> None:
    assert expected_over_ranks(open_closed_run(2, "falkon"), "h100-ib", None) is None


def test_center_ranks_are_refused() -> None:
    run = open_closed_run(2, block_size=1000)
    shared = replace(run, problem=replace(run.problem, center_ranks=2))
    with pytest.raises(ConfigError, match=r"run\.center_ranks=2 is not in the model"):
        expected_over_ranks(shared, "h100-ib", None)
