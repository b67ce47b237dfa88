"""Projection of values at the centers to weights: h -> theta with K(Z, Z) theta = h.

EP3 Prop. 2: projecting a function u onto span K(., Z) needs only its values h = u(Z). There are
three kinds, with one method `solve(h)`:

  exact      Cholesky of K(Z, Z) + jitter, p^2 elements, p^3 / 3 FLOPs once, 2 p^2 c per solve
  resident   K(Z, Z) kept, p^2 elements; epochs of EigenPro 2.0 on it, 2 p^2 c each
  inexact    epochs of EigenPro 2.0, entries evaluated on the fly, O(p) elements, 2 p^2 (d + c) each

If the centers are partitioned, each column of the grid of ranks has consecutive centers, as in the
partition of a single block: h and theta are (q, c), of the centers of a rank's column, and all
ranks call `solve`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Protocol

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.backend.rank_grid import RankGrid, length
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.low_rank import LowRankPreconditioner, build_low_rank, damp
from streamkern.solver.precondition.partition import BROADCAST_CENTERS, Partition, Same, overlap
from streamkern.solver.precondition.step_rule import StepRule

INNER_NYSTROM, PROBE_ROWS = 2000, 2000
"""Number of centers in the sample of an iterative projection, and of others in its probe."""


class Projection(Protocol):
    """Map of h to theta, (p, c) each; `h` may be overwritten."""

    def solve(self, h: Array) -> Array:
        """Return theta with K(Z, Z) theta close to h."""
        ...


class ExactProjection:
    """Projection by a Cholesky factor, whose jitter allows duplicate centers.

    Each rank has the rows of its centers, and the factor is substituted from column to column of
    the grid. In the forward pass each column broadcasts its solution; in the backward pass it
    receives the products of the columns after it. Takes 2 (C - 1) sums, of p c elements together;
    the columns solve one after the other.

    L : (p, p) lower factor of K(Z, Z) + jitter I, or (q, k), its rows of this rank's centers, up
        to the last of their columns.
    """

    def __init__(self, L: Array, partition: Partition) -> None:
        self.backend, self.ranks, self.grid = partition.backend, partition.ranks, partition.grid
        columns = self.grid.columns
        self.parts = [RankGrid(k, columns, columns).of_column(partition.p) for k in range(columns)]
        own = self.parts[self.grid.column]
        self.L = L if len(L) == length(own) else L[own, : own.stop].copy()
        self.diagonal = self.L[:, own]

    def solve(self, h: Array) -> Array:
        """Return theta, in place. Collective call."""
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
        with lent((length(part), h.shape[1]), h.dtype) as solution:
            solution[...] = h if mine and self.grid.row == 0 else 0
            self.ranks.sum(solution, self.backend)
            if k < self.grid.column:
                with lent(h.shape, h.dtype) as taken:
                    h -= self.backend.matmul(self.L[:, part], solution, taken)

    def _backward(self, k: int, h: Array) -> None:
        """Solve in column k, after subtracting the parts of the columns after it."""
        part, column = self.parts[k], self.grid.column
        if k < len(self.parts) - 1:
            shape = length(part), h.shape[1]
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


class IterativeProjection:
    """Projection by EigenPro 2.0 (EP2) with the centers as its data set.

    theta starts at 0, and each batch of centers updates its own weights and, through the
    preconditioner, the weights of a sample of centers.

    Z : points in random order, so that consecutive rows are a random batch.
    P : preconditioner whose sample is the first rows of Z.
    resident : keep K(Z, Z).
    epochs : passes over the centers.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, P: LowRankPreconditioner, *, batch: int,
        resident: bool = False, epochs: int = 1,
    ) -> None:  # fmt: skip
        self.op, self.Z, self.P, self.batch, self.epochs = op, Z, P, batch, epochs
        self.K = op.gram(Z) if resident else None
        self._kept: tuple[Array, Array, Array] | None = None

    def solve(self, h: Array) -> Array:
        """Return theta after `epochs` passes over the centers."""
        theta, g, correction = self._buffers(h)
        theta[...] = 0
        sample = slice(0, len(self.P.X_s))
        for rows in tiles(len(self.Z), self.batch) * self.epochs:
            m = rows.stop - rows.start
            part, moved, sampled = g[:m], theta[rows], theta[sample]
            self._forward(rows, theta, part)
            part -= h[rows]
            part *= self.P.rule.eta(m) / m
            moved -= part
            ids = np.arange(rows.start, min(rows.stop, sample.stop))
            same = (ids, ids - rows.start)
            sampled += self.P.correction(self.op, self.Z[rows], part, correction, same=same)
        return theta

    def _buffers(self, h: Array) -> tuple[Array, Array, Array]:
        """Return buffers for theta, a batch's residual and its correction, as wide as `h`.

        They are made once for a shape of `h`.
        """
        if self._kept is None or self._kept[0].shape != h.shape:
            sizes = (len(h), min(self.batch, len(h)), len(self.P.X_s))
            empty = self.op.backend.xp.empty
            theta, g, correction = (empty((n, h.shape[1]), self.op.dtype) for n in sizes)
            self._kept = (theta, g, correction)
        return self._kept

    def _forward(self, rows: slice, theta: Array, out: Array) -> None:
        if self.K is not None:
            self.op.backend.matmul(self.K[rows], theta, out)
            return
        ids = np.arange(rows.start, rows.stop)
        same = (ids - rows.start, ids)
        self.op.product(self.Z[rows], self.Z, theta, out=out, same=same)


