"""Count the bytes of every large buffer of a run, by phase.

`streamkern plan` prints the list before a run starts, and tests compare it with the measured peak.
The buffers here are common to all methods; each method adds its own (`solver.method.Method.count`).
This module only computes with integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from streamkern.basics.randomness import COUNTER_BYTES, DEVICE_TILE
from streamkern.planning.problem import MiB, ProblemShape, Selection
from streamkern.planning.sizes import ROW_ID_BYTES, Sizes, loader_bytes

PROCESS_OVERHEAD_BYTES = 64 * MiB
"""Bytes of Python objects, thread stacks, BLAS buffers and allocator slack."""
PRODUCT_TILE = 512
"""Rows and columns of the part of a matrix product that a thread computes at once."""
SAVED_CHUNK_BYTES = 64 * MiB
"""Largest chunk of an array in a run directory, in bytes."""
RANK_SLAB_BYTES = 4 * MiB
"""Largest part of an array in one all-reduce, in bytes; each part is held three times."""
BROADCAST_CENTER_BYTES = 4 * MiB
"""Largest part of the centers that rank 0 broadcasts at once, in bytes."""
CENTER_DIGEST_BYTES = 16
"""Bytes of a digest of a center, by which it is matched with centers of another run."""
CENTER_MATCH_BYTES = 4 * CENTER_DIGEST_BYTES + 3 * ROW_ID_BYTES
"""Bytes per center to match the centers of two runs: their digests, sorted, and positions."""
MAX_ORIGINS = 1 << 18
"""Largest number of rows, plus one unit, whose origins are read at once."""
MAX_COPIES = 16
"""Largest number of equal rows with equal targets that count as copies of one row. If there are
more, the table has few distinct rows, and new rows will equal them too."""
METRIC_FIT_ROWS = 1024
"""Number of rows that are fitted to learn a metric."""
METRIC_STEP_FIT_ROWS, METRIC_STEP_PREDICTED_ROWS = 1536, 1536
"""Largest numbers of rows to which a metric step fits a model, and that it predicts."""
METRIC_STEP_ROWS = METRIC_STEP_FIT_ROWS + METRIC_STEP_PREDICTED_ROWS
"""Largest number of rows of a metric step."""
MAX_FULL_METRIC_FEATURES = 256
"""Largest number of features for which gradient steps learn a full metric."""
MAX_DERIVATIVE_COLUMNS = 2048
"""Largest number of columns of a matrix product of kernel derivatives, unless one output has more.
The outputs are divided into groups accordingly. Each group evaluates the derivatives again, at less
than a tenth of the cost of a product with this many columns."""
EVALUATED_ROWS = 1024
"""Largest number of rows on which a model is evaluated at once."""
RESIDUAL_SCALE_ROWS, RESIDUAL_SCALE_BYTES = 500, 64 << 20
"""Largest number of calibration rows, and of their bytes, to which the residual scale is fitted."""
KEPT_STORE_BUDGET_RATIO = 8
"""Smallest ratio of the memory budget to the decoded stores at which these stay in memory."""
MAX_PANEL_OUTPUTS = 4096
"""Largest number of outputs for which a model is evaluated on `EVALUATED_ROWS` rows at once; with
more outputs, on fewer rows."""


@dataclass(frozen=True)
class Buffers:
    """List of the large buffers of a run.

    lines : (phase, name, bytes) of each buffer. Buffers of "always" are held in every phase. The
        host memory of a run on a device is listed under "host", and counts in no phase.
    """

    lines: list[tuple[str, str, int]] = field(default_factory=list)

    def add(self, phase: str, name: str, *shape: int, itemsize: int = 1) -> None:
        """Append a buffer of `shape`, whose entries have `itemsize` bytes."""
        self.lines.append((phase, name, itemsize * math.prod(shape)))

    def total(self, phase: str) -> int:
        """Return the bytes held during a phase, with the buffers of "always"."""
        return sum(size for name, _, size in self.lines if name in ("always", phase))

    @property
    def phases(self) -> list[str]:
        """Phases in order of first mention."""
        names = dict.fromkeys(name for name, _, _ in self.lines)
        return [name for name in names if name not in ("always", "host")]

    @property
    def peak(self) -> int:
        """Bytes of the largest phase."""
        return max(self.total(phase) for phase in self.phases)


class MemoryNeeds(NamedTuple):
    """Properties of a method that determine the sizes of the common buffers.

    product_rows : rows of its largest product with a kernel matrix
    outputs : columns of its largest product with a kernel matrix; at least c
    setup : number of array entries that its setup saves in addition to the centers
    sums : bytes of a checkpoint in addition to the weights
    """

    product_rows: int
    outputs: int
    setup: int = 0
    sums: int = 0


def count_run(problem: ProblemShape, sizes: Sizes, needs: MemoryNeeds) -> Buffers:
    """Count the common buffers of a run: process, centers, rows, weights, arrays being saved.

    In a run on a device, buffers in host memory are listed under "host".
    """
    buffers = Buffers()
    _count_process(buffers, problem)
    _count_centers(buffers, problem)
    if problem.metric_bytes:
        buffers.add("always", "metric, and its copy for products", 2 * problem.metric_bytes)
        buffers.add("setup", "directions of the metric", 4 * problem.metric_bytes)
    if not problem.on_device:  # a device sums over the columns in order
        sums = n_groups(needs.outputs) * needs.outputs
        buffers.add("always", "partial sums of products", sums, needs.product_rows,
            itemsize=problem.itemsize)  # fmt: skip
    if problem.center_ranks == 1:
        _count_chosen_centers(buffers, problem)
    else:
        _count_scattered_centers(buffers, problem)
    _count_rows(buffers, problem, sizes)
    _count_saving(buffers, problem, needs)
    _count_batches(buffers, problem, sizes)
    _count_weights(buffers, problem)
    _count_evaluation(buffers, problem)
    if problem.selection is not None:
        _count_selection(buffers, problem, sizes, problem.selection)
    return buffers


def _count_process(buffers: Buffers, problem: ProblemShape) -> None:
    """Count code, stacks, and the scratch memory of threads."""
    add, phase = buffers.add, problem.host_phase("always")
    add(phase, "interpreter, stacks, allocator", PROCESS_OVERHEAD_BYTES)
    if problem.library_bytes:
        add("always", "compiler", problem.library_bytes)
    add("always", "tiles of kernel matrices", problem.threads, problem.tile_bytes)
    if problem.left_bytes:
        add("always", "left sides of points", problem.left_bytes)
    add("always", "rows being prepared", problem.threads, problem.scratch_bytes)


def _count_centers(buffers: Buffers, problem: ProblemShape) -> None:
    """Count the prepared centers: all, or a rank's share, which differs in setup and steps."""
    p, row_bytes = problem.p, problem.prepared_row_bytes
    if problem.center_ranks == 1:
        buffers.add("always", "centers", p, row_bytes)
        return
    stripe = problem.setup_centers_per_rank(p)
    n_in_noise = p if problem.features == "fourier" else stripe
    for phase, name, n in (
        ("noise", "stripe", n_in_noise), ("sample", "stripe", stripe), ("setup", "stripe", stripe),
        ("train", "part", problem.centers_per_rank(p)),
    ):  # fmt: skip
        buffers.add(phase, f"this rank's {name} of the centers", n, row_bytes)
        if not problem.on_device:
            buffers.add(phase, f"this rank's {name} of the raw centers", n, problem.d,
                itemsize=problem.itemsize)  # fmt: skip


