"""EigenPro 2.0 and 1.0: SGD on the rows of the training set, preconditioned.

All rows are centers: a row is its own center and alpha moves in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.basics.errors import ConfigError
from streamkern.config.solver import SolverConfig
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.effort import OpCounts
from streamkern.planning.memory import Buffers, MemoryNeeds
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import LOADERS, batches
from streamkern.solver.base import Solver, State
from streamkern.solver.low_rank import (
    LowRank,
    LowRankSizes,
    build,
    cut,
    default_sample,
    rebuilt,
    sample_bytes,
    sampled,
    summary,
)
from streamkern.solver.method import Report, Samples, Setup, Work
from streamkern.solver.precondition.eigenfunctions import build_extended
from streamkern.solver.precondition.low_rank import LowRankPreconditioner
from streamkern.solver.precondition.step_rule import saved_rules
from streamkern.solver.sgd import SGDSolver, small_batches

PAPER_N_NYSTROM, PAPER_LEVEL = 4800, 160
"""Sample size and level of EigenPro 1.0 (Ma and Belkin 2017, section 6)."""


class EigenPro2Solver(SGDSolver):
    """EP2: alpha_rows -= eta/m g;  alpha_sample += eta/m E D E^T K(X_s, X) g.

    sample : (s,) ascending row numbers of the Nystrom sample.
    Cost per step as of `SGDSolver` and 2 m s (d + c) FLOPs.
    """

    name = "eigenpro2"
    remedy = Solver.remedy

    def __init__(
        self, op: KernelOperator, Z: Points, preconditioner: LowRankPreconditioner, *,
        sample: npt.NDArray[np.int64], **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(op, Z, preconditioner.rule, **shared)
        self.P, self.sample_rows = preconditioner, sample
        self.sample = op.backend.xp.asarray(sample)
        self.correction = op.backend.xp.empty((len(sample), self.n_outputs), op.dtype)

    def _correct(self, state: State, x: Points, g: Array, rows: npt.NDArray[np.int64]) -> None:
        in_sample = np.intersect1d(self.sample_rows, rows, return_indices=True)[1:]
        state.alpha[self.sample] += self.P.correction(
            self.op, x, g, self.correction, same=in_sample
        )


class EigenPro1Solver(EigenPro2Solver):
    """EP1, the kernel form: alpha -= eta/m (g on the batch's rows - E D E^T K(X, X_m) g).

    EP1 and EP2 take the same step in the RKHS, f <- f - eta P (gradient). The differences between
    the two in the papers:

    * Span of the correction. The eigenfunctions of EP1 are combinations of all n rows, from a
      sample by Nystrom's extension, so every step moves all of alpha and E is n x q; those of EP2
      are combinations of the sample, E is s x q.
    * Damping. EP1 has D_i = (1 - tau lam_{q+1} / lam_i), tau <= 1 against eigenvectors that spill
      into the rest: 1 with a kernel, 1/4 with random features. (Its formula in alpha has another
      1 / lam_i: that of the extension, which is a part of E here. Its public code takes the square
      root of the ratio with kernels.) EP2 has no tau, but the exponent .95 in its public code.
    * Batch and step. EP1 fixes m = 256, q = 160 and s = 4800, and takes eta ~ 1 / sqrt(lam_{q+1}),
      the leading term of its bound on |P H_m|. EP2 takes the critical batch, about
      max k(x, x) / lam_{q+1}, where the step and the hardware are both used in full.

    Differences from EP1: the step size is measured, as everywhere here (`step_rule`), and the
    extended eigenfunctions are made orthonormal, see `eigenfunctions`.
    Cost per step twice that of `SGDSolver` and 4 n q c FLOPs: K(X, X_m) is evaluated again for the
    correction; one pass would do, at the price of a second code path.
    """

    name = "eigenpro1"

    def __init__(
        self, op: KernelOperator, Z: Points, preconditioner: LowRankPreconditioner, **shared: Any
    ) -> None:
        super().__init__(op, Z, preconditioner, sample=np.arange(len(Z)), **shared)


class InPlace(LowRank[LowRankSizes]):
    """Base class of EigenPro 1 and 2."""

    sizes = LowRankSizes
    in_place = True

    def needs(self, problem: ProblemShape, sizes: LowRankSizes) -> MemoryNeeds:
        """Return the memory needs; every row of a batch is a center."""
        m, s, h = sizes.batch_size, sizes.n_sample, sizes.n_probe
        return MemoryNeeds(
            False, max(m, h, s, problem.p), problem.c, setup=s * (problem.d + sizes.level)
        )


class EigenPro2(InPlace):
    """EigenPro 2.0: its settings, sizes and costs."""

    name = "eigenpro2"

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[LowRankSizes]:
        """Return candidate sizes, best first: one sample size, and smaller and smaller batches."""
        s, h, level = sampled(problem, options, default_sample(problem.p))
        return [
            LowRankSizes(self.name, m, s, h, *loader, level=level)
            for m in batches(problem)
            for loader in LOADERS
        ]

    def effort(self, problem: ProblemShape, sizes: LowRankSizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of setup and of training.

        Setup has an eigensystem; each row takes K(X, Z) and K(X, X_s).
        """
        row = self.correction(sizes) + OpCounts(entries=problem.p)
        return self.setup_effort(sizes), row.scaled(problem.n_rows * problem.epochs)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: LowRankSizes) -> None:
        """Add the buffers, with the sample, which is kept."""
        buffers.add("always", "Nystrom rows, eigenvectors", sample_bytes(problem, sizes))
        super().add_buffers(buffers, problem, sizes)

    def compute(self, work: Work[LowRankSizes], samples: Samples, report: Report) -> Setup:
        """Compute the preconditioner and the batch size that it allows."""
        P, arrays = build(work, samples)
        batch_size = cut(work, P.rule)
        return Setup(arrays, summary(P, report, batch_size=batch_size))

    def assemble(
        self, work: Work[LowRankSizes], setup: Setup,
        sample_rows: npt.NDArray[np.int64] | None = None,
    ) -> Solver:  # fmt: skip
        """Return the solver; the sample is given by row numbers of the training set."""
        assert sample_rows is not None
        return EigenPro2Solver(
            work.op, work.Z, rebuilt(work, setup), sample=sample_rows,
            max_batch=setup.meta["batch_size"], **work.shared,
        )  # fmt: skip


