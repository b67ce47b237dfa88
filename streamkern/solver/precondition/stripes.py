"""What each of several ranks has of a setup: a stripe of what is taken over rows or centers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.backend.ranks import Ranks
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


@dataclass(frozen=True)
class AtCenters:
    """Values (p, c) of a function at all centers. values : (q, c), those of this rank's stripe."""

    values: Array
    p: int
    ranks: Ranks
    backend: Backend

    @classmethod
    def zeros(cls, p: int, like: Array, ranks: Ranks, backend: Backend) -> AtCenters:
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

    def product(self, op: KernelOperator, centers: Points, block: slice, weights: Array) -> Array:
        """K(Z, Z_b) weights at the centers of the stripe, (q, c)."""
        at, here = within(block, self.own)
        same = (np.arange(here.start, here.stop), np.arange(at.start, at.stop))
        return op.product(centers[self.own], centers[block], weights, same=same)


def apply_root(
    H: Array, g: Array, out: Array, ranks: Ranks, backend: Backend,
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


def own_rows(factor: Array | None, n: int, ranks: Ranks) -> Array | None:
    """The rows of a lower triangular factor (n, n) that are this rank's, in memory of their own;
    a factor of which it has no more is returned as it is."""
    if factor is None or ranks.alone:
        return factor
    rows = ranks.triangle(n)
    if factor.shape == (rows.stop - rows.start, rows.stop):
        return factor
    return factor[rows, : rows.stop].copy()
