"""Bytes: every buffer that a run will hold, phase by phase.

The run allocates what is listed here and nothing else of size; `streamkern plan` prints the list
before anything is started, and a test compares the peak with it. Pure integers, no arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streamkern.planning.sizes import FROM_CENTERS, INNER_NYSTROM, MiB, Problem, Sizes

# Python objects, thread stacks, BLAS buffers and allocator slack beside the arrays.
OVERHEAD = 64 * MiB
ROW_ID = 8
"""Bytes of a row's number, which travels with it."""
FEATURE_COLUMNS = 4096
"""Features that setup evaluates at once, where they do not depend on each other."""
CHUNK = 512
"""Rows and columns of what a thread does at once of a product of matrices."""
GRAM_TILE = CHUNK * CHUNK * 8
"""Of a thread that adds to a p x p matrix."""
SAVED_CHUNK = 64 * MiB
"""Of an array in a run directory, at most."""
EVALUATED_ROWS = 1024
"""Rows that a model is evaluated on at once, while it is trained and later."""
SKETCH = 16
"""Columns of a sketch of a block's leverage. With 16 the loss of several blocks was that of one in
the end (0.993 to 0.996 of the exact one in place of 1.028 to 1.037), on a smooth problem."""
LEVERAGE_ROWS = 256
"""Rows on which setup measures a leverage that only has to be about right."""


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


def count(problem: Problem, sizes: Sizes) -> Buffers:
    """Every buffer of the run. Keep in step with `solver.build` and `train`."""
    buffers = Buffers()
    _count_stream(buffers, problem, sizes)
    if problem.selection is not None:
        _count_selection(buffers, problem, sizes)
    if sizes.solver == "block":
        _count_block(buffers, problem, sizes)
    elif sizes.solver in FROM_CENTERS:
        _count_from_centers(buffers, problem, sizes)
    elif sizes.linear:
        _count_linear(buffers, problem, sizes)
    else:
        _count_eigenpro(buffers, problem, sizes)
    return buffers


def _count_stream(buffers: Buffers, problem: Problem, sizes: Sizes) -> None:
    """What every run holds: itself, the centers, rows on their way, weights, what is being saved.

    What a device has no use for counts on the "host" beside it.
    """
    item, p, c, m = problem.itemsize, problem.p, problem.c, sizes.batch_size
    d, s, h, point = problem.d, sizes.n_sample, sizes.n_probe, problem.point
    add, apart = buffers.add, problem.staging > 0
    add("host" if apart else "always", "interpreter, stacks, allocator", OVERHEAD)
    if problem.library_bytes:
        add("always", "compiler", problem.library_bytes)
    add("always", "tiles", problem.threads, problem.tile_bytes)
    add("always", "rows being prepared", problem.threads, problem.scratch_bytes)
    add("always", "centers", p, point)
    # Without a ridge, or with one that comes from a factor, they are the columns of K(X, Z) only,
    # once setup is over.
    one = sizes.solver == "block" and sizes.block_size == p
    columns = (one or not problem.ridge) and (
        sizes.solver in ("block", *FROM_CENTERS) or sizes.linear
    )
    for phase in ("sample", "setup") if columns else ("always",):
        add(phase, "centers, left side", p, point)
    if not apart:  # a device walks the columns in order
        by_row = sizes.solver in ("block", "direct") or sizes.linear
        rows = max(m, h) if by_row else max(m, h, s, p)
        outputs = 2 * c if sizes.solver == "falkon" else c
        sums = n_groups(outputs) * outputs
        add("always", "partial sums of products", sums, rows, itemsize=item)
    # The raw rows live until the prepared ones exist; a unit being decoded counts twice.
    wide = max(item, problem.transformed)
    add("sample", "raw centers", p, problem.row_bytes + d * wide)
    add("sample", "raw sample and probe", s + h, problem.row_bytes + d * wide + c * item)
    add("sample", "prepared sample and probe", s + h, point)
    add("host" if apart else "sample", "units being read", _in_hand(problem))
    add("host" if apart else "train", "loader", loader_bytes(problem, sizes))
    if apart:
        # Setup and checkpoints go between a disk and the device by chunks of at most 64 MiB, which
        # Zarr encodes beside what it was given.
        add("host", "centers as chosen", p, d, itemsize=item)
        add("host", "a chunk being saved or loaded, encoded", 2, SAVED_CHUNK)
        add("host", "copies for a checkpoint", 4 * p, c, itemsize=item)
    if problem.saving:
        factors = 2 if problem.ridge and sizes.block_size == p else 1
        saved = p * (problem.d + factors * sizes.block_size) * item
        add("host" if apart else "setup", "setup on its way", min(problem.saving, saved))
        saved = 4 * p * c * item + (p * p * 8 if sizes.solver == "direct" else 0)
        add("host" if apart else "train", "checkpoint on its way", min(problem.saving, saved))
    if apart:
        for phase, what in (("train", "staging"), ("host", "staging, pinned")):
            add(phase, what, problem.staging * m, problem.row_bytes + ROW_ID)
    add("train", "batch, prepared", 2 * m, point + c * item)
    add("train", "batch, cast and transformed", problem.feed_arrays * m, d + c, itemsize=item)
    add("train", "rows being evaluated", EVALUATED_ROWS,
        problem.row_bytes + point + d * max(item, problem.transformed) + 4 * c * item)  # fmt: skip
    add("train", "weights, average, last good, copies for a checkpoint", 7 * p, c, itemsize=item)


