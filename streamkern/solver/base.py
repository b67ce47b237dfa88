"""Base class of the solvers: the state that a checkpoint keeps, and the running average.

The package `train` has the training loop, reads the data and measures the time. A solver has

    init(alpha) -> State
    step(state, batch) -> losses    updates the state with one batch
    end_epoch(state) -> entries     called after the last batch of every epoch; for the log
    why_finished(state) -> reason   why further epochs would change nothing, or None
    finish(state)                   adds pending parts to the weights at the end of a run
    weights(state) -> (p, c)        the weights to evaluate

Sample weights enter a step in one place: the gradient of half the mean of w_i |f(x_i) - y_i|^2 is
K^T (w r) / m, so `_weigh` replaces the residual r by w r before any other computation. Step rules
are measured on rows scaled by sqrt(w), see `precondition.block`. The projection of EigenPro 3 and 4
minimises the RKHS norm of the difference, which does not depend on sample weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt

from streamkern.backend.assignments import Assignments
from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.backend.rank_grid import CenterPartition, RankGrid
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.basics.errors import DivergenceError
from streamkern.basics.message import mention
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.losses.scaled import ScaledLoss
from streamkern.planning.problem import ProblemShape
from streamkern.solver.precondition.partition import Partition
from streamkern.solver.precondition.step_rule import StepRule

AVERAGE = Assignments("average", "average = average + (alpha - average) * weight")
LOSS_BUFFER_STEPS = 32
"""Number of steps whose losses stay on the device before they are overwritten."""
BUFFER_FACTOR = 1.1
"""Rows for which a rank allocates its first buffers, relative to an equal share of a batch."""


def initial_buffer_rows(problem: ProblemShape, m: int) -> int:
    """Return the number of rows for which a rank allocates its first buffers, for batches of m."""
    return min(m, math.ceil(BUFFER_FACTOR * problem.rows_per_rank(m)))


@dataclass
class State:
    """State that changes from step to step, with all arrays on the device.

    alpha, average : (p, c) iterate and its running average.
    steps : steps taken so far.
    averaged : number of iterates in the average.
    scale : factor on every step size, below 1 after a back-off.
    n_pending : number of temporary centers.
    rows : number of rows summed in this epoch; for solvers without sums, rows of all steps so far.
    passes : number of completed epochs, for solvers that count them; named as in checkpoints.
    ridge : the ridge that the solver found last.
    pending : further arrays by name, such as sums over the rows of an epoch, or temporary centers
        and their weights.
    """

    alpha: Array
    average: Array
    steps: int = 0
    averaged: int = 0
    scale: float = 1.0
    n_pending: int = 0
    rows: int = 0
    passes: int = 0
    ridge: float = 0.0
    pending: dict[str, Array] = field(default_factory=dict)


class Solver:
    """Base class of the solvers.

    op : products with the kernel matrix, on the device of the solver.
    Z : points of the centers, p rows.
    n_outputs : number c of outputs.
    max_batch : largest number of rows of a batch, over all ranks.
    average : whether the solver keeps a running average of its iterates.
    ranks : communicator of the ranks, each of which has a part of the rows of a batch. All ranks
        have the same state, unless the centers are partitioned: then a rank's arrays with one row
        per center have only the rows of its centers `Z`.
    center_partition : partition of the centers; `Z` has this rank's centers. None: `Z` has all
        centers.
    loss : the loss of the outputs; None: the squared error.
    """

    name: str
    """Name of the solver, for error messages."""
    average_k: float = 3
    """The constant k of the running average, see `_average`."""
    temporary_center_arrays: tuple[str, ...] = ()
    """Names of the pending arrays that have one row for each temporary center."""
    remedy = "a larger bandwidth"
    """Setting to change if even very short steps diverge, with any loss."""

    def __init__(
        self, op: KernelOperator, Z: Points, *, n_outputs: int, max_batch: int,
        average: bool = True, ranks: Communicator = SINGLE,
        center_partition: CenterPartition | None = None, loss: ScaledLoss | None = None,
    ) -> None:  # fmt: skip
        self.op, self.Z, self.backend, self.ranks, self.loss = op, Z, op.backend, ranks, loss
        if center_partition is None:
            grid = RankGrid(ranks.rank, ranks.size)
            center_partition = CenterPartition([slice(0, len(Z))], grid)
        blocks, grid = center_partition.blocks, center_partition.grid
        self.partition = Partition(blocks, grid, ranks, op.backend)
        self.n_outputs, self.max_batch, self.buffer_rows = n_outputs, max_batch, 0
        self.keeps_average = average
        xp = op.backend.xp
        self.losses = xp.zeros((LOSS_BUFFER_STEPS, 2, n_outputs))

    def _ensure_buffers(self, rows: int | None = None) -> None:
        """Allocate buffers for `rows` rows of a batch, unless they already have that many rows.

        rows : None: an equal share of the largest batch, times `BUFFER_FACTOR`.
        """
        if rows is None:
            rows = math.ceil(BUFFER_FACTOR * self.max_batch / self.partition.grid.rows)
        if rows > self.buffer_rows:
            self.buffer_rows = min(rows, self.max_batch)
            self._allocate(self.buffer_rows)

    def _allocate(self, m: int) -> None:
        """Allocate the buffers of a batch of m rows."""

    def init(self, alpha: Array | None = None) -> State:
        """Return the state of the zero function, or of the weights `alpha`.

        alpha : weights of all centers, or of the centers in `Z`.
        """
        xp, shape = self.backend.xp, (len(self.Z), self.n_outputs)
        zero, average = (xp.zeros(shape, self.op.dtype) for _ in range(2))
        state = State(zero, average, pending=self._pending())
        if alpha is not None:
            state.alpha[...] = self.partition.part(alpha)
        return state

    def _pending(self) -> dict[str, Array]:
        """Return the arrays of `State.pending` at the start, by the names of a checkpoint."""
        return {}

    @property
    def remedies(self) -> str:
        """Settings to change if even very short steps diverge, for the error message."""
        if self.loss is not None and self.loss.limits:  # `direct` tests the length of its steps
            return f"{mention('solver.name', 'direct')}, {self.remedy}"
        return self.remedy

    def rules(self) -> list[StepRule]:
        """Return the step rules in use, one per block; none for solvers without a step size."""
        return []

    def step(self, state: State, batch: Batch) -> Array:
        """Update `state` with one batch and return its losses.

        The result, (2, c) float64, has the mean losses of f, before the step, and of f = 0, see
        `_measure`.

        A step reads nothing back from the device and allocates no large buffers there, because both
        would stall the queue of kernels. CuPy takes its small temporary arrays from a pool.
        """
        losses = self._step(state, batch)
        state.steps += 1
        return losses

    def _step(self, state: State, batch: Batch) -> Array:
        """Update `state` with one batch and return its losses, (2, c), as `step` does."""
        raise NotImplementedError

    def end_epoch(self, state: State) -> dict[str, Any]:
        """Finish an epoch after its last batch and return the entries for the log.

        The entry "note" is a sentence that is shown to the user as a warning. This method is called
        between two steps, so it may allocate memory and wait for the device.
        """
        return {}

    def why_finished(self, state: State) -> str | None:
        """Return why no further epoch is needed, or None. The result depends on `state` only."""
        return None

    def final_note(self, state: State) -> dict[str, str]:
        """Return a "note", see `end_epoch`, if the last epoch left the weights far from a minimum.

        It is called for runs that began with the zero function; most solvers return no note.
        """
        return {}

    def finish(self, state: State) -> None:
        """Add the pending parts to the weights. Called once, after the last step."""

    def weights(self, state: State) -> Array:
        """Return the weights to evaluate: the average if there is one, else the iterate."""
        return state.average if self.keeps_average and state.averaged else state.alpha

    @staticmethod
    def _weigh(r: Array, w: Array | None) -> Array:
        """Compute r <- w r in place and return r. r : (m, c). w : (m,), or None for all 1."""
        if w is not None:
            r *= w[:, None]
        return r

    def _to_residual(
        self, state: State, batch: Batch, values: Array, scratch: Array
    ) -> tuple[Array, Array | None, Array]:
        """Return the residual of a step, (m, c), the weights of its rows, and the losses, (2, c).

        The residual overwrites `values`. For a loss other than the squared error it is the
        residual of the quadratic function that replaces the loss in the step, see `ScaledLoss`.

        values : (m, c), f(X) - Y for the squared error, else f(X).
        scratch : (m, c), overwritten.
        """
        if self.loss is None:
            return values, batch.w, self._measure(state, batch, values, scratch)
        errors = self.loss.errors(values, batch.Y)
        losses = self._measure(state, batch, errors, scratch)
        rows_per_center = state.rows / self.partition.p
        r, w = self.loss.residual(errors, batch.Y, rows_per_center)
        if w is None or batch.w is None:
            return r, batch.w if w is None else w, losses
        return r, w * batch.w, losses

    def _measure(self, state: State, batch: Batch, r: Array, squares: Array) -> Array:
        """Return the means of w r^2 over a batch, for f and for f = 0: (2, c) float64.

        The array is on the device and valid for `LOSS_BUFFER_STEPS` steps.

        r : (m, c), before `_weigh`.
        squares : (m, c), overwritten.
        """
        losses, zero_errors, w = self.losses[state.steps % LOSS_BUFFER_STEPS], batch.Y, batch.w
        w = None if w is None else w[:, None]
        scale = 1 / batch.n_global_rows
        self.backend.sum_squares(r, losses[0], 0, squares, w, scale)
        if self.loss is not None:
            zero_errors = self.backend.xp.subtract(batch.Y, self.loss.of_zero, out=squares)
        self.backend.sum_squares(zero_errors, losses[1], 0, squares, w, scale)
        return self.partition.sum_over_rows(losses)

    def agree(self, condition: bool) -> bool:
        """Return whether the condition is true on all ranks.

        Collective only if the centers are partitioned, because each rank then has only a part of
        the state. Otherwise all ranks have the same state, and compute the same condition.
        """
        return condition if self.partition.is_replicated else self.ranks.agree(condition)

    def sums_of_rows(self, state: State) -> tuple[str, ...]:
        """Return the names of the pending arrays that are sums over the rows of this rank."""
        return ()

    def reduce_to_rank_0(self, state: State) -> None:
        """Add the sums of all ranks on rank 0, which writes the checkpoint; other ranks keep 0.

        If the centers are partitioned, they are added on the first rank of each column of the grid.
        """
        for name in self.sums_of_rows(state):
            self.partition.column_reduce(state.pending[name])

    def _average(self, state: State) -> None:
        """Update the running average with the t-th iterate.

            average <- average + w (alpha - average),    w = (k + 1) / (t + k)

        The influence of the first iterate falls like t^-(k + 1). The variance is
        (k + 1)^2 / (2 k + 1) times the variance of a plain mean: 9/8, 4/3, 9/5, 16/7 times for
        k = 1/2, 1, 2, 3. Solvers that converge slowly have a larger k, `average_k`.
        """
        if not self.keeps_average:
            return
        state.averaged += 1
        weight = (self.average_k + 1) / (state.averaged + self.average_k)
        self.backend.assign(AVERAGE, average=state.average, alpha=state.alpha, weight=weight)

    # -- checkpoint ------------------------------------------------------------------------

    def arrays(self, state: State) -> dict[str, Array]:
        """Return the arrays of a checkpoint: views, to be copied before the next step."""
        pending = {
            name: a[: self._n_temporary(state)] if name in self.temporary_center_arrays else a
            for name, a in state.pending.items()
        }
        return {"alpha": state.alpha, "average": state.average, **pending}

    def _n_temporary(self, state: State) -> int:
        """Return the number of temporary centers that this rank has."""
        return state.n_pending

    @staticmethod
    def scalars(state: State) -> dict[str, Any]:
        """Return the numbers of a checkpoint."""
        return {
            name: getattr(state, name)
            for name in ("steps", "averaged", "scale", "n_pending", "rows", "passes", "ridge")
        }

    def restore(self, arrays: dict[str, npt.NDArray[Any]], scalars: dict[str, Any]) -> State:
        """Return the state of a checkpoint, from the results of `arrays` and `scalars`."""
        state = self.init()
        numbers = {name: type(x)(scalars[name]) for name, x in self.scalars(state).items()}
        state = replace(state, **numbers)
        for name, target in self.arrays(state).items():
            target[...] = self.backend.asarray(arrays[name], target.dtype)
        if self.partition.grid.row:  # the checkpoint has the sums of all ranks, kept by grid row 0
            for name in self.sums_of_rows(state):
                state.pending[name][...] = 0
        return state

    def back_off(self, state: State, good_weights: Array, factor: float) -> None:
        """Restore `good_weights` (p, c), scale the step size by `factor`, restart the average.

        Raises DivergenceError if the solver has no step size.
        """
        if not self.rules():
            raise DivergenceError(
                f"solver {self.name!r} computed values that are not finite, and has no step size "
                "to reduce",
                "check the data for outliers, or give a larger bandwidth or a ridge",
            )
        state.alpha[...] = good_weights
        state.average[...] = good_weights
        state.averaged, state.n_pending = 0, 0
        state.scale *= factor
        for a in state.pending.values():
            a[...] = 0
