"""Inputs of a plan: sizes of the data, the model and the machine, and costs, as numbers.

A plan compares the setup with the steps, and methods with each other, before anything is measured.
`Costs` are therefore in FLOPs of a matrix product: other work counts as the number of FLOPs that
take the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

CPU_ENTRY: Final = 400
"""`Costs.entry` of a CPU: a distance, an exponential, and a number that is written once and read
twice. Measured on two cores with 200 GFLOP/s."""


@dataclass(frozen=True)
class Costs:
    """Costs in FLOPs of a matrix product in the precision of the run, float32 or float64.

    entry : cost of a kernel value, without its products.
    column : cost of a kernel value for each column that a product with K has beside the outputs.
    apply : cost of an entry of a block's preconditioner in a step, which reads it twice, for any
        number of outputs.
    half_apply : `apply` for a preconditioner in float16.
    points : time of a FLOP in a product of points, relative to other products.
    setup : FLOPs that the setup of a block may take in any run, as they need only a few seconds.
    sweeps : FLOPs that the sweeps over all blocks may take in any run, for the same reason.
    max_batch : largest batch size that is chosen automatically.
    basis : source of the numbers, for a plan.
    """

    entry: int
    column: int
    apply: int
    half_apply: int
    points: float
    setup: int
    sweeps: int
    max_batch: int
    basis: str


CPU: Final = Costs(CPU_ENTRY, 0, 80, 80, 1.0, 3 * 10**11, 10**12, 4096, "measured on two cores")
"""Costs on a CPU with 200 GFLOP/s. `setup` then takes about two seconds, and `sweeps` one or two,
because most of their time is spent on kernel values, for which `entry` is the cost with NumPy.
`entry` covers all columns. `half_apply` is no lower than `apply`: a CPU multiplies in float32."""

DEVICE_FLOPS, DEVICE_FAST, DEVICE_BANDWIDTH = 52.5e12, 545e12, 1.9e12
"""Speeds of an H100, measured by `tools/gpu_check.py` (benchmarks/results/gpu_h100.json): FLOPs per
second in float32 and in half precision, for 60 000 centers with 784 features; and bytes per second
when a matrix is multiplied with ten columns. A copy moves 3e12 bytes per second."""
DEVICE_ENTRY: Final = 428
"""`Costs.entry` of a device: applying the kernel to a product, a product with K, and one with its
transpose take 8 ps per kernel value. Measured with ten columns, so without sketches."""
DEVICE_COLUMN: Final = 2
"""`Costs.column` of a device: the FLOPs of a column, not measured. Reading K is part of `entry`."""
DEVICE_APPLY: Final = 124
"""`Costs.apply` of a device: reading the triangular half of H twice takes 4.2 ps per entry of H."""
DEVICE_HALF_APPLY: Final = DEVICE_APPLY // 2
"""`Costs.half_apply` of a device: half of the bytes, not measured."""
DEVICE_POINTS: Final[Mapping[str, float]] = MappingProxyType(
    {"exact": 1.0, "float64": 1.0, "high": 0.24, "fast": 0.097, "integer": 0.092}
)
"""`Costs.points` of a device for each precision, from two measurements. "high" takes three products
in half precision, at up to 727 TFLOP/s."""
DEVICE_MAX_BATCH: Final = 16_384
"""`Costs.max_batch` of a device."""


def device_costs(precision: str) -> Costs:
    """Return the costs of a GPU. precision : one of `kernels.PRECISIONS`."""
    speedup = DEVICE_FLOPS / 200e9
    return Costs(
        DEVICE_ENTRY, DEVICE_COLUMN, DEVICE_APPLY, DEVICE_HALF_APPLY, DEVICE_POINTS[precision],
        int(CPU.setup * speedup), int(CPU.sweeps * speedup), DEVICE_MAX_BATCH,
        "measured on an H100",
    )  # fmt: skip


@dataclass(frozen=True)
class Selection:
    """Cost of a selector that reads more rows than it keeps as centers.

    first : number of rows that it reads first, from which it starts.
    rows : number of rows that it reads.
    flops : leading terms of its FLOPs.
    buffers : (name, bytes) of its large buffers.
    streamed : whether it streams the rows and computes on the host; otherwise it reads all rows
        once and computes on the device.
    library_bytes : bytes of code that is loaded for it, and stays in memory.
    """

    first: int
    rows: int
    flops: int
    buffers: tuple[tuple[str, int], ...]
    streamed: bool = False
    library_bytes: int = 0

    @property
    def total(self) -> int:
        """Bytes of all buffers."""
        return sum(size for _, size in self.buffers)


MiB = 1 << 20
SPLIT_ROW_BYTES = 64
"""Bytes per row of a unit that are needed to determine which rows the run leaves out."""


@dataclass(frozen=True, kw_only=True)
class ProblemShape:
    """Sizes of the data, the model and the machine, and the choices that a plan depends on.

    The data:

    n_rows : number of rows per epoch, with copies.
    epochs : number of epochs.
    d : number of features.
    c : number of outputs.
    row_bytes : bytes of a stored row, X and y.
    unit_rows : largest number of rows in a unit.
    read_rows : number of rows that a read decodes if some are left out of the run; 0: unit_rows.
    n_stored : number of stored rows; row v is made from stored row v mod n_stored; 0: n_rows.
    hides_copies : whether only some rows are copies of stored rows, see `BaseSource`.
    repeats : whether every epoch has the same rows.
    complete : whether the data are complete, so that no other rows will follow.
    classes : whether the targets are classes.
    several_targets : whether there are several numeric targets, each of which may have its own
        ridge.
    transform_itemsize : bytes of an entry of X in the transforms.
    draws : whether random transforms are applied to floating-point features.

    The model:

    p : number of centers; for "fourier", of random features.
    features : "kernel", "nystrom" or "fourier".
    rows_are_centers : whether the data are complete and every row is a center, exactly once.
    selection : cost of choosing the centers; None if it is negligible.
    has_initial_weights : whether the run starts from the weights of another one.
    metric_bytes : bytes of the given or learned metric in float64; 0 without a metric.
    metric_rows : number of rows from which a metric is learned; 0 if none is.
    tree_rows : number of rows from which the trees of the kernel are chosen; 0 if none are.
    finds_bandwidth : whether the bandwidth is chosen automatically.
    ridge : whether the solver has a ridge that is not 0.
    finds_ridge : whether the ridge is chosen automatically.
    squares : whether the loss is the squared error.
    posterior : whether a posterior is requested.
    n_validation_rows : number of validation rows, which are evaluated after every epoch.
    n_calibration_rows : number of calibration rows.
    left_out : whether leave-one-out predictions replace calibration rows; methods whose centers are
        all rows need no memory for them.
    writes_checkpoints : whether checkpoints are written.
    upload_bytes : largest number of additional bytes while arrays are uploaded to remote storage.

    The machine, and how it computes:

    itemsize : bytes of a float in the precision of the run, 4 or 8.
    widened : see `Sizes`.
    float64 : time of a FLOP in float64, relative to the precision of the run.
    costs : costs of the machine.
    threads : number of threads that compute tiles.
    readers : largest number of units that are read at the same time in training; 0: one per thread.
    units_in_hand : number of units read ahead and in use, where units are read in order.
    batch_size : number of rows of a step if the user has set it; None: the method chooses.
    width : number of columns of a prepared row.
    point_bytes : bytes of a prepared row; None: `width` entries of `itemsize`.
    scratch_bytes : scratch memory of a thread that prepares rows.
    left_bytes : bytes of the prepared left points that a product holds at once.
    tile_bytes : bytes of a thread's tile of a kernel matrix.
    library_bytes : bytes of code that the backend loads.
    feed_arrays : number of copies of a batch in the feed: the cast rows, and the output of each
        transform.
    staging : number of batches in the device's ring of uploads; 0 on the CPU.

    Several ranks:

    ranks : number of ranks that share the steps.
    center_ranks : number of ranks over which the centers are partitioned; it divides `ranks`.
    streams_centers : whether rank 0 broadcasts centers while it reads them; otherwise it holds all
        of them at once.
    reads_stripes : whether each rank reads its stripe of the centers from the parent run.
    """

    n_rows: int
    epochs: int
    d: int
    c: int
    row_bytes: int
    unit_rows: int
    read_rows: int = 0
    n_stored: int = 0
    hides_copies: bool = False
    repeats: bool = True
    complete: bool = True
    classes: bool = False
    several_targets: bool = False
    transform_itemsize: int = 4
    draws: bool = False

    p: int
    features: str = "kernel"
    rows_are_centers: bool = False
    selection: Selection | None = None
    has_initial_weights: bool = False
    metric_bytes: int = 0
    metric_rows: int = 0
    tree_rows: int = 0
    finds_bandwidth: bool = False
    ridge: bool = True
    finds_ridge: bool = False
    squares: bool = True
    posterior: bool = False
    n_validation_rows: int = 0
    n_calibration_rows: int = 0
    left_out: bool = False
    writes_checkpoints: bool = True
    upload_bytes: int = 0

    itemsize: int
    widened: bool = False
    float64: float = 2.0
    costs: Costs = CPU
    threads: int
    readers: int = 0
    units_in_hand: int = 3
    batch_size: int | None = None
    width: int
    point_bytes: int | None = None
    scratch_bytes: int = 0
    left_bytes: int = 0
    tile_bytes: int
    library_bytes: int = 0
    feed_arrays: int = 2
    staging: int = 0

    ranks: int = 1
    center_ranks: int = 1
    streams_centers: bool = False
    reads_stripes: bool = False

    @property
    def search_rows(self) -> int:
        """Number of rows from which the metric and the trees of the kernel are chosen."""
        return max(self.metric_rows, self.tree_rows)

    @property
    def n_samples(self) -> int:
        """Number of distinct rows over all epochs."""
        return self.n_rows if self.repeats else self.n_rows * self.epochs

    @property
    def entry_cost(self) -> int:
        """Cost of evaluating a kernel value, in the unit of `Costs`."""
        return self.costs.entry + int(2 * self.d * self.costs.points)

    @property
    def on_device(self) -> bool:
        """True if the run computes on a device; buffers on the host are then listed apart."""
        return self.staging > 0

    def host_phase(self, phase: str) -> str:
        """Return the phase in which a buffer on the host is listed: "host" beside a device."""
        return "host" if self.on_device else phase

    def per_rank(self, n: int) -> int:
        """Return the largest number of n items that a rank has if all ranks share them."""
        return -(-n // self.ranks)

    def rows_per_rank(self, n: int) -> int:
        """Return the largest number of the n rows of a batch that a rank has."""
        return -(-n * self.center_ranks // self.ranks)

    def setup_centers_per_rank(self, n: int) -> int:
        """Return the largest number of n centers that a rank has in the setup."""
        return n if self.center_ranks == 1 else self.per_rank(n)

    def centers_per_rank(self, n: int) -> int:
        """Return the largest number of n centers that a rank has in the steps."""
        return -(-n // self.center_ranks)

    @property
    def cycled(self) -> int | None:
        """Number of rows over which the stream cycles; None if it has new rows in every epoch."""
        return self.n_rows if self.repeats and self.complete else None

    @property
    def read_bytes(self) -> int:
        """Bytes of a unit while it is read, with half of `SPLIT_ROW_BYTES` if rows are left out.

        Half, because callers count a unit that is being decoded twice.
        """
        if not self.read_rows:
            return self.unit_rows * self.row_bytes
        return self.read_rows * (self.row_bytes + SPLIT_ROW_BYTES // 2)

    @property
    def prepared_row_bytes(self) -> int:
        """Bytes of a prepared row."""
        return self.point_bytes or self.width * self.itemsize
