"""Projection of values at the centers to weights: h -> theta with K(Z, Z) theta = h.

To project a function u onto span K(., Z), only its values h = u(Z) are needed (EigenPro 3, "EP3",
Prop. 2). There are three kinds of projections, each with a method `solve(h)`:

  exact      Cholesky of K(Z, Z) + jitter, p^2 elements, p^3 / 3 FLOPs once, 2 p^2 c per solve
  resident   K(Z, Z) kept, p^2 elements; epochs of EigenPro 2.0 on it, 2 p^2 c each
  inexact    epochs of EigenPro 2.0, entries evaluated on the fly, O(p) elements, 2 p^2 (d + c) each

If the centers are partitioned over W ranks in C columns of a grid, each column has consecutive
centers. h and theta then have the rows of these centers, (q, c), and `solve` is collective.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.backend.rank_grid import RankGrid, length
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.low_rank import LowRankPreconditioner, build_low_rank, damp
from streamkern.solver.precondition.partition import (
    BROADCAST_CENTERS,
    EqualPairs,
    Partition,
    overlap,
)

INNER_NYSTROM, PROBE_ROWS = 2000, 2000
"""Number of centers in the sample of an iterative projection, and of further ones in its probe."""


class ExactProjection:
    """Projection by a Cholesky factor, whose jitter allows duplicate centers.

    Each rank has the rows of L of its centers, and the columns of the grid substitute one after the
    other. In the forward pass each column broadcasts its solution; in the backward pass it receives
    the products of the columns after it. Each pass takes C - 1 sums over all ranks, of up to p c
    elements together.

    L : (p, p) lower factor of K(Z, Z) + jitter I; or its rows of this rank's centers, (q, k), where
        center k - 1 is the last of them.
    """

    def __init__(self, L: Array, partition: Partition) -> None:
        self.backend, self.ranks, self.grid = partition.backend, partition.ranks, partition.grid
        columns = self.grid.columns
        self.parts = [RankGrid(k, columns, columns).of_column(partition.p) for k in range(columns)]
        own_centers = self.parts[self.grid.column]
        has_own_rows = len(L) == length(own_centers)
        self.L = L if has_own_rows else L[own_centers, : own_centers.stop].copy()
        self.diagonal = self.L[:, own_centers]

    def solve(self, h: Array) -> Array:
        """Overwrite h with theta, and return it. Collective call."""
        for k in range(len(self.parts)):
            self._forward(k, h)
        for k in reversed(range(len(self.parts))):
            self._backward(k, h)
        return h

    def _forward(self, k: int, h: Array) -> None:
        """Solve L y = h at the centers of column k; subtract L y in the columns after it."""
        part = self.parts[k]
        is_own = k == self.grid.column
        if is_own:
            self._solve(h)
        if k == len(self.parts) - 1:
            return
        workspace = self.backend.workspace
        with workspace((length(part), h.shape[1]), h.dtype) as solution:
            solution[...] = h if is_own and self.grid.row == 0 else 0
            self.ranks.sum(solution, self.backend)
            if k < self.grid.column:
                with workspace(h.shape, h.dtype) as product:
                    h -= self.backend.matmul(self.L[:, part], solution, product)

    def _backward(self, k: int, h: Array) -> None:
        """Solve L^T theta = y at column k's centers, less the products of the columns after it."""
        part, column = self.parts[k], self.grid.column
        if k < len(self.parts) - 1:
            shape = length(part), h.shape[1]
            with self.backend.workspace(shape, h.dtype) as product:
                if k < column and self.grid.row == 0:
                    self.backend.matmul_t(self.L[:, part], h, product)
                else:
                    product[...] = 0
                self.ranks.sum(product, self.backend)
                if k == column:
                    h -= product
        if k == column:
            self._solve(h, transposed=True)

    def _solve(self, h: Array, *, transposed: bool = False) -> None:
        """Solve with the diagonal block of this rank's column, in place."""
        if len(h):
            self.backend.solve_lower(self.diagonal, h, transposed=transposed)


