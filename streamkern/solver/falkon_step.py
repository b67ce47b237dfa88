"""FALKON: preconditioned conjugate gradient, each iteration one epoch.

Rudi, Carratino and Rosasco 2017, "FALKON: an optimal large scale kernel method", Alg. 1. With
K = K(X, Z) over all n rows, the equations are the same as in `solver.direct_step`,

    A alpha = b,    A = K^T K / n + ridge K(Z, Z),    b = K^T Y / n,

and M = H^T H = (K(Z, Z)^2 / p + mu K(Z, Z))^-1 their preconditioner. The first epoch sums the
residual at the start, r = b - A alpha; every further one sums A v for the direction v:

    a = (r . M r) / (v . A v);   alpha += a v;   r -= a A v;
    v <- M r + (r . M r)_new / (r . M r)_old v,

with separate scalars a for every output. So E epochs make E - 1 iterations. A must be
the same operator in every epoch, so all epochs use the order and the random draws of epoch 0.

The weights of the model are the last ones with a residual near the least so far (`WORST_RESIDUAL`).

The reported loss is that of the weights before the epoch; K alpha and K v are computed together.
Products of a batch are in the precision of the operator; sums over batches, vectors and scalars are
float64.

Each rank of a grid (`backend.rank_grid`) has some rows of X, and the part of its column of the
centers and of all vectors of the iteration; sums over rows are added at the end of an epoch. Each
rank has its stripe of H (`Communicator.triangle`); while M r is computed, every rank has all of r
and of M r. With a ridge, the centers are broadcast (`Partition.norm_product`).

Differences from the paper: conjugate gradient in alpha with M, not in beta = H^-T alpha, which
gives the same iterates and keeps rounding errors of H out of the residual; and batches in place of
all rows.

Cost per epoch 2 n p (d + 3 c) FLOPs, and with a ridge 2 p^2 (d + c); memory p^2 for H.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.backend.batch import Batch
from streamkern.basics.errors import DivergenceError
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.base import Solver, State

CAST_SLAB_ROWS = 256
"""Number of rows of H that are cast to float64 at a time."""
ARRAYS_WITHOUT_CENTERS = ("squares", "least", "bend", "slopes", "bound", "move")
"""Names of a checkpoint's arrays that do not have a row for each center.

The last four are of `falkon_newton_step`.
"""
WORST_RESIDUAL = 2.0
"""Largest residual, relative to the least so far, with which weights are accepted.

