"""Plain SGD, EigenPro 2.0 (EP2) and 1.0 (EP1) with all training rows as centers.

The methods `SGD`, `EigenPro1` and `EigenPro2` choose sizes, estimate costs and assemble the solver,
`SGDSolver`, which takes the steps. Every row is its own center, so a batch updates alpha at
its own rows, "in place".

    n, X_n     number of all rows, and their features; the centers
    m, X_m     number of rows of a batch, and their features
    s, X_s     number of rows of the setup sample, and their features
    alpha      (n, c) weights; alpha_m, alpha_s: at the rows of the batch, of the setup sample
    g          (m, c) residuals f(X_m) - Y_m
    eta        step size
    lam_i      eigenvalues of K(X_s, X_s) / s, descending
    q          level, the number of damped eigendirections
    E          their eigenfunctions, as weights on the n or s rows
    D          (q,) diagonal matrix of the damping

EigenPro is SGD with a preconditioner P. EP1 and EP2 take the same step in the RKHS,
f <- f - eta P (gradient):

    EP1    alpha_m -= eta/m g;   alpha   += eta/m E D E^T K(X_n, X_m) g
    EP2    alpha_m -= eta/m g;   alpha_s += eta/m E D E^T K(X_s, X_m) g

The papers differ in

* the span of the correction. The eigenfunctions of EP1 are combinations of all n rows, from the
  setup sample by Nystrom's extension, so every step changes all of alpha and E is n x q. The
  eigenfunctions of EP2 are combinations of the setup sample, and E is s x q.
* the damping of eigendirection i, where r = lam_{q+1} / lam_i:

      method   paper       public code            here
      EP1      1 - tau r   1 - sqrt(r) (kernel)   1 - tau r
      EP2      1 - r       1 - r^0.95             1 - r

  tau <= 1 allows for the error of the eigenvectors: 1 with a kernel, 1/4 with explicit features. D
  has this damping, divided by the scale of E: 1 for EP1, whose paper has another factor 1 / lam_i
  from the extension, and s lam_i for EP2.
* batch and step. EP1 has the sizes of `PAPER_BATCH`, `PAPER_N_NYSTROM` and `PAPER_LEVEL`, and
  eta ~ 1 / sqrt(lam_{q+1}), the leading term of its bound on |P H_m|. EP2 takes the critical batch,
  about max k(x, x) / lam_{q+1}, the largest one for which the step grows in proportion to the
  batch.

Differences from the papers: the step size is measured (`step_rule`), and the extended
eigenfunctions of EP1 are made orthonormal, see `build_extended_low_rank`. Cost per step in
addition to plain SGD: 2 m s (d + c) FLOPs for EP2; for EP1 2 m n (d + c), as it evaluates K(X, X_m)
a second time for the correction, and 4 n q c.
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
from streamkern.planning.sizes import Sizes, batch_candidates
from streamkern.solver.base import Solver, State
from streamkern.solver.low_rank import (
    DEFAULT_PROBE,
    LowRank,
    LowRankSizes,
    add_probe,
    compute_preconditioner,
    load_preconditioner,
    low_rank_sizes,
    lower_batch_size,
    report_setup,
    sample_bytes,
)
from streamkern.solver.method import Method, Report, Samples, Setup, Work
from streamkern.solver.precondition.low_rank import (
    PROBE_STAGE,
    LowRankPreconditioner,
    build_extended_low_rank,
    rule_of_gram,
)
from streamkern.solver.precondition.step_rule import StepRule, rules_from_meta

PAPER_BATCH, PAPER_N_NYSTROM, PAPER_LEVEL = 256, 4800, 160
"""Batch size m, sample size s and level q of EigenPro 1.0 (Ma and Belkin 2017, section 6)."""
MIN_BATCHES_PER_EPOCH = 16
"""Smallest number of batches in an epoch, because these methods need many steps."""


class SGDSolver(Solver):
    """Plain SGD on the rows of the training set, or the preconditioned SGD of EigenPro 1 and 2.

    f <- f - eta ((1/m) sum_i (f(x_i) - y_i) k(x_i, .) + ridge f), which in weights is

        alpha <- (1 - eta ridge) alpha,   alpha_m -= eta/m g.

    Pegasos (Shalev-Shwartz et al. 2007) shrinks f in the same way. Differences: the squared loss,
    as in EP1, and a constant step with a running average in place of eta = 1 / (ridge t), which
    needs a ridge. The fixed point is kernel ridge regression, (K + n ridge I) alpha = Y. Cost per
    step 2 m n (d + c) FLOPs, and a tile of memory.

    op, Z : see `Solver`; Z has all rows of the training set, in store order.
    rule : step rule, measured on rows of the training set.
    name : name of the solver, for error messages.
    ridge : coefficient of the RKHS norm in the loss.
    preconditioner : the preconditioner of EigenPro; None: plain SGD.
    sample : (s,) ascending row numbers of the setup sample of the preconditioner.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, rule: StepRule, *, name: str, ridge: float = 0.0,
        preconditioner: LowRankPreconditioner | None = None,
        sample: npt.NDArray[np.int64] | None = None, **solver_arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__(op, Z, **solver_arguments)
        self.name, self.rule, self.ridge, self.P = name, rule, ridge, preconditioner
        if preconditioner is None:
            self.remedy = f"{mention('solver.ridge')} or a larger bandwidth"
        else:
            assert sample is not None
            self.sample_rows = sample  # on the host, to find the rows of a batch in the sample
            self.sample = op.backend.xp.asarray(sample)  # on the device, to index alpha
            self.correction = op.backend.xp.empty((len(sample), self.n_outputs), op.dtype)
        shape = self.max_batch, self.n_outputs
        self.f, self.squares = (op.backend.xp.empty(shape, op.dtype) for _ in range(2))
        self.x = op.empty_points(self.max_batch, Z.n_coordinates, left=True, right=True)

    def rules(self) -> list[StepRule]:
        """Return the single step rule."""
        return [self.rule]

    def _step(self, state: State, batch: Batch) -> Array:
        """Take one step, and return the losses of the batch before it, (2, c)."""
        m, rows = len(batch.X), batch.row_ids
        x = self.op.points(batch.X, out=self.x[:m])
        # A row and its center are the same point: their distance is exactly zero.
        g = self.op.product(
            x, self.Z, state.alpha, out=self.f[:m], equal_pairs=(np.arange(m), rows)
        )
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
            equal_pairs = np.intersect1d(self.sample_rows, rows, return_indices=True)[1:]
            state.alpha[self.sample] += self.P.correction(
                self.op, x, g, self.correction, equal_pairs=equal_pairs
            )
        self._average(state)
        state.rows += m
        return loss


