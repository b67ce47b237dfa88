"""Newton steps for losses other than squares, each tested by the next pass over the rows.

The mean of the losses is minimised together with the penalty ridge / 2 tr(alpha^T K(Z, Z) alpha).
A pass sums the gradient at its weights, with K = K(X, Z) and the residual r of the square that
majorises the loss (`losses.scaled`): K^T (w r). A subclass has the step, from the curvatures h of
the outputs, relative to the bound (`Loss.curvatures`).

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

A loss with a log link has no bound of its curvature. There B is summed with the largest curvature
of every row between the start and the end of the step (`ScaledLoss.largest_curvatures`).

The weights of the model are the last that passed the test. The first pass begins at f = 0. The
ramps of quantiles fall from pass to pass; a step between two of them is not tested. Of the outputs
of the log loss, which a common change leaves as they are, a step has no common part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.basics.errors import DivergenceError
from streamkern.solver.base import Solver, State


class SafeguardedNewton(Solver):
    """Base class of solvers by Newton steps, as in the module docstring.

    `State.alpha` are the weights of the pass, `State.average` the last that passed the test. The
    other base class of a subclass has the products with K(Z, Z), and the error of a failure.
    """

    ridge: float
    jitter: float
    _norm_times: Callable[[Array], Array]
    _failure: Callable[[State], DivergenceError]

    def init(self, alpha: Array | None = None) -> State:
        """Return the state of the zero function, or of the weights `alpha`."""
        state = super().init(alpha)
        state.average[...] = state.alpha
        state.pending["tested"][...] = state.alpha
        self._set_weights(state)
        return state

    def _pending(self) -> dict[str, Array]:
        """Return the sums, all 0, and the step that is tested.

        gradient, bend : (p, c) and (c,), the sum of w (K v)^2, v the second half of `both`.
        tested, direction : (p, c), weights at the start of the step, and D.
        both : (p, 2 c) right factor of a batch's product, [alpha, v].
        slopes : (3,) a and s of the step, and a of the first one.
        """
        p, c, zeros = len(self.Z), self.n_outputs, self.backend.xp.zeros
        shapes = {
            "gradient": (p, c), "bend": (c,), "tested": (p, c), "direction": (p, c), "slopes": (3,),
        }  # fmt: skip
        sums = {name: zeros(shape) for name, shape in shapes.items()}
        return sums | {"both": zeros((p, 2 * c), self.op.dtype)}

    def _expand(
        self, state: State, batch: Batch, values: Array, r: Array, moved: Array
    ) -> tuple[Array, Array, Array]:
        """Return the residual w r (m, c), the curvatures h (m, c) and the error of the batch.

        values : (m, 2 c), K times [alpha, v].
        r, moved : (m, c), overwritten.
        """
        c, passes = self.n_outputs, state.passes
        assert self.loss is not None
        r[...], Kv = values[:, :c], values[:, c:]
        errors = self.loss.errors(r, batch.Y)
        measured = self._measure(state, batch, errors, moved)
        bent = self.backend.xp.multiply(Kv, Kv, out=moved)
        if self.loss.limits:
            length = float(state.pending["slopes"][1])
            bent = bent * self.loss.largest_curvatures(Kv * length, batch.Y)
        state.pending["bend"] += self._weigh(bent, batch.w).sum(axis=0, dtype=np.float64)
        h = self.loss.curvatures(errors, batch.Y, passes)
        r, of_rows = self.loss.residual(errors, batch.Y, passes)
        if of_rows is not None:
            r *= of_rows[:, None]
        return self._weigh(r, batch.w), h, measured

    def end_pass(self, state: State) -> dict[str, Any]:
        """Test the step that led to the weights of the pass, and take the next one."""
        pending, c = state.pending, self.n_outputs
        both = pending["both"].astype(np.float64)
        penalty = self.ridge * self._norm_times(both)
        g = pending["gradient"] / state.rows + penalty[:, :c]
        rise = float((g * pending["direction"]).sum())
        bend = self._bend(state, both, penalty)
        if not (math.isfinite(rise) and math.isfinite(bend)):
            raise self._failure(state)
        a, length, first = self.backend.to_host(pending["slopes"]).tolist()
        taken = not self._is_same_loss(state) or _descends(a, rise, length, bend)
        if taken:
            pending["tested"][...] = both[:, :c]
            state.average[...] = pending["both"][:, :c]
            a, length = self._take_step(state, g, both, penalty), 1.0
            first = first or a
        else:
            length = _shorter(a, rise, length, bend)
        pending["slopes"][...] = self.backend.asarray(np.array([a, length, first]))
        self._set_weights(state)
        for name in self.sums_of_rows(state):
            pending[name][...] = 0
        state.rows, state.passes = 0, state.passes + 1
        return {"taken": taken, "decrement": a, "length": length, "jitter": self.jitter}

    def _bend(self, state: State, both: Array, penalty: Array) -> float:
        """Return B of the step that is tested, here of v.

        both, penalty : (p, 2 c) float64, [alpha, v], and ridge K(Z, Z) times it.
        """
        v = slice(self.n_outputs, None)
        bend = float(state.pending["bend"].sum()) / state.rows
        return bend + float((both[:, v] * penalty[:, v]).sum())

    def _take_step(self, state: State, g: Array, both: Array, penalty: Array) -> float:
        """Set the direction D, (p, c), at the gradient g, (p, c), and return its decrement.

        both, penalty : see `_bend`.
        """
        raise NotImplementedError

    def _without_common(self, v: Array) -> Array:
        """Return v (p, c) without its common part if the loss does not depend on that."""
        assert self.loss is not None
        return v - v.mean(axis=1, keepdims=True) if self.loss.loss.shift_invariant else v

    def _is_same_loss(self, state: State) -> bool:
        """Return whether the loss of this pass is that of the pass before."""
        assert self.loss is not None
        at, t = self.loss.loss.at, state.passes
        return t > 0 and at(t).parameters() == at(t - 1).parameters()

    def _is_last_loss(self, state: State) -> bool:
        """Return whether the loss of the last pass is that of all later ones."""
        assert self.loss is not None
        at = self.loss.loss.at
        return state.passes > 0 and at(state.passes - 1).parameters() == at(math.inf).parameters()

    def _set_weights(self, state: State) -> None:
        """Set the weights of the next pass, in the precision of the batches' products."""
        pending, c = state.pending, self.n_outputs
        length = float(pending["slopes"][1])
        pending["both"][:, :c] = pending["tested"] + length * pending["direction"]
        state.alpha[...] = pending["both"][:, :c]

    def weights(self, state: State) -> Array:
        """Return the last weights that passed the test."""
        return state.average

    def backed_off(self, state: State, good: Array, factor: float) -> None:
        """Go on: a step that is too long is taken back at the end of the pass."""
        if not bool(self.backend.xp.isfinite(state.pending["gradient"]).all()):
            raise self._failure(state)


def _descends(a: float, b: float, s: float, bend: float) -> bool:
    """Return whether a step of length s is sure not to ascend: see the module docstring."""
    return b <= 0 or s * bend <= a * (1 + 1e-6) or b * s < (a + b) ** 2 / (2 * bend)


def _shorter(a: float, b: float, s: float, bend: float) -> float:
    """Return the length of a step that was too long with length s."""
    return max(a / bend, s * a / (a + b))
