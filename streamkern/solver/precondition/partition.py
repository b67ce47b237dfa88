"""Centers and rows that are partitioned over a grid of ranks: the seam between solvers and ranks.

A single rank is the trivial partition, with all rows and all centers: every sum is its argument,
and what is gathered is a view. So a solver is written once, for any grid.

The collective of XGBoost sums over all ranks, not over a part of them. So each group of ranks has
its own rows of a common array, which is filled with zeros elsewhere and summed over all ranks: the
number of latencies is the same, the number of elements larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.backend.rank_grid import CenterPartition, RankGrid, length
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import RANK_SLAB_BYTES

BROADCAST_CENTERS = 1024
"""Number of partitioned centers that are broadcast to all ranks at a time."""
Same = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class PartViews:
    """Views of some rows of an array, which are made anew for another array only.

    On a GPU each costs the host 2 us.
    """

    def __init__(self, parts: Sequence[slice]) -> None:
        self._parts, self._array, self._views = list(parts), None, list[Array]()

    def __call__(self, a: Array) -> list[Array]:
        """Return the views of `a`, one for each part."""
        if a is not self._array:
            self._array, self._views = a, [a[part] for part in self._parts]
        return self._views


def overlap(block: slice, stripe: slice) -> tuple[slice, slice]:
    """Return the rows that a block and a stripe share, as slices of the block and of the stripe."""
    first = max(block.start, stripe.start)
    stop = max(first, min(block.stop, stripe.stop))
    return (
        slice(first - block.start, stop - block.start),
        slice(first - stripe.start, stop - stripe.start),
    )


def gather_rows(rows: Array, ranks: Communicator, backend: Backend) -> None:
    """Gather the rows of all ranks in `rows`, which has this rank's rows, and zeros elsewhere."""
    # XGBoost's collective has no half precision, and NCCL no integers of 16 bits. With one nonzero
    # term, the bytes can be added.
    ranks.sum(rows.view(np.uint8) if rows.dtype == np.float16 else rows, backend)


