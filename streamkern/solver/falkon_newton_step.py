"""FALKON for losses other than squares: conjugate gradient whose every pass is a Newton iteration.

Marteau-Ferey, Bach and Rudi 2019 ("Globally convergent Newton methods for ill-conditioned
generalized self-concordant losses") solve each Newton step by conjugate gradient with FALKON's
preconditioner M = H^T H (`falkon_step`). Here a pass sums, at its weights alpha,

    g = K^T (w r) / n + ridge K(Z, Z) alpha,
    A v = K^T (w h (K v)) / n + ridge K(Z, Z) v

for the direction v of every output, with gradient and curvatures as in
`solver.safeguarded_newton`, and moves by D = a v. As g + a A v is the gradient to come, to first
order, its direction follows without a further pass (Daniel 1967, SIAM J. Numer. Anal. 4, 10-26):

    a = -(g . v) / (v . A v);   z = M (g + a A v);   v <- -z + (z . A v) / (v . A v) v.

With constant curvatures this is preconditioned conjugate gradient. The first pass has no v yet; it
moves by v = -M g, which is the step of the preconditioner's own model, and the second pass corrects
its length.

Differences from the paper: one iteration for each Newton step, which never waits for a gradient,
and directions that stay conjugate from step to step; M is that of squares, with all curvatures 1;
no path of falling ridges. Each took fewer passes, or as many (docs/explanation/losses.md).

The run ends when sqrt(g . M g) is at most the tolerance times that of the first pass.

Cost per pass 2 n p (d + 4 c) + 2 p^2 (d + 2 c) FLOPs; memory p^2 for H.
"""

from __future__ import annotations

from typing import Any

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.solver.base import State
from streamkern.solver.preconditioned import PreconditionedSolver, ratio
from streamkern.solver.safeguarded_newton import SafeguardedNewton


class FalkonNewtonSolver(SafeguardedNewton, PreconditionedSolver):
    """FALKON for losses other than squares, as in the module docstring."""

    def _pending(self) -> dict[str, Array]:
        """Return the sums as `SafeguardedNewton._pending`, and those of conjugate gradient.

        product : (p, c), the sum of K^T (w h (K v)).
        squares : (2, c), g . M g of the last step that passed the test, and of the first pass.
        bound : (1,) B of the step.
        """
        p, c, zeros = len(self.Z), self.n_outputs, self.backend.xp.zeros
        more = {"product": zeros((p, c)), "squares": zeros((2, c)), "bound": zeros(1)}
        return super()._pending() | more

    def _step(self, state: State, batch: Batch) -> Array:
        """Add a batch to the sums and return the loss of the weights of the pass."""
        m, c, pending = len(batch.X), self.n_outputs, state.pending
        K, Kv = self.K[:m], self.Kv[:m]
        with self.backend.single_threaded_blas():
            x = self.op.points(batch.X, out=self.x[:m])
            values = self.op.product(x, self.Z, pending["both"], out=self.values[:m], keep=K)
            r, h, measured = self._expand(state, batch, values, self.r[:m], Kv)
            self._add(K, r, pending["gradient"])
            h *= values[:, c:]
            self._add(K, self._weigh(h, batch.w), pending["product"])
        state.rows += batch.whole
        return measured

    def sums_of_rows(self, state: State) -> tuple[str, ...]:
        """Return the names of the sums."""
        return ("gradient", "product", "bend")

    def end_pass(self, state: State) -> dict[str, Any]:
        """Test the step that led to the weights of the pass, and take the next one."""
        facts = super().end_pass(state)
        return {"iteration": state.passes - 1, "residual": self._residual(state)} | facts

    def _bend(self, state: State, both: Array, penalty: Array) -> float:
        if state.passes == 1:  # v is the first step
            state.pending["bound"][0] = super()._bend(state, both, penalty)
        return float(state.pending["bound"][0])

    def _take_step(self, state: State, g: Array, both: Array, penalty: Array) -> float:
        pending, c, xp = state.pending, self.n_outputs, self.backend.xp
        v, Av = both[:, c:], pending["product"] / state.rows + penalty[:, c:]
        with self.backend.single_threaded_blas():
            M = self._preconditioned(xp.concatenate([g, Av], axis=1))
        pending["squares"][0] = self._dot(g, M[:, :c])
        bend = self._dot(v, Av)
        a = -ratio(xp, self._dot(g, v), bend)
        z = M[:, :c] + a * M[:, c:]
        following = self._without_common(ratio(xp, self._dot(z, Av), bend) * v - z)
        pending["both"][:, c:] = following
        D = self._without_common(a * v)
        # The bound's curvature along a v, whose part from the rows is at least that along D.
        of_norm = (D * self._without_common(a * penalty[:, c:])).sum()
        pending["bound"][0] = (a * a * pending["bend"]).sum() / state.rows + of_norm
        if not state.passes:
            D, pending["squares"][1] = following, pending["squares"][0]
        pending["direction"][...] = D
        return -float((g * D).sum())

    def finished(self, state: State) -> str | None:
        """Return a reason if the gradient is within the tolerance, else None."""
        return super().finished(state) if self._is_last_loss(state) else None
