"""Base class of the solvers by conjugate gradient with the preconditioner of FALKON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.basics.errors import DivergenceError
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.base import Solver, State

CAST_SLAB_ROWS = 256
"""Number of rows of H that are cast to float64 at a time."""


class PreconditionedSolver(Solver):
    """Base class: a batch is multiplied with a weight and a direction for each output.

    A batch's products are in the operator's precision; sums over batches, vectors and scalars are
    float64. `State.pending` has "squares", (2, c): r . M r and b . M b, with M = H^T H.

    Parameters
    ----------
    Z : points of the centers.
    H : (p, p) lower, from `falkon.precondition`, or its stripe, and the `jitter` it took.
    tolerance : stop once sqrt(r . M r) is at most this times sqrt(b . M b), for every output.
    """

    name = "falkon"

    def __init__(
        self, op: KernelOperator, Z: Points, *, H: Array, ridge: float = 0.0, jitter: float = 0.0,
        tolerance: float, **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(op, Z, **shared)
        self.H, self.ridge, self.jitter, self.tolerance = H, ridge, jitter, tolerance
        self.part = op.backend.xp.empty((len(Z), self.n_outputs), op.dtype)
        self._make_room()

    def _allocate(self, m: int) -> None:
        xp, dtype, c = self.backend.xp, self.op.dtype, self.n_outputs
        self.K: Array = None  # free the old buffer first
        self.K = xp.empty((m, len(self.Z)), dtype)
        self.x = self.op.empty_points(m, self.Z.n_coordinates, left=True)
        self.values = xp.empty((m, 2 * c), dtype)
        self.r, self.Kv = (xp.empty((m, c), dtype) for _ in range(2))

    def _add(self, K: Array, values: Array, sums: Array) -> None:
        """Add K^T values to the sums, (p, c). K : (m, p). values : (m, c)."""
        sums += self.backend.matmul_t(K, values, self.part)

    def _norm_times(self, v: Array) -> Array:
        """Return (K(Z, Z) + jitter) v, (p, k) float64, with the jitter of the factor in H.

        Rounded, K(Z, Z) is indefinite, by about eps, or by more where centers nearly coincide: 1e-4
        with Laplace, which takes the root of rounding, at 20 bandwidths from the mean. The factor
        exists because the jitter is above that; without it conjugate gradient grows along such
        directions (to 1.3 times the exact test error there).
        """
        narrow = self.backend.asarray(v, self.op.dtype)
        out = self.part if v.shape == self.part.shape else self.backend.xp.empty_like(narrow)
        return self.partition.norm_product(self.op, self.Z, narrow, out) + self.jitter * v

    def _preconditioned(self, r: Array) -> Array:
        """Return H^T H r at this rank's centers, in float64, whatever the precision of H.

        The product is exactly symmetric and positive. Each rank adds the part of its rows of H.
        """
        r = self.partition.gather(r, slice(0, self.partition.p))
        z, first = self.backend.xp.zeros(r.shape), self.ranks.triangle(len(r)).start
        for rows in tiles(len(self.H), CAST_SLAB_ROWS):
            end = first + rows.stop
            part = self.H[rows, :end].astype(np.float64)  # lower triangular
            z[:end] += part.T @ (part @ r[:end])
        return self.partition.part(self.partition.sum(z))

    def _dot(self, a: Array, b: Array) -> Array:
        """Return a . b for each output, over all centers: (c,)."""
        return self.partition.sum_over_columns((a * b).sum(axis=0))

    def _residual(self, state: State) -> float:
        """Return the largest sqrt(r . M r / b . M b) of an output; 0 if all targets are 0."""
        rz, bz = self.backend.to_host(state.pending["squares"])
        return math.sqrt(max(0.0, *(a / b if b > 0 else 0.0 for a, b in zip(rz, bz, strict=True))))

    @staticmethod
    def _failure(state: State) -> DivergenceError:
        return DivergenceError(
            f"solver 'falkon' has a residual that is not finite after {state.passes} passes",
            "check the data for outliers, or give a larger bandwidth",
        )

    def finished(self, state: State) -> str | None:
        """Return a reason if the residual is within the tolerance, else None."""
        if state.passes == 0:
            return None
        residual = self._residual(state)
        if residual > self.tolerance:
            return None
        return (
            f"converged in {state.passes - 1} iterations to a relative residual of {residual:.1e}, "
            f"tolerance {self.tolerance:g}"
        )


def ratio(xp: Any, a: Array, b: Array) -> Array:
    """Return a / b, and 0 where b is 0: an output that has converged does not move."""
    usable = b > 0
    return xp.where(usable, a / xp.where(usable, b, 1), 0)
