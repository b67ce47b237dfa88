"""Projections for partitioned centers: each rank has the values and weights of its own centers.

See `projection` for the computation. Each column of the grid has consecutive centers, as in the
partition of a single block: h and theta are (q, c), of the centers of a rank's column. All ranks
call `solve`.
"""

from __future__ import annotations

from contextlib import nullcontext

from streamkern.backend.base import Array, tiles
from streamkern.backend.rank_grid import CenterPartition, RankGrid
from streamkern.backend.ranks import Communicator
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.broadcast_centers import ON_THEIR_WAY, BroadcastCenters
from streamkern.solver.precondition.low_rank import damp
from streamkern.solver.precondition.step_rule import StepRule
from streamkern.solver.precondition.stripes import within


class StripedExactProjection:
    """Projection by a Cholesky factor in stripes: substitution from column to column.

    Each rank has the rows of its centers. In the forward pass each column broadcasts its solution;
    in the backward pass it receives the products of the columns after it. Takes 2 (C - 1) sums, of
    p c elements together; the columns solve one after the other.

    L : (q, k), rows of the factor of K(Z, Z) + jitter I, up to the last of their columns.
    """

    def __init__(
        self, op: KernelOperator, L: Array, share: CenterPartition, ranks: Communicator
    ) -> None:
        self.backend, self.L, self.ranks, self.grid = op.backend, L, ranks, share.grid
        columns = self.grid.columns
        self.parts = [RankGrid(k, columns, columns).of_column(share.p) for k in range(columns)]
        own = self.parts[self.grid.column]
        self.diagonal = L[:, own]

    def solve(self, h: Array) -> Array:
        """Return theta, in place."""
        for k in range(len(self.parts)):
            self._forward(k, h)
        for k in reversed(range(len(self.parts))):
            self._backward(k, h)
        return h

    def _forward(self, k: int, h: Array) -> None:
        """Solve in column k, and subtract its solution's part from the columns after it."""
        part, mine = self.parts[k], k == self.grid.column
        if mine:
            self._solve(h)
        if k == len(self.parts) - 1:
            return
        lent = self.backend.workspace
        with lent((part.stop - part.start, h.shape[1]), h.dtype) as found:
            found[...] = h if mine and self.grid.row == 0 else 0
            self.ranks.sum(found, self.backend)
            if k < self.grid.column:
                with lent(h.shape, h.dtype) as taken:
                    h -= self.backend.matmul(self.L[:, part], found, taken)

    def _backward(self, k: int, h: Array) -> None:
        """Solve in column k, after subtracting the parts of the columns after it."""
        part, column = self.parts[k], self.grid.column
        if k < len(self.parts) - 1:
            shape = part.stop - part.start, h.shape[1]
            with self.backend.workspace(shape, h.dtype) as taken:
                if k < column and self.grid.row == 0:
                    self.backend.matmul_t(self.L[:, part], h, taken)
                else:
                    taken[...] = 0
                self.ranks.sum(taken, self.backend)
                if k == column:
                    h -= taken
        if k == column:
            self._solve(h, transposed=True)

    def _solve(self, h: Array, *, transposed: bool = False) -> None:
        if len(h):
            self.backend.solve_lower(self.diagonal, h, transposed=transposed)


