"""Bytes: every buffer that a run will hold, phase by phase.

The run allocates what is listed and nothing else of size; `streamkern plan` prints the list before
anything is started, and a test compares the peak with it. What is here is the same for all methods;
each adds its own (`solver.method.Method.count`). Pure integers, no arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from streamkern.basics.randomness import COUNTER_BYTES, DEVICE_TILE
from streamkern.planning.problem import MiB, ProblemShape
from streamkern.planning.sizes import Sizes

# Python objects, thread stacks, BLAS buffers and allocator slack beside the arrays.
OVERHEAD = 64 * MiB
ROW_ID = 8
"""Bytes of a row's number, which travels with it."""
PRODUCT_TILE = 512
"""Rows and columns of what a thread does at once of a product of matrices."""
SAVED_CHUNK = 64 * MiB
"""Of an array in a run directory, at most."""
RANK_SLAB_BYTES = 4 * MiB
"""Of an array that ranks add up, at a time: each is held three times."""
TOLD_CENTERS = 4 * MiB
"""Of centers that rank 0 tells the others at a time."""
CENTER_KEY = 16
"""Bytes of a digest of a center, by which it is found in another run."""
KEYS_SORTED = 4 * CENTER_KEY + 3 * ROW_ID
"""For each center, of two runs: its keys, these sorted, and where they stand."""
MOST_ORIGINS = 1 << 18
"""Rows, and those of one unit more, of which it is looked up what they are made from."""
MOST_COPIES = 16
"""Equal rows with equal targets that count as copies of one row. More of them are one case of a
table with few different rows, and new rows will be equal to them as well."""
METRIC_FIT, METRIC_POOL, METRIC_ROWS = 1024, 3072, 10240
"""Rows that are fitted to learn a metric, from which its steps draw theirs, and all."""
STEPPED_FIT, STEPPED_OTHERS = 384, 768
"""Rows that a step on a metric fits, and predicts."""
METRIC_FEATURES = 256
"""Of a full metric that steps are taken on; d^3 FLOPs a step are then those of the factor."""
METRIC_COLUMNS = 2048
"""Of a product of slopes at most, unless an output alone has more: each group of outputs evaluates
the slopes anew, which costs less than a tenth of so many columns."""
EVALUATED_ROWS = 1024
"""Rows that a model is evaluated on at once, while it is trained and later."""
HARD_ROWS, HARD_BYTES = 500, 64 << 20
"""Rows at most, and their bytes, by which a calibrated model says how hard others are."""
PANEL = 4096
"""Outputs of which something is made at once, where all of them would be the largest there is."""


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


class MemoryNeeds(NamedTuple):
    """What a method asks of what every run holds.

    columns : whether steps take the centers as the columns of K(X, Z) alone, once setup is over.
    product_rows : rows of its largest product, and outputs of it: c or more.
    setup : numbers that it saves once, beside the centers. sums : bytes of a checkpoint beside the
    weights.
    """

    columns: bool
    product_rows: int
    outputs: int
    setup: int = 0
    sums: int = 0


def count_run(problem: ProblemShape, sizes: Sizes, needs: MemoryNeeds) -> Buffers:
    """What every run holds: itself, the centers, rows on their way, weights, what is being saved.

    What a device has no use for counts on the "host" beside it.
    """
    buffers = Buffers()
    _count_stream(buffers, problem, sizes, needs)
    if problem.selection is not None:
        _count_selection(buffers, problem, sizes)
    return buffers


