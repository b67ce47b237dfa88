"""EigenPro 3.0, delayed projection (EigenPro 4), EigenPro 2.0 and 1.0, and plain SGD.

EP3 and EP4 are one loop. A step on a fresh batch X (m, d), Y (m, c):

    g      = f(X) - Y,   f = K(., Z) alpha + K(., X_tmp) delta + K(., X_s) gamma
    X      joins the temporary centers with weights delta = -eta/m g
    gamma += eta/m E D E^T K(X_s, X) g
    h     -= eta/m K(Z, X) g                       (values of the temporary part at Z)

and every `period` steps the part outside the span of Z is projected onto it:

    alpha += proj(h + K(Z, X_s) gamma),            delta, gamma, X_tmp, h <- 0.

period = 1 is EP3 Algorithm 2; period * m close to p is EP4. K(X, Z) is evaluated once and serves
f and h; the correction is linear, so its values at Z are taken once per projection and the p x q
matrix of the papers never exists.

Differs from EP3/EP4: the step size (see `step_rule`), which the papers take from lam_{q+1},
and the running average, which helps these methods too.

SGD, EP1 and EP2 have all rows of the training set for Z: a row is its own center and alpha moves in
place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.basics.errors import ConfigError
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.base import Solver, State
from streamkern.solver.precondition.low_rank import LowRankPreconditioner
from streamkern.solver.precondition.step_rule import StepRule
from streamkern.solver.projection import Projection


class DelayedProjectionSolver(Solver):
    """EP3 (period = 1) and EP4 (period > 1).

    Parameters
    ----------
    max_batch : largest m that `step` will see. period : steps from one projection to the next.

    Cost per step 2 m p (d + 2 c) + 2 m s (d + 2 c) FLOPs and, for the temporary centers, on
    average m (period - 1) m (d + c) more; per projection that of `projection` plus 2 p s (d + c).
    Memory max_batch * p for K(X, Z), period * max_batch * (d + c) for the temporary centers.
    """

    growing = ("points", "norms", "delta")

    def __init__(
        self,
        op: KernelOperator,
        Z: Points,
        preconditioner: LowRankPreconditioner,
        projection: Projection,
        *,
        period: int,
        max_batch: int,
        **shared: Any,
    ) -> None:
        super().__init__(op, Z, **shared)
        if period < 1:
            raise ConfigError(f"period={period} must be at least 1")
        self.name = "eigenpro3" if period == 1 else "eigenpro4"
        self.P, self.projection = preconditioner, projection
        self.period, self.max_batch = period, max_batch
        xp = op.backend.xp
        self.K = xp.empty((max_batch, len(Z)), op.dtype)
        self.f, self.part = (xp.empty((max_batch, self.n_outputs), op.dtype) for _ in range(2))
        self.h = xp.empty((len(Z), self.n_outputs), op.dtype)
        self.x = op.empty_points(max_batch, Z.width, left=True, right=True)
        self.correction = xp.empty((len(preconditioner.X_s), self.n_outputs), op.dtype)

    def _pending(self) -> dict[str, Array]:
        xp, dtype, c = self.backend.xp, self.op.dtype, self.n_outputs
        # The last batch of a period is projected at once and never becomes temporary centers.
        capacity = (self.period - 1) * self.max_batch
        temporary = self.op.empty_points(capacity, self.Z.width, right=True)
        norms = {} if temporary.norms is None else {"norms": temporary.norms}
        if temporary.norms is None and temporary.right is not None:
            temporary.right[:, -2] = 1
        return {
            "points": temporary.right,
            **norms,
            "delta": xp.zeros((capacity, c), dtype),
            "gamma": xp.zeros((len(self.P.X_s), c), dtype),
            "h": xp.zeros((len(self.Z), c), dtype),
        }

    def arrays(self, state: State) -> dict[str, Array]:
        """With the temporary centers in the form that every backend can go on from."""
        arrays = super().arrays(state)
        temporary = Points(None, arrays["points"], arrays.get("norms"))
        extra = 2 if temporary.norms is None else 0
        points, norms = temporary.portable(self.Z.width - extra)
        return arrays | {"points": points, "norms": norms}

    def rules(self) -> list[StepRule]:
        """One."""
        return [self.P.rule]

    def _step(self, state: State, batch: Batch) -> Array:
        op, m, pending = self.op, len(batch.X), state.pending
        x = op.points(batch.X, out=self.x[:m])
        g = self._values(state, x)
        g -= batch.Y
        loss = self._measure(state, batch, g, self.part[:m])
        self._weigh(g, batch.w)
        g *= state.scale * self.P.rule.eta(m) / m
        gamma, h = pending["gamma"], pending["h"]
        gamma += self.P.correction(op, x, g, self.correction)
        h -= self.backend.matmul_t(self.K[:m], g, self.h)
        if (state.steps + 1) % self.period == 0:
            self._project(state)
        else:
            self._remember(state, x, g)
        return loss

    def _remember(self, state: State, x: Points, g: Array) -> None:
        """The batch as temporary centers."""
        new = slice(state.n_pending, state.n_pending + len(g))
        state.pending["points"][new] = x.right
        if x.norms is not None:
            state.pending["norms"][new] = x.norms
        self.backend.xp.negative(g, out=state.pending["delta"][new])
        state.n_pending += len(g)

    def _values(self, state: State, x: Points) -> Array:
        """f(X), all three parts; K(X, Z) stays in self.K."""
        op, m, pending = self.op, len(x), state.pending
        f = op.product(x, self.Z, state.alpha, out=self.f[:m], keep=self.K[:m])
        if state.n_pending:
            used = slice(0, state.n_pending)
            temporary = Points(None, pending["points"], pending.get("norms"))[used]
            f += op.product(x, temporary, pending["delta"][used], out=self.part[:m])
            f += op.product(x, self.P.X_s, pending["gamma"], out=self.part[:m])
        return f

    def _project(self, state: State) -> None:
        h, gamma = state.pending["h"], state.pending["gamma"]
        h += self.op.product(self.Z, self.P.X_s, gamma, out=self.h)
        state.alpha += self.projection.solve(h)
        h[...] = 0
        gamma[...] = 0
        state.n_pending = 0
        self._average(state)

    def finish(self, state: State) -> None:
        """Project what the last, incomplete period left."""
        if state.n_pending:
            self._project(state)


class SGDSolver(Solver):
    """Plain SGD on the rows of the training set, which EigenPro 1 and 2 precondition.

    f <- f - eta ((1/m) sum_i (f(x_i) - y_i) k(x_i, .) + ridge f), which in weights is

        alpha <- (1 - eta ridge) alpha,   alpha_rows -= eta/m g.

    Pegasos (Shalev-Shwartz et al. 2007) shrinks f in the same way. Differs: squared loss, as in
    EP1, and a constant step with a running average in place of eta = 1 / (ridge t), which needs a
    ridge. The fixed point is kernel ridge regression, (K + n ridge I) alpha = Y.

    rule : measured on rows of the training set. Cost per step 2 m n (d + c) FLOPs, a tile of
    memory.
    """

    name = "sgd"
    remedy = "solver.ridge or a larger bandwidth"

    def __init__(
        self, op: KernelOperator, Z: Points, rule: StepRule, *, max_batch: int,
        ridge: float = 0.0, **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(op, Z, **shared)
        self.rule, self.ridge = rule, ridge
        xp, c = op.backend.xp, self.n_outputs
        self.f, self.squares = (xp.empty((max_batch, c), op.dtype) for _ in range(2))
        self.x = op.empty_points(max_batch, Z.width, left=True, right=True)

    def rules(self) -> list[StepRule]:
        """One."""
        return [self.rule]

    def _step(self, state: State, batch: Batch) -> Array:
        """See the first lines of the class; then `_correct`."""
        m, rows = len(batch.X), batch.rows
        x = self.op.points(batch.X, out=self.x[:m])
        # A row and the center made from it are the same point: their distance is exactly zero.
        g = self.op.product(x, self.Z, state.alpha, out=self.f[:m], same=(np.arange(m), rows))
        g -= batch.Y
        loss = self._measure(state, batch, g, self.squares[:m])
        self._weigh(g, batch.w)
        eta = state.scale * self.rule.eta(m)
        g *= eta / m
        if self.ridge:
            state.alpha *= 1 - eta * self.ridge
        state.alpha[self.backend.xp.asarray(rows)] -= g
        self._correct(state, x, g, rows)
        self._average(state)
        return loss

    def _correct(self, state: State, x: Points, g: Array, rows: npt.NDArray[np.int64]) -> None:
        """What a preconditioner adds. g : (m, c), the change of the rows' weights."""


