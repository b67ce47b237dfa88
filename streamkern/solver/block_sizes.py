"""Sizes of blocks, batches and samples of the block solver, and its run time, in integers.

Setup takes p b (2 s + h + 5 b / 3) FLOPs, where s and h are a few times b, and saves rows of
training: noisy digits, a smooth and a rough function, 500 to 8000 centers, reached 1.05 times the
exact model's loss after about 5 p (p / b) rows, from 1 to 10. So there is a block size with which a
run gets there soonest, a half or a quarter of p for 2000 to 8000 centers. A larger one, up to p, is
taken if its setup is a quarter of the run or less, or seconds: it has the lower loss in the end.

Times are in FLOPs at the speed of a GEMM. They exceed a method's FLOPs by the operations that are
no multiplications: evaluating an entry of a kernel, and reading one of the preconditioner, which is
read twice a step, whatever the number of outputs: see `planning.problem`.

The larger a batch, the less often H is read; but past the critical batch the step no longer grows
in proportion to the batch. A step of m rows makes progress like m / (1 + m / critical), by the step
rule, and takes a time like m + h, where h is the number of rows that take as long as H. Progress in
a second is best at m^2 = critical h. The critical batch is not known before setup has measured it:
p is assumed. The h of a CPU is small, and its batch is p / 4 rows and at most 4096; a GPU, whose
products are fast relative to its memory, may take more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from streamkern.config.solver import SolverConfig, set_value
from streamkern.planning.op_counts import OpCounts
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import (
    LOADER_SIZES,
    MAX_PROBE,
    MIN_PROBE,
    Sizes,
    auto_batch,
    batches,
    halvings,
    near_quarter,
    power_of_two,
    sample_sizes,
)

# Sizes of the setup samples, in blocks. Loss over the exact model's after half an epoch and one,
# with 10 rows per center, p = 2000, with a sample of 5, 3, 2 blocks: digits, b = p 1.029 1.007, - ,
# 1.043 1.012; b = p/2 1.077 1.041, 1.074 1.039, 1.080 1.044; rough, b = p 1.053 1.019, -, 1.088
# 1.024; b = p/2 1.137 1.064, 1.149 1.075, 1.186 1.086. With 2 the loss is higher, but setup takes
# half the time of 5, and 1.05 is reached as soon.
# The size of the block matters far more: it is chosen with 2, and 5 are taken in long runs. More
# than 5 made no difference, nor did a probe of 2 or 4 blocks. With a probe of half a block,
# lambda_1 comes out larger: digits are at 1.05 after 2.3 epochs instead of 2.0 (p = 8000,
# b = p/4), rough after 1.8 instead of 2.0 (2000, p/2), and a tenth of the setup is saved; short
# runs use it.
SAMPLE_BLOCKS = (5, 2)
MIN_SAMPLE = 4096
SETUP_SHARE, SAMPLE_SHARE = 0.25, 0.1
MAX_SETUP_SWEEPS = 24
"""Largest number of sweeps over the blocks in setup, see `precondition.joint`."""
ROWS_TO_LEARN = 5


@dataclass(frozen=True)
class BlockSizes(Sizes):
    """Sizes of the block solver.

    block_size : largest number of centers of a block.
    keep : whether a step holds all of K(X, Z).
    """

    block_size: int
    keep: bool


def candidates(problem: ProblemShape, options: SolverConfig) -> list[BlockSizes]:
    """Return candidate sizes, from the best to the smallest."""
    preferred, *_ = sizes = preferred_batches(problem, options)
    best = max(_soonest_and_affordable(problem, preferred))
    blocks = halvings(set_value(options.block_size), best, min(256, problem.p))
    # The batch shrinks before the block does, down to half of a CPU's batch; evaluating K twice is
    # worse than either.
    few = 2 + sum(m > auto_batch(problem) for m in sizes)
    groups = ((True, sizes[:few]), (True, sizes[few:]), (False, sizes))
    return [
        block_sizes(problem, m, b, k, keep, loader)
        for keep, batch_sizes in groups
        for b in blocks
        for k in _samples(problem, b, preferred)
        for m in batch_sizes
        for loader in LOADER_SIZES
    ]


def block_reason(problem: ProblemShape, options: SolverConfig, sizes: BlockSizes) -> str:
    """Return what decided the size of the blocks, where the user did not set it."""
    soonest, affordable = _soonest_and_affordable(problem, preferred_batches(problem, options)[0])
    if sizes.block_size < max(soonest, affordable):
        return f"what the memory allows; with more it would be {max(soonest, affordable)}"
    if affordable > soonest:
        return f"the largest whose setup takes at most {SETUP_SHARE:.0%} of the run, or seconds"
    return "with this one the run is expected near the exact model the soonest"


def preferred_batches(problem: ProblemShape, options: SolverConfig) -> list[int]:
    """Return candidate numbers of rows per step, from the best to the smallest."""
    b = set_value(options.block_size) or problem.p
    if problem.batch_size is None and options.block_size == "auto":
        b = max(_soonest_and_affordable(problem, worthwhile_batch(problem, b, problem.p)))
    return batches(problem, worthwhile_batch(problem, b, problem.p))


def worthwhile_batch(problem: ProblemShape, b: int, critical: float) -> int:
    """Return the power of two nearest to sqrt(critical h), for blocks of b: see the module.

    It is no less than a CPU's batch, and no more than about a quarter of the centers.
    """
    least, apply = auto_batch(problem), _apply(problem, b)
    best = power_of_two(math.sqrt(critical * apply / _of_row(problem)))
    most = min(problem.costs.most_rows, near_quarter(problem.p), problem.n_rows)
    return max(least, min(best, most))


def measured_batch(problem: ProblemShape, sizes: BlockSizes, critical: float) -> int:
    """Return the rows of a step, given the measured critical batch.

    It is below the planned batch only if that exceeds a CPU's batch: the plan assumed a critical
    batch of p. Rules that were measured for more rows in a step hold for fewer.
    """
    planned = sizes.batch_size
    if problem.batch_size is not None or planned <= auto_batch(problem):
        return planned
    return min(planned, worthwhile_batch(problem, sizes.block_size, critical))


def batch_reason(problem: ProblemShape, options: SolverConfig, sizes: BlockSizes) -> str:
    """Return why a step has this number of rows, where the user did not set it."""
    m, b = sizes.batch_size, sizes.block_size
    preferred = preferred_batches(problem, options)[0]
    if m < preferred:
        return f"what the memory allows; with more it would be {preferred}"
    if m <= auto_batch(problem):
        return "about a quarter of the centers, from 256 to 4096 and no more than there are rows"
    rows = _apply(problem, b) // _of_row(problem)
    return (
        f"larger than the 4096 of a CPU, as reading H takes as long as {rows} rows of a step "
        f"({problem.costs.basis}); less where setup measures that so many rows buy no larger step"
    )


def _soonest_and_affordable(problem: ProblemShape, m: int) -> tuple[int, int]:
    """Return the fastest and the largest affordable block size among p and its halvings.

    m : rows of a batch. See the module docstring.
    """
    sizes = [
        block_sizes(problem, m, b, SAMPLE_BLOCKS[-1])
        for b in halvings(None, problem.p, min(256, problem.p))
    ]
    soonest = min(sizes, key=lambda block: time_until_learned(problem, block))
    affordable = (block.block_size for block in sizes if _is_affordable(problem, block))
    return soonest.block_size, next(affordable, 1)


def _samples(problem: ProblemShape, b: int, m: int) -> list[int]:
    """Return candidate sizes of the setup sample, in blocks, from the best to the smallest."""
    *more, few = SAMPLE_BLOCKS
    fits = [k for k in more if _share(problem, block_sizes(problem, m, b, k)) <= SAMPLE_SHARE]
    return [*fits, few]


def block_sizes(
    problem: ProblemShape, m: int, b: int, k: int, keep: bool = True,
    loader: tuple[int, int] = (0, 0),
) -> BlockSizes:  # fmt: skip
    """Return the sizes for batches of m, blocks of b and a sample of k blocks.

    The probe has one block, or half of one for the smaller sample.
    """
    probe = b if k == SAMPLE_BLOCKS[0] else -(-b // 2)
    probe = min(max(probe, MIN_PROBE), MAX_PROBE)
    s, h = sample_sizes(problem.n_rows, max(k * b, MIN_SAMPLE), probe)
    return BlockSizes("block", m, s, h, *loader, block_size=b, keep=keep)


def _is_affordable(problem: ProblemShape, sizes: BlockSizes) -> bool:
    most = max(SETUP_SHARE * training_time(problem, sizes), problem.costs.setup)
    return setup_time(problem, sizes) <= most


def _share(problem: ProblemShape, sizes: BlockSizes) -> float:
    """Return the time of setup as a fraction of the time of training."""
    return setup_time(problem, sizes) / training_time(problem, sizes)


def setup_time(problem: ProblemShape, sizes: BlockSizes) -> int:
    """Return the time of setup, in FLOPs at the speed of a GEMM."""
    b, sampled = sizes.block_size, sizes.n_sample + sizes.n_probe
    beside = problem.evaluated - 2 * problem.d
    return setup_flops(problem, sizes) + beside * problem.p * (b + sampled)


def training_time(problem: ProblemShape, sizes: BlockSizes) -> int:
    """Return the time of all steps, in FLOPs at the speed of a GEMM."""
    return problem.n_rows * problem.epochs * _row_time(problem, sizes)


def time_until_learned(problem: ProblemShape, sizes: BlockSizes) -> int:
    """Return the time of setup and of the rows it takes to come near the exact model."""
    rows = ROWS_TO_LEARN * problem.p**2 // sizes.block_size
    return setup_time(problem, sizes) + rows * _row_time(problem, sizes)


def _row_time(problem: ProblemShape, sizes: BlockSizes) -> int:
    apply = _apply(problem, sizes.block_size) // sizes.batch_size
    return problem.p * (_of_row(problem) + apply)


def _of_row(problem: ProblemShape) -> int:
    """Return the time per center for a row of a batch."""
    return problem.evaluated + 6 * problem.c


def _apply(problem: ProblemShape, b: int) -> int:
    """Return the time per center for a step.

    A ridge on one block, whose factor is read seldom, adds little.
    """
    return max(problem.costs.apply, 2 * problem.c) * b


def n_sweeps(problem: ProblemShape, sizes: BlockSizes) -> int:
    """Return the number of sweeps over several blocks on the sample, after the first one.

    A sweep evaluates each kernel value of the sample twice.
    """
    if sizes.block_size == problem.p:
        return 0
    once = 2 * (sizes.n_sample + problem.p) * problem.p * (problem.evaluated + 2 * problem.c)
    afforded = max(SETUP_SHARE * training_time(problem, sizes), problem.costs.sweeps)
    return min(MAX_SETUP_SWEEPS, int(afforded / once))


def setup_flops(problem: ProblemShape, sizes: BlockSizes) -> int:
    """Return the FLOPs of setup for all blocks of b centers, a sample of s rows and a probe of h.

    Per block (2 s + h) b^2 to whiten the sample, for its covariance and for the probe's features,
    5/3 b^3 for three Cholesky factors and two inverses, and the three kernel matrices; once 4/3 b^3
    for everything else.
    """
    p, b, s, h = problem.p, sizes.block_size, sizes.n_sample, sizes.n_probe
    kernels = 2 * (b + s + h) * problem.d
    return p * ((2 * s + h) * b + 5 * b * b // 3 + kernels) + 4 * b**3 // 3


def setup_op_counts(problem: ProblemShape, sizes: BlockSizes) -> OpCounts:
    """Return the operations of setup by kind, with the joint fit of all blocks.

    The fit counts as half of the sweeps, the usual number, and half of the penalties that
    `noise_on_fresh_rows` tries. The counts are those of one rank, which has a part of the sample's
    rows, and of the centers in a sweep.
    """
    p, b, s, h = problem.p, sizes.block_size, problem.of_rank(sizes.n_sample), sizes.n_probe
    factored = OpCounts(
        kept=p * (b + s + h), products=p * b * (2 * s + h + b), factors=p * b * b + b**3
    )
    if b == p:
        return factored
    swept = (1 + n_sweeps(problem, sizes)) * p * (s + problem.of_rank(p))
    return factored + OpCounts(entries=swept)