def _count_stream(
    buffers: Buffers, problem: ProblemShape, sizes: Sizes, needs: MemoryNeeds
) -> None:
    item, c, m = problem.itemsize, problem.c, sizes.batch_size
    d, s, h, point = problem.d, sizes.n_sample, sizes.n_probe, problem.point
    add, apart = buffers.add, problem.staging > 0
    add("host" if apart else "always", "interpreter, stacks, allocator", OVERHEAD)
    if problem.library_bytes:
        add("always", "compiler", problem.library_bytes)
    add("always", "tiles", problem.threads, problem.tile_bytes)
    add("always", "rows being prepared", problem.threads, problem.scratch_bytes)
    _count_centers(buffers, problem, needs)
    if problem.metric:
        add("always", "metric, and as products take it", 2 * problem.metric)
        add("setup", "directions of the metric", 4 * problem.metric)
    if not apart:  # a device walks the columns in order
        sums = n_groups(needs.outputs) * needs.outputs
        add("always", "partial sums of products", sums, needs.product_rows, itemsize=item)
    if problem.center_ranks == 1:
        _count_choosing(buffers, problem)
    else:
        _count_dealing(buffers, problem)
    # Rows as they are stored are there until they are transformed, and these until they are
    # prepared. A unit being decoded counts twice.
    add("sample", "sample and probe", s + h, max(_on_the_way(problem), d * item + point))
    add("sample", "their targets", 2 * (s + h), c, itemsize=item)
    add("host" if apart else "sample", "units being read", _in_hand(problem))
    if problem.ranks > 1:
        add("host" if apart else "always", "sums on their way", 3, RANK_SLAB_BYTES)
    add("host" if apart else "train", "loader", loader_bytes(problem, sizes))
    _count_saving(buffers, problem, needs)
    if apart and problem.draws:  # elsewhere a tile of them is small
        for phase, rows in (("sample", s + h), ("train", m)):
            add(phase, "draws", min(-(-rows * d // 4), DEVICE_TILE), COUNTER_BYTES)
    if apart:
        for phase, what in (("train", "staging"), ("host", "staging, pinned")):
            add(phase, what, problem.staging * m, problem.row_bytes + ROW_ID)
    add("train", "batch, prepared", 2 * m, point + c * item)
    add("train", "batch, cast and transformed", problem.feed_arrays * m, d + c, itemsize=item)
    add("train", "rows being evaluated", rows_at_once(c),
        problem.row_bytes + point + d * max(item, problem.transformed) + 4 * c * item)  # fmt: skip
    _count_weights(buffers, problem)
    if problem.set_aside or problem.set_apart:
        add("host" if apart else "train", "rows set aside, being read", _in_hand(problem))
    if problem.set_apart:
        values = 6 * problem.set_apart
        add("host" if apart else "train", "values of rows to calibrate by", values, c, itemsize=8)
        hard = min(problem.set_apart // 2, HARD_ROWS)
        rows = min(hard * (2 * point + d * item), 3 * HARD_BYTES)
        add("train", "rows that say how hard others are", rows, itemsize=1)
        add("host" if apart else "train", "their matrices", 5 * hard, hard, itemsize=8)


def _count_centers(buffers: Buffers, problem: ProblemShape, needs: MemoryNeeds) -> None:
    """All of them, or what is a rank's in the setup and in the steps."""
    add, p, point, setup = buffers.add, problem.p, problem.point, ("sample", "setup")
    if problem.center_ranks == 1:
        add("always", "centers", p, point)
        for phase in setup if needs.columns else ("always",):
            add(phase, "centers, left side", p, point)
        return
    stripe, all_told = problem.in_setup(p), problem.features == "fourier"  # after the noise
    for phase in ("noise", *setup):
        n = p if all_told and phase == "noise" else stripe
        add(phase, "centers, a stripe of them, both sides", 2 * n, point)
        if problem.staging == 0:
            add(phase, "raw centers, a stripe of them", n, problem.d, itemsize=problem.itemsize)
    held, sides = problem.of_column(p), 1 if needs.columns else 2
    add("train", "centers, a part of them", sides * held, point)
    if problem.staging == 0:
        add("train", "raw centers, a part of them", held, problem.d, itemsize=problem.itemsize)


def _count_choosing(buffers: Buffers, problem: ProblemShape) -> None:
    """Centers as rows, and as they are chosen; beside what a way of choosing takes."""
    p, apart = problem.p, problem.staging > 0
    if problem.selection is None:  # which are put in order by a copy
        most = max(2 * problem.row_bytes, _on_the_way(problem))
        buffers.add("centers", "rows that are centers", p, most)
        buffers.add("host" if apart else "centers", "units of them being read", _in_hand(problem))
    if not apart:
        for phase in ("sample", "setup", "train"):
            buffers.add(phase, "centers as chosen", p, problem.d, itemsize=problem.itemsize)


def _on_the_way(problem: ProblemShape) -> int:
    """Bytes of a row of a sample: as it is stored, in the transforms, and in the run's dtype where
    that is another one."""
    d, item, wide = problem.d, problem.itemsize, problem.transformed
    return problem.row_bytes + d * max(item, wide) + (d * item if wide > item else 0)


def _count_dealing(buffers: Buffers, problem: ProblemShape) -> None:
    """What rank 0 holds of centers while it reads them and tells the others, before all else."""
    item, p, d = problem.itemsize, problem.p, problem.d
    apart, wide = problem.staging > 0, max(item, problem.transformed)
    phase = "host" if apart else "centers"
    add = buffers.add
    add(phase, "raw centers, a stripe of them", problem.in_setup(p), d, itemsize=item)
    if problem.goes_on:
        _count_going_on(buffers, problem)
    if problem.reads_stripes:
        add(phase, "a chunk of centers being read", 2, min(SAVED_CHUNK, p * d * item))
        return
    add(phase, "centers being told", 2, min(TOLD_CENTERS, p * d * item))
    if problem.streams_centers:
        rows = min(p, problem.unit_rows)
        add(phase, "centers of a unit", rows, problem.row_bytes + d * wide)
        add(phase, "numbers and targets of centers", p, 7 * ROW_ID + 2 * problem.c * item)
        add(phase, "units being read", _in_hand(problem))
    elif problem.selection is None:
        add(phase, "raw centers, all of them on rank 0", p, problem.row_bytes + d * wide)


def _count_going_on(buffers: Buffers, problem: ProblemShape) -> None:
    """What rank 0 holds of the weights of another run, until each rank has those of its centers.
    The solver is there by then, and no copy for a checkpoint, which would take more."""
    add, p, weights = buffers.add, problem.p, problem.p * problem.c * problem.itemsize
    if problem.staging > 0:
        add("host", "weights that it goes on from, on rank 0", 3, weights)
        add("host", "their order", p, KEYS_SORTED)
        return
    add("centers", "weights that it goes on from, read, on rank 0", 3, weights)
    for phase in ("noise", "sample", "setup"):
        add(phase, "weights that it goes on from, on rank 0", weights + p * ROW_ID)
    add("train", "order of the weights that it goes on from", p, KEYS_SORTED)


def _count_weights(buffers: Buffers, problem: ProblemShape) -> None:
    """Of the steps; where ranks share out the centers rank 0 gathers what is saved."""
    add, item, p, c = buffers.add, problem.itemsize, problem.p, problem.c
    best = problem.set_aside > 0
    if problem.center_ranks == 1:
        what = "weights, average, last good, copies for a checkpoint"
        add("train", what, 7 * p, c, itemsize=item)
        if best:
            add("train", "best weights, a copy for a checkpoint", 2 * p, c, itemsize=item)
        return
    held = (4 + best) * problem.of_column(p)
    add("train", "weights, average, last good, a part of them", held, c, itemsize=item)
    if problem.staging == 0:
        copies = 3 + problem.finds_ridge + best
        add("train", "copies for a checkpoint, of all, on rank 0", copies * p, c, itemsize=item)
    add("train", "weights on their way to rank 0", 3, min(RANK_SLAB_BYTES, p * c * item))


def _count_saving(buffers: Buffers, problem: ProblemShape, needs: MemoryNeeds) -> None:
    """What is on its way to a run directory."""
    add, item, p, c = buffers.add, problem.itemsize, problem.p, problem.c
    apart = problem.staging > 0
    if apart:
        # Setup and checkpoints go between a disk and the device by chunks of at most 64 MiB, which
        # Zarr encodes beside what it was given.
        parts = problem.streams_centers or problem.reads_stripes
        chosen = problem.of_column(p) if parts else p
        add("host", "centers as chosen", chosen, problem.d, itemsize=item)
        add("host", "a chunk being saved or loaded, encoded", 2, SAVED_CHUNK)
        copies = 5 if problem.set_aside else 4
        add("host", "copies for a checkpoint", copies * p, c, itemsize=item)
    elif problem.kept:  # on a disk
        saved = 4 * p * c * item + needs.sums
        add("train", "chunks being saved, encoded", min(3 * SAVED_CHUNK, saved))
    if problem.saving:
        saved = (p * problem.d + needs.setup) * item
        add("host" if apart else "setup", "setup on its way", min(problem.saving, saved))
        saved = 4 * p * c * item + needs.sums
        add("host" if apart else "train", "checkpoint on its way", min(problem.saving, saved))


def _count_selection(buffers: Buffers, problem: ProblemShape, sizes: Sizes) -> None:
    """Of the centers, before anything else exists."""
    assert problem.selection is not None
    apart = problem.staging > 0
    streamed = problem.selection.streamed
    if library := problem.selection.library_bytes:
        buffers.add("host" if apart else "always", "library that chooses centers", library)
    for what, size in problem.selection.buffers:
        buffers.add("host" if apart and streamed else "centers", what, size)
    if not apart:
        alone = replace(problem, ranks=1, center_ranks=1)  # rank 0, for all
        reading = loader_bytes(alone, sizes) if streamed else _in_hand(problem)
        buffers.add("centers", "units being read", reading)


def _in_hand(problem: ProblemShape) -> int:
    """Units read one after the other; one that is being decoded counts twice."""
    return (2 * problem.units_in_hand - 1) * problem.read_bytes


def count_products(buffers: Buffers, problem: ProblemShape, b: int, phase: str = "setup") -> int:
    """Parts of products of b x b matrices. Returns the rows that solving one triangular system
    with another holds besides. A device needs neither.
    """
    if problem.staging > 0:
        return 0
    part = min(b, PRODUCT_TILE)
    # A tile of a Gram matrix; two products in a triangular system, of half its height and width.
    buffers.add(phase, "parts of products", problem.threads, 3 * part * part // 2,
        itemsize=problem.itemsize)  # fmt: skip
    return min(b, PRODUCT_TILE // 2)


def rows_at_once(c: int) -> int:
    """Rows that a model with c outputs is evaluated on at once."""
    return max(16, EVALUATED_ROWS * PANEL // max(c, PANEL))


def n_groups(c: int) -> int:
    """Most groups of columns whose shares of a product with c outputs are held side by side.

    Enough to keep 16 threads busy on a batch; with many outputs there is work enough in a tile.
    """
    return max(1, min(16, 1024 // max(c, 1)))


def loader_bytes(problem: ProblemShape, sizes: Sizes) -> int:
    """Two shuffle blocks of whole units, a straddling batch, the units being read.

    16 bytes a row: its number and its place. A read holds the stored and the decoded unit. Of
    several ranks each has its share of a block's rows, and the places of all, and how many are its.
    """
    row, unit = problem.row_bytes + 16, problem.unit_rows
    units = max(1, sizes.loader_block_bytes // (unit * row))
    block_rows = min(units * unit, problem.n_rows)
    allowed = max(1, sizes.loader_in_flight_bytes // (unit * row))
    reading = min(problem.readers or problem.threads, allowed)
    held, places = block_rows, 0
    if problem.of_row(block_rows) < block_rows:
        held, places = min(block_rows, problem.of_row(block_rows) + unit), 2 * 8 * block_rows
    blocks = 2 * (held * row + places)
    return blocks + sizes.batch_size * row + 2 * reading * problem.read_bytes


def default_budget(available: int) -> int:
    """What "auto" memory means: four fifths of what is free now."""
    return available * 4 // 5
