"""Estimate what a run would take on more and more ranks of some hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from streamkern.basics.errors import ConfigError
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import halvings
from streamkern.solver.block import BlockMethod, training_op_counts
from streamkern.solver.block_sizes import (
    ROWS_TO_LEARN,
    SAMPLE_BLOCKS,
    BlockSizes,
    block_sizes,
    setup_op_counts,
)
from streamkern.stream.buffers import MIN_UNITS_PER_RANK
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.planned import planned_batches
from tools.rank_times.hardware import HARDWARE, THIS, Machine, measured
from tools.rank_times.step_model import Step, doublings, step_time

SMALLEST_BLOCK: Final = 256


def expected_over_ranks(
    run: ResolvedRun, profile: str, speeds: Mapping[str, float] | None
) -> dict[str, Any] | None:
    """Return seconds, their parts, memory and the best block for 1, 2, 4, ... run.ranks ranks.

    None for another solver than "block".

    profile : a key of `HARDWARE`, or "this"
    speeds : measured speeds, `planned.Times.speeds`; needed for the profile "this"
    """
    if not isinstance(run.method, BlockMethod):
        return None
    if run.problem.center_ranks > 1:
        raise ConfigError(
            f"run.center_ranks={run.problem.center_ranks} is not in the model of what ranks would "
            "take; leave it out"
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
    run: ResolvedRun, machine: Machine, ranks: int, alone: float, blocks: list[BlockSizes]
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


def _machine(run: ResolvedRun, profile: str, speeds: Mapping[str, float] | None) -> Machine:
    problem = run.problem
    if profile == THIS:
        assert speeds is not None
        return measured(speeds, itemsize=problem.itemsize, memory_bytes=run.budget_bytes)
    return HARDWARE[profile].machine(
        d=problem.d, c=problem.c, outputs=run.method.outputs(problem), itemsize=problem.itemsize,
        fast=run.precision == "fast",
    )  # fmt: skip


def _step(run: ResolvedRun, sizes: Any) -> Step:
    """Return the work of one step, with its rows divided among ranks as the loader does."""
    problem = run.problem
    unit_bytes = problem.unit_rows * (problem.row_bytes + 16)
    units = min(max(1, sizes.loader_block_bytes // unit_bytes), run.data.source.n_units)
    return step_of(problem, sizes, units // MIN_UNITS_PER_RANK)


def step_of(problem: ProblemShape, sizes: BlockSizes, dealt: int = 0) -> Step:
    """Return the work of one step of the block solver, summed over all ranks.

    dealt : as in `Step`
    """
    p, b, c, m = problem.p, sizes.block_size, problem.c, sizes.batch_size
    steps = -(-problem.n_rows * problem.epochs // m)
    kernel, factors, calls = (part.scaled(1 / steps) for part in training_op_counts(problem, sizes))
    n_sums, summed = 2.0 * -(-p // b), 2.0 * p * c
    if problem.finds_ridge and b < p:  # of a block of K(Z, Z) alpha, in every second step
        n_sums, summed = n_sums + 0.5, summed + b * c / 2
    return Step(
        m, kernel, factors, calls.calls, p * c, n_sums, summed, problem.itemsize,
        p * problem.prepared_row_bytes, dealt,
    )  # fmt: skip


def _blocks(run: ResolvedRun) -> list[BlockSizes]:
    """Return sizes for blocks of p, p/2, p/4, ... centers."""
    sizes, p = run.sizes, run.problem.p
    assert isinstance(sizes, BlockSizes)
    loader = (sizes.loader_block_bytes, sizes.loader_in_flight_bytes)
    return [
        block_sizes(
            run.problem,
            sizes.batch_size,
            b,
            SAMPLE_BLOCKS[-1],
            sizes.keep,
            loader,
            half_factors=sizes.half_factors,
        )
        for b in halvings(None, p, min(SMALLEST_BLOCK, p))
    ]


def _best_block(
    run: ResolvedRun, machine: Machine, ranks: int, blocks: list[BlockSizes]
) -> int | None:
    """Return the block size with which a run approaches the exact model soonest.

    Only sizes that fit into the memory are compared; None if none fits.
    """
    problem = replace(run.problem, ranks=ranks)
    fitting = [
        sizes for sizes in blocks if run.method.count(problem, sizes).peak <= machine.memory_bytes
    ]
    if not fitting:
        return None
    return min(fitting, key=lambda sizes: _learned_s(run, problem, machine, sizes)).block_size


def _learned_s(
    run: ResolvedRun, problem: ProblemShape, machine: Machine, sizes: BlockSizes
) -> float:
    """Return the seconds of the setup and of the steps on `ROWS_TO_LEARN`, see `block_sizes`."""
    steps = ROWS_TO_LEARN * problem.p**2 / sizes.block_size / sizes.batch_size
    setup = setup_op_counts(problem, sizes).seconds(machine.each)
    return setup + steps * step_time(_step(run, sizes), machine, problem.ranks).seconds