class Partition(CenterPartition):
    """A partition of the centers and of the rows of batches, with its collective operations.

    All sums are in place, have the same bits on all ranks that receive them, and return their
    argument.

    first_row : number of rows of a batch before this rank's, if both rows and centers are
        partitioned, after `begin`.
    """

    def __init__(
        self, blocks: Sequence[slice], grid: RankGrid, ranks: Communicator, backend: Backend
    ) -> None:
        super().__init__(blocks, grid)
        self.ranks, self.backend = ranks, backend
        self.first_row = self._batch_rows = 0

    @classmethod
    def trivial(cls, p: int, backend: Backend) -> Partition:
        """Return the partition of p centers for a single rank."""
        return cls([slice(0, p)], RankGrid(), SINGLE, backend)

    # -- sums ------------------------------------------------------------------------------

    def begin(self, m: int, n: int) -> None:
        """Prepare for a batch of n rows, of which this rank has m. Collective call."""
        grid = self.grid
        if grid.columns == 1 or grid.rows == 1:
            return
        held = self.ranks.allgather([m]).reshape(grid.rows, grid.columns)
        assert (held == held[:, :1]).all(), "ranks of a row have other rows"
        self.first_row, self._batch_rows = int(held[: grid.row, 0].sum()), n

    def sum(self, a: Array) -> Array:
        """Sum `a` over all ranks."""
        return self.ranks.sum(a, self.backend)

    def largest(self, a: Array) -> Array:
        """Return the largest of the ranks' values of `a`, whose shape is ()."""
        if self.ranks.is_single:
            return a
        values = self.backend.xp.zeros(self.ranks.size, a.dtype)
        values[self.ranks.rank] = a
        return self.sum(values).max()

    def broadcast(self, a: Array) -> Array:
        """Broadcast `a` from rank 0, as ranks may differ by rounding."""
        if self.ranks.rank:
            a[...] = 0
        return self.sum(a)

    def sum_over_rows(self, a: Array) -> Array:
        """Sum `a`, which ranks of a row of the grid have alike, over the rows, for all ranks."""
        if self.grid.column:
            a[...] = 0
        return self.sum(a)

    def sum_over_columns(self, a: Array) -> Array:
        """Sum `a`, which ranks of a column have alike, over the columns, for all ranks."""
        if self.whole:
            return a
        if self.grid.row:
            a[...] = 0
        return self.sum(a)

    def row_sum(self, a: Array) -> Array:
        """Sum `a` (m, k), of the rows of this rank, over the ranks of its row of the grid.

        A sum has R times the elements, c for each row of a batch. A sum of g or u of the block
        solver, which is over all ranks anyway, has b c elements, usually more.
        """
        if self.whole:
            return a
        if self.grid.rows == 1:
            return self.sum(a)
        rows = slice(self.first_row, self.first_row + len(a))
        with self.backend.workspace((self._batch_rows, a.shape[1]), a.dtype) as batch:
            batch[...] = 0
            batch[rows] = a
            self.sum(batch)
            a[...] = batch[rows]
        return a

    def column_sum(self, a: Array) -> Array:
        """Sum `a` (q, k), of the centers of this rank, over the ranks of its column of the grid.

        A sum has C times the elements, a few for each center, and takes `RANK_SLAB_BYTES` at a
        time. Every step of EigenPro has such a sum, so a rank's centers are slices: indices would
        have to be copied to the device.
        """
        if self.grid.rows == 1:
            return a
        if self.whole:
            return self.sum(a)
        row_bytes = a.shape[1] * a.dtype.itemsize
        for part in tiles(self.p, max(1, RANK_SLAB_BYTES // row_bytes)):
            with self.backend.workspace((length(part), a.shape[1]), a.dtype) as rows:
                rows[...] = 0
                for at, here in self.within(part):
                    rows[at] = a[here]
                self.sum(rows)
                for at, here in self.within(part):
                    a[here] = rows[at]
        return a

    def column_reduce(self, a: Array) -> None:
        """Move the sum of `a` over the ranks of the column to its first rank; others have 0."""
        self.column_sum(a)
        if self.grid.row:
            a[...] = 0

    def column_broadcast(self, a: Array) -> Array:
        """Broadcast `a` (q, k) from the first rank of the column, as ranks may differ by rounding.

        The centers are those of this rank.
        """
        if self.grid.row:
            a[...] = 0
        return self.column_sum(a)

    def rows_before(self, m: int) -> int:
        """Return the rows of the batch before this rank's m, in the order of ranks. Collective."""
        return self.ranks.exclusive_scan(m) if self.whole else self.first_row

    def gather_batch(self, a: Array, first: int, n: int, at: slice, out: Array) -> None:
        """Write the rows `at` of a batch of n rows to `out`. Collective call.

        a : (m, ...) rows of this rank, from `first` on.
        """
        if self.grid.rows == 1:
            out[...] = a[at]
            return
        memory = self.backend.workspace((n, *a.shape[1:]), a.dtype)
        with nullcontext(out) if self.whole else memory as rows:
            rows[...] = 0
            if not self.grid.column:  # one of the ranks with these rows contributes them
                rows[first : first + len(a)] = a
            gather_rows(rows, self.ranks, self.backend)
            if not self.whole:
                out[...] = rows[at]

    # -- centers ---------------------------------------------------------------------------

    def gather(self, a: Array, part: slice, out: Array | None = None) -> Array:
        """Return the rows of all centers in a slice. Collective call.

        a : array with the rows of this rank's centers; if these are all, the result is a view.
        out : memory of the result, otherwise new.
        """
        if self.whole:
            return a[part]
        if out is None:
            out = self.backend.xp.empty((length(part), *a.shape[1:]), a.dtype)
        out[...] = 0
        if self.grid.row == 0:  # one of the ranks with the same centers contributes them
            for at, here in self.within(part):
                out[at] = a[here]
        gather_rows(out, self.ranks, self.backend)
        return out

    @contextmanager
    def gathered(self, a: Array, part: slice) -> Iterator[Array]:
        """Yield the result of `gather`, in a workspace."""
        with ExitStack() as lent:
            yield self._gathered(a, part, lent)

    def _gathered(self, a: Array, part: slice, lent: ExitStack) -> Array:
        if self.whole:
            return a[part]
        shape = length(part), *a.shape[1:]
        return self.gather(a, part, lent.enter_context(self.backend.workspace(shape, a.dtype)))

    @contextmanager
    def gathered_points(self, Z: Points, part: slice) -> Iterator[Points]:
        """Yield the points of the centers in a slice. Z : those of this rank. Collective call."""
        with ExitStack() as lent:
            yield Z.each(lambda a: self._gathered(a, part, lent))

    @contextmanager
    def replaced(self, a: Array, part: slice) -> Iterator[Array]:
        """Yield an array for the rows of all centers in a slice, which then replace those of `a`.

        a : array with the rows of this rank's centers; if these are all, a view is yielded.
        """
        if self.whole:
            yield a[part]
            return
        with self.backend.workspace((length(part), *a.shape[1:]), a.dtype) as rows:
            yield rows
            for at, here in self.within(part):
                a[here] = rows[at]

    def same(self, part: slice) -> Same:
        """Return which of the centers in a slice are this rank's, and their indices in these."""
        pairs = [(slice(0, 0), slice(0, 0)), *self.within(part)]
        i, j = (
            np.concatenate([np.arange(s.start, s.stop) for s in side])
            for side in zip(*pairs, strict=True)
        )
        return i, j

    def product(
        self, op: KernelOperator, Z: Points, part: slice, weights: Array, out: Array, turn: int = 0
    ) -> None:
        """Write K(Z_part, Z) weights to `out`, (n, c), for a slice of all centers. Collective call.

        Each rank evaluates some of the rows, with its own centers as columns.

        Z, weights : centers of this rank, and their weights, (q, c).
        turn : see `RankGrid.of_row`.
        """
        rows = self.grid.of_row(len(out), turn)
        same = self.same(slice(part.start + rows.start, part.start + rows.stop))
        if not self.ranks.is_single:
            out[...] = 0
        with self.gathered_points(Z, part) as x:
            op.product(x[rows], Z, weights, out=out[rows], same=same)
        self.sum(out)

    def norm_product(self, op: KernelOperator, Z: Points, weights: Array, out: Array) -> Array:
        """Write K(Z, Z) weights to `out`, (q, c), at this rank's centers. Collective call."""
        together = self.p if self.whole else BROADCAST_CENTERS
        for turn, part in enumerate(tiles(self.p, together)):
            with self.replaced(out, part) as values:
                self.product(op, Z, part, weights, values, turn)
        return out


@dataclass(frozen=True)
class Centers:
    """The p centers of a setup, of which each rank has a stripe in sums over centers.

    points : points of all centers, or of those of the stripe if they are `partitioned`.
    stripes : partition with a stripe for each rank. Arrays (q, c) of values at the centers of a
        stripe, or of weights of these, are this rank's part.
    """

    points: Points
    stripes: Partition
    partitioned: bool = False

    @classmethod
    def of(
        cls, points: Points, backend: Backend, ranks: Communicator = SINGLE, p: int | None = None,
        *, partitioned: bool = False,
    ) -> Centers:  # fmt: skip
        """Return the centers; p : their number, if they are partitioned."""
        p = len(points) if p is None else p
        grid = RankGrid(ranks.rank, ranks.size, ranks.size)
        return cls(points, Partition([slice(0, p)], grid, ranks, backend), partitioned)

    def __len__(self) -> int:
        return self.stripes.p

    @property
    def own(self) -> slice:
        """The stripe of this rank, as a slice of all centers."""
        return self.stripes.in_block[0]

    @property
    def stripe(self) -> Points:
        """The centers of this rank's stripe."""
        return self.points if self.partitioned else self.points[self.own]

    def block(self, block: slice) -> Points:
        """Return the centers of a block, on all ranks. Collective call.

        Partitioned centers are broadcast, to new memory.
        """
        if not self.partitioned:
            return self.points[block]
        return self.points.each(lambda a: self.stripes.gather(a, block))

    def zeros(self, like: Array) -> Array:
        """Return zeros (q, c) for the stripe, with as many columns as `like`."""
        shape = length(self.own), like.shape[1]
        return self.stripes.backend.xp.zeros(shape, like.dtype)

    def held(self, values: Array) -> Array:
        """Return the values at the centers that are in `points`. Collective call."""
        return values if self.partitioned else self.stripes.gather(values, slice(0, len(self)))

    def product(self, op: KernelOperator, block: slice, Z: Points, weights: Array) -> Array:
        """Return K(stripe, Z) weights, (q, c). Z : centers of the block."""
        at, here = overlap(block, self.own)
        same = (np.arange(here.start, here.stop), np.arange(at.start, at.stop))
        return op.product(self.stripe, Z, weights, same=same)


def apply_root(
    H: Array, g: Array, out: Array, ranks: Communicator, backend: Backend,
    damp: Callable[[Array], object] = lambda half: None,
) -> Array:  # fmt: skip
    """Write H^T H g to `out`, or the part of this rank's rows of a lower triangular H.

    H : (b, b), or some rows of it up to the last of their columns.
    g, out : (b, c).
    damp : function that receives H g, to change it in place.
    """
    rows, result = ranks.triangle(len(g)), out
    lower = rows.start == 0
    if rows.stop < len(g):
        out[rows.stop :] = 0
        g, out = g[: rows.stop], out[: rows.stop]
    with backend.workspace((len(H), g.shape[1]), g.dtype) as half:
        backend.matmul(H, g, half, lower=lower)
        damp(half)
        backend.matmul_t(H, half, out, lower=lower)
    return result


def triangle_rows(factor: Array | None, n: int, ranks: Communicator) -> Array | None:
    """Return a copy of this rank's rows of a lower triangular factor (n, n).

    A factor that has no other rows is returned as it is.
    """
    if factor is None or ranks.is_single:
        return factor
    rows = ranks.triangle(n)
    if factor.shape == (rows.stop - rows.start, rows.stop):
        return factor
    return factor[rows, : rows.stop].copy()