def _count_chosen_centers(buffers: Buffers, problem: ProblemShape) -> None:
    """Count the rows that become centers, and the raw centers, without the selector's buffers."""
    add, p = buffers.add, problem.p
    stored_bytes, raw_bytes = problem.row_bytes, problem.d * problem.itemsize
    if problem.selection is None:  # the rows are copied into the order of the centers
        row_bytes = max(2 * stored_bytes, _sample_row_bytes(problem))
        add("centers", "rows chosen as centers", p, row_bytes)
        if problem.on_device:  # two copies, or one and the raw centers
            add(
                "host", "rows chosen as centers", p, max(stored_bytes, 2 * stored_bytes - raw_bytes)
            )
        add(problem.host_phase("centers"), "units with centers being read", _reading_bytes(problem))
    if not problem.on_device:
        for phase in ("sample", "setup", "train"):
            add(phase, "raw centers", p, raw_bytes)


def _count_scattered_centers(buffers: Buffers, problem: ProblemShape) -> None:
    """Count the centers that rank 0 holds while it reads and broadcasts them."""
    add, item, p, d = buffers.add, problem.itemsize, problem.p, problem.d
    phase, raw_bytes = problem.host_phase("centers"), p * d * item
    row_bytes = problem.row_bytes + d * max(item, problem.transform_itemsize)
    stripe = problem.setup_centers_per_rank(p)
    add(phase, "this rank's stripe of the raw centers", stripe, d, itemsize=item)
    if problem.has_initial_weights:
        _count_initial_weights(buffers, problem)
    if problem.reads_stripes:
        add(phase, "chunk of centers being read", 2, min(SAVED_CHUNK_BYTES, raw_bytes))
        return
    add(phase, "centers being broadcast", 2, min(BROADCAST_CENTER_BYTES, raw_bytes))
    if problem.streams_centers:
        add(phase, "centers of one unit", min(p, problem.unit_rows), row_bytes)
        numbers_and_targets = 7 * ROW_ID_BYTES + 2 * problem.c * item
        add(phase, "row numbers and targets of the centers", p, numbers_and_targets)
        add(phase, "units being read", _reading_bytes(problem))
    elif problem.selection is None:
        add(phase, "all raw centers, on rank 0", p, row_bytes)