class PartitionedProjection:
    """Projection by EigenPro 2.0 on centers that are partitioned over columns of ranks.

    Each row of the grid evaluates some of a batch of centers, each column the part of its own
    centers. The centers of some batches are broadcast at a time; with `resident` only in the first
    pass. The values at the sample, the first centers, are a part of K(batch, Z), so the correction
    needs no evaluation. Takes two sums per batch, of m c and of s c elements; only the first if
    each rank has all rows of a batch, and one rank the sample.

    Z : points of this rank's centers; the centers of all ranks are in random order.
    E, D, rule : see `LowRankPreconditioner`; its sample is the first centers.
    resident : keep K(Z, Z), of which a rank has p^2 / W elements.
    epochs : passes over the centers.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, E: Array, D: Array, rule: StepRule,
        partition: Partition, *, batch: int, resident: bool = False, epochs: int = 1,
    ) -> None:  # fmt: skip
        self.op, self.Z, self.E, self.D, self.rule = op, Z, E, D, rule
        self.partition, self.grid, self.own = partition, partition.grid, partition.in_block[0]
        self.backend, self.batch, self.epochs = op.backend, batch, epochs
        at, here = overlap(slice(0, len(E)), self.own)
        self.head, self.sampled = here.stop, at  # this rank's centers in the sample
        first = RankGrid(0, self.grid.columns, self.grid.columns).of_column(partition.p)
        self.one_rank_has_sample = self.grid.rows == 1 and len(E) <= first.stop
        batches, together = tiles(partition.p, batch), max(1, BROADCAST_CENTERS // batch)
        self.broadcasts = [batches[part] for part in tiles(len(batches), together)]
        self.K: Array | None = None
        self.filled = False
        if resident:
            evaluated = sum(length(self._part(rows)) for rows in batches)
            self.K = op.backend.xp.empty((evaluated, len(Z)), op.dtype)
        self.theta: Array | None = None

    def _part(self, rows: slice) -> slice:
        """Return which centers of a batch this rank evaluates, as indices in the batch."""
        return self.grid.of_row(length(rows), rows.start // self.batch)

    def solve(self, h: Array) -> Array:
        """Return theta after `epochs` passes over the centers; `h` is unchanged."""
        if self.theta is None or self.theta.shape != h.shape:
            self.theta = self.backend.xp.empty_like(h)
        self.theta[...] = 0
        for _ in range(self.epochs):
            self._pass(h)
        return self.theta

    def _pass(self, h: Array) -> None:
        """Take the steps of all batches."""
        done = 0
        for batches in self.broadcasts:
            together = slice(batches[0].start, batches[-1].stop)
            with (
                nullcontext()
                if self.filled
                else self.partition.gathered_points(self.Z, together) as x
            ):
                for rows in batches:
                    n = length(self._part(rows))
                    K_part = None if self.K is None else self.K[done : done + n]
                    first = rows.start - together.start + self._part(rows).start
                    self._step(rows, None if x is None else x[first : first + n], K_part, h)
                    done += n
        self.filled = self.K is not None

    def _step(self, rows: slice, x: Points | None, K_part: Array | None, h: Array) -> None:
        """Take the step of a batch of centers.

        x, K_part : the centers that this rank evaluates, and K(x, Z).
        """
        assert self.theta is not None
        m, part, c = length(rows), self._part(rows), h.shape[1]
        at, here = overlap(rows, self.own)
        lent = self.backend.workspace
        with lent((m, c), h.dtype) as g, lent((length(part), self.head), h.dtype) as of_sample:
            g[...] = 0
            if K_part is None:
                assert x is not None
                self._evaluate(rows.start + part.start, x, g[part], of_sample)
            else:
                if x is not None:
                    same = self._same(rows.start + part.start, len(x))
                    self.op.product(x, self.Z, keep=K_part, same=same)
                self.backend.matmul(K_part, self.theta, g[part])
                of_sample = K_part[:, : self.head]
            if self.grid.row == 0:
                g[at] -= h[here]
            self.partition.sum(g)
            g *= self.rule.eta(m) / m
            self.theta[here] -= g[at]
            self._correct(of_sample, g[part])

    def _evaluate(self, first: int, x: Points, out: Array, of_sample: Array) -> None:
        """Write K(x, Z) theta to `out`, and K(x, Z) to `of_sample`, for Z in the sample."""
        assert self.theta is not None
        head = self.head
        self.op.product(
            x, self.Z[:head], self.theta[:head], out=out, keep=of_sample,
            same=self._same(first, len(x)),
        )  # fmt: skip
        with self.backend.workspace(out.shape, out.dtype) as others:
            out += self.op.product(
                x, self.Z[head:], self.theta[head:], out=others,
                same=self._same(first, len(x), head),
            )  # fmt: skip

    def _same(self, first: int, n: int, shift: int = 0) -> Same:
        """Return which of n centers from `first` on are in Z, and their indices in Z[shift:]."""
        i, j = self.partition.same(slice(first, first + n))
        return i, j - shift

    def _correct(self, of_sample: Array, g: Array) -> None:
        """Add E D E^T K(sample, batch) g to theta at the sample."""
        if self.one_rank_has_sample and not self.head:
            return
        assert self.theta is not None
        lent, c = self.backend.workspace, g.shape[1]
        with lent((len(self.E), c), g.dtype) as moved, lent((self.head, c), g.dtype) as values:
            self.backend.matmul_t(of_sample, g, values)
            damp(self.backend, self.E, self.D, values, moved, self.sampled)
            if not self.one_rank_has_sample:
                self.partition.sum(moved)
            self.theta[: self.head] += moved[self.sampled]


def inner_centers(p: int, n_nystrom: int = INNER_NYSTROM) -> int:
    """Return how many of the first of p centers `inner_rule` takes."""
    return min(p, n_nystrom + PROBE_ROWS)


def inner_rule(
    op: KernelOperator, Z: Points, p: int, *, level: int, n_nystrom: int, max_batch: int,
    seed: int = 0,
) -> tuple[LowRankPreconditioner, int]:  # fmt: skip
    """Return the preconditioner of the first centers, with its step rule, and the batch size.

    Z : the first `inner_centers` of p centers.
    """
    s = min(n_nystrom, p)
    # All centers if there are few: the bound is then exact. Otherwise centers that are not in the
    # sample.
    probe = Z if p <= s + PROBE_ROWS else Z[s:]
    P = build_low_rank(op, Z[:s], probe, level=min(level, s - 1), seed=seed)
    return P, int(max(1, min(P.rule.critical_batch, max_batch, p)))