class IterativeProjection:
    """Projection by EigenPro 2.0 (EP2), with the centers as training rows and h as targets.

    theta starts at 0, and each batch of centers updates its own weights and, through the
    preconditioner, the weights of a sample of centers.

    Z : points of the centers in random order, so that consecutive centers are a random batch.
    P : preconditioner whose sample is the first centers.
    batch : number of centers in a batch.
    resident : whether K(Z, Z) is kept.
    epochs : number of epochs over the centers.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, P: LowRankPreconditioner, *, batch: int,
        resident: bool = False, epochs: int = 1,
    ) -> None:  # fmt: skip
        self.op, self.Z, self.P, self.batch, self.epochs = op, Z, P, batch, epochs
        self.K = op.gram(Z) if resident else None
        self._buffers: tuple[Array, Array, Array] | None = None

    def solve(self, h: Array) -> Array:
        """Return theta after `epochs` epochs over the centers."""
        theta, residuals, correction = self._buffers_for(h)
        theta[...] = 0
        sample = slice(0, len(self.P.X_s))
        theta_sample = theta[sample]
        for rows in tiles(len(self.Z), self.batch) * self.epochs:
            m = rows.stop - rows.start
            g, theta_batch = residuals[:m], theta[rows]
            self._evaluate(rows, theta, g)
            g -= h[rows]
            g *= self.P.rule.eta(m) / m
            theta_batch -= g
            ids = np.arange(rows.start, min(rows.stop, sample.stop))
            equal_pairs = (ids, ids - rows.start)
            theta_sample += self.P.correction(
                self.op, self.Z[rows], g, correction, equal_pairs=equal_pairs
            )
        return theta

    def _buffers_for(self, h: Array) -> tuple[Array, Array, Array]:
        """Return buffers for theta, the residuals of a batch and its correction.

        They have as many columns as h, and are reused for another h of the same shape.
        """
        if self._buffers is None or self._buffers[0].shape != h.shape:
            sizes = (len(h), min(self.batch, len(h)), len(self.P.X_s))
            empty = self.op.backend.xp.empty
            theta, g, correction = (empty((n, h.shape[1]), self.op.dtype) for n in sizes)
            self._buffers = (theta, g, correction)
        return self._buffers

    def _evaluate(self, rows: slice, theta: Array, out: Array) -> None:
        """Write K(Z[rows], Z) theta to `out`."""
        if self.K is not None:
            self.op.backend.matmul(self.K[rows], theta, out)
            return
        ids = np.arange(rows.start, rows.stop)
        equal_pairs = (ids - rows.start, ids)
        self.op.product(self.Z[rows], self.Z, theta, out=out, equal_pairs=equal_pairs)


class PartitionedProjection:
    """Projection by EigenPro 2.0 on centers that are partitioned over columns of ranks.

    For a batch of m centers, the ranks of a row of the grid evaluate a part of the rows of
    K(batch, Z), and the ranks of a column the columns of their own centers. The centers of several
    batches are broadcast at a time; with `resident` only in the first epoch. The values at the
    sample of s centers are columns of K(batch, Z), so the correction evaluates no kernel. A batch
    takes two sums over ranks, of m c and of s c elements, or only the first if the grid has a
    single row and one rank has the whole sample.

    Z : points of this rank's centers; the centers of all ranks are in random order.
    P : preconditioner whose sample is the first centers; its points are not used.
    partition : the partition of the centers.
    batch : see `IterativeProjection`.
    resident : whether K(Z, Z) is kept; each rank has p^2 / W of its elements.
    epochs : see `IterativeProjection`.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, P: LowRankPreconditioner, partition: Partition, *,
        batch: int, resident: bool = False, epochs: int = 1,
    ) -> None:  # fmt: skip
        self.op, self.Z, self.P = op, Z, P
        self.partition, self.grid = partition, partition.grid
        self.own_centers = partition.in_block[0]
        self.backend, self.batch, self.epochs = op.backend, batch, epochs
        # This rank's centers in the sample, as indices in the sample, and their number.
        sample = slice(0, len(P.E))
        self.sample_part, in_own = overlap(sample, self.own_centers)
        self.n_own_sample = in_own.stop
        first_column = RankGrid(0, self.grid.columns, self.grid.columns).of_column(partition.p)
        self.one_rank_has_sample = self.grid.rows == 1 and sample.stop <= first_column.stop
        batches = tiles(partition.p, batch)
        n_batches = max(1, BROADCAST_CENTERS // batch)
        self.broadcasts = [batches[part] for part in tiles(len(batches), n_batches)]
        self.K: Array | None = None
        self.K_is_evaluated = False  # whether K has its values
        if resident:
            n_rows = sum(length(self._part(rows)) for rows in batches)
            self.K = op.backend.xp.empty((n_rows, len(Z)), op.dtype)
        self.theta: Array | None = None

    def _part(self, rows: slice) -> slice:
        """Return the centers of a batch that this rank evaluates, as indices in the batch."""
        return self.grid.of_row(length(rows), rows.start // self.batch)

    def solve(self, h: Array) -> Array:
        """Return theta after `epochs` epochs over the centers; `h` is unchanged."""
        if self.theta is None or self.theta.shape != h.shape:
            self.theta = self.backend.xp.empty_like(h)
        self.theta[...] = 0
        for _ in range(self.epochs):
            self._run_epoch(h)
        return self.theta

    def _run_epoch(self, h: Array) -> None:
        """Take the steps of all batches."""
        n_evaluated = 0
        for batches in self.broadcasts:
            centers = slice(batches[0].start, batches[-1].stop)
            with (
                nullcontext()
                if self.K_is_evaluated
                else self.partition.lend_gathered_points(self.Z, centers) as x
            ):
                for rows in batches:
                    n = length(self._part(rows))
                    K_part = None if self.K is None else self.K[n_evaluated : n_evaluated + n]
                    start = rows.start - centers.start + self._part(rows).start
                    x_part = None if x is None else x[start : start + n]
                    self._step(rows, x_part, K_part, h)
                    n_evaluated += n
        self.K_is_evaluated = self.K is not None

    def _step(self, rows: slice, x: Points | None, K_part: Array | None, h: Array) -> None:
        """Take the step of a batch of centers.

        x : the centers of the batch that this rank evaluates; None if K_part has its values.
        K_part : K(x, Z), or None if it is not kept.
        """
        assert self.theta is not None
        m, part, c = length(rows), self._part(rows), h.shape[1]
        in_batch, in_own = overlap(rows, self.own_centers)
        workspace, K_shape = self.backend.workspace, (length(part), self.n_own_sample)
        with workspace((m, c), h.dtype) as g, workspace(K_shape, h.dtype) as K_sample:
            g[...] = 0
            if K_part is None:
                assert x is not None
                self._evaluate(rows.start + part.start, x, g[part], K_sample)
            else:
                if x is not None:
                    equal_pairs = self._equal_pairs(rows.start + part.start, len(x))
                    self.op.product(x, self.Z, keep=K_part, equal_pairs=equal_pairs)
                self.backend.matmul(K_part, self.theta, g[part])
                K_sample = K_part[:, : self.n_own_sample]
            if self.grid.row == 0:
                g[in_batch] -= h[in_own]
            self.partition.sum(g)
            g *= self.P.rule.eta(m) / m
            self.theta[in_own] -= g[in_batch]
            self._correct(K_sample, g[part])

    def _evaluate(self, start: int, x: Points, out: Array, K_sample: Array) -> None:
        """Write K(x, Z) theta to `out`, and the columns of K(x, Z) in the sample to `K_sample`.

        start : index of the first center of x, among all centers.
        """
        assert self.theta is not None
        n = self.n_own_sample
        self.op.product(
            x, self.Z[:n], self.theta[:n], out=out, keep=K_sample,
            equal_pairs=self._equal_pairs(start, len(x)),
        )  # fmt: skip
        with self.backend.workspace(out.shape, out.dtype) as values:
            out += self.op.product(
                x, self.Z[n:], self.theta[n:], out=values,
                equal_pairs=self._equal_pairs(start, len(x), n),
            )  # fmt: skip

    def _equal_pairs(self, start: int, n: int, shift: int = 0) -> EqualPairs:
        """Return the pairs (i, j) where center start + i of all centers is center j of Z[shift:].

        n : number of centers from `start` on.
        """
        i, j = self.partition.equal_pairs(slice(start, start + n))
        return i, j - shift

    def _correct(self, K_sample: Array, g: Array) -> None:
        """Add E D E^T K(sample, batch) g to theta at the sample."""
        if self.one_rank_has_sample and not self.n_own_sample:
            return
        assert self.theta is not None
        workspace, c, n = self.backend.workspace, g.shape[1], self.n_own_sample
        with (
            workspace((len(self.P.E), c), g.dtype) as correction,
            workspace((n, c), g.dtype) as values,
        ):
            self.backend.matmul_t(K_sample, g, values)
            damp(self.backend, self.P.E, self.P.D, values, correction, self.sample_part)
            if not self.one_rank_has_sample:
                self.partition.sum(correction)
            self.theta[:n] += correction[self.sample_part]


Projection = ExactProjection | IterativeProjection | PartitionedProjection
"""Map of h to theta, (p, c) each; `solve` may overwrite h."""


def inner_centers(p: int, n_nystrom: int) -> int:
    """Return the number of centers that `inner_rule` needs, from the first one on."""
    return min(p, n_nystrom + PROBE_ROWS)


def inner_rule(
    op: KernelOperator, Z: Points, p: int, *, level: int, n_nystrom: int, max_batch: int,
    seed: int = 0,
) -> tuple[LowRankPreconditioner, int]:  # fmt: skip
    """Return the preconditioner of an iterative projection, with its step rule, and its batch size.

    Z : the first `inner_centers` of p centers.
    level : number of damped directions.
    n_nystrom : number of centers in the sample.
    max_batch : largest batch size; otherwise it is the critical batch.
    """
    s = min(n_nystrom, p)
    # With few centers the probe has all of them, which makes the step rule exact. Otherwise it has
    # centers that are not in the sample.
    probe = Z if p <= s + PROBE_ROWS else Z[s:]
    P = build_low_rank(op, Z[:s], probe, level=min(level, s - 1), seed=seed)
    return P, int(max(1, min(P.rule.critical_batch, max_batch, p)))