def _count_selection(buffers: Buffers, problem: Problem, sizes: Sizes) -> None:
    """Of the centers, before anything else exists."""
    assert problem.selection is not None
    apart = problem.staging > 0
    means = problem.selection.method == "kmeans"  # on the host, whatever the device
    for what, size in problem.selection.buffers:
        buffers.add("host" if apart and means else "centers", what, size)
    if not apart:
        reading = loader_bytes(problem, sizes) if means else _in_hand(problem)
        buffers.add("centers", "units being read", reading)


def _in_hand(problem: Problem) -> int:
    """Units read one after the other; one that is being decoded counts twice."""
    return (2 * problem.units_in_hand - 1) * problem.unit_rows * problem.row_bytes


def _count_block(buffers: Buffers, problem: Problem, sizes: Sizes) -> None:
    """What `precondition.block.build_block` and `solver.block` hold."""
    add, item, p, c = buffers.add, problem.itemsize, problem.p, problem.c
    s, h = sizes.n_sample, sizes.n_probe
    n_blocks = -(-p // sizes.block_size)
    b = -(-p // n_blocks)
    add("always", "block factors H", p, b, itemsize=item)
    add("always", "weights learned from the sample", p, c, itemsize=item)
    add("setup", "sample and probe, targets", s + h, problem.point + c * item)
    add("setup", "products with targets, residuals", 3 * b + 2 * h, c, itemsize=item)
    add("setup", "raw centers", p, problem.d, itemsize=item)
    # The search for the damping takes some more rows, in the place of H: there is none yet.
    few = max(2 * LEVERAGE_ROWS - p, 0)
    solving = _count_products(buffers, problem, b)
    beside = max(b + max(few, solving), 2 * h)
    add("setup", "factors of one block, probe", 2 * b + beside, b, itemsize=item)
    add("train", "K(X, Z)", sizes.batch_size, p if sizes.keep else b, itemsize=item)
    add("train", "parts of a step", 3 * b, c, itemsize=item)
    if n_blocks > 1:  # as setup made them, and beside the block's step
        add("always", "sketches of the leverage", p, SKETCH, itemsize=item)
        add("train", "sketches beside the steps", p + sizes.batch_size, c + SKETCH, itemsize=item)
    if problem.ridge and n_blocks > 1:
        add("train", "K(Z, Z) alpha, its copy", 2 * p, c, itemsize=item)
    elif problem.ridge and sizes.features != "fourier":
        add("train", "factor of K(Z, Z)", p, p, itemsize=item)


def _count_products(buffers: Buffers, problem: Problem, b: int) -> int:
    """Parts of products of b x b matrices. Returns the rows that solving one triangular system
    with another holds besides. A device needs neither.
    """
    if problem.staging > 0:
        return 0
    part = min(b, CHUNK)
    # A tile of a Gram matrix; two products in a triangular system, of half its height and width.
    buffers.add("setup", "parts of products", problem.threads, 3 * part * part // 2,
        itemsize=problem.itemsize)  # fmt: skip
    return min(b, CHUNK // 2)


def _count_eigenpro(buffers: Buffers, problem: Problem, sizes: Sizes) -> None:
    """What SGD, EigenPro 1, 2, 3 and 4 hold on a kernel."""
    add, item, p, c, m = buffers.add, problem.itemsize, problem.p, problem.c, sizes.batch_size
    d, s, h, point = problem.d, sizes.n_sample, sizes.n_probe, problem.point
    if sizes.solver == "sgd":
        add("setup", "probe, K(probe, probe)", h, 2 * point + h * item)
        return
    if sizes.solver == "eigenpro1":
        add("always", "eigenvectors on all rows", p, sizes.level, itemsize=item)
        add("setup", "extended eigenvectors, their values", 3 * p, sizes.level + 1, itemsize=item)
        add("setup", "Nystrom rows, eigenvectors", s, 2 * point + (d + sizes.level) * item)
        add("train", "correction", p, c, itemsize=item)
    else:
        add("always", "Nystrom rows, eigenvectors", s, 2 * point + (d + sizes.level) * item)
    add("setup", "K(X_s, X_s) and workspace", 3 * s, s, itemsize=item)
    add("setup", "probe, K(probe, probe)", h, 2 * point + h * item)
    _count_projection(buffers, problem, sizes)
    if not sizes.in_place:
        add("train", "K(X, Z)", m, p, itemsize=item)
        # Cut to the critical batch, a period has more steps but no more rows than before.
        rows = sizes.period * m if sizes.period > 1 else 0
        add("train", "temporary centers", rows, point + c * item)
        add("train", "values at the centers", 3 * p, c, itemsize=item)


def _count_projection(buffers: Buffers, problem: Problem, sizes: Sizes) -> None:
    """What `projection` holds."""
    add, item, p = buffers.add, problem.itemsize, problem.p
    if sizes.projection in ("exact", "resident"):
        add("always", "K(Z, Z)", p, p, itemsize=item)
    if sizes.projection in ("resident", "inexact"):
        inner = min(INNER_NYSTROM, p)
        probed = min(2 * INNER_NYSTROM, p)
        add("setup", "eigensystem of the projection", 3 * inner, inner, itemsize=item)
        add("setup", "K(probe, probe) of the projection", probed, probed, itemsize=item)


def _count_from_centers(buffers: Buffers, problem: Problem, sizes: Sizes) -> None:
    """What `solver.direct` and `solver.falkon` hold."""
    add, item, p, c, m = buffers.add, problem.itemsize, problem.p, problem.c, sizes.batch_size
    add("train", "K(X, Z)", m, p, itemsize=item)
    add("always", "tiles of a p x p matrix", problem.threads, GRAM_TILE)
    if sizes.solver == "falkon":
        add("always", "preconditioner H", p, p, itemsize=item)
        solving = _count_products(buffers, problem, p)
        add("setup", "factors", 3 * p + solving, p, itemsize=item)
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


def _count_linear(buffers: Buffers, problem: Problem, sizes: Sizes) -> None:
    """What `linear.build_linear` and the step on its result hold."""
    add, p, item = buffers.add, problem.p, problem.itemsize
    s, h, q = sizes.n_sample, sizes.n_probe, sizes.level
    coupled = sizes.features == "nystrom"
    add("setup", "sample and probe", s + h, problem.point)
    # Twice: as it is, and turned for the product with itself.
    add("setup", "features of the sample", 2 * max(s, h), p if coupled else min(p, FEATURE_COLUMNS),
        itemsize=item)  # fmt: skip
    add("setup", "products of features", 3 * s * s + h * h, itemsize=item)
    solving = _count_products(buffers, problem, max(s, h, p if coupled else 0))
    if coupled:
        add("always", "L^-1", p, p, itemsize=item)
        add("setup", "L", p + solving, p, itemsize=item)
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
