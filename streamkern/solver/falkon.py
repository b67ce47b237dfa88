"""FALKON: its settings, costs and preconditioner; see `falkon_step`."""

from __future__ import annotations

from collections.abc import Sequence

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
from streamkern.planning.sizes import Sizes, batches, check_epochs
from streamkern.solver.base import Solver, batch_room
from streamkern.solver.falkon_step import OF_ALL, FalkonSolver
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
from streamkern.solver.preconditioned import CAST_SLAB_ROWS, PreconditionedSolver

CG_TOLERANCE = 1e-4
"""Default tolerance of the relative residual.

At 3e-4 the test error on noisy digits had the exact model's first four digits; float32 ends at
about 1e-6.
"""
SMALL_MU = 1e-4
"""The preconditioner's mu relative to the trace, unless the ridge is larger.

With less, rows far from all centers dominate the first iterations. Test error over the exact
model's on ten tables, p = 2000, after 3, 7 and 19 iterations: median 1.051, 1.000, 1.000 with mu =
ridge, 1.099, 1.001, 1.000 with this, 1.299, 1.047, 1.001 with 1e-3; worst (KEGG) 32.9, 8.7, 1.29,
and 27.9, 4.2, 1.06, and 9.4, 1.5, 1.04. 441 heavy-tailed rows, 397 of them centers, over the
variance: 2.3, .83, 4.1, and .089, .085, .100.
"""


class Falkon(Method[Sizes]):
    """FALKON: its settings, sizes and costs."""

    name = "falkon"
    sizes = Sizes
    of_losses = False
    reaches_minimum = True
    same_rows = True
    empty_epochs = 2
    data_parallel = over_centers = True
    sharded_arrays = ("H.0",)
    dense_p_by_p = True
    insensitive_to_conditioning = True
    min_penalty = MIN_PENALTY
    solver: type[PreconditionedSolver] = FalkonSolver
    n_vectors = 12
    """Number of vectors of the iteration, including temporary ones."""

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError as `Method.check`, and for too few epochs."""
        super().check(problem, options)
        check_epochs(problem, self.name)

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[Sizes]:
        """Return candidate sizes, best first, without a sample of the stream."""
        return self._sized(batches(problem))

    def op_counts(self, problem: ProblemShape, sizes: Sizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of setup and of training; H is cast anew for every product.

        See `falkon_step`, and `precondition`.
        """
        n, p = problem.n_rows * problem.epochs, problem.p
        ends = problem.epochs * p * p
        setup = OpCounts(kept=2 * p * p, products=p**3, factors=p**3)
        return setup, OpCounts(kept=p * n, swept=2 * p * n + 4 * ends, entries=ends)

    def outputs(self, problem: ProblemShape) -> int:
        """Return the number of outputs of the weights and of the direction."""
        return 2 * problem.c

    def needs(self, problem: ProblemShape, sizes: Sizes) -> MemoryNeeds:
        """Return the memory needs of K times [alpha, v]; a ridge evaluates K(Z, Z)."""
        p = problem.p
        rows = p if problem.center_ranks == 1 else min(p, BROADCAST_CENTERS)
        return MemoryNeeds(max(sizes.batch_size, rows), 2 * problem.c, setup=p * p)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: Sizes) -> None:
        """Add the buffers of H, its factors and the vectors of the iteration."""
        add, item, p, c = buffers.add, problem.itemsize, problem.p, problem.c
        m, held = sizes.batch_size, problem.of_column(p)
        add("train", "K(X, Z)", batch_room(problem, m), held, itemsize=item)
        add("always", "tiles of a p x p matrix", problem.threads, PRODUCT_TILE**2, itemsize=8)
        if problem.ranks == 1:
            add("always", "preconditioner H", p, p, itemsize=item)
        else:
            add("setup", "preconditioner H", p, p, itemsize=item)
            add(
                "train",
                "preconditioner H, this rank's stripe",
                problem.of_rank(p),
                p,
                itemsize=item,
            )
        solving = count_products(buffers, problem, p)
        add("setup", "triangular factors of the preconditioner", 3 * p + solving, p, itemsize=item)
        add("train", "vectors of the iteration", self.n_vectors * held, c, itemsize=8)
        add("train", "slab of H in float64", min(p, CAST_SLAB_ROWS), p, itemsize=8)
        add_left_out(buffers, problem)
        if problem.center_ranks > 1:
            _count_shared(buffers, problem, sizes)

    def compute(self, work: Work[Sizes], samples: Samples, report: Report) -> Setup:
        """Compute H, on rank 0 only; partitioned centers are broadcast for it."""
        problem = work.problem
        if problem.center_ranks > 1:
            samples()  # there are none; the call makes the other ranks take part
        Z = work.centers.block(slice(0, problem.p))
        if work.ranks.rank:
            return Setup({}, {})
        H, mu, jitter = precondition(work.op, Z, ridge=work.options.fixed_ridge)
        report("block", {"block": 0, "blocks": 1, "mu": mu, "jitter": jitter})
        meta = {"rules": [], "batch_size": work.sizes.batch_size, "mu": mu, "jitter": jitter}
        return Setup({"H.0": H}, meta)

    def assemble(self, work: Work[Sizes], setup: Setup) -> Solver:
        """Return the solver that iterates with H."""
        ridge, share = work.options.fixed_ridge, self.share(work.problem, work.sizes, work.ranks)
        H = triangle_rows(setup.arrays["H.0"], share.p, work.ranks)
        return self.solver(
            work.op, work.Z.each(share.part), H=H, ridge=ridge,
            jitter=setup.meta["jitter"], tolerance=work.options.tolerance or CG_TOLERANCE,
            share=share, **work.shared(setup),
        )  # fmt: skip

    def rows_of(self, name: str, n: int, share: CenterPartition) -> npt.NDArray[np.int64] | None:
        """Return the rows of a checkpoint's array that a rank has; None: all, as of scalars."""
        return None if name in OF_ALL else share.ids