def _count_initial_weights(buffers: Buffers, problem: ProblemShape) -> None:
    """Count the initial weights, which rank 0 holds until they are scattered over the ranks.

    In the phase "train", the copies for checkpoints take more memory, and do not exist yet.
    """
    add, p, weights = buffers.add, problem.p, problem.p * problem.c * problem.itemsize
    if problem.on_device:
        add("host", "initial weights, on rank 0", 3, weights)
        add("host", "order of the initial weights", p, CENTER_MATCH_BYTES)
        return
    add("centers", "initial weights being read, on rank 0", 3, weights)
    for phase in ("noise", "sample", "setup"):
        add(phase, "initial weights, on rank 0", weights + p * ROW_ID_BYTES)
    add("train", "order of the initial weights", p, CENTER_MATCH_BYTES)


def _count_rows(buffers: Buffers, problem: ProblemShape, sizes: Sizes) -> None:
    """Count the rows of sample and probe, and the rows that are read ahead."""
    add, item, n = buffers.add, problem.itemsize, sizes.n_sample + sizes.n_probe
    # Stored rows are held until they are transformed, and transformed rows until they are prepared.
    # A unit that is being decoded counts twice.
    transformed_bytes = problem.d * item + problem.prepared_row_bytes
    add("sample", "sample and probe", n, max(_sample_row_bytes(problem), transformed_bytes))
    add("sample", "targets of sample and probe", 2 * n, problem.c, itemsize=item)
    add(problem.host_phase("sample"), "units being read", _reading_bytes(problem))
    if problem.ranks > 1:
        add(problem.host_phase("always"), "all-reduce buffers", 3, RANK_SLAB_BYTES)
    loader, phase = loader_bytes(problem, sizes), problem.host_phase("train")
    pinned = ", pinned" if problem.on_device else ""
    add(phase, f"loader, its shuffle blocks{pinned}", loader.rows)
    add(phase, "loader, positions of rows, and units being read", loader.overhead)


