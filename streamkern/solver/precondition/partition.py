"""Collective operations of solvers, for centers and rows that are partitioned over a grid of ranks.

With a single rank every sum returns its argument, and every gathered array is a view. So solvers
need no second code path for a single rank.

The collective of XGBoost can sum over all ranks only, not over the ranks of a row or a column of
the grid. So each row, or column, writes its values to its own rows of a common array, with zeros in
all other rows, and this array is summed over all ranks. This takes one call, as a sum over part of
the ranks would, but more elements are sent.

Symbols: the grid has R rows and C columns; a rank has q of the p centers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.backend.half_products import half_product
from streamkern.backend.rank_grid import CenterPartition, RankGrid, length
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import RANK_SLAB_BYTES

BROADCAST_CENTERS = 1024
"""Number of partitioned centers that are broadcast to all ranks at a time."""
EqualPairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Pairs (i, j) of equal points, as two arrays of indices; see `KernelOperator.product`."""


class PartViews:
    """Views of some rows of an array, cached until another array is passed.

    Creating a view of an array on a GPU takes time on the host.
    """

    def __init__(self, parts: Sequence[slice]) -> None:
        self._parts, self._views = list(parts), list[Array]()
        self._array: Array = None

    def __call__(self, a: Array) -> list[Array]:
        """Return the views of `a`, one for each part."""
        if a is not self._array:
            self._array, self._views = a, [a[part] for part in self._parts]
        return self._views


def overlap(block: slice, stripe: slice) -> tuple[slice, slice]:
    """Return the centers in both slices, as indices in the block and as indices in the stripe."""
    start = max(block.start, stripe.start)
    stop = max(start, min(block.stop, stripe.stop))
    in_block = slice(start - block.start, stop - block.start)
    return in_block, slice(start - stripe.start, stop - stripe.start)


def gather_rows(rows: Array, ranks: Communicator, backend: Backend) -> None:
    """Gather the rows of all ranks in `rows`, which has this rank's rows, and zeros elsewhere."""
    # XGBoost's collective cannot sum half-precision numbers, and NCCL no 16-bit integers. As only
    # one term is nonzero, the sum of the bytes is the same.
    ranks.sum(rows.view(np.uint8) if rows.dtype == np.float16 else rows, backend)


