"""EigenPro 3.0, delayed projection (EigenPro 4), and EigenPro 2.0.

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

Differs from EP3/EP4: the step size (see `preconditioner`), which the papers take from lam_{q+1},
and the running average, which helps these methods too.

EP2 is Z = all rows of the training set: a row is its own center and alpha moves in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend import Array
from streamkern.errors import ConfigError
from streamkern.points import Points
from streamkern.preconditioner import LowRankPreconditioner
from streamkern.products import KernelOperator
from streamkern.projection import Projection
from streamkern.solver.base import Solver, State
from streamkern.step_rule import StepRule


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

    def step(
        self,
        state: State,
        X: Array,
        Y: Array,
        rows: npt.NDArray[np.int64],
        step: int,
        w: Array | None = None,
    ) -> Array:
        """See the module's first lines."""
        op, m, pending = self.op, len(X), state.pending
        x = op.points(X, out=self.x[:m])
        g = self._values(state, x)
        g -= Y
        loss = self._measure(g, Y, self.part[:m], step, w)
        self._weigh(g, w)
        g *= state.scale * self.P.rule.eta(m) / m
        gamma, h = pending["gamma"], pending["h"]
        gamma += self.P.correction(op, x, g, self.correction)
        h -= self.backend.matmul_t(self.K[:m], g, self.h)
        if (step + 1) % self.period == 0:
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


class EigenPro2Solver(Solver):
    """EP2: the centers are the rows of the training set, in store order.

    sample : (s,) ascending row numbers of the Nystrom sample.
    Cost per step 2 m n (d + c) FLOPs, a tile of memory.
    """

    name = "eigenpro2"

    def __init__(
        self,
        op: KernelOperator,
        Z: Points,
        preconditioner: LowRankPreconditioner,
        *,
        sample: npt.NDArray[np.int64],
        max_batch: int,
        **shared: Any,
    ) -> None:
        super().__init__(op, Z, **shared)
        self.P, self.sample_rows = preconditioner, sample
        self.sample = op.backend.xp.asarray(sample)
        xp, c = op.backend.xp, self.n_outputs
        self.f, self.squares = (xp.empty((max_batch, c), op.dtype) for _ in range(2))
        self.correction = xp.empty((len(sample), c), op.dtype)
        self.x = op.empty_points(max_batch, Z.width, left=True, right=True)

    def rules(self) -> list[StepRule]:
        """One."""
        return [self.P.rule]

    def step(
        self,
        state: State,
        X: Array,
        Y: Array,
        rows: npt.NDArray[np.int64],
        step: int,
        w: Array | None = None,
    ) -> Array:
        """alpha_rows -= eta/m g;  alpha_sample += eta/m E D E^T K(X_s, X) g."""
        m = len(X)
        x = self.op.points(X, out=self.x[:m])
        # A row and the center made from it are the same point: their distance is exactly zero.
        same = (np.arange(m), rows)
        in_sample = np.intersect1d(self.sample_rows, rows, return_indices=True)[1:]
        g = self.op.product(x, self.Z, state.alpha, out=self.f[:m], same=same)
        g -= Y
        loss = self._measure(g, Y, self.squares[:m], step, w)
        self._weigh(g, w)
        g *= state.scale * self.P.rule.eta(m) / m
        state.alpha[self.backend.xp.asarray(rows)] -= g
        state.alpha[self.sample] += self.P.correction(
            self.op, x, g, self.correction, same=in_sample
        )
        self._average(state)
        return loss
