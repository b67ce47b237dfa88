"""Sizes for what a user left open, from the best to the smallest.

The block. Setup takes p b (2 s + h + 5 b / 3) FLOPs, where s and h are some blocks, and what it
buys is rows: noisy digits, a smooth and a rough function, 500 to 8000 centers, were at 1.05 times
the exact model's loss after about 5 p (p / b) rows, from 1 to 10. So there is a block with which a
run is there the soonest, a half or a quarter of p for 2000 to 8000 centers. A larger one, up to p,
is taken where its setup is a quarter of the run or less: it is ahead in the end.
"""

from __future__ import annotations

from dataclasses import replace

from streamkern.basics.errors import ConfigError
from streamkern.planning import gemm_time
from streamkern.planning.sizes import (
    FROM_CENTERS,
    IN_PLACE,
    ON_FEATURES,
    MiB,
    Problem,
    Sizes,
    SolverName,
    Wishes,
)

# Sizes of the setup samples, in blocks. Loss over the exact model's after half an epoch and one,
# of 10 rows a center, p = 2000, with a sample of 5, 3, 2 blocks: digits, b = p 1.029 1.007, - ,
# 1.043 1.012; b = p/2 1.077 1.041, 1.074 1.039, 1.080 1.044; rough, b = p 1.053 1.019, -, 1.088
# 1.024; b = p/2 1.137 1.064, 1.149 1.075, 1.186 1.086. 2 are behind, and half the setup of 5; with
# mu = lambda (see `damping`) they are at 1.05 as soon, and noisy digits without a ridge end alike.
# The size of the block matters far more: it is chosen with 2, and 5 are taken in long runs. More
# than 5 made no difference, nor did a probe of 2 or 4 blocks. Of half a block, lambda_1 comes out
# larger: digits are at 1.05 after 2.3 epochs in place of 2.0 (p = 8000, b = p/4), rough after 1.8
# in place of 2.0 (2000, p/2), and a tenth of the setup is saved, which short runs take.
SAMPLE_BLOCKS = (5, 2)
MIN_SAMPLE, MIN_PROBE, MAX_PROBE = 1024, 512, 4096
SETUP_SHARE, SAMPLE_SHARE = 0.25, 0.1
MIN_BATCH, MAX_BATCH = 256, 4096
MAX_EXACT_CENTERS = 20_000
LARGE_N_NYSTROM, N_NYSTROM, LEVEL_SHARE = 5000, 2000, 20
# EigenPro 1.0's batch, sample and level (Ma and Belkin 2017, section 6).
PAPER_BATCH, PAPER_N_NYSTROM, PAPER_LEVEL = 256, 4800, 160


