"""What solvers share that solve equations at the end of a pass: sums over its rows, one factor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from streamkern.backend.base import Array
from streamkern.basics.array_types import Floats
from streamkern.basics.errors import DivergenceError
from streamkern.solver.base import Solver, State
from streamkern.solver.posterior import Posterior, simultaneous
from streamkern.solver.precondition.norm import eps

KERNEL_SLAB_ROWS = 1024
"""Rows of a kernel matrix that are evaluated at a time."""
SINGULAR = 100
"""The smallest pivot, in jitters, below which the equations count as singular.

Measured without a ridge, 160 centers on a curve, each twice or nearly so: 1 to 27, in float32 as in
float64. With Laplace the test error was up to 2e6 times that of f = 0, with a Gaussian kernel it
was small. On 1500 digits: 2e8 and 6e7 for 100 and 1500 centers, Gaussian 5e6 and 126.
"""
SINGULAR_NOTE = "the equations of solver 'direct'"
"""How the warning of singular equations begins."""


class EquationSolver(Solver):
    """Base of the solvers whose weights come from a Cholesky factor.

    `State.alpha` are the weights of the last pass that ended, `State.average` those of all
    `State.averaged` rows that were in the sums when they were asked for.

    ridge : None: it is found on rows held out, and is `State.ridge`. ridges : (c,) in its place, of
    each output. repeats : whether every pass
    brings the same rows. keeps_posterior : whether `posterior` will be asked for. `singular` :
    whether a jitter, and no ridge, is all that made the last equations solvable.
    """

    name = "direct"

    ridge: float | None
    repeats: bool
    jitter = 0.0
    singular = False
    keeps_posterior = False
    ridges: Floats | None = None

    def end_pass(self, state: State) -> dict[str, Any]:
        """Solve, so that the next pass measures its loss with what this one found; on rank 0."""
        self.gather(state)
        if self.ranks.rank == 0:
            state.alpha[...] = self.weights(state)
        state.averaged = state.rows
        for a in (state.alpha, state.average):
            self._of_first(a)
        state.ridge = float(self.ranks.broadcast_scalars([state.ridge])[0])
        state.passes += 1
        facts: dict[str, Any] = {"rows": state.rows, "jitter": self.jitter}
        return facts | {"note": self._note()} if self.singular else facts

    def _note(self) -> str:
        """The same words for all passes of a run: Python shows a repeated warning once."""
        what = "features" if self.op.kernel.explicit else "centers"
        return (
            f"{SINGULAR_NOTE} for {len(self.Z)} {what} are singular to rounding: "
            f"some {what} nearly coincide, or the rows can not tell them apart; the weights may "
            "fit noise and be useless on other rows: set solver.ridge, such as 1e-4"
        )

    def finished(self, state: State) -> str | None:
        """After the first pass, where another one would bring the same rows."""
        if not (self.repeats and state.passes):
            return None
        return f"all {state.rows} rows are in the equations; another pass would bring the same"

    def weights(self, state: State) -> Array:
        """Those of all rows so far; solved for when rows were added since the last time.

        Raises DivergenceError where the sums are not finite.
        """
        if state.averaged != state.rows:
            self._solve(state, state.average)
            state.averaged = state.rows
        return state.average

    def _solve(self, state: State, out: Array) -> None:
        """out (p, c) <- the weights, no more than `PANEL` columns at once in float64."""
        raise NotImplementedError

    def posterior(self, state: State) -> Posterior:
        """How sure the model is of its values, once all rows have come; see `solver.posterior`."""
        p = len(self.Z)
        tau = state.rows * self._ridges(state)
        R = self.backend.xp.empty((p, p))
        self._fill_norm(R)
        # As little as rounding bears, of the kernel's values and of the sums.
        scale = float(R.diagonal().max())
        jitter = max(10 * eps(self.op.dtype), self._lost(state) / (tau.min() * scale))
        self._factor(R, state, 1.0, lambda: self._fill_norm(R), jitter)
        U, lam = simultaneous(self.backend, R, self._inside(state, R))
        lam_host = self.backend.to_host(lam)
        left, norms, n = self._fit(state, U, lam, tau)
        taus, place = np.unique(tau, return_inverse=True)
        free = n - p + (taus / (lam_host[:, None] + taus)).sum(axis=0)[place]
        least = eps(np.float64) * left  # of targets that are all the same
        prior = np.maximum(norms / np.maximum(n - free, eps(np.float64)), least)
        return Posterior(self.backend.to_host(U), lam_host, left / free, prior)

    def _fill_norm(self, R: Array) -> None:
        """Lower part of R <- K(Z, Z)."""
        raise NotImplementedError

    def _lost(self, state: State) -> float:
        """What rounding may leave of an eigenvalue of G that is 0, a hundred times over."""
        return 0.0

    def _inside(self, state: State, R: Array) -> Array:
        """R^-1 G R^-T, of which the lower part counts. R : lower factor of K(Z, Z)."""
        raise NotImplementedError

    def _fit(self, state: State, U: Array, lam: Array, tau: Floats) -> tuple[Floats, Floats, float]:
        """(c,) weighted squares that the fit leaves of the targets, (c,) squared norms of it, and
        how many rows have a weight."""
        raise NotImplementedError

    def _ridges(self, state: State) -> Floats:
        """(c,) those in force."""
        if self.ridges is not None:
            return self.ridges
        return np.full(self.n_outputs, state.ridge if self.ridge is None else self.ridge)

    def _factor(
        self, A: Array, state: State, ridge: float, fill: Callable[[], None], relative: float,
        have: float = 0.0,
    ) -> None:  # fmt: skip
        """A <- lower factor of A + jitter, A as `fill` makes it; sets `jitter` and `singular`.

        Equal centers make the matrix singular, nearly equal ones singular but for rounding. The
        jitter begins at `relative`, of the largest diagonal entry, less what `fill` adds already,
        `have`, and grows by 10 until there is a factor.
        """
        diagonal = self.backend.xp.arange(len(A))
        fill()
        if self.op.kernel.geometry == "inner" and not A.diagonal().any():
            A[diagonal, diagonal] = 1  # all rows are 0, and the model is the mean for any weights
        scale = float(A.diagonal().max())
        # Far rows and a narrow bandwidth may have values that are nothing but rounding.
        self.jitter = least = max(min(relative, 1) * scale - have, 10 * eps(np.float64) * scale)
        while 0 < self.jitter <= scale < math.inf:
            A[diagonal, diagonal] += self.jitter
            if self.backend.cholesky(A):
                # A pivot is what the centers before it leave of a center, the jitter is rounding.
                small = float(A.diagonal().min()) ** 2 < SINGULAR * self.jitter
                self.singular = not ridge and (small or self.jitter > least)
                return
            fill()
            self.jitter *= 10
        raise self._failure(state)

    @staticmethod
    def _failure(state: State) -> DivergenceError:
        return DivergenceError(
            f"solver 'direct' can not solve its normal equations of {state.rows} rows: the kernel "
            "between centers and rows, or the targets, are zero or not finite; give a larger "
            "bandwidth, or check the data for outliers"
        )
