"""FALKON: its settings, costs and preconditioner; see `falkon_step`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.backend.rank_grid import CenterPartition
from streamkern.config.solver import SolverConfig
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import (
    PRODUCT_TILE,
    RANK_SLAB_BYTES,
    Buffers,
    MemoryNeeds,
    count_products,
)
from streamkern.planning.op_counts import OpCounts
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import Sizes, check_epochs
from streamkern.solver.base import Solver, initial_buffer_rows
from streamkern.solver.falkon_step import (
    ARRAYS_WITHOUT_CENTERS,
    CAST_SLAB_ROWS,
    FalkonSolver,
    PreconditionedSolver,
)
from streamkern.solver.left_out import add_left_out
from streamkern.solver.method import Method, Report, Samples, Setup, Work
from streamkern.solver.precondition.block import MIN_PENALTY
from streamkern.solver.precondition.norm import (
    WeightNorm,
    inverse_root,
    jittered_cholesky,
    noise_floor,
)
from streamkern.solver.precondition.partition import BROADCAST_CENTERS, triangle_rows

CG_TOLERANCE = 1e-4
"""Default tolerance of the relative residual; in float32 a residual reaches about 1e-6."""
MIN_MU = 1e-4
"""Smallest mu of the preconditioner, relative to the trace.

