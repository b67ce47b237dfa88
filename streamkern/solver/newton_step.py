"""Newton's method for losses other than squares, one step for each epoch.

In addition to the gradient g of `solver.safeguarded_newton`, an epoch sums the Hessians at its
weights,

    G_k += K^T diag(w h_k) K   (p, p) for output k,

and at its end the step is D_k = -(G_k / n + ridge K(Z, Z))^-1 (g_k / n + ridge K(Z, Z) alpha_k).

The computed K(Z, Z) has eigenvalues below 0, of the size of its rounding errors. Along their
eigenvectors the penalised loss would have no minimum, and steps would grow from epoch to epoch. The
solver therefore uses K(Z, Z) + e I in place of K(Z, Z), where e estimates the norm of the rounding
errors.

Marteau-Ferey, Bach and Rudi 2019 reach small ridges by a path of decreasing ridges. With exact
factors, as here, such a path took more epochs.

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
from streamkern.solver.safeguarded_newton import SafeguardedNewton

DECREMENT_TOLERANCE = 1e-8
"""Largest decrement a of a step, relative to the first step, at which the run has converged.

The objective is then about a / 2 above the minimum.
"""
NORM_ROUNDING = 0.3
"""Norm of the rounding errors of K(Z, Z), over `rounding` times sqrt(p) times its largest entry.

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

    Z : points of the centers.
    """

    ridge: float

    def __init__(self, op: KernelOperator, Z: Points, *, ridge: float, **shared: Any) -> None:
        super().__init__(op, Z, **shared)
        self.ridge, self.repeats = ridge, True
        self._norm_shift = self._rounding_of_norm()
        xp, p, c, m = op.backend.xp, len(Z), self.n_outputs, self.max_batch
        self.K = xp.empty((m, p), op.dtype)
        self.wide_K, self.weighted = (xp.empty((m, p)) for _ in range(2))
        self.x = op.empty_points(m, Z.n_coordinates, left=True)
        self.values = xp.empty((m, 2 * c), op.dtype)
        self.r, self.squares = (xp.empty((m, c), op.dtype) for _ in range(2))
        self.gradient_part = xp.empty((p, c))

    def _rounding_of_norm(self) -> float:
        """Return e, the estimate of the module docstring; 0 for explicit features."""
        if self.op.kernel.explicit:
            return 0.0
        diagonal = self.backend.xp.diagonal
        largest = max(
            float(diagonal(slab[:, rows]).max()) for rows, slab in self._slabs(lower=True)
        )
        return NORM_ROUNDING * rounding(self.op, self.Z) * math.sqrt(len(self.Z)) * largest

    def _pending(self) -> dict[str, Array]:
        """Return the arrays of `SafeguardedNewton._pending`, with v = D, and G (c, p, p)."""
        p, c = len(self.Z), self.n_outputs
        return super()._pending() | {"G": self.backend.xp.zeros((c, p, p))}

    def _step(self, state: State, batch: Batch) -> Array:
        """Add a batch to the sums and return the loss of the weights of the epoch."""
        m, xp, pending, w = len(batch.X), self.backend.xp, state.pending, batch.w
        K = self.wide_K[:m]
        with self.backend.single_threaded_blas():
            x = self.op.points(batch.X, out=self.x[:m])
            values = self.op.product(
                x, self.Z, pending["both"], out=self.values[:m], keep=self.K[:m]
            )
            K[...] = self.K[:m]
            r, h, measured = self._expand(state, batch, values, self.r[:m], self.squares[:m])
            h = h.astype(np.float64)
            for k in range(self.n_outputs):
                root = xp.sqrt(h[:, k] if w is None else h[:, k] * w)
                xp.multiply(K, root[:, None], out=self.weighted[:m])
                self.backend.add_gram(pending["G"][k], self.weighted[:m], 1.0)
            wide_r = r.astype(np.float64)
            pending["gradient"] += self.backend.matmul_t(K, wide_r, self.gradient_part)
        state.rows += batch.n_global_rows
        return measured

    def sums_of_rows(self, state: State) -> tuple[str, ...]:
        """Return the names of the sums."""
        return ("G", "gradient", "bend")

    def _take_step(self, state: State, g: Array, both: Array, penalty: Array) -> float:
        D, p = state.pending["direction"], len(self.Z)
        A = self.backend.xp.empty((p, p))
        for k in range(self.n_outputs):
            self._factor_output(A, state, k)
            D[:, k : k + 1] = -self._substitute(A, state, g[:, k : k + 1].copy())
        D[...] = self._without_common(D)
        return -float((g * D).sum())

    def _factor_output(self, A: Array, state: State, k: int) -> None:
        """Write the factor of G_k / n + ridge (K(Z, Z) + e I) to A (p, p)."""

        def fill() -> None:
            self.backend.xp.multiply(state.pending["G"][k], 1 / state.rows, out=A)
            self._add_norm(A, self.ridge)
            A.reshape(-1)[:: len(A) + 1] += self.ridge * self._norm_shift

        self._factor(A, state, self.ridge, fill, rounding(self.op, self.Z) ** 2)

    def _norm_times(self, v: Array) -> Array:
        """Return (K(Z, Z) + e I) v, (p, k) float64."""
        return super()._norm_times(v) + self._norm_shift * v

    def _set_weights(self, state: State) -> None:
        super()._set_weights(state)
        D, products = state.pending["direction"], state.pending["both"][:, self.n_outputs :]
        products[...] = D
        D[...] = products  # D as it was rounded, to which the sums of the epoch refer

    def end_epoch(self, state: State) -> dict[str, Any]:
        """Test the step that led to the weights of the epoch, and compute the next one.

        If the run has stalled, the decrement is stored with a minus sign, for `why_finished`.
        """
        a_before, length, first = self.backend.to_host(state.pending["slopes"]).tolist()
        same_loss = self._is_same_loss(state)
        facts = super().end_epoch(state)
        a = facts["decrement"]
        full_step = same_loss and facts["taken"] and length == 1.0
        if full_step and self._is_last_loss(state) and a_before <= a <= STALLED_DECREMENT * first:
            state.pending["slopes"][0] = -a
        return facts

    def why_finished(self, state: State) -> str | None:
        """Return a reason if the decrement is within the tolerance or stalled, else None."""
        a, _, first = self.backend.to_host(state.pending["slopes"]).tolist()
        if not self._is_last_loss(state) or a > DECREMENT_TOLERANCE * first:
            return None
        reached = f"{state.passes - 1} steps to a relative decrement of {abs(a) / (first or 1):.1e}"
        if a < 0:
            return f"ended after {reached}, which no longer falls"
        return f"converged in {reached}, tolerance {DECREMENT_TOLERANCE:g}"
