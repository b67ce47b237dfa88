"""What is known of the centers before a row is streamed: those that are rows of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend


@dataclass(frozen=True)
class Known:
    """The centers as rows of the stream.

    counts : (p,) on the host, rows that equal a center. weights : (p,) sum of their sample weights.
    Y : (p, c) their weighted mean targets. n_rows : of the stream.
    """

    counts: npt.NDArray[np.int64]
    weights: Array
    Y: Array
    n_rows: int

    def share(self, block: slice) -> float:
        """Of the rows of the stream, that are centers of a block."""
        return float(self.counts[block].sum()) / self.n_rows


def by_center(
    backend: Backend, place: npt.NDArray[np.int64], Y: npt.NDArray[Any], w: npt.NDArray[Any] | None,
    *, p: int, n_rows: int,
) -> Known:  # fmt: skip
    """Of rows that are centers: place (q,), which one each is. Y : (q, c). w : (q,) or None."""
    w = np.ones(len(place), Y.dtype) if w is None else w
    weights, sums = np.zeros(p, Y.dtype), np.zeros((p, Y.shape[1]), Y.dtype)
    np.add.at(weights, place, w)
    np.add.at(sums, place, w[:, None] * Y)
    sums /= np.where(weights > 0, weights, 1)[:, None]
    counts = np.bincount(place, minlength=p)
    return Known(counts, backend.asarray(weights), backend.asarray(sums), n_rows)
