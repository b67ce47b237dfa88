"""FALKON: preconditioned conjugate gradient, each iteration one pass over the rows.

Rudi, Carratino and Rosasco 2017, "FALKON: an optimal large scale kernel method", Alg. 1. With
K = K(X, Z) over all n rows, the equations are those of `solver.direct_step`,

    A alpha = b,    A = K^T K / n + ridge K(Z, Z),    b = K^T Y / n,

and M = H^T H = (K(Z, Z)^2 / p + mu K(Z, Z))^-1 their preconditioner. The first pass sums the
residual at the start, r = b - A alpha; every further one sums A v for the direction v:

    a = (r . M r) / (v . A v);   alpha += a v;   r -= a A v;
    v <- M r + (r . M r)_new / (r . M r)_old v,

with separate scalars a for every output. So data.epochs passes are data.epochs - 1 iterations.
A is one operator only if every pass brings the same rows: all use the order and the random draws
of epoch 0.

The weights of the model are the last with a residual near the least so far (`WORST_RESIDUAL`).

The loss is that of the last weights, K alpha evaluated together with K v. A batch's products
are in the operator's precision; sums over batches, vectors and scalars are float64.

Each rank of a grid (`backend.rank_grid`) has some rows of X, and the part of the centers and of all
vectors of the iteration that belongs to its column; sums over rows stay separate until the pass
ends. Each has its stripe of H (`Communicator.triangle`): while M r is computed, all ranks hold all
of r and of M r. With a ridge, the centers are broadcast (`Partition.norm_product`).

Differences from the paper: conjugate gradient in alpha with M rather than in beta = H^-T alpha,
which gives the same iterates and keeps the residual free of the rounding of H; batches in place of
all rows.

Cost per pass 2 n p (d + 3 c) FLOPs, and with a ridge 2 p^2 (d + c); memory p^2 for H.
"""

from __future__ import annotations

from typing import Any

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.solver.base import State
from streamkern.solver.preconditioned import PreconditionedSolver, ratio

OF_ALL = ("squares", "least")
"""Names of a checkpoint's arrays that do not have a row for each center."""
WORST_RESIDUAL = 2.0
"""Largest residual, relative to the least so far, with which weights are accepted.

With hardly any ridge the residual falls to the rounding of the products and then grows again: 441
heavy-tailed rows, 397 of them centers, were at .26 after 29 iterations. While it falls it may rise
for a few iterations, as it did on KEGG.
"""


class FalkonSolver(PreconditionedSolver):
    """FALKON, as in the module docstring."""

    def init(self, alpha: Array | None = None) -> State:
        """Return the state of the zero function, or of the weights `alpha`, see `Solver.init`."""
        state = super().init(alpha)
        state.pending["alpha64"][...] = state.alpha
        self._take(state)
        return state

    def _pending(self) -> dict[str, Array]:
        """Return the arrays of the iteration, at its start.

        both : (p, 2 c) right factor of a batch's product, [alpha, v].
        sums : A v, or r, so far.
        b : right-hand side.
        squares : (2, c) r . M r and b . M b.
        least : (1,) least residual.

        All ranks have all of the last two, and the rows of their centers of the others.
        """
        xp, p, c = self.backend.xp, len(self.Z), self.n_outputs
        wide = {name: xp.zeros((p, c)) for name in ("alpha64", "v", "r", "b", "sums")}
        wide["least"] = xp.full(1, xp.inf)
        return wide | {"squares": xp.zeros((2, c)), "both": xp.zeros((p, 2 * c), self.op.dtype)}

    def _step(self, state: State, batch: Batch) -> Array:
        """Add a batch to the sums and return the loss of the last weights."""
        X, Y, w = batch.X, batch.Y, batch.w
        m, c, xp, pending = len(X), self.n_outputs, self.backend.xp, state.pending
        self._make_room(m)
        self.partition.begin(m, batch.whole)
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
        state.rows += batch.whole
        return loss

    def sums_of_rows(self, state: State) -> tuple[str, ...]:
        """Return the names of the sums over rows; in the first pass also the right-hand side."""
        return ("sums",) if state.passes else ("sums", "b")

    def end_pass(self, state: State) -> dict[str, Any]:
        """Compute the residual after the first pass, and do an iteration after every other pass.

        Rank 0 returns the entries for the log.
        """
        for name in self.sums_of_rows(state):
            self.partition.column_sum(state.pending[name])
        self._iterate(state)
        self._tell(state)
        facts = self._taken(state)
        state.rows, state.passes = 0, state.passes + 1
        if not bool(self.backend.xp.isfinite(state.pending["squares"]).all()):
            raise self._failure(state)
        return {} if self.ranks.rank else facts

    def _iterate(self, state: State) -> None:
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

    def _tell(self, state: State) -> None:
        """Broadcast the results of the first rank of each column to the column, and scalars to all.

        The rest follows from these with the same bits: `_taken` compares and casts, b does not
        change after the first pass, and sums are 0.
        """
        for name in ("alpha64", "v", "r") if state.passes else ("alpha64", "v", "r", "b"):
            self.partition.column_broadcast(state.pending[name])
        self.partition.broadcast(state.pending["squares"])

    def _add_ridge(self, sums: Array, v: Array, ridge: float) -> None:
        """Add ridge K(Z, Z) v to `sums`."""
        if ridge:
            sums += ridge * self._norm_times(v)

    def _taken(self, state: State) -> dict[str, Any]:
        """Accept the weights, if their residual is near the least, and the direction."""
        pending, residual = state.pending, self._residual(state)
        taken = residual <= WORST_RESIDUAL * float(pending["least"][0])
        pending["least"][...] = min(residual, float(pending["least"][0]))
        self._take(state, weights=taken)
        return {"iteration": state.passes, "residual": residual, "taken": taken}

    def _take(self, state: State, *, weights: bool = True) -> None:
        """Cast the weights and the direction to the precision of the batches' products."""
        pending, c = state.pending, self.n_outputs
        pending["both"][:, :c] = pending["alpha64"]
        if weights:
            state.alpha[...] = pending["both"][:, :c]
        pending["both"][:, c:] = pending["v"]
        pending["v"][...] = pending["both"][:, c:]  # the direction that A is applied to
