"""Bytes and FLOPs into sizes: batch, blocks, samples, projection. Pure integers, no arrays.

`resolve` turns the settings that are "auto" into numbers and lists every buffer the run will hold,
phase by phase. The run allocates what is listed here and nothing else of size; `streamkern plan`
prints the list before anything is started, and a test compares the peak with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from streamkern.errors import ConfigError, MemoryBudgetError
from streamkern.selection import Selection

MiB = 1 << 20
# Sizes of the setup samples, in blocks. Test error with a sample of 5, 3, 2 blocks, two seeds:
# noisy digits over the exact model, one block, 1e6 samples 0.9995, 0.9995, -; four blocks, 2e5
# samples 1.037, 1.042, 1.043 and 1e6 samples 1.017, 1.020, -; a smooth target under a Gaussian
# kernel, 2e5 samples, one block 6.4e-3, 6.7e-3, 7.1e-3, four blocks 2.33e-2, 2.38e-2, 2.41e-2.
# The size of the block matters far more: the largest block is taken that 3 of it afford, and then
# 5 where those are affordable too. A probe of 1, 2 or 4 blocks made no difference.
SAMPLE_BLOCKS = (5, 3)
PROBE_PER_BLOCK = 2
MIN_PROBE, MAX_PROBE = 512, 4096
# Setup may cost a quarter of the run's FLOPs, or this many, whichever is more: about 20 s on two
# cores. It runs at 0.8 of SGEMM speed and training at 0.65, so in time it is less than a quarter.
FREE_SETUP_FLOPS = 3 * 10**12
SETUP_SHARE = 0.25
MIN_BATCH, MAX_BATCH = 256, 4096
MAX_EXACT_CENTERS = 20_000
LARGE_N_NYSTROM, N_NYSTROM, LEVEL_SHARE = 5000, 2000, 20
INNER_NYSTROM = 2000
# Python objects, thread stacks, BLAS buffers and allocator slack beside the arrays.
OVERHEAD = 64 * MiB
ROW_ID = 8
"""Bytes of a row's number, which travels with it."""

SolverName = Literal[
    "block", "sgd", "eigenpro1", "eigenpro2", "eigenpro3", "eigenpro4", "direct", "falkon"
]
IN_PLACE = ("sgd", "eigenpro1", "eigenpro2")
"""The methods whose centers, with a kernel, are the rows of the training set."""
ON_FEATURES = ("block", "sgd", "eigenpro1", "direct")
"""The methods that train explicit features."""
FROM_CENTERS = ("direct", "falkon")
"""Solvers whose setup takes no sample of the stream, and which hold p x p matrices."""
FEATURE_COLUMNS = 4096
"""Features that setup evaluates at once, where they do not depend on each other."""
GRAM_TILE = 512 * 512 * 8
"""Of a thread that adds to a p x p matrix."""
# EigenPro 1.0's batch, sample and level (Ma and Belkin 2017, section 6).
PAPER_BATCH, PAPER_N_NYSTROM, PAPER_LEVEL = 256, 4800, 160


@dataclass(frozen=True)
class Problem:
    """What is given: sizes of the data, the model and the machine.

    n_rows : rows per epoch (virtual ones included). d, c : features and outputs.
    row_bytes : a row of X and y in storage. unit_rows : rows that one read brings.
    itemsize : 4 or 8. threads : tile threads. width : columns of a prepared row.
    tile_bytes : a thread's tile. library_bytes : code that the backend loads.
    feed_arrays : of a batch that the feed holds: the cast rows, and what each transform makes.
    point_bytes : a prepared row, if it does not hold `width` of `itemsize`. scratch_bytes : to
    prepare rows in. staging : batches in the ring that feeds a device with memory of its own.
    readers : units read at once at most while training; 0 is one for each thread.
    units_in_hand : units read ahead, and in use, where they are read one after the other.
    saving : at most this much more is held while arrays go to remote storage. kept : whether
    there are checkpoints. selection : of the centers, where that takes memory and time of its own.
    """

    n_rows: int
    epochs: int
    d: int
    c: int
    p: int
    row_bytes: int
    unit_rows: int
    itemsize: int
    threads: int
    width: int
    tile_bytes: int
    library_bytes: int = 0
    feed_arrays: int = 2
    point_bytes: int | None = None
    scratch_bytes: int = 0
    staging: int = 0
    readers: int = 0
    units_in_hand: int = 3
    saving: int = 0
    selection: Selection | None = None
    kept: bool = True


