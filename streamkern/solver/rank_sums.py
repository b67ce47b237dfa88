"""Sums over some of the ranks of a grid, with the same rows of a batch or the same centers.

The collective of XGBoost sums over all ranks, not over a part of them. So each group of ranks has
its own rows of a common array, which is filled with zeros elsewhere and summed over all ranks: the
number of latencies is the same, the number of elements larger.
"""

from __future__ import annotations

from streamkern.backend.base import Array, Backend, tiles
from streamkern.backend.rank_grid import CenterPartition, RankGrid
from streamkern.backend.ranks import Communicator
from streamkern.planning.memory import RANK_SLAB_BYTES


class RowSums:
    """Sums over the ranks of one row of a grid, each of which has other centers.

    A sum has R times the elements, c for each row of a batch. A sum of g or u of the block solver,
    which is over all ranks anyway, has b c elements, usually more.

    first : number of rows of a batch before this rank's, if both rows and centers are partitioned.
    """

    def __init__(self, ranks: Communicator, grid: RankGrid, backend: Backend) -> None:
        self._ranks, self._grid, self._backend = ranks, grid, backend
        self._n = self.first = 0

    def begin(self, m: int, n: int) -> None:
        """Prepare for a batch of n rows, of which this rank has m. Collective call."""
        grid = self._grid
        if grid.columns == 1 or grid.rows == 1:
            return
        held = self._ranks.allgather([m]).reshape(grid.rows, grid.columns)
        assert (held == held[:, :1]).all(), "ranks of a row have other rows"
        self.first, self._n = int(held[: grid.row, 0].sum()), n

    def sum(self, a: Array) -> Array:
        """Sum `a` (m, k) over the ranks of the row, in place, with the same bits on all of them."""
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
    """Sums over the ranks of one column of a grid, which have the same centers and other rows.

    A sum has C times the elements, a few for each center, and takes `RANK_SLAB_BYTES` at a time.
    Every step of EigenPro has such a sum, so a rank's centers are slices: indices would have to be
    copied to the device.
    """

    def __init__(self, ranks: Communicator, share: CenterPartition, backend: Backend) -> None:
        self._ranks, self._share, self._backend = ranks, share, backend

    def sum(self, a: Array) -> Array:
        """Sum `a` over the ranks of the column, in place, with the same bits on all of them.

        Collective call.

        a : (q, k), with a row for each of the rank's centers.
        """
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
        """Broadcast `a` from the first rank of the column, in place. Collective call.

        Results that ranks compute separately may differ by rounding.
        """
        if self._share.grid.row:
            a[...] = 0
        return self.sum(a)
