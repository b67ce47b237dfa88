"""Newton's method for losses other than squares, one step for each pass over the rows.

Every batch is added to sums at the weights of the pass, with K = K(X, Z) and the residual r of the
square that majorises the loss (`losses.scaled`), the mean of whose losses is minimised together
with the penalty ridge / 2 tr(alpha^T K(Z, Z) alpha):

    G_k += K^T diag(w h_k) K   (p, p) for output k,     g += K^T (w r)   (p, c),

where h_k are the curvatures of the outputs, relative to the bound (`Loss.curvatures`). At the end
of a pass the step is D_k = -(G_k / n + ridge K(Z, Z))^-1 (g_k / n + ridge K(Z, Z) alpha_k).

For Huber's loss and quantiles h is the curvature of the sharpest square that touches the loss at
the error and is nowhere below it (Huber 1981, section 7.8; De Leeuw and Lange 2009), so every step
descends: this is IRLS. For others h is the second derivative, or for the log loss twice the
diagonal p (1 - p) of the Hessian, which is above it (Gershgorin), and a step may go too far. So
the next pass also tests the step, by gradients alone. Along D let -a be the slope at its start, b
that at its end, and B the curvature of the bound, (|K D|^2 / n + ridge |D|^2). The slope rises, by
at most B, so the end is not above the start if

    b <= 0    or    b s < (a + b)^2 / (2 B),

s being the length of the step. Else the length is the larger one of a / B, with which the bound
itself descends, and of s a / (a + b), where a straight line through the slopes is 0.

The weights of the model are the last that passed the test. The first pass begins at f = 0. The
ramps of quantiles fall from pass to pass; a step between two of them is not tested. Of the outputs
of the log loss, which a common change leaves as they are, a step has no common part.

Marteau-Ferey, Bach and Rudi 2019 reach small ridges by a path of larger ones; here, where a
factor is exact, it took more passes.

Cost per row c p^2 + 2 p (d + 3 c) FLOPs, of which c p^2 in float64; c p^3 / 3 at the end of a pass.
Memory (c + 1) p^2 float64.
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

DECREMENT_TOLERANCE = 1e-8
"""Decrement a of a step over that of the first, at which the weights are those of the minimum.