def check(problem: Problem, wishes: Wishes) -> None:
    n, p = problem.n_rows, problem.p
    steps = -(-n // (wishes.batch_size or _auto_batch(problem))) * problem.epochs
    for name, value, low, high, bound in (
        ("batch_size", wishes.batch_size, 1, n, "n_rows="),
        ("block_size", wishes.block_size, 1, p, "n_centers="),
        ("n_nystrom", wishes.n_nystrom, 2, n, "n_rows="),
        ("period", wishes.period, 1, steps, "the steps of the run, "),
    ):
        if value is not None and not low <= value <= high:
            remedy = "lower" if value > high else "raise"
            raise ConfigError(
                f"{name}={value} must lie between {low} and {bound}{high}; {remedy} it"
            )
    if wishes.solver in IN_PLACE and wishes.features == "kernel" and p != n:
        raise ConfigError(
            f"solver={wishes.solver!r} needs every training row as a center, but n_centers={p} and "
            f"n_rows={n}; set centers='all' without random augmentation, or use another solver"
            + (", or features='nystrom'" if wishes.solver in ON_FEATURES else "")
        )


def candidates(problem: Problem, wishes: Wishes) -> list[Sizes]:
    """From the best to the smallest."""
    solver: SolverName = "block" if wishes.solver == "auto" else wishes.solver  # type: ignore[assignment]
    # 64 MiB of rows and what goes with them: whole numbers of chunks of 4, 8 and 16 MiB.
    loaders = [(128 * MiB, 68 * MiB), (64 * MiB, 32 * MiB), (32 * MiB, 16 * MiB)]
    batches = _halvings(wishes.batch_size, _auto_batch(problem), min(64, problem.n_rows))
    if solver == "block":
        wished = batches[0]
        blocks = _halvings(wishes.block_size, _best_block(problem, wished), min(256, problem.p))
        # A block is worth more than a batch, down to half the batch wished for; evaluating K twice
        # is worse than either.
        groups = ((True, batches[:2]), (True, batches[2:]), (False, batches))
        return [
            replace(_block_sizes(problem, m, b, s, keep, loader), features=wishes.features)
            for keep, sizes in groups
            for b in blocks
            for s in _samples(problem, b, wished)
            for m in sizes
            for loader in loaders
        ]
    if solver in FROM_CENTERS:
        return [
            Sizes(solver, m, problem.p, True, 0, 0, 0, 0, 1, "none", *loader, wishes.features)
            for m in batches
            for loader in loaders
        ]
    if solver in ("sgd", "eigenpro1"):
        # Of few rows, 16 batches an epoch: these methods take more steps than passes.
        few_rows = min(PAPER_BATCH, max(1, problem.n_rows // 16))
        return [
            _plain_sizes(problem, wishes, solver, m, loader)
            for m in _halvings(wishes.batch_size, few_rows, min(64, problem.n_rows))
            for loader in loaders
        ]
    if wishes.projection is None:
        few = problem.p <= MAX_EXACT_CENTERS
        projections = ["exact", "inexact"] if few else ["resident", "inexact"]
    else:
        projections = [wishes.projection]
    return [
        _eigenpro_sizes(problem, wishes, solver, m, projection, loader)
        for projection in projections
        for m in batches
        for loader in loaders
    ]


def _halvings(fixed: int | None, start: int, end: int) -> list[int]:
    if fixed is not None:
        return [fixed]
    sizes = [start]
    while sizes[-1] // 2 >= end:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _auto_batch(problem: Problem) -> int:
    """The power of two nearest to p / 4, between 256 and 4096 and at most n.

    A step costs 2 p b c FLOPs and two passes over H whatever m is; with m = p / 4 that is a few
    per cent of the kernel product, and m stays below the critical batch, where every row counts.
    """
    m = min((1 << k for k in range(20)), key=lambda size: abs(size - problem.p / 4))
    return min(max(MIN_BATCH, min(m, MAX_BATCH)), problem.n_rows)


def _best_block(problem: Problem, m: int) -> int:
    return max(_soonest_and_affordable(problem, m))


def block_reason(problem: Problem, wishes: Wishes, sizes: Sizes) -> str | None:
    """What decided the size of the blocks; None where there are none, or the user did."""
    if sizes.solver != "block" or wishes.block_size is not None:
        return None
    m = wishes.batch_size or _auto_batch(problem)
    soonest, affordable = _soonest_and_affordable(problem, m)
    if sizes.block_size < max(soonest, affordable):
        return f"what the memory allows; with more it would be {max(soonest, affordable)}"
    if affordable > soonest:
        return f"the largest whose setup takes at most {SETUP_SHARE:.0%} of the run's time"
    return "with this one the run is expected near the exact model the soonest"


def _soonest_and_affordable(problem: Problem, m: int) -> tuple[int, int]:
    """Of p and its halvings, with batches of m; see the module's first lines."""
    few = SAMPLE_BLOCKS[-1]
    sizes = [
        _block_sizes(problem, m, b, few, True, (0, 0))
        for b in _halvings(None, problem.p, min(256, problem.p))
    ]
    soonest = min(sizes, key=lambda block: gemm_time.until_learned(problem, block))
    affordable = (block.block_size for block in sizes if _share(problem, block) <= SETUP_SHARE)
    return soonest.block_size, next(affordable, 1)


def _samples(problem: Problem, b: int, m: int) -> list[int]:
    """Sizes of the setup sample, in blocks, from the best to the smallest."""
    few = SAMPLE_BLOCKS[-1]
    return [
        k
        for k in SAMPLE_BLOCKS
        if k == few or _share(problem, _block_sizes(problem, m, b, k, True, (0, 0))) <= SAMPLE_SHARE
    ]


def _share(problem: Problem, sizes: Sizes) -> float:
    """Of setup in the time of the run."""
    return gemm_time.setup(problem, sizes) / gemm_time.training(problem, sizes)


def sample_sizes(n_rows: int, wanted: int, probe: int) -> tuple[int, int]:
    """Rows of the setup sample and of the probe; together more than n_rows if they overlap.

    With too few rows to hold `probe` of them out, the sample is four fifths of them. The probe is
    then all rows, if they are few: the stream cycles over exactly these, and what is measured on
    all of them is not an estimate but the bound itself. Otherwise it is the fifth left over.
    """
    if wanted + probe <= n_rows:
        return wanted, probe
    sample = max(1, n_rows * 4 // 5)
    return sample, n_rows if n_rows <= MAX_PROBE else min(n_rows - sample, MAX_PROBE)


def _block_sizes(
    problem: Problem, m: int, b: int, k: int, keep: bool, loader: tuple[int, int]
) -> Sizes:
    s, h = _block_samples(problem, b, k)
    return Sizes("block", m, b, keep, s, h, 0, 0, 1, "none", *loader)


def _block_samples(problem: Problem, b: int, k: int) -> tuple[int, int]:
    """Rows of the sample, k blocks of b, and of the probe, one block or half of one."""
    probe = b if k == SAMPLE_BLOCKS[0] else -(-b // 2)
    probe = min(max(probe, MIN_PROBE), MAX_PROBE)
    return sample_sizes(problem.n_rows, max(k * b, MIN_SAMPLE), probe)


def _plain_sizes(
    problem: Problem, wishes: Wishes, solver: SolverName, m: int, loader: tuple[int, int]
) -> Sizes:
    """Of plain SGD, which needs a probe alone, and of EigenPro 1."""
    s, h, level = 0, min(problem.n_rows, MIN_PROBE * 4), 0
    if solver == "eigenpro1":
        s, h, level = _nystrom_sizes(
            problem, wishes, PAPER_N_NYSTROM, _paper_level(problem, wishes)
        )
    sizes = Sizes(solver, m, problem.p, True, s, h, s, level, 1, "none", *loader)
    return replace(sizes, features=wishes.features)


def _paper_level(problem: Problem, wishes: Wishes) -> int:
    """That of the paper. Of p features a part: damped in nearly all of them, steps fit the noise
    (p = 160, no ridge: a test error of 55 with 159 in place of 0.025 with 20, over that of 0)."""
    if wishes.features == "kernel":
        return PAPER_LEVEL
    if wishes.level is not None and wishes.level >= problem.p:
        raise ConfigError(
            f"level={wishes.level} must lie between 1 and the number of features - 1 = "
            f"{problem.p - 1}; lower it"
        )
    return max(1, min(PAPER_LEVEL, problem.p // 8))


def _nystrom_sizes(
    problem: Problem, wishes: Wishes, n_nystrom: int, level: int
) -> tuple[int, int, int]:
    """Rows of the sample and of the probe, and damped directions. The numbers are the defaults."""
    s, h = sample_sizes(problem.n_rows, wishes.n_nystrom or n_nystrom, MIN_PROBE * 4)
    if wishes.n_nystrom is not None:
        s, left = wishes.n_nystrom, problem.n_rows - wishes.n_nystrom
        # Fresh rows only, unless the sample is nearly all there is: then it is the stream itself.
        h = min(h, left) if left >= MIN_PROBE // 2 else min(problem.n_rows, MAX_PROBE)
    if s < 2:
        raise ConfigError(
            f"n_nystrom={s} must lie between 2 and n_rows={problem.n_rows}; use more training rows"
        )
    level = wishes.level or max(1, min(level or s // LEVEL_SHARE, s - 1))
    if level >= s:
        raise ConfigError(f"level={level} must lie between 1 and n_nystrom - 1 = {s - 1}; lower it")
    return s, h, level


def _eigenpro_sizes(
    problem: Problem, wishes: Wishes, solver: SolverName, m: int, projection: str,
    loader: tuple[int, int],
) -> Sizes:  # fmt: skip
    default = N_NYSTROM if problem.p <= MAX_EXACT_CENTERS else LARGE_N_NYSTROM
    s, h, level = _nystrom_sizes(problem, wishes, default, 0)
    period = 1
    if solver == "eigenpro4":
        period = wishes.period or max(1, round(problem.p / m))
    if solver == "eigenpro2":
        projection = "none"
    return Sizes(solver, m, problem.p, True, s, h, s, level, period, projection, *loader)
