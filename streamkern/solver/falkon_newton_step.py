"""FALKON for losses other than squares: conjugate gradient whose every epoch is a Newton iteration.

Marteau-Ferey, Bach and Rudi 2019 ("Globally convergent Newton methods for ill-conditioned
generalized self-concordant losses") solve each Newton step by conjugate gradient with FALKON's
preconditioner M = H^T H (`falkon_step`). Here an epoch sums, at its weights alpha,

    g = K^T (w r) / n + ridge K(Z, Z) alpha,
    A v = K^T (w h (K v)) / n + ridge K(Z, Z) v

for the direction v of every output, with gradient and curvatures as in
`solver.safeguarded_newton`, and its step is D = a v. To first order, g + a A v is the gradient
after this step, so that the next direction needs no further epoch (Daniel 1967, SIAM J. Numer.
Anal. 4, 10-26):

    a = -(g . v) / (v . A v);   z = M (g + a A v);   v <- -z + (z . A v) / (v . A v) v.

With constant curvatures this is preconditioned conjugate gradient. The first epoch has no v yet;
its step is v = -M g, the Newton step if M^-1 were the Hessian, and the second epoch corrects its
length.

Differences from the paper: one iteration of conjugate gradient for each Newton step, with
directions that stay conjugate from step to step; the M of squares, with all curvatures 1; and no
path of decreasing ridges. None of them takes more epochs (docs/explanation/losses-measured.md).

For a loss with a log link, the curvatures h are not bounded, so three things differ:

- The first step is 0, as M alone does not say how long v may be.
- An epoch also finds the largest move of a row, max |K v|. The step a v is shortened so that no
  output z moves by more than `MAX_STEP_MOVE`.
- B is a^2 (K v)^T w l'' (K v) / n times exp(largest move), plus the term of the ridge, with the
  second derivatives l'' at the start of the step. As |l'''| <= l'', the second derivative of a row
  grows by at most this factor along the step (self-concordance; Bach 2010, Electron. J. Stat. 4).

The run ends when sqrt(g . M g) is at most the tolerance times its value in the first epoch.

Rows and centers are divided over ranks as in `solver.falkon_step`.

Cost per epoch 2 n p (d + 4 c) + 2 p^2 (d + 2 c) FLOPs; memory p^2 for H.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.losses.scaled import MAX_STEP_MOVE
from streamkern.solver.base import State
from streamkern.solver.falkon_step import PreconditionedSolver, ratio
from streamkern.solver.safeguarded_newton import NEWTON_KEYS, NewtonArrays, SafeguardedNewton


class FalkonNewtonSolver(SafeguardedNewton, PreconditionedSolver):
    """FALKON for losses other than squares, as in the module docstring."""

    @property
    def _has_log_link(self) -> bool:
        return self.loss is not None and self.loss.limits

    def _pending(self) -> dict[str, Array]:
        """Return the arrays of `NewtonArrays`, and the arrays of conjugate gradient.

        product : (p, c) sum of K^T (w h (K v)).
        squares : (2, c) g . M g after the last step that passed the test, and of the first epoch.
        bound : (1,) B of the step.
        move : (1,) largest |K v| of a row, in units of z; only for a log link.

        If the centers are partitioned, a rank has the rows of its centers of "product", and all of
        the others.
        """
        p, c, zeros = len(self.Z), self.n_outputs, self.backend.xp.zeros
        arrays = {"product": zeros((p, c)), "squares": zeros((2, c)), "bound": zeros(1)}
        if self._has_log_link:
            arrays["move"] = zeros(1, self.op.dtype)
        return super()._pending() | arrays

    def _row_curvatures(self, state: State, Kv: Array, Y: Array) -> Array:
        """Return the curvatures at the weights of the epoch, and update the largest move by v."""
        assert self.loss is not None
        move = state.pending["move"]
        self.backend.xp.maximum(move, self.loss.largest_move(Kv.copy()), out=move)
        return self.loss.curvatures_at(Y)

    def _step(self, state: State, batch: Batch) -> Array:
        """Add a batch to the sums and return its losses with the weights of the epoch, (2, c)."""
        m, c, arrays = len(batch.X), self.n_outputs, NewtonArrays.of(state)
        self._ensure_buffers(m)
        self.partition.begin_batch(m, batch.n_global_rows)
        K, Kv = self.K[:m], self.Kv[:m]
        with self.backend.single_threaded_blas():
            x = self.op.points(batch.X, out=self.x[:m])
            values = self.op.product(
                x, self.Z, arrays.weights_and_direction, out=self.values[:m], keep=K
            )
            self.partition.row_sum(values)
            r, h, losses = self._expand(state, batch, values, self.r[:m], Kv)
            self._add(K, r, arrays.gradient)
            h *= values[:, c:]
            self._add(K, self._weigh(h, batch.w), state.pending["product"])
        state.rows += batch.n_global_rows
        return losses

    def sums_of_rows(self, state: State) -> tuple[str, ...]:
        """Return the names of the sums."""
        return (NEWTON_KEYS.gradient, "product", NEWTON_KEYS.curvature_along_step)

    def _sum_over_ranks(self, state: State) -> None:
        """Add the sums over rows of all ranks, and find the largest move of a row of any rank."""
        super()._sum_over_ranks(state)
        if self._has_log_link:
            move = state.pending["move"]
            move[...] = self.partition.largest(move[0])

    def end_epoch(self, state: State) -> dict[str, Any]:
        """Test the step that led to the weights of the epoch, and compute the next one."""
        facts = super().end_epoch(state)
        if self._has_log_link:
            state.pending["move"][...] = 0
        if self.ranks.rank:
            return {}
        return {"iteration": state.passes - 1, "residual": self._residual(state)} | facts

    def _broadcast_direction(self, state: State) -> None:
        """Broadcast the arrays that `_set_direction` sets, as ranks may differ by rounding."""
        super()._broadcast_direction(state)
        self.partition.column_broadcast(NewtonArrays.of(state).weights_and_direction)
        for name in ("squares", "bound"):
            self.partition.broadcast(state.pending[name])

    def _majorant_curvature(self, state: State, both: Array, penalty: Array) -> float:
        """Return B of the step that is tested, which `_set_direction` stored in "bound"."""
        if state.passes == 1:  # the first step is v itself, whose sums this epoch has
            state.pending["bound"][0] = super()._majorant_curvature(state, both, penalty)
        return float(state.pending["bound"][0])

    def _set_direction(self, state: State, g: Array, both: Array, penalty: Array) -> float:
        """Set D = a v, and the next v, for the gradient g, (p, c), and return -g^T D.

        Before the first step there is no v: D is then the next v or, for a log link, 0.
        """
        pending, c, xp = state.pending, self.n_outputs, self.backend.xp
        arrays = NewtonArrays.of(state)
        v, Av = both[:, c:], pending["product"] / state.rows + penalty[:, c:]
        with self.backend.single_threaded_blas():
            preconditioned = self._preconditioned(xp.concatenate([g, Av], axis=1))
        Mg, MAv = preconditioned[:, :c], preconditioned[:, c:]
        pending["squares"][0] = self._dot(g, Mg)
        vAv = self._dot(v, Av)
        a, growth = self._step_length(state, -ratio(xp, self._dot(g, v), vAv))
        z = Mg + a * MAv
        next_v = self._without_common(ratio(xp, self._dot(z, Av), vAv) * v - z)
        arrays.weights_and_direction[:, c:] = next_v
        D = self._without_common(a * v)
        # B of the step. The term of the rows is for a v, for which it is at least as large as for D
        # without the common part.
        norm_term = self._inner_product(D, self._without_common(a * penalty[:, c:]))
        from_rows = (growth * a * a * arrays.curvature_along_step).sum() / state.rows
        pending["bound"][0] = from_rows + norm_term
        if not state.passes:
            pending["squares"][1] = pending["squares"][0]
            D = next_v * 0 if self._has_log_link else next_v
        arrays.direction[...] = D
        return -self._inner_product(g, D)

    def _step_length(self, state: State, a: Array) -> tuple[Array, Array | float]:
        """Return the lengths a (c,) of a step, shortened for a log link, and the growth of l''.

        The growth is the factor (c,) by which second derivatives may grow along the step, or 1 for
        a loss whose curvatures are bounded.
        """
        if not self._has_log_link:
            return a, 1.0
        assert self.loss is not None
        xp, moves = self.backend.xp, state.pending["move"].astype(np.float64) * abs(a)
        return a * self.loss.limit(moves), xp.exp(xp.minimum(moves, MAX_STEP_MOVE))

    def why_finished(self, state: State) -> str | None:
        """Return a reason if the gradient of the final loss is within the tolerance, else None."""
        return super().why_finished(state) if self._is_last_loss(state) else None
