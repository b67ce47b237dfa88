"""Steps of EigenPro 3.0, and of EigenPro 4, which delays the projection.

EigenPro 3 (EP3) and 4 (EP4) have the same step, on a fresh batch X (m, d), Y (m, c):

    g      = f(X) - Y,   f = K(., Z) alpha + K(., X_tmp) delta + K(., X_s) gamma
    X_tmp  gets the rows X, as temporary centers with the weights delta = -eta/m g
    gamma += eta/m E D E^T K(X_s, X) g
    h     -= eta/m K(Z, X) g                       (values of the temporary part at Z)

and every `period` steps the part outside the span of Z is projected onto it:

    alpha += proj(h + K(Z, X_s) gamma),            delta, gamma, X_tmp, h <- 0.

period = 1 is EP3 Algorithm 2; period * m close to p is EP4. K(X, Z) is evaluated once, for f and
for h. The correction gamma is linear, so its values at Z are needed only once per projection, and
the p x q matrix of the papers is never formed.

Each rank of a grid (`backend.rank_grid`) has some rows of X, all of X_s and gamma, and the part of
its column of the centers, of alpha and h, and of the temporary centers. f is summed over the ranks
with the same rows, h over the ranks with the same centers, and the change of gamma over all ranks.
Temporary center i belongs to column i mod C, independently of the batches.

Differences from EP3/EP4: the step size is measured (see `step_rule`), which the papers take from
lam_{q+1}; and the weights of the model are a running average.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.backend.rank_grid import RankGrid
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.base import Solver, State
from streamkern.solver.precondition.low_rank import LowRankPreconditioner
from streamkern.solver.precondition.step_rule import StepRule
from streamkern.solver.projection import Projection

TEMPORARY_ARRAYS = ("points", "norms", "delta")
"""Names of a checkpoint's arrays with a row for each temporary center."""


def temporary_ids(grid: RankGrid, start: int, stop: int) -> range:
    """Return the indices from `start` to `stop` of the temporary centers that a column has."""
    # Column k of C has the indices k, k + C, ...: the first of them that is not below `start`.
    return range(start + (grid.column - start) % grid.columns, stop, grid.columns)