class EigenPro2Solver(SGDSolver):
    """EP2: alpha_rows -= eta/m g;  alpha_sample += eta/m E D E^T K(X_s, X) g.

    sample : (s,) ascending row numbers of the Nystrom sample.
    Cost per step that of `SGDSolver` and 2 m s (d + c) FLOPs.
    """

    name = "eigenpro2"
    remedy = Solver.remedy

    def __init__(
        self, op: KernelOperator, Z: Points, preconditioner: LowRankPreconditioner, *,
        sample: npt.NDArray[np.int64], **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(op, Z, preconditioner.rule, **shared)
        self.P, self.sample_rows = preconditioner, sample
        self.sample = op.backend.xp.asarray(sample)
        self.correction = op.backend.xp.empty((len(sample), self.n_outputs), op.dtype)

    def _correct(self, state: State, x: Points, g: Array, rows: npt.NDArray[np.int64]) -> None:
        in_sample = np.intersect1d(self.sample_rows, rows, return_indices=True)[1:]
        state.alpha[self.sample] += self.P.correction(
            self.op, x, g, self.correction, same=in_sample
        )


class EigenPro1Solver(EigenPro2Solver):
    """EP1, the kernel form: alpha -= eta/m (g on the batch's rows - E D E^T K(X, X_m) g).

    EP1 and EP2 take the same step in the RKHS, f <- f - eta P (gradient). What differs between the
    two in the papers:

    * Where the correction lives. The eigenfunctions of EP1 are combinations of all n rows, from a
      sample by Nystrom's extension, so every step moves all of alpha and E is n x q; those of EP2
      are combinations of the sample, E is s x q.
    * Damping. EP1 has D_i = (1 - tau lam_{q+1} / lam_i), tau <= 1 against eigenvectors that spill
      into the rest: 1 with a kernel, 1/4 with random features. (Its formula in alpha has another
      1 / lam_i: that of the extension, which is a part of E here. Its public code takes the square
      root of the ratio with kernels.) EP2 has no tau, but the exponent .95 in its public code.
    * Batch and step. EP1 fixes m = 256, q = 160 and s = 4800, and takes eta ~ 1 / sqrt(lam_{q+1}),
      the leading term of its bound on |P H_m|. EP2 takes the critical batch, about
      max k(x, x) / lam_{q+1}, where the step and the hardware are both used in full.

    Differs from EP1: the step comes from what is measured, as everywhere here (`step_rule`), and
    the extended eigenfunctions are made orthonormal, see `eigenfunctions`.
    Cost per step that of `SGDSolver` twice and 4 n q c FLOPs: K(X, X_m) is evaluated again for the
    correction, where one pass could do, at the price of a second code path.
    """

    name = "eigenpro1"

    def __init__(
        self, op: KernelOperator, Z: Points, preconditioner: LowRankPreconditioner, **shared: Any
    ) -> None:
        super().__init__(op, Z, preconditioner, sample=np.arange(len(Z)), **shared)