With a smaller mu, rows far from all centers dominate the first iterations; a larger one takes more
iterations. Measured in docs/explanation/solver-measured.md.
"""


class Falkon(Method[Sizes]):
    """FALKON: its settings, sizes and costs."""

    name = "falkon"
    sizes = Sizes
    minimises_losses = False
    reaches_minimum = True
    needs_same_rows = True
    empty_epochs = 2
    data_parallel = partitions_centers = True
    sharded_arrays = ("H.0",)
    dense_p_by_p = True
    insensitive_to_conditioning = True
    min_penalty = MIN_PENALTY
    solver: type[PreconditionedSolver] = FalkonSolver
    n_vectors = 12
    """Number of (p, c) arrays of the iteration, including temporary ones."""
    n_exchanged = 1
    """Number of (p, c) arrays that the end of an epoch preconditions, or multiplies by K(Z, Z)."""

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError as `Method.check`, and for too few epochs."""
        super().check(problem, options)
        check_epochs(problem, self.name)

    def op_counts(self, problem: ProblemShape, sizes: Sizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of the setup, see `precondition`, and of the training.

        At the end of each epoch H is converted to float64 and multiplied, and K(Z, Z) evaluated.
        """
        n, p = problem.n_rows * problem.epochs, problem.p
        epoch_ends = problem.epochs * p * p
        setup = OpCounts(kept=2 * p * p, products=p**3, factors=p**3)
        return setup, OpCounts(kept=p * n, swept=2 * p * n + 4 * epoch_ends, entries=epoch_ends)

    def outputs(self, problem: ProblemShape) -> int:
        """Return the columns of the product with K(X, Z): the weights and the direction."""
        return 2 * problem.c

    def needs(self, problem: ProblemShape, sizes: Sizes) -> MemoryNeeds:
        """Return the memory needs of K(X, Z) [alpha, v], and of K(Z, Z) v for a ridge."""
        p = problem.p
        rows = p if problem.center_ranks == 1 else min(p, BROADCAST_CENTERS)
        return MemoryNeeds(max(sizes.batch_size, rows), 2 * problem.c, setup=p * p)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: Sizes) -> None:
        """Add the buffers of H, its factors and the vectors of the iteration."""
        add, item, p, c = buffers.add, problem.itemsize, problem.p, problem.c
        m, q = sizes.batch_size, problem.centers_per_rank(p)
        add("train", "K(X, Z)", initial_buffer_rows(problem, m), q, itemsize=item)
        add("always", "tiles of a p x p matrix", problem.threads, PRODUCT_TILE**2, itemsize=8)
        if problem.ranks == 1:
            add("always", "preconditioner H", p, p, itemsize=item)
        else:
            add("setup", "preconditioner H", p, p, itemsize=item)
            stripe = problem.per_rank(p)
            add("train", "preconditioner H, this rank's stripe", stripe, p, itemsize=item)
        rows = 3 * p + count_products(buffers, problem, p)
        add("setup", "triangular factors of the preconditioner", rows, p, itemsize=item)
        add("train", "vectors of the iteration", self.n_vectors * q, c, itemsize=8)
        add("train", "slab of H in float64", min(p, CAST_SLAB_ROWS), p, itemsize=8)
        add_left_out(buffers, problem)
        if problem.center_ranks > 1:
            self._add_partitioned_buffers(buffers, problem, sizes)

    def _add_partitioned_buffers(
        self, buffers: Buffers, problem: ProblemShape, sizes: Sizes
    ) -> None:
        """Add further buffers, needed if the centers are partitioned over ranks.

        The buffers of the setup are on rank 0, which computes H alone.
        """
        add, item, p, c, m = buffers.add, problem.itemsize, problem.p, problem.c, sizes.batch_size
        columns = self.n_exchanged * c
        add("setup", "all centers, to build H", p, problem.prepared_row_bytes)
        add("train", "full vectors of the iteration, being exchanged", 2 * p, columns, itemsize=8)
        phase = problem.host_phase("train")
        add(phase, "iteration vectors, copies on rank 0", 6 * p, c, itemsize=8)
        sent_bytes = min(RANK_SLAB_BYTES, 8 * p * columns)
        add("train", "vectors of the iteration being sent to rank 0", sent_bytes)
        add("train", "all-reduce buffers of a step", m, 2 * c, itemsize=item)
        if problem.ridge:
            n = min(p, BROADCAST_CENTERS)
            add("train", "centers being broadcast", n, problem.prepared_row_bytes)
            name = "weights of the broadcast centers, and products"
            add("train", name, 2 * n, columns, itemsize=item)

    def compute(self, work: Work[Sizes], samples: Samples, report: Report) -> Setup:
        """Compute H on rank 0; if the centers are partitioned, all of them are gathered there."""
        problem = work.problem
        if problem.center_ranks > 1:
            samples()  # the samples are empty, but the call is collective
        Z = work.centers.block(slice(0, problem.p))
        if work.ranks.rank:
            return Setup({}, {})
        H, mu, jitter = precondition(work.op, Z, ridge=work.options.fixed_ridge)
        report("block", {"block": 0, "blocks": 1, "mu": mu, "jitter": jitter})
        meta = {"rules": [], "batch_size": work.sizes.batch_size, "mu": mu, "jitter": jitter}
        return Setup({"H.0": H}, meta)

    def assemble(self, work: Work[Sizes], setup: Setup) -> Solver:
        """Return the solver that iterates with H."""
        partition = self.center_partition(work.problem, work.sizes, work.ranks)
        H = triangle_rows(setup.arrays["H.0"], partition.p, work.ranks)
        return self.solver(
            work.op, work.Z.each(partition.part), H=H, ridge=work.options.fixed_ridge,
            jitter=setup.meta["jitter"], tolerance=work.options.tolerance or CG_TOLERANCE,
            center_partition=partition, **work.solver_arguments(setup),
        )  # fmt: skip

    def rows_of(
        self, name: str, n: int, partition: CenterPartition
    ) -> npt.NDArray[np.int64] | None:
        """Return the rows of a checkpoint's array that a rank has; None: all of them."""
        return None if name in ARRAYS_WITHOUT_CENTERS else partition.ids


def precondition(op: KernelOperator, Z: Points, *, ridge: float) -> tuple[Array, float, float]:
    """Return H (p, p), mu and the jitter.

    H is computed as in `precondition.block`, with a single block and the centers as the sample S.
    For S = Z, W = L^-1 K(Z, Z) = L^T, so that A A^T = L^T L / p + mu I needs no further kernel
    evaluation and H^T H = (K(Z, Z)^2 / p + mu K(Z, Z))^-1, where K(Z, Z) has its jitter (Rudi,
    Carratino and Rosasco 2017, eq. 13, with lambda = mu). There is no step size to measure.
    Cost 2 p^3 FLOPs; memory 3 p^2 elements besides H.

    Z : points of the centers.
    ridge : mu is the ridge, but at least `MIN_MU` times the trace.

    Raises
    ------
    ConfigError
        The kernel between the centers is not finite or not positive definite.
    """
    backend, p = op.backend, len(Z)
    # With a smaller jitter, nearly equal centers and a ridge, the residual would grow in float32.
    norm = WeightNorm(*jittered_cholesky(op, Z, noise_floor(op, p)))
    C = backend.xp.zeros((p, p), op.dtype)
    backend.add_gram(C, norm.L, 1 / p, lower=True)
    # The trace replaces the top eigenvalue as the scale of mu, as it needs no eigensolver.
    trace = float(C.diagonal().sum())
    H, mu = inverse_root(op, norm, C, max(ridge, MIN_MU * trace), trace)
    return H, mu, norm.jitter
