"""K(Z, Z) of ranks that share out the centers Z: some of these travel to all of them at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.backend.rank_grid import CenterPartition
from streamkern.backend.ranks import Communicator
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.stripes import add_up, within

ON_THEIR_WAY = 1024
"""Centers that all ranks have at a time, while those are evaluated."""


class BroadcastCenters:
    """The centers of a rank, and those of the others as they come by.

    Z : points of this rank's, both sides, in one piece of all of them, which `share` tells.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, share: CenterPartition, ranks: Communicator
    ) -> None:
        self.op, self.Z, self.share, self.ranks = op, Z, share, ranks
        self.own, self.grid = share.at[0], share.grid

    @contextmanager
    def left(self, some: slice) -> Iterator[Points]:
        """The left side of some of all centers. Everybody calls it."""
        at, here = within(some, self.own)
        backend = self.op.backend
        with ExitStack() as lent:

            def rows_of(a: Array) -> Array:
                shape = some.stop - some.start, *a.shape[1:]
                whole = lent.enter_context(backend.workspace(shape, a.dtype))
                whole[...] = 0
                if self.grid.row == 0:  # of those with the same centers one says it
                    whole[at] = a[here]
                add_up(whole, self.ranks, backend)
                return whole

            yield Points(self.Z.left, None, self.Z.norms).each(rows_of)

    def same(self, first: int, n: int, shift: int = 0) -> tuple[Array, Array]:
        """Which of n centers from `first` on are which of Z from `shift` on."""
        at, here = within(slice(first, first + n), self.own)
        return np.arange(at.start, at.stop), np.arange(here.start, here.stop) - shift

    def product(self, weights: Array, out: Array) -> Array:
        """out <- K(Z, Z) weights, (q, c) of this rank's centers, as weights are. Everybody calls
        it: each evaluates some rows of those that travel, with its own centers."""
        backend = self.op.backend
        for turn, some in enumerate(tiles(self.share.p, ON_THEIR_WAY)):
            n = some.stop - some.start
            part = self.grid.of_row(n, turn)
            at, here = within(some, self.own)
            with self.left(some) as x, backend.workspace((n, out.shape[1]), out.dtype) as values:
                values[...] = 0
                self.op.product(
                    x[part], self.Z, weights, out=values[part],
                    same=self.same(some.start + part.start, part.stop - part.start),
                )  # fmt: skip
                self.ranks.sum(values, backend)
                out[here] = values[at]
        return out
