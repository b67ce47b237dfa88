"""Scatter the centers of a setup over the ranks of a center partition.

Rank 0 has chosen the centers. It broadcasts them part by part, and each rank keeps its stripe: a
range of consecutive centers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from streamkern.backend.base import tiles
from streamkern.backend.ranks import Communicator
from streamkern.basics.array_types import HostArray, Ints
from streamkern.planning.memory import BROADCAST_CENTER_BYTES

CenterPart = tuple[Ints, HostArray]
"""Indices of centers, (m,), and these centers, (m, d)."""


def scatter(parts: Iterable[CenterPart], p: int, ranks: Communicator) -> HostArray:
    """Broadcast all centers from rank 0, and return its stripe, (q, d).

    Called on rank 0, while the other ranks call `receive_shard`.

    parts : all p centers, each of them once
    """

    def broadcast_parts() -> Iterator[CenterPart]:
        for indices, X in parts:
            for rows in tiles(len(X), max(1, BROADCAST_CENTER_BYTES // max(1, X[:1].nbytes))):
                part = np.ascontiguousarray(X[rows])
                ranks.broadcast_scalars([*part.shape, part.itemsize])
                yield ranks.broadcast(indices[rows].copy()), ranks.broadcast(part)
        ranks.broadcast_scalars([0, 0, 0])

    return _own_stripe(broadcast_parts(), p, ranks)


def receive_shard(p: int, ranks: Communicator) -> HostArray:
    """Receive the centers that rank 0 broadcasts, and return the stripe of this rank, (q, d)."""

    def received_parts() -> Iterator[CenterPart]:
        while True:
            m, d, itemsize = (int(size) for size in ranks.broadcast_scalars([0, 0, 0]))
            if not m:
                return
            X = np.empty((m, d), f"f{itemsize}")
            yield ranks.broadcast(np.empty(m, np.int64)), ranks.broadcast(X)

    return _own_stripe(received_parts(), p, ranks)


def _own_stripe(parts: Iterable[CenterPart], p: int, ranks: Communicator) -> HostArray:
    """Return the stripe of this rank, (q, d), from parts of all centers."""
    own, stripe = ranks.stripe(p), None
    for indices, X in parts:
        if stripe is None:
            stripe = np.empty((own.stop - own.start, X.shape[1]), X.dtype)
        in_stripe = (indices >= own.start) & (indices < own.stop)
        stripe[indices[in_stripe] - own.start] = X[in_stripe]
    assert stripe is not None, "there are no centers"
    return stripe


def mean(Z: HostArray, p: int, ranks: Communicator) -> HostArray:
    """Return the mean of all centers, (d,) float64. Collective.

    One rank after the other adds its rows, one by one, to the sum of the ranks before. This is the
    order of `numpy.mean`; in another order, the result would depend on the number of ranks.

    Z : (q, d), the stripe of this rank
    """
    total = np.zeros(Z.shape[1])
    for turn in range(ranks.size):
        if turn == ranks.rank:
            for rows in tiles(len(Z), 1024):
                total = np.concatenate([total[None], Z[rows]]).sum(axis=0)
        total = ranks.allgather(total.tolist())[turn]
    return total / p