With hardly any ridge, the residual falls to the size of rounding errors and then grows again. It
may also rise for a few iterations before that, so weights with a slightly larger residual are
accepted.
"""


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
        tolerance: float, **solver_arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__(op, Z, **solver_arguments)
        self.H, self.ridge, self.jitter, self.tolerance = H, ridge, jitter, tolerance
        self.part = op.backend.xp.empty((len(Z), self.n_outputs), op.dtype)
        self._ensure_buffers()

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

    def _center_kernel_times(self, v: Array) -> Array:
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
    def _divergence_error(state: State) -> DivergenceError:
        return DivergenceError(
            f"solver 'falkon' has a residual that is not finite after {state.passes} epochs",
            "check the data for outliers, or give a larger bandwidth",
        )

    def why_finished(self, state: State) -> str | None:
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


class FalkonSolver(PreconditionedSolver):
    """FALKON, as in the module docstring."""

    def init(self, alpha: Array | None = None) -> State:
        """Return the state of the zero function, or of the weights `alpha`, see `Solver.init`."""
        state = super().init(alpha)
        state.pending["alpha64"][...] = state.alpha
        self._round_to_batch_precision(state)
        return state

    def _pending(self) -> dict[str, Array]:
        """Return the arrays of the iteration, at its start.

        alpha64 : (p, c) weights, in float64.
        v, r, b : (p, c) direction, residual and right-hand side, in float64.
        sums : (p, c) sum of A v or, in the first epoch, of r, over the rows so far.
        both : (p, 2 c) [alpha, v], in the precision of the products of a batch.
        squares : (2, c) r . M r and b . M b.
        least : (1,) least residual so far.

        If the centers are partitioned, a rank has the rows of its centers, and all of the last two.
        """
        xp, p, c = self.backend.xp, len(self.Z), self.n_outputs
        arrays = {name: xp.zeros((p, c)) for name in ("alpha64", "v", "r", "b", "sums")}
        arrays["least"] = xp.full(1, xp.inf)
        return arrays | {"squares": xp.zeros((2, c)), "both": xp.zeros((p, 2 * c), self.op.dtype)}

    def _step(self, state: State, batch: Batch) -> Array:
        """Add a batch to the sums and return its loss with the weights before the epoch."""
        X, Y, w = batch.X, batch.Y, batch.w
        m, c, xp, pending = len(X), self.n_outputs, self.backend.xp, state.pending
        self._ensure_buffers(m)
        self.partition.begin_batch(m, batch.n_global_rows)
        K, r, Kv = self.K[:m], self.r[:m], self.Kv[:m]
        with self.backend.single_threaded_blas():
            x = self.op.points(X, out=self.x[:m])
            values = self.op.product(x, self.Z, pending["both"], out=self.values[:m], keep=K)
            self.partition.row_sum(values)
            xp.subtract(values[:, :c], Y, out=r)
            loss = self._measure(state, batch, r, Kv)
            if state.passes:
                Kv[...] = values[:, c:]
                self._add(K, self._weigh(Kv, w), pending["sums"])
            else:
                r *= -1
                self._add(K, self._weigh(r, w), pending["sums"])
                Kv[...] = Y
                self._add(K, self._weigh(Kv, w), pending["b"])
        state.rows += batch.n_global_rows
        return loss

    def sums_of_rows(self, state: State) -> tuple[str, ...]:
        """Return the names of the sums over rows; in the first epoch also the right-hand side."""
        return ("sums",) if state.passes else ("sums", "b")

    def end_epoch(self, state: State) -> dict[str, Any]:
        """Compute the residual after the first epoch; do an iteration after every later epoch.

        Returns the entries for the log on rank 0, and none on other ranks.

        Raises DivergenceError if the residual is not finite.
        """
        for name in self.sums_of_rows(state):
            self.partition.column_sum(state.pending[name])
        self._iterate(state)
        self._broadcast_results(state)
        facts = self._accept_weights(state)
        state.rows, state.passes = 0, state.passes + 1
        if not bool(self.backend.xp.isfinite(state.pending["squares"]).all()):
            raise self._divergence_error(state)
        return {} if self.ranks.rank else facts

    def _iterate(self, state: State) -> None:
        """Update alpha, r, v and `squares`, see the module docstring, from the sums of an epoch."""
        pending, xp = state.pending, self.backend.xp
        v, r, sums, squares = (pending[name] for name in ("v", "r", "sums", "squares"))
        sums *= 1 / state.rows
        with self.backend.single_threaded_blas():
            if state.passes:
                self._add_ridge(sums, v, self.ridge)
                a = ratio(xp, squares[0], self._dot(v, sums))
                pending["alpha64"] += a * v
                r -= a * sums
            else:
                b = pending["b"]
                b *= 1 / state.rows
                squares[1] = self._dot(b, self._preconditioned(b))
                self._add_ridge(sums, pending["alpha64"], -self.ridge)
                r[...] = sums
            z = self._preconditioned(r)
            rz = self._dot(r, z)
            v *= ratio(xp, rz, squares[0])
            v += z
        squares[0] = rz
        sums[...] = 0

    def _broadcast_results(self, state: State) -> None:
        """Broadcast the vectors of the first rank of each column to the column; scalars to all.

        All other arrays are then equal on all ranks, bit for bit: b does not change after the first
        epoch, sums are 0, and `_accept_weights` only compares and rounds.
        """
        changed_names = ("alpha64", "v", "r") if state.passes else ("alpha64", "v", "r", "b")
        for name in changed_names:
            self.partition.column_broadcast(state.pending[name])
        self.partition.broadcast(state.pending["squares"])

    def _add_ridge(self, sums: Array, v: Array, ridge: float) -> None:
        """Add ridge K(Z, Z) v to `sums`."""
        if ridge:
            sums += ridge * self._center_kernel_times(v)

    def _accept_weights(self, state: State) -> dict[str, Any]:
        """Accept the weights if their residual is near the least; return the entries for the log.

        The direction is used in any case.
        """
        pending, residual = state.pending, self._residual(state)
        taken = residual <= WORST_RESIDUAL * float(pending["least"][0])
        pending["least"][...] = min(residual, float(pending["least"][0]))
        self._round_to_batch_precision(state, accepted=taken)
        return {"iteration": state.passes, "residual": residual, "taken": taken}

    def _round_to_batch_precision(self, state: State, *, accepted: bool = True) -> None:
        """Round weights and direction to the precision of the products of a batch.

        accepted : whether the weights become the weights of the model.
        """
        pending, c = state.pending, self.n_outputs
        pending["both"][:, :c] = pending["alpha64"]
        if accepted:
            state.alpha[...] = pending["both"][:, :c]
        pending["both"][:, c:] = pending["v"]
        pending["v"][...] = pending["both"][:, c:]  # A v is computed for the rounded v


def ratio(xp: Any, a: Array, b: Array) -> Array:
    """Return a / b, and 0 where b <= 0: the step of an output that has converged is 0."""
    positive = b > 0
    return xp.where(positive, a / xp.where(positive, b, 1), 0)
