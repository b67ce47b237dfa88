"""A trained model whose centers are partitioned over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.backend.rank_grid import RankGrid
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.train.model.kernel_model import KernelModel


@dataclass
class SharedModel(KernelModel):
    """A model whose centers are partitioned over ranks.

    Rank 0 initiates each evaluation, and uses its result. It broadcasts the rows; each rank adds
    the contribution of its centers on some of the rows, in an all-reduce.

    Z, weights : prepared centers and weights (p_rank, c) of this rank, on the device
    ranks : communicator of the ranks
    grid : position of this rank, which determines its rows
    """

    ranks: Communicator = SINGLE
    grid: RankGrid = field(default_factory=RankGrid)

    def function(self, X: Array) -> Array:
        """Evaluate on rank 0, while the other ranks run `serve_rank0`: see `KernelModel`."""
        self.ranks.broadcast_scalars(X.shape)
        return self._sum_over_ranks(np.ascontiguousarray(self.backend.to_host(X)))

    def warn_of_unseen(self, X: Array) -> None:
        """Do nothing, because a rank does not know the values of the other ranks' centers."""

    def serve_rank0(self) -> None:
        """Evaluate for rank 0, on another rank, until rank 0 calls `serve_rank0` as well."""
        while True:
            n, d = (int(size) for size in self.ranks.broadcast_scalars([0, 0]))
            if not n:
                return
            with np.errstate(over="ignore", invalid="ignore"):  # rank 0 checks the result
                self._sum_over_ranks(np.empty((n, d), self.op.dtype))

    def _sum_over_ranks(self, rows: npt.NDArray[Any]) -> Array:
        """Return f(X) (n, c) of rank 0's rows, summed over the ranks.

        rows : (n, d) on the host, scaled; overwritten with the rows of rank 0 on the other ranks.
        """
        X = self.backend.asarray(self.ranks.broadcast(rows), self.op.dtype)
        F = self.backend.xp.zeros((len(X), self.n_outputs), self.op.dtype)
        own_rows = self.grid.of_row(len(X))
        F[own_rows] = super().function(X[own_rows])
        return self.ranks.sum(F, self.backend)
