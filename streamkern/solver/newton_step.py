"""Newton's method for losses other than squares, one step for each epoch.

In addition to the gradient g of `solver.safeguarded_newton`, an epoch sums the Hessians at its
weights,

    G_k += K^T diag(w h_k) K   (p, p) for output k,

and at its end the step is D_k = -(G_k / n + ridge K(Z, Z))^-1 (g_k / n + ridge K(Z, Z) alpha_k).

The computed K(Z, Z) has eigenvalues below 0, of the size of its rounding errors. Along their
eigenvectors the penalised loss would have no minimum, and steps would grow from epoch to epoch. The
solver therefore uses K(Z, Z) + e I in place of K(Z, Z), where e (`norm_shift`) estimates the
spectral norm of the rounding errors of K(Z, Z).

Marteau-Ferey, Bach and Rudi 2019 reach small ridges by a path of decreasing ridges. With exact
factors, as here, such a path took more epochs (docs/explanation/losses-measured.md).

Cost per row c p^2 + 2 p (d + 3 c) FLOPs, c p^2 of them in float64; c p^3 / 3 at the end of an
epoch. Memory (c + 1) p^2 float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.base import State
from streamkern.solver.equations import EquationSolver
from streamkern.solver.precondition.held_out import rounding
from streamkern.solver.precondition.norm import add_to_diagonal
from streamkern.solver.safeguarded_newton import NEWTON_KEYS, NewtonArrays, SafeguardedNewton

DECREMENT_TOLERANCE = 1e-8
"""Largest decrement a of a step, relative to the first step, at which the run has converged.

The objective is then about a / 2 above the minimum.
"""
NORM_ROUNDING = 0.3
"""Norm of the rounding errors of K(Z, Z), divided by `rounding` sqrt(p) max K(Z, Z).

The errors are independent, about 1 eps each, and `rounding` is at least 10 eps. The value is a
compromise: with less, steps may grow in float32; with more, predictions are less accurate
(tests/train/test_loss_solvers.py).
"""
STALLED_DECREMENT = 1e-5
"""Largest decrement of a full step, relative to the first step, at which a run may have stalled.

