"""Newton steps for losses other than squares, each tested by the next epoch.

The objective is the mean of the losses plus the penalty ridge / 2 tr(alpha^T K(Z, Z) alpha).
An epoch sums the gradient K^T (w r) at its weights, with K = K(X, Z) and the residual r of the
quadratic function that majorises the loss (`losses.scaled`). A subclass computes the step D, from
the curvatures h of the outputs relative to the majorant (`Loss.curvatures`).

For Huber's loss and quantiles, h is the curvature of the sharpest quadratic function that touches
the loss at the error and is nowhere below it (Huber 1981, section 7.8; De Leeuw and Lange 2009).
This is IRLS, and every step descends. For other losses h is the second derivative, or for the log
loss twice the diagonal p (1 - p) of the Hessian, which bounds the Hessian (Gershgorin). A step may
then be too long. So the next epoch tests the step, by its gradient. Along D, let -a be the slope at
the start of the step (a is the decrement), b the slope at its end, s its length, and B the
curvature of the majorant, |K D|^2 / n + ridge |D|^2. The slope rises at a rate of at most B, so the
objective at the end is not above the objective at the start if

    b <= 0    or    b s < (a + b)^2 / (2 B).

Otherwise the new length is the larger of a / B, with which the majorant descends, and
s a / (a + b), where linear interpolation of the slopes is 0.

The curvature of a loss with a log link has no bound. For such a loss, B is summed with a bound for
the curvature of each row between the start and the end of the step (`_row_curvatures`).

The weights of the model are the last that passed the test. The first epoch begins at f = 0. The
ramps of quantiles become narrower from epoch to epoch; a step between two different ramps is not
tested. The log loss does not change if the same function is added to all outputs; such a common
part is removed from the steps.

Several ranks add their sums over rows at the end of an epoch. Rank 0 broadcasts b and B, and so
decides for all ranks whether the step passed the test. It also broadcasts the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.basics.errors import DivergenceError
from streamkern.basics.message import mention
from streamkern.solver.base import Solver, State

UNCONVERGED_DECREMENT = 1e-3
"""Smallest decrement of the next step, relative to the first step, after which a run that has ended
counts as not converged. Measured in docs/explanation/losses-measured.md."""


class LineSearch(NamedTuple):
    """The step that led to the weights of the epoch.

    decrement : a, minus the slope of the objective along D at the start of the step. A solver that
        has stalled stores -a as the mark, because checkpoints have no other place for it.
    step_length : s.
    first_decrement : a of the first step of the run.
    """

    decrement: float
    step_length: float
    first_decrement: float

    @property
    def is_stalled(self) -> bool:
        """True if the run is marked as stalled."""
        return self.decrement < 0


class NewtonArrays(NamedTuple):
    """The arrays of the iteration, which are views of `State.pending`.

    If the centers are partitioned, a rank has the rows of its centers.

    gradient : (p, c) float64, sum of K^T (w r).
    curvature_along_step : (c,) float64, sum of w (K v)^2; "bend" in checkpoints.
    start_weights : (p, c) float64, weights at the start of the step, which passed the test;
        "tested" in checkpoints.
    direction : (p, c) float64, D.
    weights_and_direction : (p, 2 c), [alpha, v] in the precision of the products of a batch, with
        which K is multiplied; v is a direction of the subclass; "both" in checkpoints.
    line_search : (3,) float64, the fields of `LineSearch`; "slopes" in checkpoints.
    """

    gradient: Array
    curvature_along_step: Array
    start_weights: Array
    direction: Array
    weights_and_direction: Array
    line_search: Array

    @classmethod
    def of(cls, state: State) -> NewtonArrays:
        """Return the arrays of `state`."""
        return cls(*(state.pending[key] for key in NEWTON_KEYS))


NEWTON_KEYS = NewtonArrays("gradient", "bend", "tested", "direction", "both", "slopes")
"""Key in `State.pending`, and in checkpoints, of each array of `NewtonArrays`."""


class SafeguardedNewton(Solver):
    """Base class of solvers by Newton steps, as in the module docstring.

    `State.alpha` has the weights of the epoch, `State.average` the last that passed the test. A
    subclass has a second base class, which defines `jitter`, `_center_kernel_times` and
    `_divergence_error`.
    """

    ridge: float
    jitter: float
    _center_kernel_times: Callable[[Array], Array]
    _divergence_error: Callable[[State], DivergenceError]

    def init(self, alpha: Array | None = None) -> State:
        """Return the state of the zero function, or of the weights `alpha`."""
        state = super().init(alpha)
        state.average[...] = state.alpha
        NewtonArrays.of(state).start_weights[...] = state.alpha
        self._set_weights(state)
        return state

    def _pending(self) -> dict[str, Array]:
        """Return the arrays of `NewtonArrays` by their keys, all 0."""
        p, c, zeros = len(self.Z), self.n_outputs, self.backend.xp.zeros
        arrays = NewtonArrays(
            gradient=zeros((p, c)),
            curvature_along_step=zeros(c),
            start_weights=zeros((p, c)),
            direction=zeros((p, c)),
            weights_and_direction=zeros((p, 2 * c), self.op.dtype),
            line_search=zeros(3),
        )
        return dict(zip(NEWTON_KEYS, arrays, strict=True))

    def _line_search(self, state: State) -> LineSearch:
        """Return the step that led to the weights of the epoch, read from the device."""
        return LineSearch(*self.backend.to_host(NewtonArrays.of(state).line_search).tolist())

    def _store_line_search(self, state: State, line_search: LineSearch) -> None:
        """Write a step to the array of the state."""
        NewtonArrays.of(state).line_search[...] = self.backend.asarray(np.array(line_search))

    def _expand(
        self, state: State, batch: Batch, values: Array, r: Array, scratch: Array
    ) -> tuple[Array, Array, Array]:
        """Return w r and the curvatures, both (m, c), and the losses of the batch, (2, c).

        values : (m, 2 c), K times [alpha, v].
        r, scratch : (m, c), overwritten.
        """
        c, epochs = self.n_outputs, state.passes
        assert self.loss is not None
        r[...], Kv = values[:, :c], values[:, c:]
        errors = self.loss.errors(r, batch.Y)
        losses = self._measure(state, batch, errors, scratch)
        curvature = self.backend.xp.multiply(Kv, Kv, out=scratch)
        if self.loss.limits:
            curvature = curvature * self._row_curvatures(state, Kv, batch.Y)
        curvature_along_step = NewtonArrays.of(state).curvature_along_step
        curvature_along_step += self._weigh(curvature, batch.w).sum(axis=0, dtype=np.float64)
        curvatures = self.loss.curvatures(errors, batch.Y, epochs)
        r, row_weights = self.loss.residual(errors, batch.Y, epochs)
        if row_weights is not None:
            r *= row_weights[:, None]
        return self._weigh(r, batch.w), curvatures, losses

    def _row_curvatures(self, state: State, Kv: Array, Y: Array) -> Array:
        """Return the curvatures of a log link that `curvature_along_step` sums, (m, c) float64.

        Here they are the largest along the step that is tested, whose direction is v.

        Kv, Y : (m, c), K times v, and the targets.
        """
        assert self.loss is not None
        return self.loss.largest_curvatures(Kv * self._line_search(state).step_length, Y)

    def end_epoch(self, state: State) -> dict[str, Any]:
        """Test the step that led to the weights of the epoch, and compute the next one.

        On rank 0, the entry "taken" says whether the step passed the test; "decrement" and "length"
        describe the next step, and "jitter" the equations of its direction. Other ranks return no
        entries.

        Raises DivergenceError if the sums are not finite.
        """
        arrays, c = NewtonArrays.of(state), self.n_outputs
        self._sum_over_ranks(state)
        both = arrays.weights_and_direction.astype(np.float64)
        penalty = self.ridge * self._center_kernel_times(both)
        g = arrays.gradient / state.rows + penalty[:, :c]
        b = self._inner_product(g, arrays.direction)
        B = self._majorant_curvature(state, both, penalty)
        b, B = self.ranks.broadcast_scalars([b, B]).tolist()
        if not (math.isfinite(b) and math.isfinite(B)):
            raise self._divergence_error(state)
        a, s, first_decrement = self._line_search(state)
        passes_test = not self._is_same_loss(state) or _descends(a, b, s, B)
        if passes_test:
            arrays.start_weights[...] = both[:, :c]
            state.average[...] = arrays.weights_and_direction[:, :c]
            a, s = self._set_direction(state, g, both, penalty), 1.0
            a = float(self.ranks.broadcast_scalars([a])[0])
            self._broadcast_direction(state)
            first_decrement = first_decrement or a
        else:
            s = _shortened_length(a, b, s, B)
        self._store_line_search(state, LineSearch(a, s, first_decrement))
        self._set_weights(state)
        for name in self.sums_of_rows(state):
            state.pending[name][...] = 0
        state.rows, state.passes = 0, state.passes + 1
        if self.ranks.rank:
            return {}
        return {"taken": passes_test, "decrement": a, "length": s, "jitter": self.jitter}

    def _broadcast_direction(self, state: State) -> None:
        """Broadcast the arrays that `_set_direction` sets, as ranks may differ by rounding."""
        self.partition.column_broadcast(NewtonArrays.of(state).direction)

    def _sum_over_ranks(self, state: State) -> None:
        """Add the sums over rows of all ranks, for all ranks. Collective."""
        for name in self.sums_of_rows(state):
            sums = state.pending[name]
            if name == NEWTON_KEYS.curvature_along_step:  # equal on the ranks with the same rows
                self.partition.sum_over_rows(sums)
            else:
                self.partition.column_sum(sums)

    def reduce_to_rank_0(self, state: State) -> None:
        """Add the sums of all ranks, see `Solver.reduce_to_rank_0`. Collective."""
        self._sum_over_ranks(state)
        if self.partition.grid.row:
            for name in self.sums_of_rows(state):
                state.pending[name][...] = 0

    def _inner_product(self, a: Array, b: Array) -> float:
        """Return tr(a^T b) over all centers, for a and b (q, c) at this rank's. Collective."""
        total = (a * b).sum().reshape(1)
        return float(self.partition.sum_over_columns(total)[0])

    def final_note(self, state: State) -> dict[str, str]:
        """Return a note if the next step still has a large decrement, see `UNCONVERGED_DECREMENT`.

        The objective is about half the decrement of a Newton step above its minimum. The steps of
        FALKON have a smaller decrement than Newton's, so their objective may be farther above it.
        """
        step = self._line_search(state)
        if step.decrement <= UNCONVERGED_DECREMENT * step.first_decrement:
            return {}
        other = "; solver 'direct' needs fewer epochs" if self.name == "falkon" else ""
        return {
            "note": f"solver {self.name!r} has not converged in {state.passes} epochs, so that its "
            f"loss is above the minimum: give more epochs, such as "
            f"{mention('data.epochs', 5 * state.passes)}{other}"
        }

    def _majorant_curvature(self, state: State, both: Array, penalty: Array) -> float:
        """Return B of the step that is tested; here for the direction v.

        both, penalty : (p, 2 c) float64, [alpha, v], and ridge K(Z, Z) times it.
        """
        v = slice(self.n_outputs, None)
        from_rows = float(NewtonArrays.of(state).curvature_along_step.sum()) / state.rows
        return from_rows + self._inner_product(both[:, v], penalty[:, v])

    def _set_direction(self, state: State, g: Array, both: Array, penalty: Array) -> float:
        """Set the direction D, (p, c), for the gradient g, (p, c), and return its decrement a.

        both, penalty : see `_majorant_curvature`.
        """
        raise NotImplementedError

    def _without_common(self, v: Array) -> Array:
        """Return v (p, c) minus its mean over outputs, if that does not change the loss."""
        assert self.loss is not None
        return v - v.mean(axis=1, keepdims=True) if self.loss.loss.shift_invariant else v

    def _is_same_loss(self, state: State) -> bool:
        """Return whether this epoch has the same loss as the previous epoch."""
        assert self.loss is not None
        loss_at, epoch = self.loss.loss.at, state.passes
        return epoch > 0 and loss_at(epoch).parameters() == loss_at(epoch - 1).parameters()

    def _is_last_loss(self, state: State) -> bool:
        """Return whether the loss of the completed epoch is also that of all later epochs."""
        assert self.loss is not None
        loss_at, epoch = self.loss.loss.at, state.passes
        return epoch > 0 and loss_at(epoch - 1).parameters() == loss_at(math.inf).parameters()

    def _set_weights(self, state: State) -> None:
        """Set the weights of the next epoch, in the precision of the products of a batch."""
        arrays, s = NewtonArrays.of(state), self._line_search(state).step_length
        weights = arrays.weights_and_direction[:, : self.n_outputs]
        weights[...] = arrays.start_weights + s * arrays.direction
        state.alpha[...] = weights

    def weights(self, state: State) -> Array:
        """Return the last weights that passed the test."""
        return state.average

    def back_off(self, state: State, good_weights: Array, factor: float) -> None:
        """Change nothing, as the end of the epoch shortens a step that is too long.

        Raises DivergenceError on all ranks if the gradient is not finite. Collective.
        """
        gradient = NewtonArrays.of(state).gradient
        if not self.ranks.agree(bool(self.backend.xp.isfinite(gradient).all())):
            raise self._divergence_error(state)


def _descends(a: float, b: float, s: float, B: float) -> bool:
    """Return whether a step of length s is certain not to ascend, see the module docstring."""
    return b <= 0 or s * B <= a * (1 + 1e-6) or b * s < (a + b) ** 2 / (2 * B)


def _shortened_length(a: float, b: float, s: float, B: float) -> float:
    """Return the new length of a step whose length s was too long, see the module docstring."""
    return max(a / B, s * a / (a + b))