class EigenPro1(InPlace):
    """EigenPro 1.0: its settings, sizes and costs."""

    name = "eigenpro1"
    instead = "another solver, or features='nystrom' for chosen centers"

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError as `Method.check`, and for a ridge, which EP1 has only for features."""
        super().check(problem, options)
        if options.fixed_ridge:
            raise ConfigError(
                f"solver.ridge={options.fixed_ridge:g} is not defined for solver {self.name!r} on "
                "a kernel; set it to 0 or use another solver"
            )

    def asks_ridge(self, problem: ProblemShape) -> bool:
        """Return False: there is no ridge."""
        return False

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[LowRankSizes]:
        """Return candidate sizes, best first, with the paper's sample size and level."""
        s, h, level = sampled(problem, options, PAPER_N_NYSTROM, PAPER_LEVEL)
        return [
            LowRankSizes(self.name, m, s, h, *loader, level=level)
            for m in small_batches(problem)
            for loader in LOADERS
        ]

    def effort(self, problem: ProblemShape, sizes: LowRankSizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of setup, an eigensystem and its extension, and of training.

        Each row takes K(X, Z) twice, each step E twice.
        """
        p, q, n = problem.p, sizes.level, problem.n_rows * problem.epochs
        seen = p * (p + sizes.n_sample)
        extended = OpCounts(entries=seen, products=2 * seen * q)
        steps = OpCounts(entries=2 * p * n, swept=2 * p * q * -(-n // sizes.batch_size))
        return self.setup_effort(sizes) + extended, steps

    def needs(self, problem: ProblemShape, sizes: LowRankSizes) -> MemoryNeeds:
        """Return the memory needs, with eigenvectors on all rows."""
        return super().needs(problem, sizes)._replace(setup=problem.p * sizes.level)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: LowRankSizes) -> None:
        """Add the buffers, with the eigenvectors on all rows."""
        add, item, p, q = buffers.add, problem.itemsize, problem.p, sizes.level
        add("always", "eigenvectors on all rows", p, q, itemsize=item)
        add("setup", "extended eigenvectors, their values", 3 * p, q + 1, itemsize=item)
        add("setup", "Nystrom rows, eigenvectors", sample_bytes(problem, sizes))
        add("train", "correction", p, problem.c, itemsize=item)
        super().add_buffers(buffers, problem, sizes)

    def compute(self, work: Work[LowRankSizes], samples: Samples, report: Report) -> Setup:
        """Compute the extended eigenfunctions."""
        op, options, (sample, probe) = work.op, work.options, samples()
        P = build_extended(
            op, work.Z, op.points(sample.X, left=True, right=True),
            op.points(probe.X, left=True, right=True), level=work.sizes.level,
            tau=1.0 if options.damping == "auto" else options.damping, seed=work.seed,
            root=probe.root,
        )  # fmt: skip
        meta = summary(P, report, batch_size=work.sizes.batch_size)
        return Setup({"E": P.E, "D": P.D}, meta)

    def assemble(
        self, work: Work[LowRankSizes], setup: Setup,
        sample_rows: npt.NDArray[np.int64] | None = None,
    ) -> Solver:  # fmt: skip
        """Return the solver; the preconditioner has all rows as its sample."""
        (rule,) = saved_rules(setup.meta["rules"], work.options.step_scale)
        P = LowRankPreconditioner(work.Z, setup.arrays["E"], setup.arrays["D"], rule)
        return EigenPro1Solver(
            work.op, work.Z, P, max_batch=setup.meta["batch_size"], **work.shared
        )  # fmt: skip