The objective is then about a / 2 above the minimum.
"""


class NewtonSolver(EquationSolver):
    """Newton's method, as in the module docstring.

    `State.alpha` are the weights of the pass, `State.average` the last that passed the test.

    Z : points of the centers, both sides.
    """

    ridge: float

    def __init__(self, op: KernelOperator, Z: Points, *, ridge: float, **shared: Any) -> None:
        super().__init__(op, Z, **shared)
        self.ridge, self.repeats = ridge, True
        xp, p, c, m = op.backend.xp, len(Z), self.n_outputs, self.max_batch
        self.K = xp.empty((m, p), op.dtype)
        self.wide_K, self.weighted = (xp.empty((m, p)) for _ in range(2))
        self.x = op.empty_points(m, Z.width, left=True)
        self.values = xp.empty((m, 2 * c), op.dtype)
        self.r, self.squares = (xp.empty((m, c), op.dtype) for _ in range(2))
        self.gradient_part = xp.empty((p, c))

    def init(self, alpha: Array | None = None) -> State:
        """Return the state of the zero function, or of the weights `alpha`."""
        state = super().init(alpha)
        state.average[...] = state.alpha
        state.pending["tested"][...] = state.alpha
        self._try(state)
        return state

    def _pending(self) -> dict[str, Array]:
        """Return the sums, all 0, and the step that is tested.

        G, gradient, bend : (c, p, p), (p, c) and (1,), the sum of w |K D|^2.
        tested, direction : (p, c), weights at the start of the step, and D.
        both : (p, 2 c) right factor of a batch's product, [alpha, D].
        slopes : (3,) a and s of the step, and a of the first one.
        """
        p, c, zeros = len(self.Z), self.n_outputs, self.backend.xp.zeros
        shapes = {
            "G": (c, p, p), "gradient": (p, c), "bend": (1,), "tested": (p, c), "direction": (p, c),
            "slopes": (3,),
        }  # fmt: skip
        sums = {name: zeros(shape) for name, shape in shapes.items()}
        return sums | {"both": zeros((p, 2 * c), self.op.dtype)}

    def _step(self, state: State, batch: Batch) -> Array:
        """Add a batch to the sums and return the loss of the weights of the pass."""
        m, c, xp, pending, w = len(batch.X), self.n_outputs, self.backend.xp, state.pending, batch.w
        assert self.loss is not None
        K, r = self.wide_K[:m], self.r[:m]
        with self.backend.single_threaded_blas():
            x = self.op.points(batch.X, out=self.x[:m])
            values = self.op.product(
                x, self.Z, pending["both"], out=self.values[:m], keep=self.K[:m]
            )
            K[...] = self.K[:m]
            r[...] = values[:, :c]
            moved = self.squares[:m]
            xp.multiply(values[:, c:], values[:, c:], out=moved)
            pending["bend"] += self._weigh(moved, w).sum(dtype=np.float64)
            errors = self.loss.errors(r, batch.Y)
            measured = self._measure(state, batch, errors, moved)
            h = self.loss.curvatures(errors, batch.Y, state.passes).astype(np.float64)
            r, _ = self.loss.residual(errors, batch.Y, state.passes)
            for k in range(c):
                root = xp.sqrt(h[:, k] if w is None else h[:, k] * w)
                xp.multiply(K, root[:, None], out=self.weighted[:m])
                self.backend.add_gram(pending["G"][k], self.weighted[:m], 1.0)
            wide = self._weigh(r, w).astype(np.float64)
            pending["gradient"] += self.backend.matmul_t(K, wide, self.gradient_part)
        state.rows += batch.whole
        return measured

    def sums_of_rows(self, state: State) -> tuple[str, ...]:
        """Return the names of the sums."""
        return ("G", "gradient", "bend")

    def end_pass(self, state: State) -> dict[str, Any]:
        """Test the step that led to the weights of the pass, and take the next one."""
        pending, c, n = state.pending, self.n_outputs, state.rows
        both = pending["both"].astype(np.float64)
        penalty = self.ridge * self._norm_times(both)
        g = pending["gradient"] / n + penalty[:, :c]
        rise = float((g * pending["direction"]).sum())
        bend = float(pending["bend"][0]) / n + float((both[:, c:] * penalty[:, c:]).sum())
        if not (math.isfinite(rise) and math.isfinite(bend)):
            raise self._failure(state)
        a, length, first = self.backend.to_host(pending["slopes"]).tolist()
        taken = not self._is_same_loss(state) or _descends(a, rise, length, bend)
        if taken:
            pending["tested"][...] = both[:, :c]
            state.average[...] = pending["both"][:, :c]
            a, length = self._take_step(state, g), 1.0
            first = first or a
        else:
            length = _shorter(a, rise, length, bend)
        pending["slopes"][...] = self.backend.asarray(np.array([a, length, first]))
        self._try(state)
        for name in self.sums_of_rows(state):
            pending[name][...] = 0
        state.rows, state.passes = 0, state.passes + 1
        return {"taken": taken, "decrement": a, "length": length, "jitter": self.jitter}

    def _is_same_loss(self, state: State) -> bool:
        """Return whether the loss of this pass is that of the pass before."""
        assert self.loss is not None
        at, t = self.loss.loss.at, state.passes
        return t > 0 and at(t).parameters() == at(t - 1).parameters()

    def _take_step(self, state: State, g: Array) -> float:
        """Set the direction, (p, c), at the gradient g, and return its decrement."""
        D, p = state.pending["direction"], len(self.Z)
        A = self.backend.xp.empty((p, p))
        for k in range(self.n_outputs):
            self._factor_output(A, state, k)
            D[:, k : k + 1] = -self._substitute(A, state, g[:, k : k + 1].copy())
        assert self.loss is not None
        if self.loss.loss.shift_invariant:
            D -= D.mean(axis=1, keepdims=True)
        return -float((g * D).sum())

    def _factor_output(self, A: Array, state: State, k: int) -> None:
        """Write the factor of G_k / n + ridge K(Z, Z) to A."""

        def fill() -> None:
            self.backend.xp.multiply(state.pending["G"][k], 1 / state.rows, out=A)
            self._add_norm(A, self.ridge)

        self._factor(A, state, self.ridge, fill, rounding(self.op, self.Z) ** 2)

    def _try(self, state: State) -> None:
        """Set the weights of the next pass, in the precision of the batches' products."""
        pending, c = state.pending, self.n_outputs
        D, length = pending["direction"], float(pending["slopes"][1])
        pending["both"][:, :c] = pending["tested"] + length * D
        pending["both"][:, c:] = D
        D[...] = pending["both"][:, c:]  # the direction that the sums are of
        state.alpha[...] = pending["both"][:, :c]

    def weights(self, state: State) -> Array:
        """Return the last weights that passed the test."""
        return state.average

    def backed_off(self, state: State, good: Array, factor: float) -> None:
        """Go on: a step that is too long is taken back at the end of the pass."""
        if not bool(self.backend.xp.isfinite(state.pending["gradient"]).all()):
            raise self._failure(state)

    def finished(self, state: State) -> str | None:
        """Return a reason if the weights are those of the minimum, else None."""
        if not state.passes or self.loss is None:
            return None
        a, _, first = self.backend.to_host(state.pending["slopes"]).tolist()
        at = self.loss.loss.at
        final = at(state.passes - 1).parameters() == at(math.inf).parameters()
        if not final or a > DECREMENT_TOLERANCE * first:
            return None
        return (
            f"converged in {state.passes - 1} steps to a relative decrement of "
            f"{a / first if first else 0.0:.1e}, tolerance {DECREMENT_TOLERANCE:g}"
        )


def _descends(a: float, b: float, s: float, bend: float) -> bool:
    """Return whether a step of length s is sure not to ascend: see the module docstring."""
    return b <= 0 or s * bend <= a * (1 + 1e-6) or b * s < (a + b) ** 2 / (2 * bend)


def _shorter(a: float, b: float, s: float, bend: float) -> float:
    """Return the length of a step that was too long with length s."""
    return max(a / bend, s * a / (a + b))
