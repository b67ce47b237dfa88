"""Sums over the ranks that have the same rows of a batch."""

from __future__ import annotations

from streamkern.backend.base import Array, Backend
from streamkern.backend.rank_grid import RankGrid
from streamkern.backend.ranks import Ranks


class RowSums:
    """Over the ranks of one row of a grid, each with other centers.

    The collective of XGBoost knows all ranks and no part of them. So every row of the grid has a
    place of its own in an array of the whole batch, and that is added up over all ranks: as many
    latencies, and R times the numbers, c of each row of a batch. A sum of g or u, which is over all
    ranks anyway, has b c of them, as a rule more.
    """

    def __init__(self, ranks: Ranks, grid: RankGrid, backend: Backend) -> None:
        self._ranks, self._grid, self._backend = ranks, grid, backend
        self._first = self._n = 0

    def begin(self, m: int, n: int) -> None:
        """A batch of n rows follows, of which this rank has m. Everybody calls it."""
        grid = self._grid
        if grid.columns == 1 or grid.rows == 1:
            return
        held = self._ranks.each([m]).reshape(grid.rows, grid.columns)
        assert (held == held[:, :1]).all(), "ranks of a row have other rows"
        self._first, self._n = int(held[: grid.row, 0].sum()), n

    def sum(self, a: Array) -> Array:
        """a <- its sum over the ranks of the row, with the same bits on these. a : (m, k)."""
        if self._grid.columns == 1:
            return a
        if self._grid.rows == 1:
            return self._ranks.sum(a, self._backend)
        own = slice(self._first, self._first + len(a))
        with self._backend.workspace((self._n, a.shape[1]), a.dtype) as whole:
            whole[...] = 0
            whole[own] = a
            self._ranks.sum(whole, self._backend)
            a[...] = whole[own]
        return a
