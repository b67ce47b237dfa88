"""What a plan starts from: the sizes of the data, the model and the machine. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass

from streamkern.planning.center_costs import Selection
from streamkern.planning.costs import CPU, Costs

MiB = 1 << 20
TOLD_APART = 64
"""Bytes for a row of a unit, while it is found out which of them are left out of a run."""


@dataclass(frozen=True)
class ProblemShape:
    """What is given: sizes of the data, the model and the machine.

    n_rows : rows per epoch (virtual ones included). d, c : features and outputs.
    row_bytes : a row of X and y in storage. unit_rows : rows that one read brings.
    itemsize : 4 or 8. threads : tile threads. width : columns of a prepared row.
    tile_bytes : a thread's tile. library_bytes : code that the backend loads.
    feed_arrays : of a batch that the feed holds: the cast rows, and what each transform makes.
    transformed : bytes of an entry of X while it goes through the transforms.
    point_bytes : a prepared row, if it does not hold `width` of `itemsize`. scratch_bytes : to
    prepare rows in. staging : batches in the ring that feeds a device with memory of its own.
    readers : units read at once at most while training; 0 is one for each thread.
    units_in_hand : units read ahead, and in use, where they are read one after the other.
    saving : at most this much more is held while arrays go to remote storage. kept : whether
    there are checkpoints. selection : of the centers, where that takes memory and time of its own.
    repeats : whether every epoch brings the same rows. whole : whether no other rows will follow
    them. rows_are_centers : whether every row is a center, once, and no others will follow.
    ridge : whether there is one, or may be.
    finds_ridge : whether it is left open. finds_bandwidth : whether that is.
    learns_metric : whether that is asked for. metric : bytes of one in float64, given or learned.
    n_stored : row v is made from the stored row v mod n_stored; 0 stands for n_rows.
    hides_copies : whether that is so of some rows only, see `BaseSource`.
    set_aside : rows that are validated on after every pass, see `validation`. set_apart : those
    that the finished model is calibrated by. read_rows : rows that
    a read of the data decodes, where some are left out; 0 stands for unit_rows.
    ranks : that share the steps. center_ranks : of these, among which the centers are shared out.
    streams_centers : whether rank 0 then tells the others of the centers while it reads them; else
    it has all of them at a time. reads_stripes : whether each reads its own from the run that is
    continued. goes_on : whether the run begins from the weights of another one.
    features : "kernel", "nystrom" or "fourier"; p counts the latter.
    classes : whether the targets are. several : whether they are values, two or more, of which
    each may have its own ridge. posterior : whether it is asked for.
    draws : whether random transforms run where X is floating.
    float64 : time of a FLOP in it over that of one in the precision of the run. costs : of the
    machine.
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
        """Rows that are not the same, over all epochs."""
        return self.n_rows if self.repeats else self.n_rows * self.epochs

    @property
    def evaluated(self) -> int:
        """Time of an entry of a kernel matrix, see `Costs`, before it is multiplied."""
        return self.costs.entry + int(2 * self.d * self.costs.points)

    def of_rank(self, n: int) -> int:
        """What a rank has of n things that all ranks share out."""
        return -(-n // self.ranks)

    def of_row(self, n: int) -> int:
        """What a rank has of n rows of a batch."""
        return -(-n * self.center_ranks // self.ranks)

    def in_setup(self, n: int) -> int:
        """What a rank has of n centers in the setup."""
        return n if self.center_ranks == 1 else self.of_rank(n)

    def of_column(self, n: int) -> int:
        """What a rank has of n centers in the steps."""
        return -(-n // self.center_ranks)

    @property
    def cycled(self) -> int | None:
        """Rows over which the stream cycles; None where each of them is new."""
        return self.n_rows if self.repeats and self.whole else None

    @property
    def read_bytes(self) -> int:
        """Of a unit as it is read, half of what telling rows to be left out takes among them."""
        if not self.read_rows:
            return self.unit_rows * self.row_bytes
        return self.read_rows * (self.row_bytes + TOLD_APART // 2)

    @property
    def point(self) -> int:
        """Bytes of a prepared row."""
        return self.point_bytes or self.width * self.itemsize
