"""From values at the centers to weights: h -> theta with K(Z, Z) theta = h.

EP3 Prop. 2: projecting a function u onto span K(., Z) needs only its values h = u(Z). Three ways,
one verb `solve(h)`:

  exact      Cholesky of K(Z, Z) + jitter, p^2 elements, p^3 / 3 FLOPs once, 2 p^2 c per solve
  resident   K(Z, Z) kept, p^2 elements; epochs of EigenPro 2.0 on it, 2 p^2 c per epoch
  inexact    epochs of EigenPro 2.0, kernel entries evaluated on the fly, O(p) elements, 2 p^2 (d + c)
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from streamkern.backend import Array, tiles
from streamkern.errors import ConfigError
from streamkern.kernels import KernelOperator, Points
from streamkern.preconditioner import LowRankPreconditioner, build_low_rank, jittered_cholesky

PROBE_ROWS = 2000


class Projection(Protocol):
    """h (p, c) -> theta (p, c); `h` may be overwritten."""

    def solve(self, h: Array) -> Array:
        """theta with K(Z, Z) theta close to h."""
        ...


class ExactProjection:
    """Cholesky. Duplicate centers are handled by the jitter, which is reported."""

    def __init__(self, op: KernelOperator, Z: Points) -> None:
        self.backend = op.backend
        self.L, self.jitter = jittered_cholesky(op, Z)

    def solve(self, h: Array) -> Array:
        """Two triangular solves in place."""
        h = self.backend.solve_lower(self.L, h)
        return self.backend.solve_lower(self.L, h, transposed=True)


class IterativeProjection:
    """EigenPro 2.0 (EP2) with the centers as its data set: theta starts at 0 and each batch of
    centers updates its own weights and, through the preconditioner, those of a sample of centers.

    Z : points with both sides, in random order, so that consecutive rows are a random batch.
    resident : keep K(Z, Z). epochs : passes over the centers per solve.
    """

    def __init__(
        self,
        op: KernelOperator,
        Z: Points,
        *,
        level: int,
        n_nystrom: int,
        max_batch: int,
        epochs: int = 1,
        resident: bool = False,
        seed: int = 0,
    ) -> None:
        self.op, self.Z, self.epochs = op, Z, epochs
        s = min(n_nystrom, len(Z))
        self.sample = slice(0, s)
        # All centers when there are few: then the bound is exact. Otherwise rows outside the sample.
        few = len(Z) <= s + PROBE_ROWS
        probe = Z if few else Z[s : s + PROBE_ROWS]
        self.P: LowRankPreconditioner = build_low_rank(
            op, Z[self.sample], probe, level=min(level, s - 1), seed=seed
        )
        self.batch = int(max(1, min(self.P.rule.critical_batch, max_batch, len(Z))))
        self.K = op.gram(Z) if resident else None

    def solve(self, h: Array) -> Array:
        """theta after `epochs` passes."""
        op, xp, rule = self.op, self.op.backend.xp, self.P.rule
        theta = xp.zeros_like(h)
        for _ in range(self.epochs):
            for rows in tiles(len(self.Z), self.batch):
                m = rows.stop - rows.start
                g = self._forward(rows, theta) - h[rows]
                g *= rule.eta(m) / m
                theta[rows] -= g
                theta[self.sample] += self.P.correction(op, self.Z[rows], g)
        return theta

    def _forward(self, rows: slice, theta: Array) -> Array:
        if self.K is not None:
            return self.K[rows] @ theta
        ids = np.arange(rows.start, rows.stop)
        same = (ids - rows.start, ids)
        return self.op.product(self.Z[rows], self.Z, theta, same=same)


def build_projection(
    method: str,
    op: KernelOperator,
    Z: Points,
    *,
    level: int,
    n_nystrom: int,
    max_batch: int,
    seed: int = 0,
) -> Projection:
    """The projection named `method`: "exact", "resident" or "inexact"."""
    if method == "exact":
        return ExactProjection(op, Z)
    if method in ("resident", "inexact"):
        return IterativeProjection(
            op, Z, level=level, n_nystrom=n_nystrom, max_batch=max_batch,
            resident=method == "resident", seed=seed,
        )  # fmt: skip
    raise ConfigError(f"projection={method!r} is not known; use 'exact', 'resident' or 'inexact'")
