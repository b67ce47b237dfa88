"""Inputs of a plan: the sizes of the data, the model and the machine. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass

from streamkern.planning.center_costs import Selection
from streamkern.planning.costs import CPU, Costs

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
    whole : whether the data are complete, so that no other rows will follow.
    rows_are_centers : whether every row is a center, exactly once, and the data are complete.
    ridge : whether there is a ridge, or may be.
    finds_ridge : whether the ridge is chosen automatically.
    finds_bandwidth : whether the bandwidth is chosen automatically.
    learns_metric : whether a metric will be learned.
    metric : bytes of the metric in float64, given or learned; 0: none.
    float64 : time of a FLOP in float64 over that of one in the precision of the run.
    costs : costs of the machine.
    n_stored : row v is made from stored row v mod n_stored; 0: n_rows.
    hides_copies : whether that holds for some rows only, see `BaseSource`.
    set_aside : validation rows, evaluated after every epoch.
    set_apart : calibration rows of the finished model.
    ranks : ranks that share the steps.
    center_ranks : of these, the number over which the centers are partitioned.
    streams_centers : whether rank 0 then broadcasts centers while it reads them; otherwise it holds
        all of them at once.
    goes_on : whether the run begins from the weights of another one.
    reads_stripes : whether each rank reads its own stripe from the run that is continued.
    read_rows : rows that a read decodes, where some are left out of the run; 0: unit_rows.
    features : "kernel", "nystrom" or "fourier"; p counts the random features of the last.
    classes : whether the targets are classes.
    several : whether there are two or more numeric targets, each of which may have its own ridge.
    posterior : whether a posterior is requested.
    draws : whether random transforms run where X is floating point.
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
    whole: bool = True
    rows_are_centers: bool = False
    ridge: bool = True
    finds_ridge: bool = False
    finds_bandwidth: bool = False
    learns_metric: bool = False
    metric: int = 0
    float64: float = 2.0
    costs: Costs = CPU
    n_stored: int = 0
    hides_copies: bool = False
    set_aside: int = 0
    set_apart: int = 0
    ranks: int = 1
    center_ranks: int = 1
    streams_centers: bool = False
    goes_on: bool = False
    reads_stripes: bool = False
    read_rows: int = 0
    features: str = "kernel"
    classes: bool = False
    several: bool = False
    posterior: bool = False
    draws: bool = False

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
        return self.n_rows if self.repeats and self.whole else None

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
