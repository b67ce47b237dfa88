"""Plain SGD, EigenPro 2.0 (EP2) and 1.0 (EP1) with all training rows as centers.

Every row is its own center, so a batch updates alpha at its own rows, "in place". EigenPro is SGD
with a preconditioner P. EP1 and EP2 take the same step in the RKHS, f <- f - eta P (gradient):

    EP2    alpha_rows -= eta/m g;  alpha_sample += eta/m E D E^T K(X_s, X) g
    EP1    alpha -= eta/m (g at the rows of the batch - E D E^T K(X, X_m) g)

where X has the rows of the batch for EP2, and all n rows for EP1, whose batch is X_m. The papers
differ in

* the span of the correction. The eigenfunctions of EP1 are combinations of all n rows, from a
  sample by Nystrom's extension, so every step changes all of alpha and E is n x q. Those of EP2 are
  combinations of the sample, and E is s x q.
* the damping. EP1 has D_i = (1 - tau lam_{q+1} / lam_i); tau <= 1 allows for the error of the
  eigenvectors: 1 with a kernel, 1/4 with random features. (The formula of the paper in alpha has
  another factor 1 / lam_i from the extension, which is a part of E here. The public code takes the
  square root of the ratio with kernels.) EP2 has no tau, but its public code has the exponent .95.
* batch and step. EP1 has m = 256, q = 160 and s = 4800, and eta ~ 1 / sqrt(lam_{q+1}), the leading
  term of its bound on |P H_m|. EP2 takes the critical batch, about max k(x, x) / lam_{q+1}, the
  largest one for which the step grows in proportion to the batch.

Differences from the papers: the step size is measured (`step_rule`), and the extended
eigenfunctions of EP1 are made orthonormal, see `build_extended`. Cost per step in addition to plain
SGD: 2 m s (d + c) FLOPs for EP2; for EP1 2 m n (d + c), as it evaluates K(X, X_m) a second time for
the correction, and 4 n q c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.solver import SolverConfig
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import Buffers, MemoryNeeds
from streamkern.planning.op_counts import OpCounts
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import MIN_PROBE, Sizes, batch_candidates
from streamkern.solver.base import Solver, State
from streamkern.solver.low_rank import (
    LowRank,
    LowRankSizes,
    add_probe,
    computed_preconditioner,
    low_rank_sizes,
    measured_batch_size,
    report_setup,
    sample_bytes,
    saved_preconditioner,
)
from streamkern.solver.method import Method, Report, Samples, Setup, Work
from streamkern.solver.precondition.low_rank import (
    LowRankPreconditioner,
    build_extended,
    rule_of_gram,
)
from streamkern.solver.precondition.step_rule import StepRule, saved_rules

PAPER_BATCH, PAPER_N_NYSTROM, PAPER_LEVEL = 256, 4800, 160
"""Batch size, sample size and level of EigenPro 1.0 (Ma and Belkin 2017, section 6)."""


class SGDSolver(Solver):
    """Plain SGD on the rows of the training set, or the preconditioned SGD of EigenPro 1 and 2.

    f <- f - eta ((1/m) sum_i (f(x_i) - y_i) k(x_i, .) + ridge f), which in weights is

        alpha <- (1 - eta ridge) alpha,   alpha_rows -= eta/m g.

    Pegasos (Shalev-Shwartz et al. 2007) shrinks f in the same way. Differences: the squared loss,
    as in EP1, and a constant step with a running average in place of eta = 1 / (ridge t), which
    needs a ridge. The fixed point is kernel ridge regression, (K + n ridge I) alpha = Y. Cost per
    step 2 m n (d + c) FLOPs, and a tile of memory.

    rule : step rule, measured on rows of the training set.
    preconditioner : the preconditioner of EigenPro; None: plain SGD.
    sample : (s,) ascending row numbers of its sample.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, rule: StepRule, *, name: str, ridge: float = 0.0,
        preconditioner: LowRankPreconditioner | None = None,
        sample: npt.NDArray[np.int64] | None = None, **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(op, Z, **shared)
        self.name, self.rule, self.ridge, self.P = name, rule, ridge, preconditioner
        if preconditioner is None:
            self.remedy = f"{mention('solver.ridge')} or a larger bandwidth"
        else:
            assert sample is not None
            self.sample_rows, self.sample = sample, op.backend.xp.asarray(sample)
            self.correction = op.backend.xp.empty((len(sample), self.n_outputs), op.dtype)
        shape = self.max_batch, self.n_outputs
        self.f, self.squares = (op.backend.xp.empty(shape, op.dtype) for _ in range(2))
        self.x = op.empty_points(self.max_batch, Z.n_coordinates, left=True, right=True)

    def rules(self) -> list[StepRule]:
        """Return the single step rule."""
        return [self.rule]

    def _step(self, state: State, batch: Batch) -> Array:
        m, rows = len(batch.X), batch.row_ids
        x = self.op.points(batch.X, out=self.x[:m])
        # A row and its center are the same point: their distance is exactly zero.
        g = self.op.product(x, self.Z, state.alpha, out=self.f[:m], same=(np.arange(m), rows))
        if self.loss is None:
            g -= batch.Y
        g, w, loss = self._to_residual(state, batch, g, self.squares[:m])
        self._weigh(g, w)
        eta = state.scale * self.rule.eta(m)
        g *= eta / m
        if self.ridge:
            state.alpha *= 1 - eta * self.ridge
        state.alpha[self.backend.xp.asarray(rows)] -= g
        if self.P is not None:
            same = np.intersect1d(self.sample_rows, rows, return_indices=True)[1:]
            state.alpha[self.sample] += self.P.correction(self.op, x, g, self.correction, same=same)
        self._average(state)
        state.rows += m
        return loss


