"""Sums over some of the ranks of a grid: those with the same rows of a batch, or the same centers.

The collective of XGBoost knows all ranks and no part of them. So whoever is to have a sum of its
own has a place of its own in an array of all, filled up with zeros, and that is added up over all
ranks: as many latencies, and more numbers.
"""

from __future__ import annotations

from streamkern.backend.base import Array, Backend, tiles
from streamkern.backend.rank_grid import CenterPartition, RankGrid
from streamkern.backend.ranks import Communicator
from streamkern.planning.memory import RANK_SLAB_BYTES


class RowSums:
    """Over the ranks of one row of a grid, each with other centers.

    In R times the numbers, c of each row of a batch. A sum of g or u of the block solver, which is
    over all ranks anyway, has b c of them, as a rule more.

    first : the rows of a batch before this rank's, where both rows and centers are shared out.
    """

    def __init__(self, ranks: Communicator, grid: RankGrid, backend: Backend) -> None:
        self._ranks, self._grid, self._backend = ranks, grid, backend
        self._n = self.first = 0

    def begin(self, m: int, n: int) -> None:
        """A batch of n rows follows, of which this rank has m. Everybody calls it."""
        grid = self._grid
        if grid.columns == 1 or grid.rows == 1:
            return
        held = self._ranks.allgather([m]).reshape(grid.rows, grid.columns)
        assert (held == held[:, :1]).all(), "ranks of a row have other rows"
        self.first, self._n = int(held[: grid.row, 0].sum()), n

    def sum(self, a: Array) -> Array:
        """a <- its sum over the ranks of the row, with the same bits on these. a : (m, k)."""
        if self._grid.columns == 1:
            return a
        if self._grid.rows == 1:
            return self._ranks.sum(a, self._backend)
        own = slice(self.first, self.first + len(a))
        with self._backend.workspace((self._n, a.shape[1]), a.dtype) as whole:
            whole[...] = 0
            whole[own] = a
            self._ranks.sum(whole, self._backend)
            a[...] = whole[own]
        return a


class ColumnSums:
    """Over the ranks of one column of a grid, which have the same centers, and other rows.

    In C times the numbers, a few of each center, of `RANK_SLAB_BYTES` at a time. Every step of
    EigenPro has such a sum, so a rank's centers are slices: indices would have to be sent to the
    device.
    """

    def __init__(self, ranks: Communicator, share: CenterPartition, backend: Backend) -> None:
        self._ranks, self._share, self._backend = ranks, share, backend

    def sum(self, a: Array) -> Array:
        """a <- its sum over the ranks of the column, with the same bits on these. a : (q, k), of
        its centers. Everybody calls it."""
        share = self._share
        if share.grid.rows == 1:
            return a
        if share.whole:
            return self._ranks.sum(a, self._backend)
        row_bytes = a.shape[1] * a.dtype.itemsize
        for part in tiles(share.p, max(1, RANK_SLAB_BYTES // row_bytes)):
            shape = part.stop - part.start, a.shape[1]
            with self._backend.workspace(shape, a.dtype) as whole:
                whole[...] = 0
                for at, here in share.within(part):
                    whole[at] = a[here]
                self._ranks.sum(whole, self._backend)
                for at, here in share.within(part):
                    a[here] = whole[at]
        return a

    def of_first(self, a: Array) -> Array:
        """a <- what the first rank of the column has: what ranks work out by themselves may differ
        by rounding. Everybody calls it."""
        if self._share.grid.row:
            a[...] = 0
        return self.sum(a)
