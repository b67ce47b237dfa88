"""Projection of values at the centers to weights: h -> theta with K(Z, Z) theta = h.

EP3 Prop. 2: projecting a function u onto span K(., Z) needs only its values h = u(Z). There are
three kinds, with one method `solve(h)`:

  exact      Cholesky of K(Z, Z) + jitter, p^2 elements, p^3 / 3 FLOPs once, 2 p^2 c per solve
  resident   K(Z, Z) kept, p^2 elements; an epoch of EigenPro 2.0 on it, 2 p^2 c
  inexact    an epoch of EigenPro 2.0, entries evaluated on the fly, O(p) elements, 2 p^2 (d + c)
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.low_rank import LowRankPreconditioner, build_low_rank
from streamkern.solver.precondition.norm import jittered_cholesky

INNER_NYSTROM, PROBE_ROWS = 2000, 2000
"""Number of centers in the sample of an iterative projection, and of others in its probe."""


class Projection(Protocol):
    """Map of h (p, c) to theta (p, c); `h` may be overwritten."""

    def solve(self, h: Array) -> Array:
        """Return theta with K(Z, Z) theta close to h."""
        ...


class ExactProjection:
    """Projection by a Cholesky factor. Its jitter, which is reported, allows duplicate centers.

    L : (p, p) lower factor of K(Z, Z) + jitter I.
    """

    def __init__(self, op: KernelOperator, L: Array, jitter: float) -> None:
        self.backend, self.L, self.jitter = op.backend, L, jitter

    @classmethod
    def build(cls, op: KernelOperator, Z: Points) -> ExactProjection:
        """Factor K(Z, Z); Z has both sides."""
        return cls(op, *jittered_cholesky(op, Z))

    def solve(self, h: Array) -> Array:
        """Return theta by two triangular solves, in place."""
        h = self.backend.solve_lower(self.L, h)
        return self.backend.solve_lower(self.L, h, transposed=True)


class IterativeProjection:
    """Projection by EigenPro 2.0 (EP2) with the centers as its data set.

    theta starts at 0, and each batch of centers updates its own weights and, through the
    preconditioner, the weights of a sample of centers.

    Z : points with both sides, in random order, so that consecutive rows are a random batch.
    P : preconditioner whose sample is the first rows of Z.
    resident : keep K(Z, Z).
    """

    def __init__(
        self,
        op: KernelOperator,
        Z: Points,
        P: LowRankPreconditioner,
        *,
        batch: int,
        resident: bool = False,
    ) -> None:
        self.op, self.Z, self.P, self.batch = op, Z, P, batch
        self.K = op.gram(Z) if resident else None
        self._kept: tuple[Array, Array, Array] | None = None

    @classmethod
    def build(
        cls,
        op: KernelOperator,
        Z: Points,
        *,
        level: int,
        n_nystrom: int,
        max_batch: int,
        resident: bool = False,
        seed: int = 0,
    ) -> IterativeProjection:
        """Build it from the eigensystem of the first `n_nystrom` centers, and measure the step."""
        P, batch = inner_rule(
            op, Z[: inner_centers(len(Z), n_nystrom)], len(Z), level=level, n_nystrom=n_nystrom,
            max_batch=max_batch, seed=seed,
        )  # fmt: skip
        return cls(op, Z, P, batch=batch, resident=resident)

    def solve(self, h: Array) -> Array:
        """Return theta after one pass over the centers."""
        theta, g, correction = self._buffers(h)
        theta[...] = 0
        sample = slice(0, len(self.P.X_s))
        for rows in tiles(len(self.Z), self.batch):
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


def inner_centers(p: int, n_nystrom: int = INNER_NYSTROM) -> int:
    """Return how many of the first of p centers `inner_rule` takes."""
    return min(p, n_nystrom + PROBE_ROWS)


def inner_rule(
    op: KernelOperator, Z: Points, p: int, *, level: int, n_nystrom: int, max_batch: int,
    seed: int = 0,
) -> tuple[LowRankPreconditioner, int]:  # fmt: skip
    """Return the preconditioner of the first centers, with its step rule, and the batch size.

    Z : the first `inner_centers` of p centers, both sides.
    """
    s = min(n_nystrom, p)
    # All centers if there are few: the bound is then exact. Otherwise centers that are not in the
    # sample.
    probe = Z if p <= s + PROBE_ROWS else Z[s:]
    P = build_low_rank(op, Z[:s], probe, level=min(level, s - 1), seed=seed)
    return P, int(max(1, min(P.rule.critical_batch, max_batch, p)))