If the decrement then no longer falls, rounding errors of the gradient dominate it, and the run
ends.
"""


class NewtonSolver(SafeguardedNewton, EquationSolver):
    """Newton's method, as in the module docstring.

    op, Z, ridge : see `Solver` and `EquationSolver`; the ridge is set.
    norm_shift : e of the module docstring; 0 for explicit features.
    """

    ridge: float

    def __init__(
        self, op: KernelOperator, Z: Points, *, ridge: float, **solver_arguments: Any
    ) -> None:
        super().__init__(op, Z, **solver_arguments)
        self.ridge, self.repeats = ridge, True
        self.norm_shift = self._norm_of_rounding()
        xp, p, c, m = op.backend.xp, len(Z), self.n_outputs, self.max_batch
        self.K = xp.empty((m, p), op.dtype)
        self.K64, self.weighted_K = (xp.empty((m, p)) for _ in range(2))
        self.x = op.empty_points(m, Z.n_coordinates, left=True)
        self.values = xp.empty((m, 2 * c), op.dtype)
        self.r, self.squares = (xp.empty((m, c), op.dtype) for _ in range(2))
        self.gradient_part = xp.empty((p, c))

    def _norm_of_rounding(self) -> float:
        """Return `norm_shift`, from the largest diagonal entry of K(Z, Z)."""
        if self.op.kernel.explicit:
            return 0.0
        diagonal = self.backend.xp.diagonal
        largest = max(
            float(diagonal(slab[:, rows]).max()) for rows, slab in self._slabs(lower=True)
        )
        return NORM_ROUNDING * rounding(self.op, self.Z) * math.sqrt(len(self.Z)) * largest

    def _pending(self) -> dict[str, Array]:
        """Return the arrays of `NewtonArrays`, whose v is D, and the sums G, (c, p, p)."""
        p, c = len(self.Z), self.n_outputs
        return super()._pending() | {"G": self.backend.xp.zeros((c, p, p))}

    def _step(self, state: State, batch: Batch) -> Array:
        """Add a batch to the sums and return its losses with the weights of the epoch, (2, c)."""
        m, xp, w = len(batch.X), self.backend.xp, batch.w
        arrays, G = NewtonArrays.of(state), state.pending["G"]
        K64, weighted_K = self.K64[:m], self.weighted_K[:m]
        with self.backend.single_threaded_blas():
            x = self.op.points(batch.X, out=self.x[:m])
            values = self.op.product(
                x, self.Z, arrays.weights_and_direction, out=self.values[:m], keep=self.K[:m]
            )
            K64[...] = self.K[:m]
            r, h, losses = self._expand(state, batch, values, self.r[:m], self.squares[:m])
            h = h.astype(np.float64)
            for k in range(self.n_outputs):
                root = xp.sqrt(h[:, k] if w is None else h[:, k] * w)
                xp.multiply(K64, root[:, None], out=weighted_K)
                self.backend.add_gram(G[k], weighted_K, 1.0)
            r64, gradient = r.astype(np.float64), arrays.gradient
            gradient += self.backend.matmul_t(K64, r64, self.gradient_part)
        state.rows += batch.n_global_rows
        return losses

    def sums_of_rows(self, state: State) -> tuple[str, ...]:
        """Return the names of the sums."""
        return ("G", NEWTON_KEYS.gradient, NEWTON_KEYS.curvature_along_step)

    def _set_direction(self, state: State, g: Array, both: Array, penalty: Array) -> float:
        """Set D to the Newton step for the gradient g, (p, c), and return its decrement -g^T D.

        Rank 0 computes them, and broadcasts them in `end_epoch`.

        both, penalty : not needed here, as the sums G have the curvature in all directions.
        """
        if self.ranks.rank:
            return 0.0
        D, p = NewtonArrays.of(state).direction, len(self.Z)
        L = self.backend.xp.empty((p, p))
        for k in range(self.n_outputs):
            self._factor_output(L, state, k)
            D[:, k : k + 1] = -self._substitute(L, state, g[:, k : k + 1].copy())
        D[...] = self._without_common(D)
        return -float((g * D).sum())

    def _factor_output(self, L: Array, state: State, k: int) -> None:
        """Write the factor of G_k / n + ridge (K(Z, Z) + e I) to L (p, p)."""

        def fill() -> None:
            self.backend.xp.multiply(state.pending["G"][k], 1 / state.rows, out=L)
            self._add_ridge_term(L, self.ridge)
            add_to_diagonal(L, self.ridge * self.norm_shift)

        self._factor(L, state, self.ridge, fill, rounding(self.op, self.Z) ** 2)

    def _center_kernel_times(self, v: Array) -> Array:
        """Return (K(Z, Z) + e I) v, (p, k) float64."""
        return super()._center_kernel_times(v) + self.norm_shift * v

    def _set_weights(self, state: State) -> None:
        """Set the weights of the next epoch, and its direction v to D."""
        super()._set_weights(state)
        arrays = NewtonArrays.of(state)
        D, v = arrays.direction, arrays.weights_and_direction[:, self.n_outputs :]
        v[...] = D
        D[...] = v  # The sums of the epoch are for the rounded D, so its end must use the same one.

    def end_epoch(self, state: State) -> dict[str, Any]:
        """Test the step that led to the weights of the epoch, and compute the next one.

        A run that has stalled is marked, see `LineSearch.is_stalled`.
        """
        tested_step = self._line_search(state)
        same_loss = self._is_same_loss(state)
        entries = super().end_epoch(state)
        next_step = self._line_search(state)
        # A step that fails the test is shortened.
        full_step = same_loss and tested_step.step_length == next_step.step_length == 1.0
        if full_step and self._is_last_loss(state):
            limit = STALLED_DECREMENT * tested_step.first_decrement
            if tested_step.decrement <= next_step.decrement <= limit:
                stalled_step = next_step._replace(decrement=-next_step.decrement)
                self._store_line_search(state, stalled_step)
        return entries

    def why_finished(self, state: State) -> str | None:
        """Return a reason if the decrement is within the tolerance or stalled, else None."""
        step = self._line_search(state)
        largest = DECREMENT_TOLERANCE * step.first_decrement
        if not self._is_last_loss(state) or step.decrement > largest:
            return None
        relative_decrement = abs(step.decrement) / (step.first_decrement or 1)
        decrement = f"a relative decrement of {relative_decrement:.1e}"
        progress = f"{state.passes - 1} steps to {decrement}"
        if step.is_stalled:
            return f"ended after {progress}, which no longer falls"
        return f"converged in {progress}, tolerance {DECREMENT_TOLERANCE:g}"
