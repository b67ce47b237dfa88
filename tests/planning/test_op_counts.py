"""Test the FLOPs and the seconds of operation counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamkern.planning.op_counts import NO_WORK, WORK_KINDS, OpCounts, Speeds
from streamkern.planning.problem import ProblemShape

PROBLEM = ProblemShape(
    n_rows=1000, epochs=1, d=5, c=1, p=100, row_bytes=28, unit_rows=100, itemsize=4, threads=2,
    width=7, tile_bytes=1 << 20,
)  # fmt: skip

KINDS_IN_FLOPS = ("products", "factors", "eigen", "wide_products", "wide_factors")


def test_flops_include_every_kind() -> None:
    problem = replace(PROBLEM, d=7, c=3)
    assert OpCounts(entries=5).flops(problem) == 5 * 2 * (7 + 3)
    assert OpCounts(kept=5).flops(problem) == 5 * 2 * (7 + 3)
    assert OpCounts(swept=5).flops(problem) == 5 * 2 * 3
    assert OpCounts(half_swept=5).flops(problem) == 5 * 2 * 2 * 3  # two halves of each weight
    for kind in KINDS_IN_FLOPS:
        assert OpCounts(**{kind: 11.0}).flops(problem) == 11
    assert OpCounts(calls=100).flops(problem) == 0


@pytest.mark.parametrize("kind", WORK_KINDS)
def test_seconds_are_amounts_times_unit_costs(kind: str) -> None:
    work, unit_costs = OpCounts(**{kind: 6.0}), OpCounts(**{kind: 0.5})
    assert work.seconds(unit_costs) == 3
    assert (work + work).scaled(2).seconds(unit_costs) == 12
    assert sum([work, NO_WORK, work], NO_WORK).seconds(unit_costs) == 6


def test_streaming_time_overlaps_reading_and_steps() -> None:
    problem = replace(PROBLEM, threads=2, readers=0)
    speeds = Speeds(NO_WORK, prepare_s=1.0, read_s=4.0, busy_s=2.0, compile_s=0.0)
    # max(steps + rows * (prepare_s + busy_s / threads), rows * read_s / readers)
    assert speeds.streaming_seconds(10, 100.0, problem) == 100 + 10 * (1 + 2 / 2)
    assert speeds.streaming_seconds(10, 0.0, problem) == 20
    slow = replace(speeds, read_s=40.0)
    assert slow.streaming_seconds(10, 0.0, problem) == 10 * 40 / 2
    assert slow.streaming_seconds(10, 0.0, replace(problem, readers=8)) == 10 * 40 / 8
