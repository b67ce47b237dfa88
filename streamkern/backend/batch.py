"""One batch on the device: the output of the stream and the input of a solver's step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that is valid until the next one is requested; copy arrays that must stay.

    X : (m, d), float32 or float64; on the CPU a view of the loader's memory if nothing was cast.
    Y : (m, c), of the dtype of X.
    row_ids : (m,) int64 virtual rows of the source, on the host.
    w : (m,) sample weights in the dtype of X, or None if all are 1.
    epoch, index, last : position in the stream, and whether the epoch ends with this batch.
    n_rows : rows of the batch on all ranks together; 0 if X holds all of them.
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
    def whole(self) -> int:
        """Rows of the batch on all ranks."""
        return self.n_rows or len(self.X)