def small_batches(problem: ProblemShape) -> list[int]:
    """Return candidate batch sizes, with `MIN_BATCHES_PER_EPOCH` or more batches in an epoch.

    A batch size that the user sets is the only candidate, and may be larger.
    """
    largest = max(1, problem.n_rows // MIN_BATCHES_PER_EPOCH)
    return batch_candidates(problem, min(PAPER_BATCH, largest))


def probe_rows(problem: ProblemShape) -> int:
    """Return the number of rows on which the step rule is measured."""
    return min(problem.n_rows, DEFAULT_PROBE)


class SGD(Method[Sizes]):
    """The method plain SGD on the rows of the training set."""

    name = "sgd"
    sizes = Sizes
    in_place = True
    alternative = f"another solver, or {mention('features', 'nystrom')} for chosen centers"

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[Sizes]:
        """Return candidate sizes, best first, with a probe and no sample."""
        return self._sizes_for_batches(small_batches(problem), n_probe=probe_rows(problem))

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
        """Compute the step rule of the kernel, and of the ridge if there is one."""
        op, options = work.op, work.options
        _, raw_probe = samples()
        probe = op.points(raw_probe.X, right=True)
        K = op.gram(probe)
        rule = rule_of_gram(op, K, None, raw_probe.root, [work.seed, PROBE_STAGE], check=True)
        if options.fixed_ridge:
            rule = rule.with_ridge(options.fixed_ridge)
        batch_size = work.sizes.batch_size
        report("plain", asdict(rule) | {"batch_size": batch_size})
        return Setup({}, {"rules": [asdict(rule)], "batch_size": batch_size})

    def assemble(self, work: Work[Sizes], setup: Setup) -> Solver:
        """Return the solver with the measured step rule."""
        rules = rules_from_meta(setup.meta["rules"], work.options.step_scale)
        return SGDSolver(
            work.op, work.Z, rules[0], name=self.name,
            ridge=work.options.fixed_ridge, **work.solver_arguments(setup),
        )  # fmt: skip


class RowCenteredEigenPro(LowRank[LowRankSizes]):
    """Base class of EigenPro 1 and 2, whose centers are all training rows."""

    sizes = LowRankSizes
    in_place = True

    def needs(self, problem: ProblemShape, sizes: LowRankSizes) -> MemoryNeeds:
        """Return the memory needs; every row of a batch is a center."""
        m, s, h = sizes.batch_size, sizes.n_sample, sizes.n_probe
        return MemoryNeeds(max(m, h, s, problem.p), problem.c, setup=s * (problem.d + sizes.level))


class EigenPro2(RowCenteredEigenPro):
    """The method EigenPro 2.0."""

    name = "eigenpro2"

    def op_counts(self, problem: ProblemShape, sizes: LowRankSizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of the setup and of the training.

        The setup computes an eigensystem; each row needs K(X, Z) and K(X, X_s).
        """
        row = self.correction(sizes) + OpCounts(entries=problem.p)
        return self.setup_op_counts(sizes), row.scaled(problem.n_rows * problem.epochs)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: LowRankSizes) -> None:
        """Add the buffers of EigenPro; the sample stays in memory during the training."""
        buffers.add("always", "Nystrom rows, eigenvectors", sample_bytes(problem, sizes))
        super().add_buffers(buffers, problem, sizes)

    def compute(self, work: Work[LowRankSizes], samples: Samples, report: Report) -> Setup:
        """Compute the preconditioner and the batch size that it allows."""
        P, arrays = compute_preconditioner(work, samples)
        batch_size = lower_batch_size(work, P.rule)
        return Setup(arrays, report_setup(P, report, batch_size=batch_size))

    def assemble(self, work: Work[LowRankSizes], setup: Setup) -> Solver:
        """Return the solver with the preconditioner of `setup`."""
        P = load_preconditioner(work, setup)
        return SGDSolver(
            work.op, work.Z, P.rule, name=self.name, preconditioner=P, sample=setup.sample_rows,
            **work.solver_arguments(setup),
        )  # fmt: skip


class EigenPro1(RowCenteredEigenPro):
    """The method EigenPro 1.0."""

    name = "eigenpro1"
    alternative = f"another solver, or {mention('features', 'nystrom')} for chosen centers"

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError as `Method.check`, and for a ridge: EP1 on a kernel has none."""
        super().check(problem, options)
        if options.fixed_ridge:
            raise ConfigError(
                f"{mention('solver.ridge', options.fixed_ridge)} is not defined for solver "
                f"{self.name!r} on a kernel",
                "set it to 0 or use another solver",
            )

    def estimates_ridge(self, problem: ProblemShape) -> bool:
        """Return False: there is no ridge."""
        return False

    def _sample_sizes(self, problem: ProblemShape, options: SolverConfig) -> tuple[int, int, int]:
        """Return the rows of the sample and of the probe, and the level, from the paper's sizes."""
        return low_rank_sizes(problem, options, PAPER_N_NYSTROM, PAPER_LEVEL)

    def _batches(self, problem: ProblemShape) -> list[int]:
        """Return candidate batch sizes; the paper's is the largest."""
        return small_batches(problem)

    def op_counts(self, problem: ProblemShape, sizes: LowRankSizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of the setup and of the training.

        The setup computes an eigensystem and its extension; each row needs K(X, Z) twice, and each
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
        P = build_extended_low_rank(
            op, work.Z, op.points(sample.X, right=True),
            op.points(probe.X, right=True), level=work.sizes.level,
            tau=1.0 if options.damping == "auto" else options.damping, seed=work.seed,
            root=probe.root,
        )  # fmt: skip
        meta = report_setup(P, report, batch_size=work.sizes.batch_size)
        return Setup({"E": P.E, "D": P.D}, meta)

    def assemble(self, work: Work[LowRankSizes], setup: Setup) -> Solver:
        """Return the solver; the preconditioner has all rows as its sample."""
        (rule,) = rules_from_meta(setup.meta["rules"], work.options.step_scale)
        P = LowRankPreconditioner(work.Z, setup.arrays["E"], setup.arrays["D"], rule)
        return SGDSolver(
            work.op, work.Z, rule, name=self.name, preconditioner=P, sample=np.arange(len(work.Z)),
            **work.solver_arguments(setup),
        )  # fmt: skip
