"""One batch on the device: what the stream hands over, and what a solver's step takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array


@dataclass(frozen=True, slots=True)
class Batch:
    """Valid until the next one is asked for, so copy what must stay.

    X : (m, d), float32 or float64. Y : (m, c), of the dtype of X. rows : (m,) int64 row numbers,
    on the host. w : (m,) sample weights in the dtype of X, or None, which are all 1. epoch, index,
    last : its place in the stream, and whether its epoch ends with it. n_rows : of the batch as a
    whole, of which another rank may have some; 0 where X has them all.
    On the CPU, X is a view of the loader's memory where nothing had to be cast.
    """

    X: Array
    Y: Array
    rows: npt.NDArray[np.int64]
    w: Array | None = None
    epoch: int = 0
    index: int = 0
    last: bool = False
    n_rows: int = 0

    @property
    def whole(self) -> int:
        """Rows of all ranks."""
        return self.n_rows or len(self.X)
