"""A model of which each of several ranks has a part of the centers: all of them evaluate it.

Rank 0 asks, and decides by what comes of it: its rows travel to the others, each of which adds what
its centers do, on some of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.backend.rank_grid import RankGrid
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.train.model import KernelModel


@dataclass
class SharedModel(KernelModel):
    """Z, weights : those of this rank."""

    ranks: Communicator = SINGLE
    grid: RankGrid = field(default_factory=RankGrid)

    def function(self, X: Array) -> Array:
        """See `KernelModel`. On rank 0, while the others `answer`."""
        self.ranks.broadcast_scalars(X.shape)
        return self._together(np.ascontiguousarray(self.backend.to_host(X)))

    def answer(self) -> None:
        """On the other ranks evaluate for rank 0, until that calls it, too: it is done."""
        while True:
            n, d = (int(size) for size in self.ranks.broadcast_scalars([0, 0]))
            if not n:
                return
            with np.errstate(over="ignore", invalid="ignore"):  # rank 0 looks at what comes of it
                self._together(np.empty((n, d), self.op.dtype))

    def _together(self, rows: npt.NDArray[Any]) -> Array:
        """rows : (n, d) on the host, those of rank 0."""
        X = self.backend.asarray(self.ranks.broadcast(rows), self.op.dtype)
        F = self.backend.xp.zeros((len(X), self.n_outputs), self.op.dtype)
        own = self.grid.of_row(len(X))
        F[own] = super().function(X[own])
        return self.ranks.sum(F, self.backend)
