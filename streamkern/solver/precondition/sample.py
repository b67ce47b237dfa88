"""Rows of the stream that setup works with, some of which may be centers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.kernels.points import Points
from streamkern.solver.precondition.known import Known


@dataclass(frozen=True)
class Sample:
    """Rows of the stream that setup works with: X, points with the left side (n); Y : (n, c);
    root : (n,) square roots of the sample weights, or None. fresh : first row that is not in the
    other sample as well. place : (n,) on the host, which center a row is, or -1; None: none is."""

    X: Points
    Y: Array
    root: Array | None = None
    fresh: int = 0
    place: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.X)

    def in_block(self, block: slice) -> npt.NDArray[np.bool_]:
        """Which rows are centers of a block."""
        if self.place is None:
            return np.zeros(len(self), bool)
        inside: npt.NDArray[np.bool_] = (self.place >= block.start) & (self.place < block.stop)
        return inside

    def of_no_center(self) -> Sample:
        """The rows that are no center; all of them where each one is."""
        if self.place is None or (self.place < 0).sum() in (0, len(self)):
            return self
        kept = np.flatnonzero(self.place < 0)
        root = None if self.root is None else self.root[kept]
        return Sample(self.X[kept], self.Y[kept], root, int((kept < self.fresh).sum()))


def effective_rows(S: Sample, known: Known | None) -> float:
    """Rows that count alike whose mean has the variance of the sample's."""
    whole = slice(0, np.iinfo(np.int64).max)
    q = 0 if known is None else int(known.counts.sum())
    n = max(len(S), q) if known is None else known.n_rows
    others = len(S) - int(S.in_block(whole).sum())
    return 1 / ((1 - q / n) ** 2 / max(1, others) + q / n**2)