@dataclass(frozen=True)
class Wishes:
    """What the user fixed; None where the program may choose. features : see `ModelConfig`."""

    solver: str = "auto"
    features: str = "kernel"
    batch_size: int | None = None
    block_size: int | None = None
    n_nystrom: int | None = None
    level: int | None = None
    period: int | None = None
    projection: str | None = None


@dataclass(frozen=True)
class Sizes:
    """The numbers a run is made of. Batch and period of EigenPro are upper bounds until its
    setup has measured the critical batch."""

    solver: SolverName
    batch_size: int
    block_size: int
    keep: bool
    n_sample: int
    n_probe: int
    n_nystrom: int
    level: int
    period: int
    projection: str
    loader_block_bytes: int
    loader_in_flight_bytes: int
    features: str = "kernel"

    @property
    def in_place(self) -> bool:
        """Whether the centers are the rows of the training set, in store order."""
        return self.solver in IN_PLACE and self.features == "kernel"

    @property
    def linear(self) -> bool:
        """Whether explicit features are trained by steps without a block preconditioner."""
        return self.features != "kernel" and self.solver in IN_PLACE


@dataclass(frozen=True)
class Buffers:
    """Every buffer of size, by phase: (phase, what, bytes).

    "always" counts in every phase. "host" lists what a device's run holds beside the device, and
    counts in none.
    """

    lines: list[tuple[str, str, int]] = field(default_factory=list)

    def add(self, phase: str, what: str, *shape: int, itemsize: int = 1) -> None:
        """Append a buffer of the given shape."""
        size = itemsize
        for extent in shape:
            size *= extent
        self.lines.append((phase, what, size))

    def total(self, phase: str) -> int:
        """Bytes held during a phase: what is always held, and the phase's own."""
        return sum(size for name, _, size in self.lines if name in ("always", phase))

    @property
    def phases(self) -> list[str]:
        """Phases in order of first mention."""
        return [
            name
            for name in dict.fromkeys(line[0] for line in self.lines)
            if name not in ("always", "host")
        ]

    @property
    def peak(self) -> int:
        """The largest phase."""
        return max(self.total(phase) for phase in self.phases)


def resolve(problem: Problem, wishes: Wishes, budget_bytes: int) -> tuple[Sizes, Buffers]:
    """The largest block, then the largest batch, that fit `budget_bytes`.

    Raises
    ------
    MemoryBudgetError
        Nothing fits; names the smallest budget that would do.
    ConfigError
        A fixed size contradicts the data.
    """
    _check(problem, wishes)
    smallest: int | None = None
    for sizes in _candidates(problem, wishes):
        buffers = count(problem, sizes)
        if buffers.peak <= budget_bytes:
            return sizes, buffers
        smallest = min(smallest or buffers.peak, buffers.peak)
    assert smallest is not None
    raise MemoryBudgetError(
        f"memory={_mib(budget_bytes)} is not enough for n_centers={problem.p}, d={problem.d}; "
        f"the smallest plan needs {_mib(smallest)}; raise memory or lower n_centers or batch_size"
        + (", or set accelerator='none'" if problem.library_bytes else "")
        + (
            f", or use solver='block' instead of {wishes.solver!r}, which holds p x p matrices"
            if wishes.solver in FROM_CENTERS
            else ""
        )
    )


def _check(problem: Problem, wishes: Wishes) -> None:
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


