"""Sizes of blocks, batches and samples of the block solver, and its run time, in integers.

**Blocks.** The setup takes p b (2 s + h + 5 b / 3) FLOPs, where the rows s of the sample and h of
the probe are a few times b. Larger blocks need fewer rows of training: a run comes near the exact
model (1.05 times its loss) after about `ROWS_TO_LEARN` p (p / b) rows. The block size with the
shortest time until then is the *soonest*. A larger block, up to p, is chosen if its setup takes at
most a quarter of the run, or seconds, because it has the lower loss in the end.

**Times** are in FLOPs at the speed of a GEMM. Besides FLOPs they include the evaluation of kernel
entries, and the reading of the preconditioner, twice a step: see `planning.problem`.

**Batches.** With a larger batch H is read less often, but beyond the critical batch the step no
longer grows in proportion to the batch. By the step rule, the progress of a step of m rows is
proportional to m / (1 + m / critical). Its time is proportional to m + h_H, where reading H takes
as long as h_H rows. The progress per second is largest at m^2 = critical h_H. A plan assumes a
critical batch of p, as only the setup can measure it. On a CPU h_H is small, and a batch has p / 4
rows, at most 4096; a GPU, whose products are fast relative to its memory, may use more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from streamkern.config.solver import SolverConfig, number_or_none
from streamkern.planning.op_counts import OpCounts
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import (
    LOADER_SIZES,
    MAX_PROBE,
    MIN_PROBE,
    Sizes,
    auto_batch,
    batch_candidates,
    halvings,
    nearest_power_of_two,
    sample_sizes,
)
from streamkern.solver.precondition.block import SKETCH

SAMPLE_BLOCKS = (5, 2)
"""Sizes of the setup sample, in blocks: for long runs, and for short ones.

