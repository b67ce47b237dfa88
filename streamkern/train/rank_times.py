"""What a run would take on more and more ranks of some hardware, for `streamkern plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from streamkern.basics.errors import ConfigError
from streamkern.planning.hardware import HARDWARE, PROFILES, THIS, Machine, measured
from streamkern.planning.problem import Problem
from streamkern.planning.scale import Step, doublings, step_time
from streamkern.planning.sizes import halvings
from streamkern.solver.block import BlockMethod
from streamkern.solver.block_sizes import (
    ROWS_TO_LEARN,
    SAMPLE_BLOCKS,
    BlockSizes,
    block_sizes,
    setup_effort,
)
from streamkern.stream.buffers import FEWEST_UNITS
from streamkern.train.opened import Run
from streamkern.train.planned import planned_batches

SMALLEST_BLOCK: Final = 256


def check_profile(profile: str, *, measure: bool) -> None:
    """Raise ConfigError unless it is one, and its figures are at hand."""
    if profile not in PROFILES:
        raise ConfigError(f"profile={profile!r} must be one of {', '.join(PROFILES)}")
    if profile == THIS and not measure:
        raise ConfigError(
            "profile='this' takes its figures from a measurement; leave --no-measure out, or use "
            f"one of {', '.join(HARDWARE)}"
        )


def expected_over_ranks(
    run: Run, profile: str, speeds: Mapping[str, float] | None
) -> dict[str, Any] | None:
    """For 1, 2, 4, ... up to run.ranks ranks: seconds, what they go to, memory, the best block.

    speeds : that were measured, see `planned.Times`; needed for the profile "this". None, where the
    solver is another than "block", which is the only one that is modelled, or nothing was measured.
    """
    if not isinstance(run.method, BlockMethod) or (profile == THIS and speeds is None):
        return None
    if run.problem.center_ranks > 1:
        raise ConfigError(
            f"run.center_ranks={run.problem.center_ranks} is not in the model of what ranks would "
            "take; leave it out, or profile"
        )
    machine, blocks = _machine(run, profile, speeds), _blocks(run)
    alone = step_time(_step(run, run.sizes), machine, 1).seconds
    rows = [_row(run, machine, n, alone, blocks) for n in doublings(run.problem.ranks)]
    setup = [run.buffers.total(phase) for phase in run.buffers.phases if phase != "train"]
    return {
        "profile": profile,
        "about": "this machine, as measured" if profile == THIS else HARDWARE[profile].about,
        "rank_bytes": machine.memory_bytes,
        "setup_bytes": max(setup, default=0),
        "rows": rows,
    }


def _row(
    run: Run, machine: Machine, ranks: int, alone: float, blocks: list[BlockSizes]
) -> dict[str, Any]:
    taken = step_time(_step(run, run.sizes), machine, ranks)
    buffers = run.method.count(replace(run.problem, ranks=ranks), run.sizes)
    return {
        "ranks": ranks,
        "step_s": taken.seconds,
        "epoch_s": taken.seconds * planned_batches(run)[0],
        "efficiency": alone / (ranks * taken.seconds),
        "shares": taken.shares,
        "bottleneck": taken.bottleneck,
        "memory_bytes": buffers.total("train"),
        "fits": buffers.peak <= machine.memory_bytes,
        "best_block_size": _best_block(run, machine, ranks, blocks),
    }


def _machine(run: Run, profile: str, speeds: Mapping[str, float] | None) -> Machine:
    problem = run.problem
    if profile == THIS:
        assert speeds is not None
        return measured(speeds, itemsize=problem.itemsize, memory_bytes=run.budget_bytes)
    return HARDWARE[profile].machine(
        d=problem.d, c=problem.c, outputs=run.method.outputs(problem), itemsize=problem.itemsize,
        fast=run.precision == "fast",
    )  # fmt: skip


def _step(run: Run, sizes: Any) -> Step:
    """As the loader shares out the rows of a batch."""
    problem = run.problem
    unit_bytes = problem.unit_rows * (problem.row_bytes + 16)
    units = min(max(1, sizes.loader_block_bytes // unit_bytes), run.data.source.n_units)
    return replace(BlockMethod().step(problem, sizes), dealt=units // FEWEST_UNITS)


def _blocks(run: Run) -> list[BlockSizes]:
    """p and its halves."""
    sizes, p = run.sizes, run.problem.p
    assert isinstance(sizes, BlockSizes)
    loader = (sizes.loader_block_bytes, sizes.loader_in_flight_bytes)
    return [
        block_sizes(run.problem, sizes.batch_size, b, SAMPLE_BLOCKS[-1], sizes.keep, loader)
        for b in halvings(None, p, min(SMALLEST_BLOCK, p))
    ]


def _best_block(run: Run, machine: Machine, ranks: int, blocks: list[BlockSizes]) -> int | None:
    """With which a run is near the exact model the soonest, of those that fit; None if none."""
    problem = replace(run.problem, ranks=ranks)
    fitting = [
        sizes for sizes in blocks if run.method.count(problem, sizes).peak <= machine.memory_bytes
    ]
    if not fitting:
        return None
    return min(fitting, key=lambda sizes: _learned_s(run, problem, machine, sizes)).block_size


def _learned_s(run: Run, problem: Problem, machine: Machine, sizes: BlockSizes) -> float:
    """Seconds of the setup and of `ROWS_TO_LEARN`, see `block_sizes`."""
    steps = ROWS_TO_LEARN * problem.p**2 / sizes.block_size / sizes.batch_size
    setup = setup_effort(problem, sizes).seconds(machine.each)
    return setup + steps * step_time(_step(run, sizes), machine, problem.ranks).seconds
