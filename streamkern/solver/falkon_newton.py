"""FALKON for losses other than squares: its settings and costs; see `falkon_newton_step`."""

from __future__ import annotations

from streamkern.config.solver import SolverConfig
from streamkern.planning.memory import Buffers
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import Sizes
from streamkern.solver.falkon import Falkon
from streamkern.solver.falkon_newton_step import FalkonNewtonSolver
from streamkern.solver.newton import check_ridge


class FalkonNewton(Falkon):
    """FALKON for losses other than squares: its settings, sizes and costs.

    The preconditioner H is the same as for squares.
    """

    of_squares, of_losses = False, True
    data_parallel = over_centers = False
    solver = FalkonNewtonSolver
    n_vectors = 30

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError as `Method.check`, and for a ridge of 0."""
        super().check(problem, options)
        check_ridge(self.name, options)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: Sizes) -> None:
        """Add the buffers of `Falkon`, and the residuals and curvatures of a batch."""
        super().add_buffers(buffers, problem, sizes)
        rows = 4 * sizes.batch_size
        buffers.add("train", "residuals and curvatures", rows, problem.c, itemsize=problem.itemsize)