def _candidates(problem: Problem, wishes: Wishes) -> list[Sizes]:
    """From the best to the smallest."""
    solver: SolverName = "block" if wishes.solver == "auto" else wishes.solver  # type: ignore[assignment]
    # 64 MiB of rows and what goes with them: whole numbers of chunks of 4, 8 and 16 MiB.
    loaders = [(128 * MiB, 68 * MiB), (64 * MiB, 32 * MiB), (32 * MiB, 16 * MiB)]
    batches = _halvings(wishes.batch_size, _auto_batch(problem), min(64, problem.n_rows))
    if solver == "block":
        blocks = _halvings(wishes.block_size, _affordable_block(problem), min(256, problem.p))
        # A block is worth more than a batch, down to half the batch wished for; evaluating K twice
        # is worse than either.
        groups = ((True, batches[:2]), (True, batches[2:]), (False, batches))
        return [
            replace(_block_sizes(problem, m, b, s, keep, loader), features=wishes.features)
            for keep, sizes in groups
            for b in blocks
            for s in _samples(problem, b)
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


def _affordable_block(problem: Problem) -> int:
    """Largest b, of p and its halvings, whose setup is worth its time with a small sample."""
    b = problem.p
    while b > 256 and not _affordable(problem, b, SAMPLE_BLOCKS[-1]):
        b = -(-b // 2)
    return b


def _samples(problem: Problem, b: int) -> list[int]:
    """Sizes of the setup sample, in blocks, from the best to the smallest."""
    return [k for k in SAMPLE_BLOCKS if k == SAMPLE_BLOCKS[-1] or _affordable(problem, b, k)]


def _affordable(problem: Problem, b: int, k: int) -> bool:
    run = 2 * problem.p * (problem.d + 3 * problem.c) * problem.n_rows * problem.epochs
    allowed = max(FREE_SETUP_FLOPS, int(SETUP_SHARE * run))
    return setup_flops(problem, b, *_block_samples(problem, b, k)) <= allowed


def setup_flops(problem: Problem, b: int, s: int, h: int) -> int:
    """Of all blocks of b centers together, with a sample of s rows and a probe of h.

    Per block (2 s + h) b^2 to whiten the sample, for its covariance and for the probe's features,
    4/3 b^3 for two Cholesky factors and their inverses, and the three kernel matrices.
    """
    kernels = 2 * (b + s + h) * problem.d
    return problem.p * ((2 * s + h) * b + 4 * b * b // 3 + kernels)


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
    """Rows of the sample, k blocks of b, and of the probe."""
    probe = min(max(PROBE_PER_BLOCK * b, MIN_PROBE), MAX_PROBE)
    return sample_sizes(problem.n_rows, k * b, probe)


def _plain_sizes(
    problem: Problem, wishes: Wishes, solver: SolverName, m: int, loader: tuple[int, int]
) -> Sizes:
    """Of plain SGD, which needs a probe alone, and of EigenPro 1."""
    s, h, level = 0, min(problem.n_rows, MIN_PROBE * 4), 0
    if solver == "eigenpro1":
        s, h, level = _nystrom_sizes(problem, wishes, PAPER_N_NYSTROM, PAPER_LEVEL)
    sizes = Sizes(solver, m, problem.p, True, s, h, s, level, 1, "none", *loader)
    return replace(sizes, features=wishes.features)


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


def count(problem: Problem, sizes: Sizes) -> Buffers:
    """Every buffer of the run. Keep in step with `solver.build` and `train`."""
    buffers = Buffers()
    item, p, c, m = problem.itemsize, problem.p, problem.c, sizes.batch_size
    d, s, h = problem.d, sizes.n_sample, sizes.n_probe
    point = problem.point_bytes or problem.width * item
    add, apart = buffers.add, problem.staging > 0
    add("host" if apart else "always", "interpreter, stacks, allocator", OVERHEAD)
    if problem.library_bytes:
        add("always", "compiler", problem.library_bytes)
    add("always", "tiles", problem.threads, problem.tile_bytes)
    add("always", "rows being prepared", problem.threads, problem.scratch_bytes)
    add("always", "centers, both sides", 2 * p, point)
    if not apart:  # a device walks the columns in order
        by_row = sizes.solver in ("block", "direct") or sizes.linear
        rows = max(m, h) if by_row else max(m, h, s, p)
        columns = 2 * c if sizes.solver == "falkon" else c
        sums = n_groups(columns) * columns
        add("always", "partial sums of products", sums, rows, itemsize=item)
    # The raw rows live until the prepared ones exist; a unit being decoded counts twice.
    add("sample", "raw centers", p, problem.row_bytes + d * item)
    add("sample", "raw sample and probe", s + h, problem.row_bytes + d * item)
    add("sample", "prepared sample and probe", s + h, point)
    in_hand = (2 * problem.units_in_hand - 1) * problem.unit_rows
    add("host" if apart else "sample", "units being read", in_hand, problem.row_bytes)
    add("host" if apart else "train", "loader", loader_bytes(problem, sizes))
    if problem.selection is not None:
        means = problem.selection.method == "kmeans"  # on the host, whatever the device
        for what, size in problem.selection.buffers:
            add("host" if apart and means else "centers", what, size)
        if not apart:
            reading = loader_bytes(problem, sizes) if means else in_hand * problem.row_bytes
            add("centers", "units being read", reading)
    if problem.saving:
        saved = p * (problem.d + sizes.block_size) * item
        add("host" if apart else "setup", "setup on its way", min(problem.saving, saved))
        saved = 4 * p * c * item + (p * p * 8 if sizes.solver == "direct" else 0)
        add("host" if apart else "train", "checkpoint on its way", min(problem.saving, saved))
    if apart:
        for phase, what in (("train", "staging"), ("host", "staging, pinned")):
            add(phase, what, problem.staging * m, problem.row_bytes + ROW_ID)
    add("train", "batch, prepared", 2 * m, point + c * item)
    add("train", "batch, cast and transformed", problem.feed_arrays * m, d + c, itemsize=item)
    add("train", "weights, average, last good, copies for a checkpoint", 7 * p, c, itemsize=item)
    if sizes.solver == "block":
        b = sizes.block_size
        n_blocks = -(-p // b)
        b = -(-p // n_blocks)
        add("always", "block factors H", p, b, itemsize=item)
        add("setup", "sample and probe", s + h, point)
        add("setup", "raw centers", p, d, itemsize=item)
        add("setup", "factors of one block, probe", 2 * b + max(b, 2 * h), b, itemsize=item)
        add("train", "K(X, Z)", m, p if sizes.keep else b, itemsize=item)
        return buffers
    if sizes.solver in FROM_CENTERS:
        _count_from_centers(buffers, problem, sizes)
        return buffers
    if sizes.linear:
        _count_linear(buffers, problem, sizes, point)
        return buffers
    if sizes.solver == "sgd":
        add("setup", "probe, K(probe, probe)", h, 2 * point + h * item)
        return buffers
    if sizes.solver == "eigenpro1":
        add("always", "eigenvectors on all rows", p, sizes.level, itemsize=item)
        add("setup", "extended eigenvectors, their values", 3 * p, sizes.level + 1, itemsize=item)
        add("setup", "Nystrom rows, eigenvectors", s, 2 * point + (d + sizes.level) * item)
        add("train", "correction", p, c, itemsize=item)
    else:
        add("always", "Nystrom rows, eigenvectors", s, 2 * point + (d + sizes.level) * item)
    add("setup", "K(X_s, X_s) and workspace", 3 * s, s, itemsize=item)
    add("setup", "probe, K(probe, probe)", h, 2 * point + h * item)
    if sizes.projection in ("exact", "resident"):
        add("always", "K(Z, Z)", p, p, itemsize=item)
    if sizes.projection in ("resident", "inexact"):
        inner = min(INNER_NYSTROM, p)
        probed = min(2 * INNER_NYSTROM, p)
        add("setup", "eigensystem of the projection", 3 * inner, inner, itemsize=item)
        add("setup", "K(probe, probe) of the projection", probed, probed, itemsize=item)
    if not sizes.in_place:
        add("train", "K(X, Z)", m, p, itemsize=item)
        # Cut to the critical batch, a period has more steps but no more rows than before.
        rows = sizes.period * m if sizes.period > 1 else 0
        add("train", "temporary centers", rows, point + c * item)
        add("train", "values at the centers", 3 * p, c, itemsize=item)
    return buffers


def _count_from_centers(buffers: Buffers, problem: Problem, sizes: Sizes) -> None:
    """What `solver.direct` and `solver.falkon` hold."""
    add, item, p, c, m = buffers.add, problem.itemsize, problem.p, problem.c, sizes.batch_size
    add("train", "K(X, Z)", m, p, itemsize=item)
    add("always", "tiles of a p x p matrix", problem.threads, GRAM_TILE)
    if sizes.solver == "falkon":
        add("always", "preconditioner H", p, p, itemsize=item)
        add("setup", "factors", 3 * p, p, itemsize=item)
        add("train", "vectors of the iteration", 12 * p, c, itemsize=8)
        add("train", "part of H", min(p, 256), p, itemsize=8)
        return
    if item < 8:
        add("train", "K(X, Z) in float64", m, p, itemsize=8)
    add("train", "normal equations", p, p + 3 * c, itemsize=8)
    add("train", "their factor", p, p, itemsize=8)
    add("train", "part of K(Z, Z)", min(p, 1024), p, itemsize=item)
    if problem.kept:
        apart = problem.staging > 0
        add("host" if apart else "train", "their copy for a checkpoint", p, p + c, itemsize=8)


def _count_linear(buffers: Buffers, problem: Problem, sizes: Sizes, point: int) -> None:
    """What `linear.build_linear` and the step on its result hold."""
    add, p, item = buffers.add, problem.p, problem.itemsize
    s, h, q = sizes.n_sample, sizes.n_probe, sizes.level
    coupled = sizes.features == "nystrom"
    add("setup", "sample and probe", s + h, point)
    # Twice: as it is, and turned for the product with itself.
    add("setup", "features of the sample", 2 * max(s, h), p if coupled else min(p, FEATURE_COLUMNS),
        itemsize=item)  # fmt: skip
    add("setup", "products of features", 3 * s * s + h * h, itemsize=item)
    if coupled:
        add("always", "L^-1", p, p, itemsize=item)
        add("setup", "L", p, p, itemsize=item)
    if q:
        add("always", "eigenvectors", p, q, itemsize=item)
        add("train", "damped part of a step", 2 * p, problem.c, itemsize=item)
    add("train", "features of a batch", sizes.batch_size, p, itemsize=item)


def n_groups(c: int) -> int:
    """Most groups of columns whose shares of a product with c outputs are held side by side.

    Enough to keep 16 threads busy on a batch; with many outputs there is work enough in a tile.
    """
    return max(1, min(16, 1024 // max(c, 1)))


def loader_bytes(problem: Problem, sizes: Sizes) -> int:
    """Two shuffle blocks of whole units, a straddling batch, the units being read.

    16 bytes a row: its number and its place. A read holds the stored and the decoded unit.
    """
    row, unit = problem.row_bytes + 16, problem.unit_rows
    units = max(1, sizes.loader_block_bytes // (unit * row))
    block_rows = min(units * unit, problem.n_rows)
    allowed = max(1, sizes.loader_in_flight_bytes // (unit * row))
    reading = min(problem.readers or problem.threads, allowed)
    return (2 * block_rows + sizes.batch_size) * row + 2 * reading * unit * problem.row_bytes


def default_budget(available: int) -> int:
    """What "auto" memory means: four fifths of what is free now."""
    return available * 4 // 5


def _mib(size: int) -> str:
    return f"{-(-size // MiB)} MiB"
