"""Base class of the solvers: the state that a checkpoint keeps, and the running average.

A solver has no loop, no input and no clock: `train` owns those. It supplies

    init(alpha) -> State
    step(state, batch) -> loss      moves the state by one batch
    end_pass(state) -> facts        after the last batch of every epoch
    finished(state) -> reason       whether further passes would change nothing
    finish(state)                   adds pending parts to the weights at the end of a run
    weights(state) -> (p, c)        the weights to evaluate

Sample weights enter a step in one place: the gradient of half the mean of w_i |f(x_i) - y_i|^2 is
K^T (w r) / m, so `_weigh` turns the residual r into w r before anything is done with it. Step rules
are measured on rows scaled alike, see `precondition.block`. The projection of EigenPro 3 and 4 is
one in the RKHS norm and knows no weights.
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
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.losses.scaled import ScaledLoss
from streamkern.planning.problem import ProblemShape
from streamkern.solver.precondition.partition import Partition
from streamkern.solver.precondition.step_rule import StepRule

AVERAGE = Assignments("average", "average = average + (alpha - average) * weight")
LOSSES = 32
"""Number of steps whose losses stay on the device before they are overwritten."""
ROOM_FACTOR = 1.1
"""Rows of a batch that a rank has room for from the start, relative to an equal share."""


def batch_room(problem: ProblemShape, m: int) -> int:
    """Return the rows of a batch of m that a rank has room for from the start."""
    return min(m, math.ceil(ROOM_FACTOR * problem.of_row(m)))


@dataclass
class State:
    """State that changes from step to step, with all arrays on the device.

    alpha, average : (p, c) iterate and its running average.
    steps : steps taken so far.
    averaged : number of iterates in the average.
    scale : factor on every step size, below 1 after a back-off.
    ridge : the ridge that a solver found last.
    pending : arrays of the part of the function outside the span of the centers, with `n_pending`
        of their rows in use, or sums over the rows of a pass.
    rows, passes : rows in those sums, or of all steps, and completed passes, if they are counted.
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

    Z : points of the centers, p rows.
    max_batch : largest number of rows of a batch, over all ranks.
    ranks : communicator of the ranks, each of which has a part of the rows of a batch. All keep the
        same state, unless the centers are partitioned over them: then arrays with a row per center
        have only the rows of `Z`.
    share : partition of the centers, of which this rank's are in `Z`; None: all centers.
    loss : the loss of the outputs; None: squares.
    """

    name: str
    """Name of the solver, for the error of solvers whose steps have no size."""
    average_k: float = 3
    growing: tuple[str, ...] = ()
    """Names of the pending arrays of which only the first `n_pending` rows are in use."""
    remedy = "a larger bandwidth"
    """Setting to change if steps diverge however short they are, for the error message."""

    def __init__(
        self, op: KernelOperator, Z: Points, *, n_outputs: int, max_batch: int,
        average: bool = True, ranks: Communicator = SINGLE, share: CenterPartition | None = None,
        loss: ScaledLoss | None = None,
    ) -> None:  # fmt: skip
        self.op, self.Z, self.backend, self.ranks, self.loss = op, Z, op.backend, ranks, loss
        if share is None:
            share = CenterPartition([slice(0, len(Z))], RankGrid(ranks.rank, ranks.size))
        self.partition = Partition(share.blocks, share.grid, ranks, op.backend)
        self.n_outputs, self.max_batch, self.room = n_outputs, max_batch, 0
        self.averaging = average
        xp = op.backend.xp
        self.losses = xp.zeros((LOSSES, 2, n_outputs))

    def _make_room(self, rows: int | None = None) -> None:
        """Allocate buffers for `rows` rows of a batch; None: for this rank's share of the largest.

        A rank may have more rows than an equal share.
        """
        if rows is None:
            rows = math.ceil(ROOM_FACTOR * self.max_batch / self.partition.grid.rows)
        if rows > self.room:
            self.room = min(rows, self.max_batch)
            self._allocate(self.room)

    def _allocate(self, m: int) -> None:
        """Allocate the buffers of a batch of m rows."""

    def init(self, alpha: Array | None = None) -> State:
        """Return the state of the zero function, or of the weights `alpha`.

        alpha : weights of all centers or of those in `Z`.
        """
        xp, shape = self.backend.xp, (len(self.Z), self.n_outputs)
        zero, average = (xp.zeros(shape, self.op.dtype) for _ in range(2))
        state = State(zero, average, pending=self._pending())
        if alpha is not None:
            state.alpha[...] = self.partition.part(alpha)
        return state

    def _pending(self) -> dict[str, Array]:
        return {}

    def rules(self) -> list[StepRule]:
        """Return the step rules in force, one per block; none if steps have no size."""
        return []

    def step(self, state: State, batch: Batch) -> Array:
        """Move `state` by one batch and return its loss: see `_measure`.

        Nothing is read back from the device and no memory is allocated on it, which would stall the
        queue: large buffers were made before. Small arrays of CuPy's own come from its pool.
        """
        loss = self._step(state, batch)
        state.steps += 1
        return loss

    def _step(self, state: State, batch: Batch) -> Array:
        raise NotImplementedError

    def end_pass(self, state: State) -> dict[str, Any]:
        """Finish an epoch after its last batch and return the entries for the log.

        The entry "note" is a sentence that the caller of the run receives as a warning. It is
        called between two steps, so it may allocate memory and wait for the device.
        """
        return {}

    def finished(self, state: State) -> str | None:
        """Return why no further pass is needed, or None; depends on `state` only."""
        return None

    def finish(self, state: State) -> None:
        """Add the pending parts to the weights. Called once, after the last step."""

    def weights(self, state: State) -> Array:
        """Return the weights to evaluate: the average if there is one, else the iterate."""
        return state.average if self.averaging and state.averaged else state.alpha

    @staticmethod
    def _weigh(r: Array, w: Array | None) -> Array:
        """Compute r <- w r in place and return r. r : (m, c). w : (m,), or None for all 1."""
        if w is not None:
            r *= w[:, None]
        return r

    def _to_residual(
        self, state: State, batch: Batch, values: Array, scratch: Array
    ) -> tuple[Array, Array | None, Array]:
        """Return the residual of a step, (m, c) in place of `values`, the weights of its rows, and
        the error of the batch.

        With a loss the residual is that of the square which stands for it, see `ScaledLoss`.

        values : (m, c), f(X) - Y with squares, else f(X).
        scratch : (m, c), overwritten.
        """
        if self.loss is None:
            return values, batch.w, self._measure(state, batch, values, scratch)
        errors = self.loss.errors(values, batch.Y)
        measured = self._measure(state, batch, errors, scratch)
        r, w = self.loss.residual(errors, batch.Y, state.rows / self.partition.p)
        if w is None or batch.w is None:
            return r, batch.w if w is None else w, measured
        return r, w * batch.w, measured

    def _measure(self, state: State, batch: Batch, r: Array, squares: Array) -> Array:
        """Return the error of a batch, the mean of w r^2, and that of f = 0: (2, c) float64.

        The array is on the device and valid for `LOSSES` steps.

        r : (m, c), before `_weigh`.
        squares : (m, c), overwritten.
        """
        losses, of_zero, w = self.losses[state.steps % LOSSES], batch.Y, batch.w
        w = None if w is None else w[:, None]
        scale = 1 / batch.whole
        self.backend.sum_squares(r, losses[0], 0, squares, w, scale)
        if self.loss is not None:
            of_zero = self.backend.xp.subtract(batch.Y, self.loss.of_zero, out=squares)
        self.backend.sum_squares(of_zero, losses[1], 0, squares, w, scale)
        return self.partition.sum_over_rows(losses)

    def agree(self, so: bool) -> bool:
        """Return whether `so` holds on all ranks.

        The ranks are asked only if the centers are partitioned, as each then sees a part of the
        state; else all have the same state.
        """
        return so if self.partition.whole else self.ranks.agree(so)

    def sums_of_rows(self, state: State) -> tuple[str, ...]:
        """Return the names of the pending arrays that are sums over the rows of this rank."""
        return ()

    def gather(self, state: State) -> None:
        """Move the sums of all ranks to the first rank, from which a checkpoint is made.

        If the centers are partitioned, they move to the first rank of each column.
        """
        for name in self.sums_of_rows(state):
            self.partition.column_reduce(state.pending[name])

    def _average(self, state: State) -> None:
        """Update the running average with the t-th iterate.

            average <- average + w (alpha - average),    w = (k + 1) / (t + k)

        It forgets the start like t^-(k + 1) and costs (k + 1)^2 / (2 k + 1) of the variance of a
        plain mean: 9/8, 4/3, 9/5, 16/7 for k = 1/2, 1, 2, 3. The slower the solver, the larger its
        `k`.
        """
        if not self.averaging:
            return
        state.averaged += 1
        weight = (self.average_k + 1) / (state.averaged + self.average_k)
        self.backend.assign(AVERAGE, average=state.average, alpha=state.alpha, weight=weight)

    # -- checkpoint ------------------------------------------------------------------------

    def arrays(self, state: State) -> dict[str, Array]:
        """Return the arrays that a checkpoint keeps: views, to be copied before the next step."""
        used = {
            name: a[: self._used(state)] if name in self.growing else a
            for name, a in state.pending.items()
        }
        return {"alpha": state.alpha, "average": state.average, **used}

    def _used(self, state: State) -> int:
        """Return the number of rows of the growing arrays that are in use on this rank."""
        return state.n_pending

    @staticmethod
    def scalars(state: State) -> dict[str, Any]:
        """Return the numbers that a checkpoint keeps."""
        return {
            name: getattr(state, name)
            for name in ("steps", "averaged", "scale", "n_pending", "rows", "passes", "ridge")
        }

    def restore(self, arrays: dict[str, npt.NDArray[Any]], scalars: dict[str, Any]) -> State:
        """Return the state that `arrays` and `scalars` were taken from."""
        state = self.init()
        numbers = {name: type(x)(scalars[name]) for name, x in self.scalars(state).items()}
        state = replace(state, **numbers)
        for name, target in self.arrays(state).items():
            target[...] = self.backend.asarray(arrays[name], target.dtype)
        if self.partition.grid.row:
            for name in self.sums_of_rows(state):
                state.pending[name][...] = 0
        return state

    def backed_off(self, state: State, good: Array, factor: float) -> None:
        """Go back to the weights `good`, with steps `factor` times as long and a new average.

        Raises DivergenceError if steps have no size.
        """
        if not self.rules():
            raise DivergenceError(
                f"solver {self.name!r} met values that are not finite, and has no step size to "
                "lower",
                "check the data for outliers, or give a larger bandwidth or a ridge",
            )
        state.alpha[...] = good
        state.average[...] = good
        state.averaged, state.n_pending = 0, 0
        state.scale *= factor
        for a in state.pending.values():
            a[...] = 0