def _count_shared(buffers: Buffers, problem: ProblemShape, sizes: Sizes) -> None:
    """Add the further buffers for centers that are partitioned over ranks.

    Buffers of setup are those of rank 0, which makes H alone, from broadcast centers.
    """
    add, item, p, c, m = buffers.add, problem.itemsize, problem.p, problem.c, sizes.batch_size
    add("setup", "all centers, to build H", p, problem.point)
    add("train", "full vectors of the iteration, being exchanged", 2 * p, c, itemsize=8)
    add(
        "host" if problem.staging else "train",
        "iteration vectors, copies on rank 0",
        6 * p,
        c,
        itemsize=8,
    )
    add("train", "vectors of the iteration being sent to rank 0", min(RANK_SLAB_BYTES, 8 * p * c))
    add("train", "all-reduce buffers of a step", m, 2 * c, itemsize=item)
    if problem.ridge:
        travelling = min(p, BROADCAST_CENTERS)
        add("train", "centers being broadcast", travelling, problem.point)
        add(
            "train",
            "weights of the broadcast centers, and products",
            2 * travelling,
            c,
            itemsize=item,
        )


def precondition(op: KernelOperator, Z: Points, *, ridge: float) -> tuple[Array, float, float]:
    """Return H (p, p), mu and the jitter.

    H is one block of `precondition.block` with the centers as sample. With S = Z,
    W = L^-1 K(Z, Z) = L^T, so that A A^T = L^T L / p + mu I needs no further kernel evaluation and
    H^T H = (K(Z, Z)^2 / p + mu K(Z, Z))^-1, K(Z, Z) with its jitter (Rudi, Carratino and Rosasco
    2017, eq. 13, with lambda = mu). No step is measured.

    Z : points of the centers. ridge : mu, at least `SMALL_MU` of the trace.
    Cost 2 p^3 FLOPs; memory 3 p^2 elements besides H.

    Raises
    ------
    ConfigError
        The kernel between the centers is not finite or not positive definite.
    """
    backend, p = op.backend, len(Z)
    # With nearly equal centers, float32 and a ridge, the residual grew to 15 times that of the
    # start at 10 eps; with this it peaked at 1.1 and was 3e-3 after 30 iterations.
    norm = WeightNorm(*jittered_cholesky(op, Z, noise_floor(op, p)))
    C = backend.xp.zeros((p, p), op.dtype)
    backend.add_gram(C, norm.L, 1 / p, lower=True)
    # The trace, at most p times the top eigenvalue and at least that, is known without an
    # eigensolver; for a kernel with k(x, x) = 1 it is 1.
    trace = float(C.diagonal().sum())
    H, mu = inverse_root(op, norm, C, max(ridge, SMALL_MU * trace), trace)
    return H, mu, norm.jitter
