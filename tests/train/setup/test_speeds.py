"""Test the measured speeds of a machine, with a clock that the test controls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from streamkern.config.run_config import RunConfig
from streamkern.planning.op_counts import OpCounts
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.resolve.resolved_run import ResolvedRun, open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.setup import speeds
from streamkern.train.setup.speeds import measure_speeds

rng = np.random.default_rng(0)
X = rng.standard_normal((600, 6))
UNIT_ROWS = 100


class SlowSource(ArraySource):
    """Source that waits 10 ms for each unit."""

    def read_unit(self, u: int, seed: int, epoch: int) -> Any:
        time.sleep(0.01)
        return super().read_unit(u, seed, epoch)


@pytest.fixture
def run() -> Iterator[ResolvedRun]:
    """Yield a resolved run whose source is slow."""
    source = SlowSource(X, X[:, 0], unit_rows=UNIT_ROWS)
    config = RunConfig.from_tables(
        {
            "model": {"n_centers": 50},
            "solver": {"name": "block"},
            "data": {"batch_size": 64},
            "run": {"device": "cpu"},
        }
    )
    run = open_run(config, RunInputs(source=source))
    with run.backend:
        yield run


def test_only_used_operations_are_measured(run: ResolvedRun) -> None:
    actual = measure_speeds(run, [OpCounts(kept=1), OpCounts(wide_factors=1)])
    assert actual.compute.kept > 0
    assert actual.compute.wide_factors > 0
    assert actual.compute == OpCounts(
        kept=actual.compute.kept, wide_factors=actual.compute.wide_factors
    )


def test_measured_seconds_follow_the_clock(
    run: ResolvedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advance the clock by one second at each reading, so that a call takes one second."""
    monkeypatch.setattr(speeds, "MEASURED_S", 12 * speeds.MEASUREMENTS)
    ticks = count()
    monkeypatch.setattr(speeds, "perf_counter", lambda: float(next(ticks)))
    actual = measure_speeds(run, [OpCounts(kept=1, swept=1, half_swept=1)])
    assert actual.compute.kept == pytest.approx(1 / (64 * 50))
    assert actual.compute.swept == pytest.approx(1 / (2 * 64 * 50))
    assert actual.compute.half_swept == pytest.approx(1 / (2 * 50 * 50))
    assert actual.prepare_s == pytest.approx(1 / 64)


def test_reading_waits_more_than_it_computes(run: ResolvedRun) -> None:
    actual = measure_speeds(run, [OpCounts(calls=1)])
    assert actual.read_s > 0.01 / UNIT_ROWS
    assert actual.busy_s < 0.5 * actual.read_s
