"""The centers of a setup whose ranks share them out: rank 0 has chosen them, and each keeps its
stripe of what that tells, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from streamkern.backend.base import tiles
from streamkern.backend.ranks import Communicator
from streamkern.basics.array_types import HostArray, Ints
from streamkern.planning.memory import TOLD_CENTERS

CenterPart = tuple[Ints, HostArray]
"""(m,) numbers of centers, and these, (m, d)."""


def scatter(parts: Iterable[CenterPart], p: int, ranks: Communicator) -> HostArray:
    """On rank 0, to which `parts` bring every center once: its stripe, (q, d)."""

    def told() -> Iterator[CenterPart]:
        for places, X in parts:
            for rows in tiles(len(X), max(1, TOLD_CENTERS // max(1, X[:1].nbytes))):
                part = np.ascontiguousarray(X[rows])
                ranks.broadcast_scalars([*part.shape, part.itemsize])
                yield ranks.broadcast(places[rows].copy()), ranks.broadcast(part)
        ranks.broadcast_scalars([0, 0, 0])

    return _kept(told(), p, ranks)


def receive_shard(p: int, ranks: Communicator) -> HostArray:
    """On another rank: its stripe."""

    def heard() -> Iterator[CenterPart]:
        while True:
            m, d, itemsize = (int(size) for size in ranks.broadcast_scalars([0, 0, 0]))
            if not m:
                return
            X = np.empty((m, d), f"f{itemsize}")
            yield ranks.broadcast(np.empty(m, np.int64)), ranks.broadcast(X)

    return _kept(heard(), p, ranks)


def _kept(parts: Iterable[CenterPart], p: int, ranks: Communicator) -> HostArray:
    own, kept = ranks.stripe(p), None
    for places, X in parts:
        if kept is None:
            kept = np.empty((own.stop - own.start, X.shape[1]), X.dtype)
        here = (places >= own.start) & (places < own.stop)
        kept[places[here] - own.start] = X[here]
    assert kept is not None, "there are no centers"
    return kept


def mean(Z: HostArray, p: int, ranks: Communicator) -> HostArray:
    """(d,) float64, of all centers. Z : this rank's stripe. Everybody calls it.

    One rank after the other goes on from what those before have added up, row by row, which is the
    order of `numpy.mean`: with another one bits of a whole run would depend on the ranks.
    """
    total = np.zeros(Z.shape[1])
    for turn in range(ranks.size):
        if turn == ranks.rank:
            for rows in tiles(len(Z), 1024):
                total = np.concatenate([total[None], Z[rows]]).sum(axis=0)
        total = ranks.allgather(total.tolist())[turn]
    return total / p