class Partition(CenterPartition):
    """A partition of the centers and of the rows of batches, with its collective operations.

    All sums are in place, return their argument, and have the same bits on all ranks that receive
    them.

    first_row : index in the batch of this rank's first row, set by `begin_batch`, if both rows and
        centers are partitioned.
    """

    def __init__(
        self, blocks: Sequence[slice], grid: RankGrid, ranks: Communicator, backend: Backend
    ) -> None:
        super().__init__(blocks, grid)
        self.ranks, self.backend = ranks, backend
        self.first_row = self._batch_rows = 0

    # -- sums ------------------------------------------------------------------------------

    def begin_batch(self, m: int, n: int) -> None:
        """Prepare for a batch of n rows, m of them on this rank. Collective call."""
        grid = self.grid
        if grid.columns == 1 or grid.rows == 1:
            return
        counts = self.ranks.allgather([m]).reshape(grid.rows, grid.columns)
        assert (counts == counts[:, :1]).all(), "ranks of a row must have the same rows"
        self.first_row, self._batch_rows = int(counts[: grid.row, 0].sum()), n

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
        """Overwrite `a` with the values of rank 0, as ranks may differ by rounding errors."""
        if self.ranks.rank:
            a[...] = 0
        return self.sum(a)

    def sum_over_rows(self, a: Array) -> Array:
        """Sum `a`, equal on all ranks of a row of the grid, over the rows, for all ranks."""
        if self.grid.column:
            a[...] = 0
        return self.sum(a)

    def sum_over_columns(self, a: Array) -> Array:
        """Sum `a`, equal on all ranks of a column, over the columns, for all ranks."""
        if self.is_replicated:
            return a
        if self.grid.row:
            a[...] = 0
        return self.sum(a)

    def row_sum(self, a: Array) -> Array:
        """Sum `a` (m, k), with the rows of this rank, over the ranks of its row of the grid.

        The common array has R times as many elements, k for each row of the batch.
        """
        if self.is_replicated:
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
        """Sum `a` (q, k), with the centers of this rank, over the ranks of its column of the grid.

        The common array has C times as many elements, k for each center; `RANK_SLAB_BYTES` of it
        are summed at a time.
        """
        if self.grid.rows == 1:
            return a
        if self.is_replicated:
            return self.sum(a)
        row_bytes = a.shape[1] * a.dtype.itemsize
        for part in tiles(self.p, max(1, RANK_SLAB_BYTES // row_bytes)):
            with self.backend.workspace((length(part), a.shape[1]), a.dtype) as rows:
                rows[...] = 0
                for in_part, in_own in self.within(part):
                    rows[in_part] = a[in_own]
                self.sum(rows)
                for in_part, in_own in self.within(part):
                    a[in_own] = rows[in_part]
        return a

    def column_reduce(self, a: Array) -> None:
        """Sum `a` over the ranks of the column, on its first rank; set it to 0 on the others."""
        self.column_sum(a)
        if self.grid.row:
            a[...] = 0

    def column_broadcast(self, a: Array) -> Array:
        """Overwrite `a` (q, k) with the values of the column's first rank.

        Ranks may differ by rounding errors.
        """
        if self.grid.row:
            a[...] = 0
        return self.column_sum(a)

    def rows_before(self, m: int) -> int:
        """Return the index of this rank's first row in the batch; it has m rows. Collective."""
        return self.ranks.exclusive_scan(m) if self.is_replicated else self.first_row

    def gather_batch(self, a: Array, start: int, n: int, batch_rows: slice, out: Array) -> None:
        """Write the rows `batch_rows` of the batch on all ranks to `out`. Collective call.

        a : (m, ...) this rank's rows of the batch, from row `start` on.
        n : number of rows of the batch.
        """
        if self.grid.rows == 1:
            out[...] = a[batch_rows]
            return
        workspace = self.backend.workspace((n, *a.shape[1:]), a.dtype)
        with nullcontext(out) if self.is_replicated else workspace as rows:
            rows[...] = 0
            if not self.grid.column:  # the other ranks of this row of the grid have the same rows
                rows[start : start + len(a)] = a
            gather_rows(rows, self.ranks, self.backend)
            if not self.is_replicated:
                out[...] = rows[batch_rows]

    # -- centers ---------------------------------------------------------------------------

    def gather(self, a: Array, part: slice, out: Array | None = None) -> Array:
        """Return the rows of an array for a slice of all centers. Collective call.

        a : array with one row for each center of this rank; if it has all centers, the result is a
            view.
        out : buffer for the result; None: a new array.
        """
        if self.is_replicated:
            return a[part]
        if out is None:
            out = self.backend.xp.empty((length(part), *a.shape[1:]), a.dtype)
        out[...] = 0
        if self.grid.row == 0:  # the other ranks of this column have the same centers
            for in_part, in_own in self.within(part):
                out[in_part] = a[in_own]
        gather_rows(out, self.ranks, self.backend)
        return out

    @contextmanager
    def lend_gathered(self, a: Array, part: slice) -> Iterator[Array]:
        """Yield the result of `gather`, in a workspace."""
        with ExitStack() as workspaces:
            yield self._gather_in(a, part, workspaces)

    def _gather_in(self, a: Array, part: slice, workspaces: ExitStack) -> Array:
        """Return the result of `gather`, in a workspace that is added to `workspaces`."""
        if self.is_replicated:
            return a[part]
        workspace = self.backend.workspace((length(part), *a.shape[1:]), a.dtype)
        return self.gather(a, part, workspaces.enter_context(workspace))

    @contextmanager
    def lend_gathered_points(self, Z: Points, part: slice) -> Iterator[Points]:
        """Yield the points of a slice of all centers. Z : this rank's centers. Collective call."""
        with ExitStack() as workspaces:
            yield Z.each(lambda a: self._gather_in(a, part, workspaces))

    @contextmanager
    def replace_rows(self, a: Array, part: slice) -> Iterator[Array]:
        """Yield an array with one row for each center in a slice; then copy its rows to `a`.

        a : array with one row for each center of this rank; if it has all centers, a view of it is
            yielded.
        """
        if self.is_replicated:
            yield a[part]
            return
        with self.backend.workspace((length(part), *a.shape[1:]), a.dtype) as rows:
            yield rows
            for in_part, in_own in self.within(part):
                a[in_own] = rows[in_part]

    def equal_pairs(self, part: slice) -> EqualPairs:
        """Return the pairs (i, j) where center i of a slice is center j of this rank."""
        # An empty pair first, as there may be no other, and an empty list has no type.
        pairs = [(slice(0, 0), slice(0, 0)), *self.within(part)]
        i, j = (
            np.concatenate([np.arange(s.start, s.stop) for s in slices])
            for slices in zip(*pairs, strict=True)
        )
        return i, j

    def product(
        self, op: KernelOperator, Z: Points, part: slice, weights: Array, out: Array, turn: int = 0
    ) -> None:
        """Write K(Z_part, Z) weights to `out`, (n, c), for a slice of all centers. Collective call.

        Each rank evaluates some of the rows of the kernel matrix, and the columns of its centers.

        Z, weights : centers of this rank, and their weights, (q, c).
        turn : see `RankGrid.of_row`.
        """
        rows = self.grid.of_row(len(out), turn)
        pairs = self.equal_pairs(slice(part.start + rows.start, part.start + rows.stop))
        if not self.ranks.is_single:
            out[...] = 0
        with self.lend_gathered_points(Z, part) as x:
            op.product(x[rows], Z, weights, out=out[rows], equal_pairs=pairs)
        self.sum(out)

    def norm_product(self, op: KernelOperator, Z: Points, weights: Array, out: Array) -> Array:
        """Write K(Z, Z) weights to `out`, (q, c), at this rank's centers. Collective call."""
        n = self.p if self.is_replicated else BROADCAST_CENTERS
        for turn, part in enumerate(tiles(self.p, n)):
            with self.replace_rows(out, part) as values:
                self.product(op, Z, part, weights, values, turn)
        return out


@dataclass(frozen=True)
class Centers:
    """The p centers of a setup, whose work is divided into one stripe of centers for each rank.

    points : points of all centers, or of this rank's stripe if the centers are partitioned.
    stripes : the partition into stripes. A rank has the q rows of its stripe of arrays with weights
        of centers, or with values at centers.
    is_partitioned : whether each rank has only its stripe of the points.
    """

    points: Points
    stripes: Partition
    is_partitioned: bool = False

    @classmethod
    def of(
        cls, points: Points, backend: Backend, ranks: Communicator = SINGLE, p: int | None = None,
        *, is_partitioned: bool = False,
    ) -> Centers:  # fmt: skip
        """Return the centers. p : number of all centers, needed if they are partitioned."""
        p = len(points) if p is None else p
        grid = RankGrid(ranks.rank, ranks.size, ranks.size)
        return cls(points, Partition([slice(0, p)], grid, ranks, backend), is_partitioned)

    def __len__(self) -> int:
        return self.stripes.p

    @property
    def stripe_slice(self) -> slice:
        """The stripe of this rank, as a slice of all centers."""
        return self.stripes.in_block[0]

    @property
    def stripe(self) -> Points:
        """The centers of this rank's stripe."""
        return self.points if self.is_partitioned else self.points[self.stripe_slice]

    def block(self, block: slice) -> Points:
        """Return the centers of a block, on all ranks. Collective call.

        The result is a view, or new memory if the centers are partitioned.
        """
        if not self.is_partitioned:
            return self.points[block]
        return self.points.each(lambda a: self.stripes.gather(a, block))

    def zeros(self, Y: Array) -> Array:
        """Return zeros (q, c) for the stripe, with the columns and the dtype of Y (n, c)."""
        shape = length(self.stripe_slice), Y.shape[1]
        return self.stripes.backend.xp.zeros(shape, Y.dtype)

    def values_at_points(self, values: Array) -> Array:
        """Return the values at the centers of `points`, from the stripe (q, c). Collective call."""
        return values if self.is_partitioned else self.stripes.gather(values, slice(0, len(self)))

    def product(self, op: KernelOperator, block: slice, Z: Points, weights: Array) -> Array:
        """Return K(stripe, Z) weights, (q, c).

        Z, weights : centers of the block, and their weights, (b, c).
        """
        in_block, in_stripe = overlap(block, self.stripe_slice)
        i = np.arange(in_stripe.start, in_stripe.stop)
        pairs = i, np.arange(in_block.start, in_block.stop)
        return op.product(self.stripe, Z, weights, equal_pairs=pairs)


def apply_root(
    H: Array, g: Array, out: Array, ranks: Communicator, backend: Backend,
    damp: Callable[[Array], object] = lambda half: None, scale: float = 1.0,
) -> Array:  # fmt: skip
    """Write H^T H g to `out`, or the term of this rank's rows of H.

    H : (b, b) lower triangular, or this rank's rows of it, without the columns that are 0; if it is
        float16, it is `scale` times as large as the factor.
    g, out : (b, c).
    damp : function that changes H g in place.
    """
    rows, result = ranks.triangle(len(g)), out
    lower = rows.start == 0
    if rows.stop < len(g):
        out[rows.stop :] = 0
        g, out = g[: rows.stop], out[: rows.stop]
    with backend.workspace((len(H), g.shape[1]), g.dtype) as half:
        if H.dtype == np.float16:
            half_product(backend, H, g, half, lower=lower, scale=1 / scale)
            damp(half)
            half_product(backend, H, half, out, transposed=True, lower=lower, scale=1 / scale)
        else:
            backend.matmul(H, g, half, lower=lower)
            damp(half)
            backend.matmul_t(H, half, out, lower=lower)
    return result


def triangle_rows(factor: Array | None, n: int, ranks: Communicator) -> Array | None:
    """Return a copy of this rank's rows of a lower triangular factor (n, n).

    A factor that has only these rows is returned unchanged.
    """
    if factor is None or ranks.is_single:
        return factor
    rows = ranks.triangle(n)
    if factor.shape == (rows.stop - rows.start, rows.stop):
        return factor
    return factor[rows, : rows.stop].copy()
