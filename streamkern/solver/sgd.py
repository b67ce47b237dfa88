"""Plain SGD on the rows of the training set, which are its centers: alpha moves in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.config.solver import SolverConfig
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.effort import OpCounts
from streamkern.planning.memory import Buffers, MemoryNeeds
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import LOADERS, MIN_PROBE, Sizes, batches
from streamkern.solver.base import Solver, State
from streamkern.solver.method import Method, Report, Samples, Setup, Work
from streamkern.solver.precondition.low_rank import measure_low_rank
from streamkern.solver.precondition.step_rule import StepRule, saved_rules

PAPER_BATCH = 256
"""Batch size of EigenPro 1.0 (Ma and Belkin 2017, section 6)."""


class SGDSolver(Solver):
    """Plain SGD on the rows of the training set, which EigenPro 1 and 2 precondition.

    f <- f - eta ((1/m) sum_i (f(x_i) - y_i) k(x_i, .) + ridge f), which in weights is

        alpha <- (1 - eta ridge) alpha,   alpha_rows -= eta/m g.

    Pegasos (Shalev-Shwartz et al. 2007) shrinks f in the same way. Differences: squared loss, as in
    EP1, and a constant step with a running average in place of eta = 1 / (ridge t), which needs a
    ridge. The fixed point is kernel ridge regression, (K + n ridge I) alpha = Y. Cost per step
    2 m n (d + c) FLOPs, and a tile of memory.

    rule : step rule, measured on rows of the training set.
    """

    name = "sgd"
    remedy = "solver.ridge or a larger bandwidth"

    def __init__(
        self, op: KernelOperator, Z: Points, rule: StepRule, *, max_batch: int,
        ridge: float = 0.0, **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(op, Z, **shared)
        self.rule, self.ridge = rule, ridge
        xp, c = op.backend.xp, self.n_outputs
        self.f, self.squares = (xp.empty((max_batch, c), op.dtype) for _ in range(2))
        self.x = op.empty_points(max_batch, Z.width, left=True, right=True)

    def rules(self) -> list[StepRule]:
        """Return the single step rule."""
        return [self.rule]

    def _step(self, state: State, batch: Batch) -> Array:
        """Take the step of the class docstring, then `_correct`."""
        m, rows = len(batch.X), batch.rows
        x = self.op.points(batch.X, out=self.x[:m])
        # A row and its center are the same point: their distance is exactly zero.
        g = self.op.product(x, self.Z, state.alpha, out=self.f[:m], same=(np.arange(m), rows))
        g -= batch.Y
        loss = self._measure(state, batch, g, self.squares[:m])
        self._weigh(g, batch.w)
        eta = state.scale * self.rule.eta(m)
        g *= eta / m
        if self.ridge:
            state.alpha *= 1 - eta * self.ridge
        state.alpha[self.backend.xp.asarray(rows)] -= g
        self._correct(state, x, g, rows)
        self._average(state)
        return loss

    def _correct(self, state: State, x: Points, g: Array, rows: npt.NDArray[np.int64]) -> None:
        """Add the correction of a preconditioner. g : (m, c), the change of the rows' weights."""


def small_batches(problem: ProblemShape) -> list[int]:
    """Return candidate batch sizes, with at least 16 batches an epoch.

    These methods take more steps than passes.
    """
    return batches(problem, min(PAPER_BATCH, max(1, problem.n_rows // 16)))


def probe_rows(problem: ProblemShape) -> int:
    """Return the number of rows that a step is measured on."""
    return min(problem.n_rows, MIN_PROBE * 4)


class SGD(Method[Sizes]):
    """Plain SGD on the rows of the training set: its settings, sizes and costs."""

    name = "sgd"
    sizes = Sizes
    in_place = True
    instead = "another solver, or features='nystrom' for chosen centers"

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[Sizes]:
        """Return candidate sizes, best first, with a probe and no sample."""
        return [
            Sizes(self.name, m, 0, probe_rows(problem), *loader)
            for m in small_batches(problem)
            for loader in LOADERS
        ]

    def effort(self, problem: ProblemShape, sizes: Sizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of setup, K(probe, probe), and of training, K(X, Z) per batch."""
        rows = problem.n_rows * problem.epochs
        return OpCounts(kept=sizes.n_probe**2), OpCounts(entries=problem.p * rows)

    def needs(self, problem: ProblemShape, sizes: Sizes) -> MemoryNeeds:
        """Return the memory needs; every row of a batch is a center."""
        return MemoryNeeds(False, max(sizes.batch_size, sizes.n_probe, problem.p), problem.c)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: Sizes) -> None:
        """Add the buffers of the probe; the step itself needs only a tile."""
        h = sizes.n_probe
        buffers.add("setup", "probe, K(probe, probe)", h, 2 * problem.point + h * problem.itemsize)

    def compute(self, work: Work[Sizes], samples: Samples, report: Report) -> Setup:
        """Compute the step rule of the kernel; a ridge adds to both terms, see `step_rule`."""
        op, options = work.op, work.options
        fresh = samples()[1]
        probe = op.points(fresh.X, left=True, right=True)
        rule = measure_low_rank(op, None, probe, work.seed, fresh.root)
        if options.fixed_ridge:
            lambda_1 = rule.lambda_1 + options.fixed_ridge
            rule = StepRule(rule.leverage + lambda_1, lambda_1)
        batch_size = work.sizes.batch_size
        report("plain", asdict(rule) | {"batch_size": batch_size})
        return Setup({}, {"rules": [asdict(rule)], "batch_size": batch_size})

    def assemble(
        self, work: Work[Sizes], setup: Setup, sample_rows: npt.NDArray[np.int64] | None = None
    ) -> Solver:
        """Return the solver with the measured step rule."""
        rules = saved_rules(setup.meta["rules"], work.options.step_scale)
        return SGDSolver(
            work.op, work.Z.columns(), rules[0], max_batch=setup.meta["batch_size"],
            ridge=work.options.fixed_ridge, **work.shared,
        )  # fmt: skip
