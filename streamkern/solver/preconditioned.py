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
    """Base class of the solvers with one direction of conjugate gradient for each output.

    K(X, Z) is multiplied with the weights and the directions together. Products of a batch are in
    the precision of the operator; sums over batches, vectors and scalars are float64.
    `State.pending` has "squares", (2, c): r . M r and b . M b, with M = H^T H, the residual r and
    the right-hand side b.

    Parameters
    ----------
    Z : points of the centers.
    H : (p, p) lower triangular, from `falkon.precondition`, or this rank's stripe of it.
    jitter : jitter of K(Z, Z) in H.
    tolerance : the run ends if sqrt(r . M r) <= tolerance sqrt(b . M b) for every output.
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
        """Add K^T values to `sums`, (p, c). K : (m, p). values : (m, c)."""
        sums += self.backend.matmul_t(K, values, self.part)

    def _norm_times(self, v: Array) -> Array:
        """Return (K(Z, Z) + jitter I) v, (p, k) float64, with the jitter of the factor in H.

        Rounding makes K(Z, Z) indefinite, by about eps, or by more if centers nearly coincide, as
        the Laplace kernel takes the square root of a rounded distance. The jitter exceeds this, or
        there would be no factor. Without the jitter, conjugate gradient would diverge along such
        directions.
        """
        rounded = self.backend.asarray(v, self.op.dtype)
        out = self.part if v.shape == self.part.shape else self.backend.xp.empty_like(rounded)
        return self.partition.norm_product(self.op, self.Z, rounded, out) + self.jitter * v

    def _preconditioned(self, r: Array) -> Array:
        """Return H^T H r at this rank's centers, in float64.

        H is converted to float64, so that the map is symmetric and positive. Each rank computes the
        term of its rows of H.
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
        """Return the largest sqrt(r . M r / b . M b) over the outputs; 0 if all targets are 0."""
        r_M_r, b_M_b = self.backend.to_host(state.pending["squares"])
        squares = (r / b if b > 0 else 0.0 for r, b in zip(r_M_r, b_M_b, strict=True))
        return math.sqrt(max(0.0, *squares))

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
    """Return a / b, and 0 where b <= 0: the step of an output that has converged is 0."""
    positive = b > 0
    return xp.where(positive, a / xp.where(positive, b, 1), 0)
