"""What each of several ranks has of a setup: a stripe of what is taken over rows or centers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator


def within(block: slice, own: slice) -> tuple[slice, slice]:
    """The rows that a block and a stripe share: as rows of the one, and of the other."""
    first = max(block.start, own.start)
    stop = max(first, min(block.stop, own.stop))
    return (
        slice(first - block.start, stop - block.start),
        slice(first - own.start, stop - own.start),
    )


def add_up(whole: Array, ranks: Communicator, backend: Backend) -> None:
    """Every rank gets the rows of all; whole : of which each has its own, and zeros."""
    # XGBoost's collective has no half precision. Of what one rank alone has, bits add up.
    ranks.sum(whole.view(np.uint16) if whole.dtype == np.float16 else whole, backend)


@dataclass(frozen=True)
class Centers:
    """p centers of a setup, of which each rank has all, or where they are `shared` its stripe.

    points : both sides of what this rank has.
    """

    points: Points
    p: int
    ranks: Communicator
    backend: Backend
    shared: bool = False

    @classmethod
    def whole(cls, points: Points, backend: Backend, ranks: Communicator = SINGLE) -> Centers:
        """Those of which each rank has all."""
        return cls(points, len(points), ranks, backend)

    def __len__(self) -> int:
        return self.p

    @property
    def stripe(self) -> Points:
        """Those of `Ranks.stripe`."""
        return self.points if self.shared else self.points[self.ranks.stripe(self.p)]

    def of(self, block: slice, *, left: bool = False) -> Points:
        """Those of a block, on all ranks; shared ones travel, in memory of their own. Everybody
        calls it. left : with the left side, too."""
        if not self.shared:
            return self.points[block]
        return (self.points if left else self.points.columns()).each(lambda a: self._rows(a, block))

    def known(self, at_centers: AtCenters) -> Array:
        """Of what is known at the centers, what a rank keeps: those of the centers that it has.
        Everybody calls it."""
        return at_centers.values if self.shared else at_centers.of(slice(0, self.p))

    def _rows(self, a: Array, block: slice) -> Array:
        at, here = within(block, self.ranks.stripe(self.p))
        whole = self.backend.xp.zeros((block.stop - block.start, *a.shape[1:]), a.dtype)
        whole[at] = a[here]
        add_up(whole, self.ranks, self.backend)
        return whole


@dataclass(frozen=True)
class AtCenters:
    """Values (p, c) of a function at all centers, or weights of these. values : (q, c), those of
    this rank's stripe."""

    values: Array
    p: int
    ranks: Communicator
    backend: Backend

    @classmethod
    def zeros(cls, p: int, like: Array, ranks: Communicator, backend: Backend) -> AtCenters:
        """Of as many outputs as `like` has columns."""
        own = ranks.stripe(p)
        shape = own.stop - own.start, like.shape[1]
        return cls(backend.xp.zeros(shape, like.dtype), p, ranks, backend)

    @property
    def own(self) -> slice:
        """The centers of the stripe."""
        return self.ranks.stripe(self.p)

    def of(self, block: slice) -> Array:
        """Those at the centers of a block, on all ranks; of one rank a view. Everybody calls it."""
        at, here = within(block, self.own)
        if self.ranks.alone:
            return self.values[here]
        shape = block.stop - block.start, self.values.shape[1]
        out = self.backend.xp.zeros(shape, self.values.dtype)
        out[at] = self.values[here]
        return self.ranks.sum(out, self.backend)

    def put(self, block: slice, rows: Array) -> None:
        """Set those at the centers of a block. rows : (b, c)."""
        at, here = within(block, self.own)
        self.values[here] = rows[at]

    def product(
        self, op: KernelOperator, stripe: Points, block: slice, Z: Points, weights: Array
    ) -> Array:
        """K(stripe, Z) weights at the centers of the stripe, (q, c). Z : those of the block."""
        at, here = within(block, self.own)
        same = (np.arange(here.start, here.stop), np.arange(at.start, at.stop))
        return op.product(stripe, Z, weights, same=same)


def apply_root(
    H: Array, g: Array, out: Array, ranks: Communicator, backend: Backend,
    damp: Callable[[Array], object] = lambda half: None,
) -> Array:  # fmt: skip
    """out <- H^T H g, or what this rank's rows of a lower triangular H add to it.

    H : (b, b), or some rows of it up to the last of their columns. g, out : (b, c). damp : is given
    H g, to change it.
    """
    rows = ranks.triangle(len(g))
    first, lower = slice(rows.stop), rows.start == 0
    out[rows.stop :] = 0
    with backend.workspace((len(H), g.shape[1]), g.dtype) as half:
        backend.matmul(H, g[first], half, lower=lower)
        damp(half)
        backend.matmul_t(H, half, out[first], lower=lower)
    return out


def own_rows(factor: Array | None, n: int, ranks: Communicator) -> Array | None:
    """The rows of a lower triangular factor (n, n) that are this rank's, in memory of their own;
    a factor of which it has no more is returned as it is."""
    if factor is None or ranks.alone:
        return factor
    rows = ranks.triangle(n)
    if factor.shape == (rows.stop - rows.start, rows.stop):
        return factor
    return factor[rows, : rows.stop].copy()
