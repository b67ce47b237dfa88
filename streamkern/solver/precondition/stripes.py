"""Stripes of the rows and centers of a setup, one for each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator


def within(block: slice, own: slice) -> tuple[slice, slice]:
    """Return the rows that a block and a stripe share, as slices of the block and of the stripe."""
    first = max(block.start, own.start)
    stop = max(first, min(block.stop, own.stop))
    return (
        slice(first - block.start, stop - block.start),
        slice(first - own.start, stop - own.start),
    )


def add_up(whole: Array, ranks: Communicator, backend: Backend) -> None:
    """Gather the rows of all ranks in `whole`, which has this rank's own rows, and zeros."""
    # XGBoost's collective has no half precision. With one nonzero term, the bits can be added.
    ranks.sum(whole.view(np.uint16) if whole.dtype == np.float16 else whole, backend)


@dataclass(frozen=True)
class Centers:
    """The p centers of a setup, all on each rank, or only its stripe if they are `shared`.

    points : both sides of the centers on this rank.
    """

    points: Points
    p: int
    ranks: Communicator
    backend: Backend
    shared: bool = False

    @classmethod
    def whole(cls, points: Points, backend: Backend, ranks: Communicator = SINGLE) -> Centers:
        """Return centers of which each rank has all."""
        return cls(points, len(points), ranks, backend)

    def __len__(self) -> int:
        return self.p

    @property
    def stripe(self) -> Points:
        """The centers of this rank's stripe, see `Communicator.stripe`."""
        return self.points if self.shared else self.points[self.ranks.stripe(self.p)]

    def of(self, block: slice, *, left: bool = False) -> Points:
        """Return the centers of a block, on all ranks. Collective call.

        Shared centers are broadcast, to new memory. left : with the left side, too.
        """
        if not self.shared:
            return self.points[block]
        return (self.points if left else self.points.columns()).each(lambda a: self._rows(a, block))

    def known(self, at_centers: AtCenters) -> Array:
        """Return the values at the centers of this rank. Collective call."""
        return at_centers.values if self.shared else at_centers.of(slice(0, self.p))

    def _rows(self, a: Array, block: slice) -> Array:
        at, here = within(block, self.ranks.stripe(self.p))
        whole = self.backend.xp.zeros((block.stop - block.start, *a.shape[1:]), a.dtype)
        whole[at] = a[here]
        add_up(whole, self.ranks, self.backend)
        return whole


@dataclass(frozen=True)
class AtCenters:
    """Values (p, c) of a function at all centers, or weights of these.

    values : (q, c), values of this rank's stripe.
    """

    values: Array
    p: int
    ranks: Communicator
    backend: Backend

    @classmethod
    def zeros(cls, p: int, like: Array, ranks: Communicator, backend: Backend) -> AtCenters:
        """Return zeros, with as many outputs as `like` has columns."""
        own = ranks.stripe(p)
        shape = own.stop - own.start, like.shape[1]
        return cls(backend.xp.zeros(shape, like.dtype), p, ranks, backend)

    @property
    def own(self) -> slice:
        """The centers of the stripe, as a slice."""
        return self.ranks.stripe(self.p)

    def of(self, block: slice) -> Array:
        """Return the values at the centers of a block, on all ranks. Collective call.

        With a single rank it is a view.
        """
        at, here = within(block, self.own)
        if self.ranks.is_single:
            return self.values[here]
        shape = block.stop - block.start, self.values.shape[1]
        out = self.backend.xp.zeros(shape, self.values.dtype)
        out[at] = self.values[here]
        return self.ranks.sum(out, self.backend)

    def put(self, block: slice, rows: Array) -> None:
        """Set the values at the centers of a block. rows : (b, c)."""
        at, here = within(block, self.own)
        self.values[here] = rows[at]

    def product(
        self, op: KernelOperator, stripe: Points, block: slice, Z: Points, weights: Array
    ) -> Array:
        """Return K(stripe, Z) weights at the centers of the stripe, (q, c). Z : block's centers."""
        at, here = within(block, self.own)
        same = (np.arange(here.start, here.stop), np.arange(at.start, at.stop))
        return op.product(stripe, Z, weights, same=same)


def apply_root(
    H: Array, g: Array, out: Array, ranks: Communicator, backend: Backend,
    damp: Callable[[Array], object] = lambda half: None,
) -> Array:  # fmt: skip
    """Write H^T H g to `out`, or the part of this rank's rows of a lower triangular H.

    H : (b, b), or some rows of it up to the last of their columns.
    g, out : (b, c).
    damp : function that receives H g, to change it in place.
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
    """Return a copy of this rank's rows of a lower triangular factor (n, n).

    A factor that has no other rows is returned as it is.
    """
    if factor is None or ranks.is_single:
        return factor
    rows = ranks.triangle(n)
    if factor.shape == (rows.stop - rows.start, rows.stop):
        return factor
    return factor[rows, : rows.stop].copy()