def small_batches(problem: ProblemShape) -> list[int]:
    """Return candidate batch sizes, the largest of them with at least 16 batches an epoch.

    These methods need many steps, so an epoch must not have only a few.
    """
    return batch_candidates(problem, min(PAPER_BATCH, max(1, problem.n_rows // 16)))


def probe_rows(problem: ProblemShape) -> int:
    """Return the number of rows on which the step rule is measured."""
    return min(problem.n_rows, MIN_PROBE * 4)


class SGD(Method[Sizes]):
    """Plain SGD on the rows of the training set: its settings, sizes and costs."""

    name = "sgd"
    sizes = Sizes
    in_place = True
    instead = f"another solver, or {mention('features', 'nystrom')} for chosen centers"

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[Sizes]:
        """Return candidate sizes, best first, with a probe and no sample."""
        return self._sized(small_batches(problem), n_probe=probe_rows(problem))

    def op_counts(self, problem: ProblemShape, sizes: Sizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of the setup, K(probe, probe), and of the training, K(X, Z)."""
        rows = problem.n_rows * problem.epochs
        return OpCounts(kept=sizes.n_probe**2), OpCounts(entries=problem.p * rows)

    def needs(self, problem: ProblemShape, sizes: Sizes) -> MemoryNeeds:
        """Return the memory needs; every row of a batch is a center."""
        return MemoryNeeds(max(sizes.batch_size, sizes.n_probe, problem.p), problem.c)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: Sizes) -> None:
        """Add the buffers of the probe; a step needs only a tile."""
        add_probe(buffers, problem, sizes)

    def compute(self, work: Work[Sizes], samples: Samples, report: Report) -> Setup:
        """Compute the step rule of the kernel; a ridge adds to both terms, see `step_rule`."""
        op, options = work.op, work.options
        _, raw_probe = samples()
        probe = op.points(raw_probe.X, right=True)
        K = op.gram(probe)
        rule = rule_of_gram(op, K, None, raw_probe.root, [work.seed, 3], checked=True)
        if options.fixed_ridge:
            lambda_1 = rule.lambda_1 + options.fixed_ridge
            rule = StepRule(rule.leverage + lambda_1, lambda_1)
        batch_size = work.sizes.batch_size
        report("plain", asdict(rule) | {"batch_size": batch_size})
        return Setup({}, {"rules": [asdict(rule)], "batch_size": batch_size})

    def assemble(self, work: Work[Sizes], setup: Setup) -> Solver:
        """Return the solver with the measured step rule."""
        rules = saved_rules(setup.meta["rules"], work.options.step_scale)
        return SGDSolver(
            work.op, work.Z, rules[0], name=self.name,
            ridge=work.options.fixed_ridge, **work.shared(setup),
        )  # fmt: skip


class InPlace(LowRank[LowRankSizes]):
    """Base class of EigenPro 1 and 2."""

    sizes = LowRankSizes
    in_place = True

    def needs(self, problem: ProblemShape, sizes: LowRankSizes) -> MemoryNeeds:
        """Return the memory needs; every row of a batch is a center."""
        m, s, h = sizes.batch_size, sizes.n_sample, sizes.n_probe
        return MemoryNeeds(max(m, h, s, problem.p), problem.c, setup=s * (problem.d + sizes.level))


class EigenPro2(InPlace):
    """EigenPro 2.0: its settings, sizes and costs."""

    name = "eigenpro2"

    def op_counts(self, problem: ProblemShape, sizes: LowRankSizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of the setup and of the training.

        The setup computes an eigensystem; each row takes K(X, Z) and K(X, X_s).
        """
        row = self.correction(sizes) + OpCounts(entries=problem.p)
        return self.setup_op_counts(sizes), row.scaled(problem.n_rows * problem.epochs)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: LowRankSizes) -> None:
        """Add the buffers of EigenPro; the sample stays in memory during the training."""
        buffers.add("always", "Nystrom rows, eigenvectors", sample_bytes(problem, sizes))
        super().add_buffers(buffers, problem, sizes)

    def compute(self, work: Work[LowRankSizes], samples: Samples, report: Report) -> Setup:
        """Compute the preconditioner and the batch size that it allows."""
        P, arrays = computed_preconditioner(work, samples)
        batch_size = measured_batch_size(work, P.rule)
        return Setup(arrays, report_setup(P, report, batch_size=batch_size))

    def assemble(self, work: Work[LowRankSizes], setup: Setup) -> Solver:
        """Return the solver with the preconditioner of `setup`."""
        P = saved_preconditioner(work, setup)
        return SGDSolver(
            work.op, work.Z, P.rule, name=self.name, preconditioner=P, sample=setup.sample_rows,
            **work.shared(setup),
        )  # fmt: skip


class EigenPro1(InPlace):
    """EigenPro 1.0: its settings, sizes and costs."""

    name = "eigenpro1"
    instead = f"another solver, or {mention('features', 'nystrom')} for chosen centers"

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError as `Method.check`, and for a ridge: EP1 on a kernel has none."""
        super().check(problem, options)
        if options.fixed_ridge:
            raise ConfigError(
                f"{mention('solver.ridge', options.fixed_ridge)} is not defined for solver "
                f"{self.name!r} on a kernel",
                "set it to 0 or use another solver",
            )

    def asks_ridge(self, problem: ProblemShape) -> bool:
        """Return False: there is no ridge."""
        return False

    def _sample_sizes(self, problem: ProblemShape, options: SolverConfig) -> tuple[int, int, int]:
        return low_rank_sizes(problem, options, PAPER_N_NYSTROM, PAPER_LEVEL)

    def _batches(self, problem: ProblemShape) -> list[int]:
        return small_batches(problem)

    def op_counts(self, problem: ProblemShape, sizes: LowRankSizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of the setup and of the training.

        The setup computes an eigensystem and its extension; each row takes K(X, Z) twice, and each
        step reads E twice.
        """
        p, q, n = problem.p, sizes.level, problem.n_rows * problem.epochs
        entries = p * (p + sizes.n_sample)
        extension = OpCounts(entries=entries, products=2 * entries * q)
        steps = OpCounts(entries=2 * p * n, swept=2 * p * q * -(-n // sizes.batch_size))
        return self.setup_op_counts(sizes) + extension, steps

    def needs(self, problem: ProblemShape, sizes: LowRankSizes) -> MemoryNeeds:
        """Return the memory needs, with eigenvectors on all rows."""
        return super().needs(problem, sizes)._replace(setup=problem.p * sizes.level)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: LowRankSizes) -> None:
        """Add the buffers of EigenPro, with eigenvectors on all rows."""
        add, item, p, q = buffers.add, problem.itemsize, problem.p, sizes.level
        add("always", "eigenvectors on all rows", p, q, itemsize=item)
        add("setup", "eigenvectors being extended to all rows", 3 * p, q + 1, itemsize=item)
        add("setup", "Nystrom rows, eigenvectors", sample_bytes(problem, sizes))
        add("train", "correction along the eigenvectors", p, problem.c, itemsize=item)
        super().add_buffers(buffers, problem, sizes)

    def compute(self, work: Work[LowRankSizes], samples: Samples, report: Report) -> Setup:
        """Compute the extended eigenfunctions."""
        op, options, (sample, probe) = work.op, work.options, samples()
        P = build_extended(
            op, work.Z, op.points(sample.X, right=True),
            op.points(probe.X, right=True), level=work.sizes.level,
            tau=1.0 if options.damping == "auto" else options.damping, seed=work.seed,
            root=probe.root,
        )  # fmt: skip
        meta = report_setup(P, report, batch_size=work.sizes.batch_size)
        return Setup({"E": P.E, "D": P.D}, meta)

    def assemble(self, work: Work[LowRankSizes], setup: Setup) -> Solver:
        """Return the solver; the preconditioner has all rows as its sample."""
        (rule,) = saved_rules(setup.meta["rules"], work.options.step_scale)
        P = LowRankPreconditioner(work.Z, setup.arrays["E"], setup.arrays["D"], rule)
        return SGDSolver(
            work.op, work.Z, rule, name=self.name, preconditioner=P, sample=np.arange(len(work.Z)),
            **work.shared(setup),
        )  # fmt: skip