The smaller sample halves the time of the setup, for a somewhat higher loss. Block sizes are
compared with the smaller sample. Measured in docs/explanation/solver-measured.md.
"""
MIN_SAMPLE = 4096
"""Smallest number of rows of the setup sample, if there are as many."""
SETUP_SHARE, SAMPLE_SHARE = 0.25, 0.1
"""Largest time of the setup, relative to the training, for a larger block and a larger sample."""
MAX_SETUP_SWEEPS = 24
"""Largest number of sweeps over the blocks in setup, see `precondition.joint`."""
ROWS_TO_LEARN = 5
"""Rows until the model is near the exact one, in units of p (p / b)."""


@dataclass(frozen=True)
class BlockSizes(Sizes):
    """Sizes of the block solver.

    block_size : largest number of centers of a block.
    keep : whether a step holds all of K(X, Z).
    half_factors : whether the factors of the preconditioner are float16.
    """

    block_size: int
    keep: bool
    half_factors: bool = False


def candidates(problem: ProblemShape, options: SolverConfig) -> list[BlockSizes]:
    """Return candidate sizes, from the best to the smallest."""
    all_batches = preferred_batches(problem, options)
    preferred = all_batches[0]
    largest_block = max(_soonest_and_affordable(problem, options, preferred))
    blocks = halvings(number_or_none(options.block_size), largest_block, min(256, problem.p))
    # First smaller batches, down to half of a CPU's batch, then smaller blocks, then still smaller
    # batches. Evaluating K twice in a step is the last resort.
    n_first = 2 + sum(m > auto_batch(problem) for m in all_batches)
    groups = ((True, all_batches[:n_first]), (True, all_batches[n_first:]), (False, all_batches))
    half = has_half_factors(options)
    return [
        block_sizes(problem, m, b, k, keep, loader, half_factors=half)
        for keep, batch_sizes in groups
        for b in blocks
        for k in _sample_blocks(problem, options, b, preferred)
        for m in batch_sizes
        for loader in LOADER_SIZES
    ]


def has_half_factors(options: SolverConfig) -> bool:
    """Return whether the user has set factors of the preconditioner in float16."""
    return options.factor_dtype == "float16"


def block_reason(problem: ProblemShape, options: SolverConfig, sizes: BlockSizes) -> str:
    """Return the reason for the block size, as text, if the user did not set it."""
    preferred = preferred_batches(problem, options)[0]
    soonest, affordable = _soonest_and_affordable(problem, options, preferred)
    if sizes.block_size < max(soonest, affordable):
        return f"the largest that fits the memory; with more it would be {max(soonest, affordable)}"
    if affordable > soonest:
        return f"the largest whose setup takes at most {SETUP_SHARE:.0%} of the run, or seconds"
    return "with this size the run is expected to come near the exact model soonest"


def preferred_batches(problem: ProblemShape, options: SolverConfig) -> list[int]:
    """Return candidate numbers of rows per step, from the best to the smallest."""
    half = has_half_factors(options)
    b = number_or_none(options.block_size) or problem.p
    if problem.batch_size is None and options.block_size == "auto":
        m = worthwhile_batch(problem, b, problem.p, half_factors=half)
        b = max(_soonest_and_affordable(problem, options, m))
    return batch_candidates(problem, worthwhile_batch(problem, b, problem.p, half_factors=half))


def worthwhile_batch(
    problem: ProblemShape, b: int, critical: float, *, half_factors: bool = False
) -> int:
    """Return the batch size with the best progress per second, for blocks of b.

    It is the power of two nearest to sqrt(critical h_H), see the module docstring, but no less than
    a CPU's batch, and no more than about a quarter of the centers.
    """
    h_H = _step_cost(problem, b, half_factors) / _row_cost(problem)
    fastest = nearest_power_of_two(math.sqrt(critical * h_H))
    largest = min(problem.costs.max_batch, nearest_power_of_two(problem.p / 4), problem.n_rows)
    return max(auto_batch(problem), min(fastest, largest))


def measured_batch(problem: ProblemShape, sizes: BlockSizes, critical: float) -> int:
    """Return the batch size, given the measured critical batch.

    A planned batch that exceeds a CPU's batch may be lowered, because the plan assumed a critical
    batch of p. The step rules are also valid for the smaller batch.
    """
    planned = sizes.batch_size
    if problem.batch_size is not None or planned <= auto_batch(problem):
        return planned
    b, half = sizes.block_size, sizes.half_factors
    return min(planned, worthwhile_batch(problem, b, critical, half_factors=half))


def batch_reason(problem: ProblemShape, options: SolverConfig, sizes: BlockSizes) -> str:
    """Return the reason for the batch size, as text, if the user did not set it."""
    m, b = sizes.batch_size, sizes.block_size
    preferred = preferred_batches(problem, options)[0]
    if m < preferred:
        return f"the largest that fits the memory; with more it would be {preferred}"
    if m <= auto_batch(problem):
        return "about a quarter of the centers, from 256 to 4096 and no more than there are rows"
    rows = _step_cost(problem, b, sizes.half_factors) // _row_cost(problem)
    return (
        f"larger than the 4096 of a CPU, as reading H takes as long as {rows} rows of a step "
        f"({problem.costs.basis}); reduced if the setup measures that this many rows allow no "
        "larger step"
    )


def _soonest_and_affordable(
    problem: ProblemShape, options: SolverConfig, m: int
) -> tuple[int, int]:
    """Return the fastest and the largest affordable block size among p and its halvings.

    m : rows of a batch. See the module docstring.
    """
    half = has_half_factors(options)
    sizes = [
        block_sizes(problem, m, b, SAMPLE_BLOCKS[-1], half_factors=half)
        for b in halvings(None, problem.p, min(256, problem.p))
    ]
    soonest = min(sizes, key=lambda block: time_to_learn(problem, block))
    affordable = (block.block_size for block in sizes if _is_affordable(problem, block))
    return soonest.block_size, next(affordable, 1)


def _sample_blocks(problem: ProblemShape, options: SolverConfig, b: int, m: int) -> list[int]:
    """Return candidate sizes of the setup sample, in blocks, from the best to the smallest."""
    large, small = SAMPLE_BLOCKS
    sizes = block_sizes(problem, m, b, large, half_factors=has_half_factors(options))
    if setup_time(problem, sizes) / training_time(problem, sizes) <= SAMPLE_SHARE:
        return [large, small]
    return [small]


def block_sizes(
    problem: ProblemShape, m: int, b: int, k: int, keep: bool = True,
    loader: tuple[int, int] = (0, 0), *, half_factors: bool = False,
) -> BlockSizes:  # fmt: skip
    """Return the sizes for batches of m, blocks of b and a sample of k blocks.

    The probe has one block, or half of one for the smaller sample.
    """
    probe = b if k == SAMPLE_BLOCKS[0] else -(-b // 2)
    probe = min(max(probe, MIN_PROBE), MAX_PROBE)
    s, h = sample_sizes(problem.n_rows, max(k * b, MIN_SAMPLE), probe)
    return BlockSizes("block", m, s, h, *loader, block_size=b, keep=keep, half_factors=half_factors)


def _is_affordable(problem: ProblemShape, sizes: BlockSizes) -> bool:
    """Return whether the setup takes at most a quarter of the run, or seconds."""
    limit = max(SETUP_SHARE * training_time(problem, sizes), problem.costs.setup)
    return setup_time(problem, sizes) <= limit


def setup_time(problem: ProblemShape, sizes: BlockSizes) -> int:
    """Return the time of setup, in FLOPs at the speed of a GEMM."""
    b, n_rows = sizes.block_size, sizes.n_sample + sizes.n_probe
    entry = problem.entry_cost - 2 * problem.d  # without the FLOPs of the product of points
    return setup_flops(problem, sizes) + entry * problem.p * (b + n_rows)


def training_time(problem: ProblemShape, sizes: BlockSizes) -> int:
    """Return the time of all steps, in FLOPs at the speed of a GEMM."""
    return problem.n_rows * problem.epochs * _row_time(problem, sizes)


def time_to_learn(problem: ProblemShape, sizes: BlockSizes) -> int:
    """Return the time of the setup and of the training until the model is near the exact one."""
    rows = ROWS_TO_LEARN * problem.p**2 // sizes.block_size
    return setup_time(problem, sizes) + rows * _row_time(problem, sizes)


def _row_time(problem: ProblemShape, sizes: BlockSizes) -> int:
    """Return the time per row of training."""
    step_cost = _step_cost(problem, sizes.block_size, sizes.half_factors)
    return problem.p * (_row_cost(problem) + step_cost // sizes.batch_size)


def _row_cost(problem: ProblemShape) -> int:
    """Return the time per center and row of a batch, with the sketches beside the outputs."""
    return problem.entry_cost + 6 * problem.c + SKETCH * problem.costs.column


def _step_cost(problem: ProblemShape, b: int, half_factors: bool) -> int:
    """Return the time per center and step, for applying the preconditioner.

    A ridge on one block, whose factor is read seldom, adds little.
    """
    costs = problem.costs
    return max(costs.half_apply if half_factors else costs.apply, 2 * problem.c) * b


def n_sweeps(problem: ProblemShape, sizes: BlockSizes) -> int:
    """Return the number of sweeps over several blocks on the sample, after the first one.

    A sweep evaluates each kernel value of the sample twice.
    """
    if sizes.block_size == problem.p:
        return 0
    sweep_time = 2 * (sizes.n_sample + problem.p) * problem.p * (problem.entry_cost + 2 * problem.c)
    time_limit = max(SETUP_SHARE * training_time(problem, sizes), problem.costs.sweeps)
    return min(MAX_SETUP_SWEEPS, int(time_limit / sweep_time))


def setup_flops(problem: ProblemShape, sizes: BlockSizes) -> int:
    """Return the FLOPs of setup for all blocks of b centers, a sample of s rows and a probe of h.

    Each block takes (2 s + h) b^2 FLOPs to whiten the sample, for its covariance and for the
    features of the probe, 5/3 b^3 for three Cholesky factors and two inverses, and the products of
    three kernel matrices. The rest takes 4/3 b^3 once.
    """
    p, b, s, h = problem.p, sizes.block_size, sizes.n_sample, sizes.n_probe
    kernels = 2 * (b + s + h) * problem.d
    return p * ((2 * s + h) * b + 5 * b * b // 3 + kernels) + 4 * b**3 // 3


def setup_op_counts(problem: ProblemShape, sizes: BlockSizes) -> OpCounts:
    """Return the operations of the setup on one rank, including the joint fit of all blocks.

    A run usually makes half of the `n_sweeps` sweeps, and `noise_on_fresh_rows` usually tries half
    of its penalties; these halves are counted. In a sweep, a rank has a part of the rows of the
    sample and of the centers.
    """
    p, b, s, h = problem.p, sizes.block_size, problem.per_rank(sizes.n_sample), sizes.n_probe
    factors = OpCounts(
        kept=p * (b + s + h), products=p * b * (2 * s + h + b), factors=p * b * b + b**3
    )
    if b == p:
        return factors
    sweep_entries = (1 + n_sweeps(problem, sizes)) * p * (s + problem.per_rank(p))
    return factors + OpCounts(entries=sweep_entries)
