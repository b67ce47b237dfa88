"""One batch on the device, which the stream yields and a solver's step takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of m rows.

    Its arrays are valid only until the next batch is requested.

    X : (m, d), float32 or float64; on the CPU a view of the loader's memory unless it was cast.
    Y : (m, c) targets, in the dtype of X.
    row_ids : (m,) int64 row numbers in the source, on the host; of augmented rows, virtual ones.
    w : (m,) sample weights in the dtype of X; None if all are 1.
    epoch : epoch of the batch, from 0.
    index : position of the batch in its epoch, from 0.
    last : whether the epoch ends with this batch.
    n_rows : rows of the batch on all ranks together; 0 if X has all of them.
    """

    X: Array
    Y: Array
    row_ids: npt.NDArray[np.int64]
    w: Array | None = None
    epoch: int = 0
    index: int = 0
    last: bool = False
    n_rows: int = 0

    @property
    def n_global_rows(self) -> int:
        """Number of rows of the batch on all ranks together."""
        return self.n_rows or len(self.X)
