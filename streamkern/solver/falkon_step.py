"""FALKON: preconditioned conjugate gradient, each iteration one pass over the rows.

Rudi, Carratino and Rosasco 2017, "FALKON: an optimal large scale kernel method", Alg. 1. With
K = K(X, Z) over all n rows, the equations are those of `solver.direct_step`,

    A alpha = b,    A = K^T K / n + ridge K(Z, Z),    b = K^T Y / n,

and M = H^T H = (K(Z, Z)^2 / p + mu K(Z, Z))^-1 their preconditioner. The first pass sums the
residual at the start, r = b - A alpha; every further one sums A v for the direction v:

    a = (r . M r) / (v . A v);   alpha += a v;   r -= a A v;
    v <- M r + (r . M r)_new / (r . M r)_old v,

with scalars a of its own for every output. So data.epochs passes are data.epochs - 1 iterations.
A is one operator only if every pass brings the same rows: they come with the order and the draws
of epoch 0.

The weights of the model are the last ones with about the least residual so far (`WORST_RESIDUAL`).

The loss is that of the last weights, K alpha evaluated together with K v. A batch's products
are in the operator's precision; sums over batches, vectors and scalars are float64.

Of ranks in a grid (`backend.rank_grid`) each has some rows of X, and of the centers and all vectors
of the iteration those of its column; sums over rows stay apart until the pass ends. Of H each has
its stripe (`Ranks.triangle`): r is whole on all of them while M r is taken, and M r on its way. A
ridge has the centers travel (`travelling`).

Differs: conjugate gradient in alpha with M rather than in beta = H^-T alpha, which gives the same
iterates and keeps the residual free of the rounding of H; batches in place of all rows.

Cost per pass 2 n p (d + 3 c) FLOPs, and with a ridge 2 p^2 (d + c); memory p^2 for H.
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
from streamkern.solver.base import MORE, Solver, State
from streamkern.solver.broadcast_centers import BroadcastCenters

OF_ALL = ("squares", "least")
"""Arrays of a checkpoint that have no row for each center."""
CAST_SLAB_ROWS = 256
"""Rows of H that are cast to float64 at a time."""
WORST_RESIDUAL = 2.0
"""Times the least residual so far: weights with more are not taken. Without a ridge to speak of the
residual falls to the rounding of the products and then grows again: 441 heavy-tailed rows, 397 of
them centers, were at .26 after 29 iterations. On its way down it may be larger than before, as that
of KEGG was."""


class FalkonSolver(Solver):
    """The method above.

    Parameters
    ----------
    Z : points of the centers, both sides if there is a ridge.
    H : (p, p) lower, from `precondition`, or its stripe, and the `jitter` it took.
    max_batch : largest m that `step` will see; the buffers are made for it.
    tolerance : stop once sqrt(r . M r) is at most this times sqrt(b . M b), for every output.
    """

    name = "falkon"

    def __init__(
        self,
        op: KernelOperator,
        Z: Points,
        H: Array,
        *,
        max_batch: int,
        ridge: float = 0.0,
        jitter: float = 0.0,
        tolerance: float,
        **shared: Any,
    ) -> None:
        super().__init__(op, Z, **shared)
        self.H, self.ridge, self.jitter, self.tolerance = H, ridge, jitter, tolerance
        self.part = op.backend.xp.empty((len(Z), self.n_outputs), op.dtype)
        self.max_batch, self.room = max_batch, 0
        self._make_room(math.ceil(MORE * max_batch / self.share.grid.rows))

    def _make_room(self, rows: int) -> None:
        """For as many rows of a batch; of several ranks one may have more than its share."""
        if rows <= self.room:
            return
        xp, dtype, c = self.backend.xp, self.op.dtype, self.n_outputs
        self.room = m = min(rows, self.max_batch)
        self.K: Array = None  # before there is another
        self.K = xp.empty((m, len(self.Z)), dtype)
        self.x = self.op.empty_points(m, self.Z.width, left=True)
        self.values = xp.empty((m, 2 * c), dtype)
        self.r, self.Kv = (xp.empty((m, c), dtype) for _ in range(2))

    def init(self, alpha: Array | None = None) -> State:
        """As of every solver."""
        state = super().init(alpha)
        state.pending["alpha64"][...] = state.alpha
        self._take(state)
        return state

    def _pending(self) -> dict[str, Array]:
        """both : (p, 2 c) what a batch is multiplied with, [alpha, v]. sums : A v, or r, so far.
        b : the right-hand side. squares : (2, c) r . M r and b . M b. least : (1,) residual. Of
        these two all ranks have all, of the others the rows of their centers."""
        xp, p, c = self.backend.xp, len(self.Z), self.n_outputs
        wide = {name: xp.zeros((p, c)) for name in ("alpha64", "v", "r", "b", "sums")}
        wide["least"] = xp.full(1, xp.inf)
        return wide | {"squares": xp.zeros((2, c)), "both": xp.zeros((p, 2 * c), self.op.dtype)}

    def _step(self, state: State, batch: Batch) -> Array:
        """Add a batch to the sums."""
        X, Y, w = batch.X, batch.Y, batch.w
        m, c, xp, pending = len(X), self.n_outputs, self.backend.xp, state.pending
        self._make_room(m)
        self.across.begin(m, batch.whole)
        K, r, Kv = self.K[:m], self.r[:m], self.Kv[:m]
        with self.backend.single_threaded_blas():
            x = self.op.points(X, out=self.x[:m])
            values = self.op.product(x, self.Z, pending["both"], out=self.values[:m], keep=K)
            self.across.sum(values)
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
        """Of the first pass the right-hand side as well."""
        return ("sums",) if state.passes else ("sums", "b")

    def _add(self, K: Array, values: Array, sums: Array) -> None:
        sums += self.backend.matmul_t(K, values, self.part)

    def end_pass(self, state: State) -> dict[str, Any]:
        """The residual after the first pass, an iteration after every other one; told by rank 0."""
        for name in self.sums_of_rows(state):
            self.down.sum(state.pending[name])
        self._iterate(state)
        self._tell(state)
        facts = self._taken(state)
        state.rows, state.passes = 0, state.passes + 1
        if not bool(self.backend.xp.isfinite(state.pending["squares"]).all()):
            raise DivergenceError(
                f"solver 'falkon' has a residual that is not finite after {state.passes} passes; "
                "check the data for outliers, or give a larger bandwidth"
            )
        return {} if self.ranks.rank else facts

    def _iterate(self, state: State) -> None:
        pending, xp = state.pending, self.backend.xp
        v, r, sums, squares = (pending[name] for name in ("v", "r", "sums", "squares"))
        sums *= 1 / state.rows
        with self.backend.single_threaded_blas():
            if state.passes:
                self._add_ridge(sums, v, self.ridge)
                a = _ratio(xp, squares[0], self._dot(v, sums))
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
            v *= _ratio(xp, rz, squares[0])
            v += z
        squares[0] = rz
        sums[...] = 0

    def _tell(self, state: State) -> None:
        """What the first rank of a column worked out, to the others; the scalars, to all.

        The rest follows from these with the same bits: `_taken` compares and casts, b does not
        change after the first pass, and sums are 0.
        """
        for name in ("alpha64", "v", "r") if state.passes else ("alpha64", "v", "r", "b"):
            self.down.of_first(state.pending[name])
        self._of_first(state.pending["squares"])

    def _taken(self, state: State) -> dict[str, Any]:
        """Take the weights, if they are about the best so far, and the direction."""
        pending, residual = state.pending, self._residual(state)
        taken = residual <= WORST_RESIDUAL * float(pending["least"][0])
        pending["least"][...] = min(residual, float(pending["least"][0]))
        self._take(state, weights=taken)
        return {"iteration": state.passes, "residual": residual, "taken": taken}

    def _take(self, state: State, *, weights: bool = True) -> None:
        """The weights and the direction in the precision in which batches see them."""
        pending, c = state.pending, self.n_outputs
        pending["both"][:, :c] = pending["alpha64"]
        if weights:
            state.alpha[...] = pending["both"][:, :c]
        pending["both"][:, c:] = pending["v"]
        pending["v"][...] = pending["both"][:, c:]  # the one that A is applied to

    def _add_ridge(self, sums: Array, v: Array, ridge: float) -> None:
        """sums += ridge (K(Z, Z) + jitter) v, jitter as in the factor that H was made of.

        Rounded, K(Z, Z) is indefinite, by about eps, or by more where centers nearly coincide: 1e-4
        with Laplace, which takes the root of rounding, at 20 bandwidths from the mean. The factor
        exists because the jitter is above that; without it conjugate gradient grows along such
        directions (to 1.3 times the exact test error there).
        """
        if ridge:
            part = self._norm_of(self.backend.asarray(v, self.op.dtype))
            sums += ridge * (part + self.jitter * v)

    def _norm_of(self, v: Array) -> Array:
        """K(Z, Z) v at this rank's centers; each rank evaluates a part."""
        if not self.share.whole:
            return BroadcastCenters(self.op, self.Z, self.share, self.ranks).product(v, self.part)
        own = self.share.grid.of_row(len(self.Z))
        if not self.ranks.alone:
            self.part[...] = 0
        same = np.arange(own.stop - own.start), np.arange(own.start, own.stop)
        self.op.product(self.Z[own], self.Z, v, out=self.part[own], same=same)
        return self.down.sum(self.part)

    def _preconditioned(self, r: Array) -> Array:
        """H^T H r at this rank's centers, float64, whatever the precision of H: exactly symmetric
        and positive. Each rank takes the part of its rows of H."""
        r = self._whole(r)
        z, first = self.backend.xp.zeros(r.shape), self.ranks.triangle(len(r)).start
        for rows in tiles(len(self.H), CAST_SLAB_ROWS):
            end = first + rows.stop
            part = self.H[rows, :end].astype(np.float64)  # lower triangular
            z[:end] += part.T @ (part @ r[:end])
        self._total(z)
        return z if self.share.whole else z[self.share.at[0]].copy()

    def _whole(self, a: Array) -> Array:
        """The rows of all centers."""
        if self.share.whole:
            return a
        whole = self.backend.xp.zeros((self.share.p, a.shape[1]), a.dtype)
        if self.share.grid.row == 0:  # of those with the same centers one says it
            whole[self.share.at[0]] = a
        return self._total(whole)

    def _dot(self, a: Array, b: Array) -> Array:
        """(c,) a . b for each output, over all centers."""
        total = (a * b).sum(axis=0)
        if self.share.whole:
            return total
        if self.share.grid.row:
            total[...] = 0
        return self._total(total)

    def _residual(self, state: State) -> float:
        """The largest sqrt(r . M r / b . M b) of an output; 0 where there is nothing to fit."""
        rz, bz = self.backend.to_host(state.pending["squares"])
        return math.sqrt(max(0.0, *(a / b if b > 0 else 0.0 for a, b in zip(rz, bz, strict=True))))

    def finished(self, state: State) -> str | None:
        """Whether the residual is within the tolerance."""
        if state.passes == 0:
            return None
        residual = self._residual(state)
        if residual > self.tolerance:
            return None
        return (
            f"converged in {state.passes - 1} iterations to a relative residual of {residual:.1e}, "
            f"tolerance {self.tolerance:g}"
        )


def _ratio(xp: Any, a: Array, b: Array) -> Array:
    """a / b, and 0 where b is 0: an output that has converged stays where it is."""
    usable = b > 0
    return xp.where(usable, a / xp.where(usable, b, 1), 0)