def _count_batches(buffers: Buffers, problem: ProblemShape, sizes: Sizes) -> None:
    """Count a batch on its way to a step, and the rows of an evaluation."""
    add, item, d, c, m = buffers.add, problem.itemsize, problem.d, problem.c, sizes.batch_size
    n, point_bytes = sizes.n_sample + sizes.n_probe, problem.prepared_row_bytes
    if problem.on_device and problem.draws:  # on the CPU they are drawn in small tiles
        for phase, rows in (("sample", n), ("train", m)):
            counters = min(-(-rows * d // 4), DEVICE_TILE)
            add(phase, "random numbers of transforms", counters, COUNTER_BYTES)
    if problem.on_device:
        add("train", "staging", problem.staging * m, problem.row_bytes + ROW_ID_BYTES)
    add("train", "batch, prepared", 2 * m, point_bytes + c * item)
    add("train", "batch, cast and transformed", problem.feed_arrays * m, d + c, itemsize=item)
    transformed_bytes = d * max(item, problem.transform_itemsize)
    row_bytes = problem.row_bytes + point_bytes + transformed_bytes + 4 * c * item
    add("train", "rows being evaluated", rows_at_once(c), row_bytes)


def _sample_row_bytes(problem: ProblemShape) -> int:
    """Return the bytes of a row of the sample: stored, transformed, and cast to another dtype."""
    d, item, transformed = problem.d, problem.itemsize, problem.transform_itemsize
    return problem.row_bytes + d * max(item, transformed) + (d * item if transformed > item else 0)


def _count_weights(buffers: Buffers, problem: ProblemShape) -> None:
    """Count the weights in the steps. Rank 0 gathers partitioned weights for checkpoints."""
    add, item, p, c = buffers.add, problem.itemsize, problem.p, problem.c
    keeps_best = problem.n_validation_rows > 0
    if problem.center_ranks == 1:
        name = "weights, their average, last good ones, checkpoint copies"
        add("train", name, 7 * p, c, itemsize=item)
        if keeps_best:
            add("train", "best weights, and their checkpoint copy", 2 * p, c, itemsize=item)
        return
    rows = (4 + keeps_best) * problem.centers_per_rank(p)
    add("train", "this rank's part of weights, average, last good weights", rows, c, itemsize=item)
    if not problem.on_device:
        copies = 3 + problem.finds_ridge + keeps_best
        add("train", "checkpoint copies of all weights, on rank 0", copies * p, c, itemsize=item)
    add("train", "weights being sent to rank 0", 3, min(RANK_SLAB_BYTES, p * c * item))


def _count_evaluation(buffers: Buffers, problem: ProblemShape) -> None:
    """Count validation and calibration rows, and the calibration."""
    add, phase, n_rows = buffers.add, problem.host_phase("train"), problem.n_calibration_rows
    if problem.n_validation_rows or n_rows:
        add(phase, "validation and calibration rows being read", _reading_bytes(problem))
    if n_rows:
        add(phase, "outputs for the calibration rows", 6 * n_rows, problem.c, itemsize=8)
        n_points = min(n_rows // 2, RESIDUAL_SCALE_ROWS)
        rows = n_points * (2 * problem.prepared_row_bytes + problem.d * problem.itemsize)
        size = min(rows, 3 * RESIDUAL_SCALE_BYTES)
        add("train", "rows that estimate the residual scale", size)
        add(phase, "kernel matrices of the residual scale", 5 * n_points, n_points, itemsize=8)


def _count_saving(buffers: Buffers, problem: ProblemShape, needs: MemoryNeeds) -> None:
    """Count the arrays that are being written to a run directory."""
    add, item, p, c = buffers.add, problem.itemsize, problem.p, problem.c
    checkpoint_bytes = 4 * p * c * item + needs.sums
    if problem.on_device:
        # Arrays move between disk and device in chunks of at most `SAVED_CHUNK_BYTES`, which Zarr
        # encodes into a second buffer.
        is_partitioned = problem.streams_centers or problem.reads_stripes
        n_centers = problem.centers_per_rank(p) if is_partitioned else p
        add("host", "raw centers", n_centers, problem.d, itemsize=item)
        add("host", "encoded chunk being saved or loaded", 2, SAVED_CHUNK_BYTES)
        copies = 5 if problem.n_validation_rows else 4
        add("host", "checkpoint copies of the weights", copies * p, c, itemsize=item)
    elif problem.writes_checkpoints:  # on a disk
        add("train", "encoded chunks being saved", min(3 * SAVED_CHUNK_BYTES, checkpoint_bytes))
    if problem.upload_bytes:
        setup_bytes = (p * problem.d + needs.setup) * item
        for phase, name, size in (
            ("setup", "setup", setup_bytes), ("train", "checkpoint", checkpoint_bytes),
        ):  # fmt: skip
            size = min(problem.upload_bytes, size)
            add(problem.host_phase(phase), f"{name} being uploaded", size)


def _count_selection(
    buffers: Buffers, problem: ProblemShape, sizes: Sizes, selection: Selection
) -> None:
    """Count the buffers of a selector of centers, in the first phase of a run."""
    if selection.library_bytes:
        phase = problem.host_phase("always")
        buffers.add(phase, "library that selects the centers", selection.library_bytes)
    for name, size in selection.buffers:
        phase = problem.host_phase("centers") if selection.streamed else "centers"
        buffers.add(phase, name, size)
    if not problem.on_device:
        single = replace(problem, ranks=1, center_ranks=1)  # rank 0 selects for all ranks
        reading = (
            sum(loader_bytes(single, sizes)) if selection.streamed else _reading_bytes(problem)
        )
        buffers.add("centers", "units being read", reading)


def _reading_bytes(problem: ProblemShape) -> int:
    """Return the bytes of units read ahead in order; one that is being decoded counts twice."""
    return (2 * problem.units_in_hand - 1) * problem.read_bytes


def count_products(buffers: Buffers, problem: ProblemShape, b: int, phase: str = "setup") -> int:
    """Count the temporary arrays of products of b x b matrices on the CPU; a device needs none.

    Returns the number of additional rows that are held while a triangular system is solved for a
    triangular right-hand side.
    """
    if problem.on_device:
        return 0
    part = min(b, PRODUCT_TILE)
    # A tile of a Gram matrix, and two products of half its height and width in a triangular system.
    buffers.add(phase, "tiles of matrix products", problem.threads, 3 * part * part // 2,
        itemsize=problem.itemsize)  # fmt: skip
    return min(b, PRODUCT_TILE // 2)


def rows_at_once(c: int) -> int:
    """Return the number of rows on which a model with c outputs is evaluated at once.

    It is at least 16, with any number of outputs.
    """
    return max(16, EVALUATED_ROWS * MAX_PANEL_OUTPUTS // max(c, MAX_PANEL_OUTPUTS))


def n_groups(c: int) -> int:
    """Return the largest number of groups of columns whose partial products are held together.

    16 groups occupy 16 threads in a batch. With many outputs, fewer groups suffice, since a single
    tile is enough work for a thread.
    """
    return max(1, min(16, 1024 // max(c, 1)))


def keep_stores(
    buffers: Buffers, problem: ProblemShape, decoded_bytes: int, budget_bytes: int
) -> int:
    """Decide whether the loader keeps the decoded rows of the stores; if so, count them.

    The rows are kept if they are read more than once, for replicas or epochs, take at most a
    `KEPT_STORE_BUDGET_RATIO`-th of the budget, and fit in it together with the other buffers.
    Returns the bytes that are kept, or 0.

    decoded_bytes : bytes of all decoded rows of the stores
    budget_bytes : budget of host memory
    """
    rereads = problem.epochs > 1 or problem.n_rows > problem.n_stored
    phase = problem.host_phase("train")
    is_small = KEPT_STORE_BUDGET_RATIO * decoded_bytes <= budget_bytes
    fits = buffers.total(phase) + decoded_bytes <= budget_bytes
    if not (rereads and is_small and fits and decoded_bytes):
        return 0
    buffers.add(phase, "rows of the stores, kept decoded", decoded_bytes)
    return decoded_bytes


def default_budget(available: int) -> int:
    """Return the budget for memory="auto": four fifths of the available bytes."""
    return available * 4 // 5
