"""Inputs of a plan: the sizes of the data, the model and the machine, and costs. Pure numbers.

A plan compares the setup with the steps, and one method with another, before anything is measured.
So `Costs` are FLOPs at the speed of a matrix product; other work counts as the number of FLOPs that
take the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

ENTRY: Final = 400
"""Cost of an entry of a kernel matrix beside its products on a CPU: a distance, an exponential,
and a number written once and read twice. Measured on two cores with 200 GFLOP/s."""


@dataclass(frozen=True)
class Costs:
    """Costs in FLOPs of a product in the precision of the run, float32 or float64.

    entry : an entry of a kernel matrix, beside its products.
    apply : an entry of a block's preconditioner, which is read twice a step, for any number of
        outputs.
    points : time of a FLOP of a product of points over that of any other product.
    setup, sweeps : FLOPs that the setup of a block, and sweeps over all blocks, may always take:
        some seconds.
    most_rows : largest batch that is chosen automatically.
    basis : source of the numbers, in words.
    """

    entry: int
    apply: int
    points: float
    setup: int
    sweeps: int
    most_rows: int
    basis: str


CPU: Final = Costs(ENTRY, 80, 1.0, 3 * 10**11, 10**12, 4096, "measured on two cores")
"""Costs at 200 GFLOP/s, where `setup` takes about two seconds and `sweeps` one or two, as most
of them is `entry`, the cost of NumPy. On bike, p = 8000, p/4, one epoch: 14 sweeps give 1.064
times the loss of the exact model and 24 give 1.054, at three seconds more on one core."""

DEVICE_FLOPS, DEVICE_FAST, DEVICE_BANDWIDTH = 52.5e12, 545e12, 1.9e12
"""Speeds of an H100, by `tools/gpu_check.py` (benchmarks/results/gpu_h100.json): FLOPs per
second in float32 and in half precision, for 60 000 centers of 784 features; bytes per second
of a matrix that is multiplied with ten columns. A copy moves 3e12."""
DEVICE_ENTRY: Final = 428
"""Applying the kernel to a product, a product with K and one with its transpose: 8 ps."""
DEVICE_APPLY: Final = 124
"""Reading one half of H, which is triangular, twice: 4.2 ps for both."""
DEVICE_POINTS: Final[Mapping[str, float]] = MappingProxyType(
    {"exact": 1.0, "float64": 1.0, "high": 0.24, "fast": 0.097, "integer": 0.092}
)
"""Relative times, from two runs. "high" takes three products in half precision, at up to 727
TFLOP/s."""
DEVICE_ROWS: Final = 16_384


def device_costs(precision: str) -> Costs:
    """Return the costs of a GPU. precision : one of `kernels.PRECISIONS`."""
    faster = DEVICE_FLOPS / 200e9
    return Costs(
        DEVICE_ENTRY, DEVICE_APPLY, DEVICE_POINTS[precision], int(CPU.setup * faster),
        int(CPU.sweeps * faster), DEVICE_ROWS, "measured on an H100",
    )  # fmt: skip


@dataclass(frozen=True)
class Selection:
    """Cost of a selector that reads more rows than it keeps as centers.

    first : rows that it begins with.
    rows : rows that it reads.
    flops : leading terms.
    buffers : every large buffer, (name, bytes).
    streamed : whether the rows are a stream and everything is on the host; otherwise they are read
        once, and are on the device.
    library_bytes : code that is loaded for it, and stays in memory.
    """

    first: int
    rows: int
    flops: int
    buffers: tuple[tuple[str, int], ...]
    streamed: bool = False
    library_bytes: int = 0

    @property
    def total(self) -> int:
        """Return the bytes of all buffers."""
        return sum(size for _, size in self.buffers)


MiB = 1 << 20
TOLD_APART = 64
"""Bytes per row of a unit while the rows that a run leaves out are determined."""


@dataclass(frozen=True)
class ProblemShape:
    """Sizes of the data, the model and the machine.

    n_rows : rows per epoch, virtual ones included.
    d, c : features and outputs.
    batch_size : rows of a step, where the user set them; None: the method chooses.
    row_bytes : bytes of a row of X and y in storage.
    unit_rows : rows that one read returns.
    itemsize : 4 or 8.
    threads : threads that compute tiles.
    width : columns of a prepared row.
    tile_bytes : bytes of a thread's tile.
    left_bytes : bytes of the left sides of points that a product makes at once.
    library_bytes : bytes of code that the backend loads.
    feed_arrays : copies of a batch in the feed: the cast rows, and the output of each transform.
    transformed : bytes of an entry of X in the transforms.
    point_bytes : bytes of a prepared row; None: `width` entries of `itemsize`.
    scratch_bytes : scratch memory for preparing rows.
    staging : batches in the ring that feeds a device with memory of its own; 0 on the CPU.
    readers : units read at once in training, at most; 0: one per thread.
    units_in_hand : units read ahead and in use, where they are read one after the other.
    saving : largest additional bytes held while arrays go to remote storage.
    selection : cost of choosing the centers; None if it needs no memory and time of its own.
    kept : whether checkpoints are written.
    repeats : whether every epoch yields the same rows.
    complete : whether the data are complete, so that no other rows will follow.
    rows_are_centers : whether every row is a center, exactly once, and the data are complete.
    ridge : whether there is a ridge, or may be.
    finds_ridge : whether the ridge is chosen automatically.
    finds_bandwidth : whether the bandwidth is chosen automatically.
    metric_rows : number of rows from which a metric will be learned; 0: none is.
    metric : bytes of the metric in float64, given or learned; 0: none.
    float64 : time of a FLOP in float64 over that of one in the precision of the run.
    costs : costs of the machine.
    n_stored : row v is made from stored row v mod n_stored; 0: n_rows.
    hides_copies : whether that holds for some rows only, see `BaseSource`.
    n_validation_rows : number of validation rows, which are evaluated after every epoch.
    n_calibration_rows : number of calibration rows of the finished model.
    left_out : whether each row is predicted by the others instead, if not all are centers.
    ranks : ranks that share the steps.
    center_ranks : of these, the number over which the centers are partitioned.
    streams_centers : whether rank 0 then broadcasts centers while it reads them; otherwise it holds
        all of them at once.
    has_initial_weights : whether the run begins from the weights of another one.
    reads_stripes : whether each rank reads its own stripe from the run that is continued.
    read_rows : rows that a read decodes, where some are left out of the run; 0: unit_rows.
    features : "kernel", "nystrom" or "fourier"; p counts the random features of the last.
    classes : whether the targets are classes.
    several : whether there are two or more numeric targets, each of which may have its own ridge.
    posterior : whether a posterior is requested.
    draws : whether random transforms run where X is floating point.
    squares : whether the loss is the squared error.
    widened : see `Sizes`.
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
    batch_size: int | None = None
    library_bytes: int = 0
    left_bytes: int = 0
    feed_arrays: int = 2
    transformed: int = 4
    point_bytes: int | None = None
    scratch_bytes: int = 0
    staging: int = 0
    readers: int = 0
    units_in_hand: int = 3
    saving: int = 0
    selection: Selection | None = None
    kept: bool = True
    repeats: bool = True
    complete: bool = True
    rows_are_centers: bool = False
    ridge: bool = True
    finds_ridge: bool = False
    finds_bandwidth: bool = False
    metric_rows: int = 0
    metric: int = 0
    float64: float = 2.0
    costs: Costs = CPU
    n_stored: int = 0
    hides_copies: bool = False
    n_validation_rows: int = 0
    n_calibration_rows: int = 0
    left_out: bool = False
    ranks: int = 1
    center_ranks: int = 1
    streams_centers: bool = False
    has_initial_weights: bool = False
    reads_stripes: bool = False
    read_rows: int = 0
    features: str = "kernel"
    classes: bool = False
    several: bool = False
    posterior: bool = False
    draws: bool = False
    squares: bool = True
    widened: bool = False

    @property
    def n_samples(self) -> int:
        """Return the distinct rows over all epochs."""
        return self.n_rows if self.repeats else self.n_rows * self.epochs

    @property
    def evaluated(self) -> int:
        """Cost of an entry of a kernel matrix, see `Costs`, before it is multiplied."""
        return self.costs.entry + int(2 * self.d * self.costs.points)

    def of_rank(self, n: int) -> int:
        """Return the largest share of a rank in n things that all ranks share."""
        return -(-n // self.ranks)

    def of_row(self, n: int) -> int:
        """Return the largest share of a rank in the n rows of a batch."""
        return -(-n * self.center_ranks // self.ranks)

    def in_setup(self, n: int) -> int:
        """Return the largest number of centers of a rank in the setup, of n."""
        return n if self.center_ranks == 1 else self.of_rank(n)

    def of_column(self, n: int) -> int:
        """Return the largest number of centers of a rank in the steps, of n."""
        return -(-n // self.center_ranks)

    @property
    def cycled(self) -> int | None:
        """Return the rows over which the stream cycles; None if each row is new."""
        return self.n_rows if self.repeats and self.complete else None

    @property
    def read_bytes(self) -> int:
        """Bytes of a unit as read, with half of the bytes that finding omitted rows takes."""
        if not self.read_rows:
            return self.unit_rows * self.row_bytes
        return self.read_rows * (self.row_bytes + TOLD_APART // 2)

    @property
    def point(self) -> int:
        """Return the bytes of a prepared row."""
        return self.point_bytes or self.width * self.itemsize