class DelayedProjectionSolver(Solver):
    """EP3 (period = 1) and EP4 (period > 1).

    Parameters
    ----------
    op, Z : see `Solver`.
    preconditioner, projection : the preconditioner of the steps; the projection onto the centers.
    columns : number of columns of a point, see `KernelOperator.columns`.
    period : number of steps from one projection to the next.

    Cost per step 2 m p (d + 2 c) + 2 m s (d + 2 c) FLOPs and, for the temporary centers, on
    average m (period - 1) m (d + c) more; per projection as in `projection` plus 2 p s (d + c).
    Memory max_batch * p for K(X, Z), period * max_batch * (d + c) for the temporary centers.
    """

    temporary_center_arrays = TEMPORARY_ARRAYS

    def __init__(
        self, op: KernelOperator, Z: Points, preconditioner: LowRankPreconditioner,
        projection: Projection, *, columns: int, period: int, **solver_arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__(op, Z, **solver_arguments)
        self.P, self.projection = preconditioner, projection
        self.columns, self.period = columns, period
        xp, s = op.backend.xp, len(preconditioner.X_s)
        self.sample_part = self.partition.grid.of_column(s)
        self.h = xp.empty((len(Z), self.n_outputs), op.dtype)
        self.correction = xp.empty((s, self.n_outputs), op.dtype)
        self._ensure_buffers()

    def _allocate(self, m: int) -> None:
        """Allocate K(X, Z), the values and the points of a batch of m rows."""
        xp, dtype = self.backend.xp, self.op.dtype
        self.K: Array = None  # free the old buffer first
        self.K = xp.empty((m, len(self.Z)), dtype)
        self.f, self.part = (xp.empty((m, self.n_outputs), dtype) for _ in range(2))
        self.x = self.op.empty_points(m, self.Z.n_coordinates, left=True, right=True)

    def _pending(self) -> dict[str, Array]:
        """Return the arrays of the module docstring, all 0; "points" and "norms" are X_tmp."""
        xp, dtype, c = self.backend.xp, self.op.dtype, self.n_outputs
        # The last batch of a period is projected immediately, without becoming temporary centers.
        capacity = len(temporary_ids(self.partition.grid, 0, (self.period - 1) * self.max_batch))
        points = self.op.empty_points(capacity, self.Z.n_coordinates, right=True)
        norms = {} if points.norms is None else {"norms": points.norms}
        right = points.right
        assert right is not None
        right[:, self.columns :] = 0
        if points.norms is None:
            right[:, -2] = 1  # the column of ones of a right point, see `Points`
        return {
            "points": right,
            **norms,
            "delta": xp.zeros((capacity, c), dtype),
            "gamma": xp.zeros((len(self.P.X_s), c), dtype),
            "h": xp.zeros((len(self.Z), c), dtype),
        }

    def arrays(self, state: State) -> dict[str, Array]:
        """Return the arrays of a checkpoint; its points can be read by every backend."""
        arrays = super().arrays(state)
        points, norms = self._temporary_points(arrays).portable(self.columns)
        return arrays | {"points": points, "norms": norms}

    def _temporary_points(self, arrays: Mapping[str, Array]) -> Points:
        """Return X_tmp as points."""
        return Points(None, arrays["points"], arrays.get("norms"), self.Z.n_coordinates)

    def _n_temporary(self, state: State) -> int:
        """Return the number of temporary centers of this rank's column of the grid."""
        return len(temporary_ids(self.partition.grid, 0, state.n_pending))

    def rules(self) -> list[StepRule]:
        """Return the single step rule."""
        return [self.P.rule]

    def _step(self, state: State, batch: Batch) -> Array:
        """Take one step, and project at the end of a period; return the losses, (2, c)."""
        op = self.op
        m = len(batch.X)
        n = batch.n_global_rows
        pending = state.pending
        self._ensure_buffers(m)
        self.partition.begin_batch(m, n)
        x = op.points(batch.X, out=self.x[:m])
        g = self._values(state, x)
        # Only the first rank of a row of the grid subtracts Y, as the ranks' results are summed.
        if self.loss is None and not self.partition.grid.column:
            g -= batch.Y
        self.partition.row_sum(g)
        g, w, loss = self._to_residual(state, batch, g, self.part[:m])
        self._weigh(g, w)
        g *= state.scale * self.P.rule.eta(n) / n
        gamma, h = pending["gamma"], pending["h"]
        gamma += self.partition.sum(
            self.P.correction(op, x, g, self.correction, part=self.sample_part)
        )
        h -= self.partition.column_sum(self.backend.matmul_t(self.K[:m], g, self.h))
        if (state.steps + 1) % self.period == 0:
            self._project(state)
        else:
            self._add_temporary(state, x, g, n)
        state.rows += n
        return loss

    def _add_temporary(self, state: State, x: Points, g: Array, n: int) -> None:
        """Add the n rows of the batch on all ranks to the temporary centers.

        Each rank stores the rows that belong to its column of the grid.

        x, g : (m, ...) this rank's rows, and their step.
        """
        grid, n_before = self.partition.grid, self._n_temporary(state)
        batch_start = self.partition.rows_before(len(g))
        ids = temporary_ids(grid, state.n_pending, state.n_pending + n)
        target = slice(n_before, n_before + len(ids))
        column_rows = slice(ids.start - state.n_pending, n, grid.columns)
        for name, part in {"points": x.right, "norms": x.norms, "delta": g}.items():
            if part is not None:
                out = state.pending[name][target]
                self.partition.gather_batch(part, batch_start, n, column_rows, out)
        delta = state.pending["delta"][target]
        self.backend.xp.negative(delta, out=delta)
        state.n_pending += n

    def _values(self, state: State, x: Points) -> Array:
        """Return this rank's part of the three terms of f(X), and write K(X, Z) to `K`."""
        op, m, pending = self.op, len(x), state.pending
        f = op.product(x, self.Z, state.alpha, out=self.f[:m], keep=self.K[:m])
        if state.n_pending:
            temporary, sample = slice(0, self._n_temporary(state)), self.sample_part
            X_tmp = self._temporary_points(pending)[temporary]
            delta = pending["delta"][temporary]
            f += op.product(x, X_tmp, delta, out=self.part[:m])
            f += op.product(x, self.P.X_s[sample], pending["gamma"][sample], out=self.part[:m])
        return f

    def _project(self, state: State) -> None:
        """Project the temporary part of f onto the span of Z, and add its weights to alpha."""
        h, gamma = state.pending["h"], state.pending["gamma"]
        row_part = self.partition.grid.of_row(len(self.Z))
        self.h[...] = 0
        self.op.product(self.Z[row_part], self.P.X_s, gamma, out=self.h[row_part])
        h += self.partition.column_sum(self.h)
        state.alpha += self.partition.column_broadcast(self.projection.solve(h))
        h[...] = 0
        gamma[...] = 0
        state.n_pending = 0
        self._average(state)

    def finish(self, state: State) -> None:
        """Project the steps of the last, incomplete period."""
        if state.n_pending:
            self._project(state)
