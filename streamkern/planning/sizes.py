"""What a plan is made of: the data and the machine, what the user fixed, and the sizes of a run.

Pure integers, no arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamkern.planning.center_costs import Selection

MiB = 1 << 20
SolverName = Literal[
    "block", "sgd", "eigenpro1", "eigenpro2", "eigenpro3", "eigenpro4", "direct", "falkon"
]
IN_PLACE = ("sgd", "eigenpro1", "eigenpro2")
"""The methods whose centers, with a kernel, are the rows of the training set."""
ON_FEATURES = ("block", "sgd", "eigenpro1", "direct")
"""The methods that train explicit features."""
FROM_CENTERS = ("direct", "falkon")
"""Solvers whose setup takes no sample of the stream, and which hold p x p matrices."""
INNER_NYSTROM = 2000
"""Rows of the sample of an iterative projection."""


@dataclass(frozen=True)
class Problem:
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
    repeats : whether every epoch brings the same rows. ridge : whether there is one.
    float64 : time of a FLOP in it over that of one in the precision of the run.
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
    ridge: bool = True
    float64: float = 2.0

    @property
    def summed(self) -> int:
        """Rows that the direct solver sums: it stops where the same ones would come again."""
        return self.n_rows if self.repeats else self.n_rows * self.epochs

    @property
    def point(self) -> int:
        """Bytes of a prepared row."""
        return self.point_bytes or self.width * self.itemsize


@dataclass(frozen=True)
class Wishes:
    """What the user fixed; None where the program may choose. features : see `ModelConfig`.
    steps : a setting of the block solver's steps that is set."""

    solver: str = "auto"
    features: str = "kernel"
    batch_size: int | None = None
    block_size: int | None = None
    n_nystrom: int | None = None
    level: int | None = None
    period: int | None = None
    projection: str | None = None
    steps: str | None = None


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