class StripedIterativeProjection:
    """Projection by EigenPro 2.0 on partitioned centers.

    Each row of the grid evaluates some of a batch of centers, each column the part of its own
    centers. The centers of some batches are broadcast at a time; with `resident` only in the first
    pass. The values at the sample, the first centers, are a part of K(batch, Z), so the correction
    needs no evaluation. Takes two sums per batch, of m c and of s c elements; only the first if
    each rank has all rows of a batch, and one rank the sample.

    Z : points of this rank's centers, both sides; the centers of all ranks are in random order.
    E, D, rule : see `LowRankPreconditioner`; its sample is the first centers.
    resident : keep K(Z, Z), of which a rank has p^2 / W elements.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, E: Array, D: Array, rule: StepRule,
        share: CenterPartition, ranks: Communicator, *, batch: int, resident: bool = False,
    ) -> None:  # fmt: skip
        self.op, self.Z, self.E, self.D, self.rule = op, Z, E, D, rule
        self.centers = BroadcastCenters(op, Z, share, ranks)
        self.ranks, self.grid, self.own = ranks, share.grid, share.at[0]
        self.backend, self.batch = op.backend, batch
        at, here = within(slice(0, len(E)), self.own)
        self.head, self.sampled = here.stop, at  # this rank's centers in the sample
        first = RankGrid(0, self.grid.columns, self.grid.columns).of_column(share.p)
        self.alone = self.grid.rows == 1 and len(E) <= first.stop
        batches, together = tiles(share.p, batch), max(1, ON_THEIR_WAY // batch)
        self.travels = [batches[some] for some in tiles(len(batches), together)]
        self.K: Array | None = None
        self.filled = False
        if resident:
            evaluated = sum(_length(self._part(rows)) for rows in batches)
            self.K = op.backend.xp.empty((evaluated, len(Z)), op.dtype)
        self.theta: Array | None = None

    def _part(self, rows: slice) -> slice:
        """Return which centers of a batch this rank evaluates, as indices in the batch."""
        return self.grid.of_row(_length(rows), rows.start // self.batch)

    def solve(self, h: Array) -> Array:
        """Return theta after one pass over the centers; `h` is unchanged."""
        if self.theta is None or self.theta.shape != h.shape:
            self.theta = self.backend.xp.empty_like(h)
        self.theta[...] = 0
        done = 0
        for batches in self.travels:
            together = slice(batches[0].start, batches[-1].stop)
            with nullcontext() if self.filled else self.centers.left(together) as x:
                for rows in batches:
                    n = _length(self._part(rows))
                    kept = None if self.K is None else self.K[done : done + n]
                    first = rows.start - together.start + self._part(rows).start
                    self._step(rows, None if x is None else x[first : first + n], kept, h)
                    done += n
        self.filled = self.K is not None
        return self.theta

    def _step(self, rows: slice, x: Points | None, kept: Array | None, h: Array) -> None:
        """Take the step of a batch of centers.

        x, kept : the centers that this rank evaluates, and K(x, Z).
        """
        assert self.theta is not None
        m, part, c = _length(rows), self._part(rows), h.shape[1]
        at, here = within(rows, self.own)
        lent = self.backend.workspace
        with lent((m, c), h.dtype) as g, lent((_length(part), self.head), h.dtype) as of_sample:
            g[...] = 0
            if kept is None:
                assert x is not None
                self._evaluate(rows.start + part.start, x, g[part], of_sample)
            else:
                if x is not None:
                    same = self.centers.same(rows.start + part.start, len(x))
                    self.op.product(x, self.Z, keep=kept, same=same)
                self.backend.matmul(kept, self.theta, g[part])
                of_sample = kept[:, : self.head]
            if self.grid.row == 0:
                g[at] -= h[here]
            self.ranks.sum(g, self.backend)
            g *= self.rule.eta(m) / m
            self.theta[here] -= g[at]
            self._correct(of_sample, g[part])

    def _evaluate(self, first: int, x: Points, out: Array, of_sample: Array) -> None:
        """Write K(x, Z) theta to `out`, and K(x, Z) to `of_sample`, for Z in the sample."""
        assert self.theta is not None
        head = self.head
        self.op.product(
            x, self.Z[:head], self.theta[:head], out=out, keep=of_sample,
            same=self.centers.same(first, len(x)),
        )  # fmt: skip
        with self.backend.workspace(out.shape, out.dtype) as others:
            out += self.op.product(
                x, self.Z[head:], self.theta[head:], out=others,
                same=self.centers.same(first, len(x), head),
            )  # fmt: skip

    def _correct(self, of_sample: Array, g: Array) -> None:
        """Add E D E^T K(sample, batch) g to theta at the sample."""
        if self.alone and not self.head:
            return
        assert self.theta is not None
        lent, c = self.backend.workspace, g.shape[1]
        with lent((len(self.E), c), g.dtype) as moved, lent((self.head, c), g.dtype) as values:
            self.backend.matmul_t(of_sample, g, values)
            damp(self.backend, self.E, self.D, values, moved, self.sampled)
            if not self.alone:
                self.ranks.sum(moved, self.backend)
            self.theta[: self.head] += moved[self.sampled]


def _length(part: slice) -> int:
    return int(part.stop) - int(part.start)
