"""Rows used in the setup: a sample of the stream, and the centers that are rows of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.kernels.points import Points


@dataclass(frozen=True)
class Sample:
    """Rows of the stream that are used in the setup.

    X : points with the left side (n).
    Y : (n, c) targets.
    root : (n,) square roots of the sample weights, or None.
    fresh : first row that is not also in the other sample.
    place : (n,) on the host, index of the center that a row is, or -1; None: no row is one.
    ranks : ranks, each of which has some of the rows; SINGLE: this is all of them.
    """

    X: Points
    Y: Array
    root: Array | None = None
    fresh: int = 0
    place: npt.NDArray[np.int64] | None = None
    ranks: Communicator = SINGLE

    def __len__(self) -> int:
        return len(self.X)

    def shared(self, ranks: Communicator) -> Sample:
        """Return this rank's stripe of the rows."""
        own = ranks.stripe(len(self))
        root, place = (None if a is None else a[own] for a in (self.root, self.place))
        return Sample(self.X[own], self.Y[own], root, self.fresh, place, ranks)

    def outside(self, block: slice) -> int:
        """Return how many rows of all ranks are no centers of a block. Collective call."""
        mine = len(self) - int(self.in_block(block).sum())
        return int(self.ranks.allgather([mine]).sum())

    @property
    def n_rows(self) -> int:
        """Number of rows of all ranks. Collective call."""
        return int(self.ranks.allgather([len(self)]).sum())

    def in_block(self, block: slice) -> npt.NDArray[np.bool_]:
        """Return which rows are centers of a block."""
        if self.place is None:
            return np.zeros(len(self), bool)
        inside: npt.NDArray[np.bool_] = (self.place >= block.start) & (self.place < block.stop)
        return inside

    @property
    def n_fresh(self) -> int:
        """Number of rows, at the end, that nothing was fitted to, of a result of `of_no_center`.

        Centers that are rows are known, in a sample or not.
        """
        if self.place is not None and (self.place >= 0).any():
            return 0
        return len(self) - self.fresh

    def of_no_center(self, backend: Backend) -> Sample:
        """Return the rows that are not centers, or all rows if each is one."""
        if self.place is None or (self.place < 0).sum() in (0, len(self)):
            return self
        rows = np.flatnonzero(self.place < 0)
        kept = backend.asarray(rows)
        root = None if self.root is None else self.root[kept]
        return Sample(self.X[kept], self.Y[kept], root, int((rows < self.fresh).sum()))


@dataclass(frozen=True)
class CenterTargets:
    """The centers as rows of the stream.

    counts : (p,) on the host, number of rows that equal a center.
    weights : (p,) sum of their sample weights.
    Y : (p, c) their weighted mean targets.
    n_rows : number of rows of the stream.
    whole : whether no other rows will follow these.
    """

    counts: npt.NDArray[np.int64]
    weights: Array
    Y: Array
    n_rows: int
    whole: bool = True

    def share(self, block: slice) -> float:
        """Return the fraction of the stream's rows that are centers of a block."""
        return float(self.counts[block].sum()) / self.n_rows

    def part(self, own: slice) -> CenterTargets:
        """Return the targets of a slice of the centers."""
        return replace(self, counts=self.counts[own], weights=self.weights[own], Y=self.Y[own])


def by_center(
    backend: Backend, place: npt.NDArray[np.int64], Y: npt.NDArray[Any], w: npt.NDArray[Any] | None,
    *, p: int, n_rows: int,
) -> CenterTargets:  # fmt: skip
    """Return the targets of the centers, from rows that are centers.

    place : (q,) index of the center that a row is.
    Y : (q, c) targets.
    w : (q,) sample weights, or None.
    """
    w = np.ones(len(place), Y.dtype) if w is None else w
    weights, sums = np.zeros(p, Y.dtype), np.zeros((p, Y.shape[1]), Y.dtype)
    np.add.at(weights, place, w)
    np.add.at(sums, place, w[:, None] * Y)
    sums /= np.where(weights > 0, weights, 1)[:, None]
    counts = np.bincount(place, minlength=p)
    return CenterTargets(counts, backend.asarray(weights), backend.asarray(sums), n_rows)


def effective_rows(S: Sample, known: CenterTargets | None) -> float:
    """Return the number of equally weighted rows whose mean has the variance of the sample's."""
    whole = slice(0, np.iinfo(np.int64).max)
    q = 0 if known is None else int(known.counts.sum())
    n = max(S.n_rows, q) if known is None else known.n_rows
    others = S.outside(whole)
    return 1 / ((1 - q / n) ** 2 / max(1, others) + q / n**2)
