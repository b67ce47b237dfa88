"""Products with K(Z, Z) for partitioned centers, which are broadcast some at a time."""

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
"""Number of centers that are broadcast to all ranks at a time."""


class BroadcastCenters:
    """The centers of a rank, and access to the centers of the other ranks.

    Z : points of this rank's centers, both sides.
    share : their partition, of a single block.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, share: CenterPartition, ranks: Communicator
    ) -> None:
        self.op, self.Z, self.share, self.ranks = op, Z, share, ranks
        self.own, self.grid = share.at[0], share.grid

    @contextmanager
    def left(self, some: slice) -> Iterator[Points]:
        """Yield the left side of a slice of all centers. Collective call."""
        at, here = within(some, self.own)
        backend = self.op.backend
        with ExitStack() as lent:

            def rows_of(a: Array) -> Array:
                shape = some.stop - some.start, *a.shape[1:]
                whole = lent.enter_context(backend.workspace(shape, a.dtype))
                whole[...] = 0
                if self.grid.row == 0:  # one of the ranks with the same centers contributes them
                    whole[at] = a[here]
                add_up(whole, self.ranks, backend)
                return whole

            yield Points(self.Z.left, None, self.Z.norms).each(rows_of)

    def same(self, first: int, n: int, shift: int = 0) -> tuple[Array, Array]:
        """Return which of n centers from `first` on are in Z, and their indices in Z.

        shift : number that is subtracted from the indices in Z.
        """
        at, here = within(slice(first, first + n), self.own)
        return np.arange(at.start, at.stop), np.arange(here.start, here.stop) - shift

    def product(self, weights: Array, out: Array) -> Array:
        """Write K(Z, Z) weights to `out`, (q, c), at this rank's centers. Collective call.

        Each rank evaluates some rows of the broadcast centers, with its own centers as columns.

        weights : (q, c), of this rank's centers.
        """
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
