"""What every solver shares: the state that a checkpoint keeps, and the running average.

A solver has no loop, no input and no clock: `train` owns those. It supplies

    init(alpha) -> State
    step(state, batch) -> loss      moves the state by one batch
    end_pass(state) -> facts        after the last batch of every epoch
    finished(state) -> reason       whether further passes would change nothing
    finish(state)                   brings pending parts home at the end of a run
    weights(state) -> (p, c)        what is evaluated

Sample weights enter a step in one place: the gradient of half the mean of w_i |f(x_i) - y_i|^2 is
K^T (w r) / m, so `_weigh` turns the residual r into w r before anything is done with it. Step rules
are measured on rows scaled alike, see `precondition.block`. The projection of EigenPro 3 and 4 is
one in the RKHS norm and knows no weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.backend.rank_grid import CenterPartition, RankGrid
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.basics.errors import DivergenceError
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.step_rule import StepRule
from streamkern.solver.rank_sums import ColumnSums, RowSums

LOSSES = 32
"""Steps whose losses stay on the device before they are written over."""
MORE = 1.1
"""Of an equal share of a batch, for which a rank has room from the beginning."""


@dataclass
class State:
    """What changes from step to step, all of it on the device.

    alpha, average : (p, c) the iterate and its running average. steps : taken so far.
    averaged : iterates in the average. scale : factor on every step size, below 1 after a
    back-off. ridge : the one that a solver found last. pending : parts of the function outside the
    span of the centers, `n_pending` of
    their rows in use, or sums over the rows of a pass. rows, passes : rows in those sums, and
    passes that have ended, where the solver counts them.
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
    """Base of the solvers. `Z` : points of the centers, p rows, both sides. ranks : that each have
    a part of the rows of a batch; all keep the same state, unless they share out the centers: then
    what has a row for each center has those of Z alone. share : the centers of this rank, which are
    in Z; None: all of them."""

    name: str
    """Of a solver whose steps have no size."""
    average_k: float = 3
    growing: tuple[str, ...] = ()
    """The pending arrays of which only the first `n_pending` rows are in use."""
    remedy = "a larger bandwidth"
    """What may be set where steps diverge however short they are."""

    def __init__(
        self, op: KernelOperator, Z: Points, *, n_outputs: int, average: bool = True,
        ranks: Communicator = SINGLE, share: CenterPartition | None = None,
    ) -> None:  # fmt: skip
        self.op, self.Z, self.backend, self.ranks = op, Z, op.backend, ranks
        if share is None:
            share = CenterPartition([slice(0, len(Z))], RankGrid(ranks.rank, ranks.size))
        self.share, self.counts = share, share.grid.column == 0
        self.across = RowSums(ranks, share.grid, op.backend)
        self.down = ColumnSums(ranks, share, op.backend)
        self.n_outputs = n_outputs
        self.averaging = average
        xp = op.backend.xp
        self.losses = xp.zeros((LOSSES, 2, n_outputs))
        self._scratch = xp.empty((len(Z), n_outputs), op.dtype)

    def init(self, alpha: Array | None = None) -> State:
        """The zero function, or the one with the weights `alpha`, of all centers or those of Z."""
        xp, shape = self.backend.xp, (len(self.Z), self.n_outputs)
        zero, average = (xp.zeros(shape, self.op.dtype) for _ in range(2))
        state = State(zero, average, pending=self._pending())
        if alpha is not None:
            state.alpha[...] = self.share.part(alpha)
        return state

    def _pending(self) -> dict[str, Array]:
        return {}

    def rules(self) -> list[StepRule]:
        """The step rules in force, one per block; none where a step has no size."""
        return []

    def step(self, state: State, batch: Batch) -> Array:
        """Move `state` by one batch and return its loss: see `_measure`.

        Nothing is read back and no memory is asked of the device, which would stall the queue: what
        is of size was made before. Small arrays of CuPy's own come from its pool.
        """
        loss = self._step(state, batch)
        state.steps += 1
        return loss

    def _step(self, state: State, batch: Batch) -> Array:
        raise NotImplementedError

    def end_pass(self, state: State) -> dict[str, Any]:
        """What follows the last batch of an epoch; returns what is worth a line of the log.

        Of it, "note" is a sentence that the caller of the run is warned with.
        Between two steps, so it may allocate and wait for the device.
        """
        return {}

    def finished(self, state: State) -> str | None:
        """Why no further pass is needed, or None. Asked between passes; a function of `state`."""
        return None

    def finish(self, state: State) -> None:
        """Bring what is pending home. Called once, after the last step."""

    def weights(self, state: State) -> Array:
        """The weights to evaluate: the average where there is one."""
        return state.average if self.averaging and state.averaged else state.alpha

    @staticmethod
    def _weigh(r: Array, w: Array | None) -> Array:
        """r <- w r, in place. r : (m, c). w : (m,), or None for all 1."""
        if w is not None:
            r *= w[:, None]
        return r

    def _measure(self, state: State, batch: Batch, r: Array, squares: Array) -> Array:
        """(2, c) float64 on the device, good for `LOSSES` steps: mean of w r^2, and that of f = 0.

        r : (m, c), before `_weigh`. squares : (m, c), overwritten.
        """
        losses = self.losses[state.steps % LOSSES]
        for values, loss in ((r, losses[0, ...]), (batch.Y, losses[1, ...])):
            self.backend.xp.multiply(values, values, out=squares)
            self._weigh(squares, batch.w).sum(axis=0, dtype=loss.dtype, out=loss)
        if self.counts:  # the rows of this rank, which another column has as well
            losses *= 1 / batch.whole
        else:
            losses[...] = 0
        return self._total(losses)

    def _total(self, a: Array) -> Array:
        """a <- the sum of what the ranks have."""
        return self.ranks.sum(a, self.backend)

    def _of_first(self, a: Array) -> Array:
        """a <- what rank 0 has: what ranks work out by themselves may differ by rounding."""
        if self.ranks.rank:
            a[...] = 0
        return self._total(a)

    def agree(self, so: bool) -> bool:
        """Whether all ranks say so, of what each sees of its state: where centers are shared out it
        has a part of that, else all have the same."""
        return so if self.share.whole else self.ranks.agree(so)

    def sums_of_rows(self, state: State) -> tuple[str, ...]:
        """The pending arrays that are sums over the rows that this rank has seen."""
        return ()

    def gather(self, state: State) -> None:
        """What all ranks have in those sums becomes the first rank's, which a checkpoint is made
        of; where centers are shared out, the first's of each column."""
        for name in self.sums_of_rows(state):
            total = self.down.sum(state.pending[name])
            if self.share.grid.row:
                total[...] = 0

    def _average(self, state: State) -> None:
        """average <- average + w (alpha - average), w = (k + 1) / (t + k), on the t-th of them.

        It forgets the start like t^-(k + 1) and costs (k + 1)^2 / (2 k + 1) of the variance of a
        plain mean: 9/8, 4/3, 9/5, 16/7 for k = 1/2, 1, 2, 3. The slower the solver, the larger
        its `k`.
        """
        if not self.averaging:
            return
        state.averaged += 1
        weight = (self.average_k + 1) / (state.averaged + self.average_k)
        move = self._scratch
        self.backend.xp.subtract(state.alpha, state.average, out=move)
        move *= weight
        state.average += move

    # -- checkpoint ------------------------------------------------------------------------

    def arrays(self, state: State) -> dict[str, Array]:
        """The arrays that a checkpoint keeps; views, to be copied before the next step."""
        used = {
            name: a[: self._used(state)] if name in self.growing else a
            for name, a in state.pending.items()
        }
        return {"alpha": state.alpha, "average": state.average, **used}

    def _used(self, state: State) -> int:
        """Rows of the growing arrays that are in use on this rank."""
        return state.n_pending

    @staticmethod
    def scalars(state: State) -> dict[str, Any]:
        """The numbers that a checkpoint keeps."""
        return {
            name: getattr(state, name)
            for name in ("steps", "averaged", "scale", "n_pending", "rows", "passes", "ridge")
        }

    def restore(self, arrays: dict[str, npt.NDArray[Any]], scalars: dict[str, Any]) -> State:
        """The state they came from."""
        state = self.init()
        numbers = {name: type(x)(scalars[name]) for name, x in self.scalars(state).items()}
        state = replace(state, **numbers)
        for name, target in self.arrays(state).items():
            target[...] = self.backend.asarray(arrays[name], target.dtype)
        if self.share.grid.row:
            for name in self.sums_of_rows(state):
                state.pending[name][...] = 0
        return state

    def backed_off(self, state: State, good: Array, factor: float) -> None:
        """Go back to the weights `good` with steps `factor` times as long, average begun again.

        Raises DivergenceError where steps have no size.
        """
        if not self.rules():
            raise DivergenceError(
                f"solver {self.name!r} met values that are not finite, and has no step size to "
                "lower; check the data for outliers, or give a larger bandwidth or a ridge"
            )
        state.alpha[...] = good
        state.average[...] = good
        state.averaged, state.n_pending = 0, 0
        state.scale *= factor
        for a in state.pending.values():
            a[...] = 0
