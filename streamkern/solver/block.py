"""The block solver, the default method: see `block_step`, `block_sizes`, `precondition.block`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

from streamkern.backend.base import Array
from streamkern.backend.rank_grid import CenterPartition, RankGrid
from streamkern.backend.ranks import Communicator
from streamkern.backend.split_products import SPLIT_PANEL
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.solver import SolverConfig, number_or_none
from streamkern.planning.memory import PRODUCT_TILE, Buffers, MemoryNeeds, count_products
from streamkern.planning.op_counts import NO_WORK, OpCounts
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import check_between
from streamkern.solver.base import Solver, initial_buffer_rows
from streamkern.solver.block_sizes import (
    BlockSizes,
    batch_reason,
    block_reason,
    candidates,
    measured_batch,
    n_sweeps,
    setup_op_counts,
)
from streamkern.solver.block_step import BlockSolver, finite_population_factor
from streamkern.solver.left_out import add_left_out
from streamkern.solver.method import Method, Report, Samples, Setup, Work
from streamkern.solver.precondition.block import (
    MIN_PENALTY,
    SKETCH,
    BlockPreconditioner,
    block_slices,
    build_block,
)
from streamkern.solver.precondition.block_factor import BlockInputs
from streamkern.solver.precondition.samples import Sample
from streamkern.solver.precondition.step_rule import rules_from_meta

CALLS_OF_STEP, CALLS_OF_BLOCK = 10, 6
"""Approximate overhead of a step, and of each block in it, in calls of a kernel product."""


class BlockMethod(Method[BlockSizes]):
    """SGD preconditioned block by block in the span of the centers."""

    name = "block"
    sizes = BlockSizes
    features = ("kernel", "nystrom", "fourier")
    reaches_minimum = True
    uses_center_targets = True
    insensitive_to_conditioning = True
    data_parallel = partitions_centers = True
    center_array_prefixes = ("start", "values", "G.")
    sharded_arrays = ("H.", "L")
    computes_in_stripes = True
    min_penalty = MIN_PENALTY

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError as `Method.check`, and for a wrong block size or dtype of factors."""
        super().check(problem, options)
        if options.factor_dtype == "float16" and problem.itemsize == 8:
            raise ConfigError(
                f"{mention('solver.factor_dtype', 'float16')} is not defined for "
                f"{mention('run.precision', 'float64')}, whose products are not of half precision",
                "leave one of them at its default",
            )
        check_between("block_size", options.block_size, 1, problem.p, "n_centers=")

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[BlockSizes]:
        """Return candidate sizes, best first, see `block_sizes.candidates`."""
        return candidates(problem, options)

    def reason(self, problem: ProblemShape, options: SolverConfig, sizes: BlockSizes) -> str | None:
        """Return the reasons for the sizes of blocks and batches; None if the user set both."""
        reasons = []
        if options.block_size == "auto":
            reasons.append(f"block_size: {block_reason(problem, options, sizes)}")
        if problem.batch_size is None:
            reasons.append(f"batch_size: {batch_reason(problem, options, sizes)}")
        return "\n".join(reasons) or None

    def op_counts(self, problem: ProblemShape, sizes: BlockSizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of the setup and of the training, as on a single rank.

        See `precondition.block.build_block` and `block_step`.
        """
        setup = setup_op_counts(replace(problem, ranks=1), sizes)
        return setup, sum(training_op_counts(problem, sizes), NO_WORK)

    def outputs(self, problem: ProblemShape) -> int:
        """Return the columns of the product with K(X, Z): outputs and a sketch of the leverage."""
        return problem.c + SKETCH

    def needs(self, problem: ProblemShape, sizes: BlockSizes) -> MemoryNeeds:
        """Return the memory needs of the setup and of the step."""
        single_block = sizes.block_size == problem.p
        factors = (0.5 if sizes.half_factors else 1.0) + bool(problem.ridge and single_block)
        sweep_rows = 0 if single_block else max(problem.p, sizes.n_sample)
        return MemoryNeeds(
            product_rows=max(sizes.batch_size, sizes.n_probe, sweep_rows),
            outputs=problem.c,
            setup=math.ceil(factors * problem.p * sizes.block_size),
        )

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: BlockSizes) -> None:
        """Add the buffers of `precondition.block.build_block` and of `block_step`."""
        add, item, p, c = buffers.add, problem.itemsize, problem.p, problem.c
        s, h = sizes.n_sample, sizes.n_probe
        n_blocks = -(-p // sizes.block_size)
        b = -(-p // n_blocks)
        per_rank = problem.per_rank
        has_ranks, is_partitioned = problem.ranks > 1, problem.center_ranks > 1
        # What the setup keeps: the factors of all blocks, the start, and the sketches.
        factor_item = 2 if sizes.half_factors else item
        add("setup", "block factors H", per_rank(p) + b * has_ranks, b, itemsize=factor_item)
        add("train", "block factors H", per_rank(p), b, itemsize=factor_item)
        in_setup, in_training = problem.setup_centers_per_rank(p), problem.centers_per_rank(p)
        for phase, centers in (("setup", in_setup), ("train", in_training)):
            add(phase, "weights learned from the sample", centers, c, itemsize=item)
            add(phase, "sketches of the leverage", centers, SKETCH, itemsize=item)
        # The setup's working arrays.
        add("setup", "sample and probe, targets", s + h, problem.prepared_row_bytes + c * item)
        add("setup", "kernel products with targets, residuals", 3 * b + 2 * h, c, itemsize=item)
        add("setup", "targets of the centers", p, c, itemsize=item)
        if n_blocks > 1:
            # Values at the centers, the change by a block there and on the sample, two directions,
            # and the state to return to.
            q, t = per_rank(p), per_rank(s)
            rows = q + t + max(2 * t, 3 * q) + 3 * (2 * q + t)
            add("setup", "sweeps over the blocks: values, directions", rows, c, itemsize=item)
        if has_ranks:
            add("sample", "targets of the centers, being broadcast", p, c + 1, itemsize=item)
        rows = 2 * b + max(b + count_products(buffers, problem, b) + part_rows(problem, b), 2 * h)
        if is_partitioned:
            add("setup", "centers of one block", b, problem.prepared_row_bytes)
        add("setup", "factors of one block, probe", rows, b, itemsize=item)
        # The arrays of a step.
        q, m = problem.centers_per_rank(p), initial_buffer_rows(problem, sizes.batch_size)
        add("train", "K(X, Z)", m, q if sizes.keep else problem.centers_per_rank(b), itemsize=item)
        add("train", "gradient and update of one block", 3 * b, c, itemsize=item)
        if sizes.half_factors:
            # In setup the factor in float32 as well. In a product, two halves of each entry, the
            # sums of their products, and absolute values; a CPU copies tiles of H in float32.
            add("setup", "block factor before it is rounded", b, b, itemsize=item)
            for phase in ("setup", "train"):
                add(phase, "gradient of one block in halves", 5 * b, c, itemsize=item)
                if not problem.on_device:
                    tiles = problem.threads * PRODUCT_TILE
                    add(phase, "tiles of H in float32", tiles, b, itemsize=item)
        rows = q + m * n_blocks
        add("train", "alpha and sketches, side by side", rows, c + SKETCH, itemsize=item)
        add("train", "leverages of a batch", m, n_blocks + 2, itemsize=item)
        add_left_out(buffers, problem)
        if problem.ridge and problem.features != "fourier":
            add("train", "K(Z, Z) alpha: current, copy, initial", 3 * q, c, itemsize=item)
            if n_blocks == 1:
                add("train", "factor of K(Z, Z)", per_rank(p), p, itemsize=item)
        if is_partitioned:
            rows = m + (sizes.batch_size if problem.ranks > problem.center_ranks else 0)
            columns = c + SKETCH * n_blocks
            add("train", "all-reduce buffers of a step", rows, columns, itemsize=item)
            if problem.ridge:
                add("train", "weights of one block", b, c, itemsize=item)
            if problem.ridge and n_blocks > 1:
                add("train", "centers of one block", b, problem.prepared_row_bytes)

    def center_partition(
        self, problem: ProblemShape, sizes: BlockSizes, ranks: Communicator
    ) -> CenterPartition:
        """Return the center partition, in which each rank has a part of every block."""
        grid = RankGrid(ranks.rank, ranks.size, problem.center_ranks)
        return CenterPartition(block_slices(problem.p, sizes.block_size), grid)

    def compute(self, work: Work[BlockSizes], samples: Samples, report: Report) -> Setup:
        """Compute the preconditioner, its step rules and, from these, the batch size."""
        op, options, problem, m = work.op, work.options, work.problem, work.sizes.batch_size
        # The step rules are for independent rows. Rows of a cycle vary less, like a larger batch.
        variance_ratio = finite_population_factor(problem.cycled, m)
        S, probe = (
            Sample(
                op.points(rows.X, left=True), rows.Y, rows.root, rows.first_fresh, rows.center_index
            )
            for rows in samples()
        )
        S = S.shard(work.ranks)
        op.backend.release()
        inputs = BlockInputs(
            op, work.centers, S, probe, work.center_targets,
            half_factors=options.factor_dtype == "float16",
            batch=m / variance_ratio if variance_ratio else math.inf, seed=work.seed,
        )  # fmt: skip
        pre = build_block(
            inputs, block_slices(problem.p, work.sizes.block_size), noise=work.noise,
            n_effective_rows=work.n_effective_rows, damping=number_or_none(options.damping),
            ridge=options.fixed_ridge, max_batch=m, sweeps=n_sweeps(problem, work.sizes),
            report=report,
        )  # fmt: skip
        critical = min(rule.critical_batch for rule in pre.rules)
        batch = measured_batch(problem, work.sizes, critical)
        if batch < m:
            report("batch", {"planned": m, "batch_size": batch})
        ridge_from_noise = {} if work.n_effective_rows is None else {"ridge": pre.ridge}
        meta = {
            "rules": [asdict(rule) for rule in pre.rules], "mu": pre.mu, "jitter": pre.jitter,
            "jitters": pre.jitters, "start_rows": pre.start_rows, "batch_size": batch,
        }  # fmt: skip
        if pre.scales is not None:
            meta["factor_scales"] = pre.scales
        return Setup(_setup_arrays(pre), ridge_from_noise | meta)

    def assemble(self, work: Work[BlockSizes], setup: Setup) -> Solver:
        """Return the solver that steps with the preconditioner of `setup`."""
        arrays, meta, options, problem = setup.arrays, setup.meta, work.options, work.problem
        partition = self.center_partition(problem, work.sizes, work.ranks)
        arrays = arrays | partition.parts(arrays, self.center_array_prefixes)
        blocks = partition.blocks
        sketches = [arrays[name] for b in range(len(blocks)) if (name := f"G.{b}") in arrays]
        pre = BlockPreconditioner(
            blocks, [arrays.get(f"H.{b}") for b in range(len(blocks))],
            rules_from_meta(meta["rules"], options.step_scale), meta["mu"], meta["jitters"],
            arrays["start"], meta["start_rows"], sketches or None,
            arrays.get("values"), arrays.get("L"), scales=meta.get("factor_scales"),
        ).shard(work.ranks)  # fmt: skip
        return BlockSolver(
            work.op, work.Z.each(partition.part), pre, seed=work.seed, ridge=options.fixed_ridge,
            keep=work.sizes.keep, cycled=problem.cycled, center_partition=partition,
            **work.solver_arguments(setup),
        )  # fmt: skip


def part_rows(problem: ProblemShape, b: int) -> int:
    """Return the float16 parts of two panels, see `split_products`, in rows of b float32 numbers.

    A device computes them in precision "high", the only one whose points have left sides.
    """
    return 3 * min(SPLIT_PANEL, b) if problem.on_device and problem.left_bytes else 0


def training_op_counts(
    problem: ProblemShape, sizes: BlockSizes
) -> tuple[OpCounts, OpCounts, OpCounts]:
    """Return the operations of all steps: on the rows of batches, on the centers, and in calls.

    With several blocks and a ridge that is chosen automatically, the count assumes that a step
    evaluates 1 / 32 of the blocks of K(Z, Z), but no more kernel values than in its batch, which
    the setup ensures (`precondition.block`), and at least one block in every second step. A ridge
    that the user sets is usually weak, and is not counted; nor is the factor of a single block,
    which few steps read.
    """
    p, b, n = problem.p, sizes.block_size, problem.n_rows * problem.epochs
    steps = -(-n // sizes.batch_size)
    rows = OpCounts(kept=p * n, swept=p * n * (1 if b == p else 2))
    if not sizes.keep:
        rows += OpCounts(entries=p * n)
    n_read = p * b * steps  # entries of H
    centers = OpCounts(half_swept=n_read) if sizes.half_factors else OpCounts(swept=n_read)
    if problem.finds_ridge and b < p:
        blocks_per_step = max(1 / 2, min(p / b / 32, sizes.batch_size / b))
        centers += OpCounts(entries=p * b * steps * blocks_per_step)
    return rows, centers, OpCounts(calls=steps * (CALLS_OF_STEP + CALLS_OF_BLOCK * -(-p // b)))


def _setup_arrays(pre: BlockPreconditioner) -> dict[str, Array]:
    """Return the arrays of the setup; a name that ends in .b is an array of block b."""
    arrays = {f"H.{b}": H for b, H in enumerate(pre.H) if H is not None}
    assert pre.start is not None
    arrays["start"] = pre.start
    arrays |= {f"G.{b}": G for b, G in enumerate(pre.sketches or [])}
    optional = {"values": pre.values, "L": pre.L}
    return arrays | {name: array for name, array in optional.items() if array is not None}
