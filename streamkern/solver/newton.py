"""The direct solver and FALKON for losses other than squares: their settings and costs.

See `newton_step` and `falkon_newton_step`.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.solver import SolverConfig
from streamkern.planning.memory import PRODUCT_TILE, Buffers, MemoryNeeds
from streamkern.planning.op_counts import NO_WORK, OpCounts
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import Sizes, batch_candidates, check_epochs
from streamkern.solver.base import Solver
from streamkern.solver.direct import DirectSizes
from streamkern.solver.equations import KERNEL_SLAB_ROWS
from streamkern.solver.falkon import Falkon
from streamkern.solver.falkon_newton_step import FalkonNewtonSolver
from streamkern.solver.method import Method, Report, Samples, Setup, Work
from streamkern.solver.newton_step import NewtonSolver


class Newton(Method[DirectSizes]):
    """Newton's method: its settings, sizes and costs. Each output has a Hessian, see `n_sums`."""

    name = "direct"
    sizes = DirectSizes
    features = ("kernel", "nystrom", "fourier")
    minimises_squares = False
    needs_same_rows = True
    empty_epochs = 2
    data_parallel = True
    dense_p_by_p = True
    insensitive_to_conditioning = True

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError as `Method.check`, and for a ridge of 0 or fewer than two epochs."""
        super().check(problem, options)
        check_ridge(self.name, options)
        check_epochs(problem, self.name)

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[DirectSizes]:
        """Return candidate sizes, best first, with a sum for each output."""
        return self._sizes_for_batches(batch_candidates(problem), n_sums=problem.c)

    def op_counts(self, problem: ProblemShape, sizes: DirectSizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of the setup, none, and of the training, see `newton_step`."""
        p, c, n = problem.p, problem.c, problem.n_rows * problem.epochs
        return NO_WORK, OpCounts(
            kept=p * n, swept=p * n, wide_products=c * p * (p + 2) * n,
            wide_factors=problem.epochs * c * p**3 / 3,
        )  # fmt: skip

    def outputs(self, problem: ProblemShape) -> int:
        """Return the columns of the product with K(X, Z): the weights and the direction."""
        return 2 * problem.c

    def needs(self, problem: ProblemShape, sizes: DirectSizes) -> MemoryNeeds:
        """Return the memory needs; the sums are a part of every checkpoint."""
        sums = 8 * problem.c * problem.p**2
        return MemoryNeeds(sizes.batch_size, 2 * problem.c, sums=sums)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: DirectSizes) -> None:
        """Add the buffers of the sums and of the step."""
        add, item, p, c, m = buffers.add, problem.itemsize, problem.p, problem.c, sizes.batch_size
        add("train", "K(X, Z)", m, p, itemsize=item)
        add("train", "K(X, Z) in float64, with weights", 2 * m, p, itemsize=8)
        add("train", "residuals and curvatures", 4 * m, c, itemsize=item + 8)
        add("always", "tiles of a p x p matrix", problem.threads, PRODUCT_TILE**2, itemsize=8)
        add("train", "Hessians", c * p, p, itemsize=8)
        add("train", "gradient and step", 12 * p, c, itemsize=8)
        add("train", "factor of a Hessian", p, p, itemsize=8)
        add("train", "slab of K(Z, Z)", min(p, KERNEL_SLAB_ROWS), p, itemsize=item + 8)
        if problem.writes_checkpoints:
            phase = problem.host_phase("train")
            add(phase, "Hessians, checkpoint copy", c * p, p + 6, itemsize=8)

    def compute(self, work: Work[DirectSizes], samples: Samples, report: Report) -> Setup:
        """Return a setup without arrays, as there is nothing to compute before the first step."""
        return Setup({}, {"rules": [], "batch_size": work.sizes.batch_size})

    def assemble(self, work: Work[DirectSizes], setup: Setup) -> Solver:
        """Return the solver, with empty sums."""
        return NewtonSolver(
            work.op, work.Z, ridge=work.options.fixed_ridge, **work.solver_arguments(setup)
        )


class FalkonNewton(Falkon):
    """FALKON for losses other than squares: its settings, sizes and costs.

    The preconditioner H is the same as for squares.
    """

    minimises_squares, minimises_losses = False, True
    solver = FalkonNewtonSolver
    n_vectors, n_exchanged = 30, 2

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError as `Method.check`, and for a ridge of 0."""
        super().check(problem, options)
        check_ridge(self.name, options)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: Sizes) -> None:
        """Add the buffers of `Falkon`, and the residuals and curvatures of a batch."""
        super().add_buffers(buffers, problem, sizes)
        rows = 4 * sizes.batch_size
        buffers.add("train", "residuals and curvatures", rows, problem.c, itemsize=problem.itemsize)


def check_ridge(name: str, options: SolverConfig) -> None:
    """Raise ConfigError if the ridge is 0, for the solver `name` with Newton steps."""
    if options.ridge == 0:
        raise ConfigError(
            f"{mention('solver.ridge', 0)} cannot be used by {mention('solver', name)} with a "
            "loss other than squares, because such a loss may have no minimum without a ridge",
            'leave the ridge at "auto", or set it above 0',
        )
