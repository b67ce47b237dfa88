"""The direct solver, which computes the exact least-squares weights.

If every row is a center, it factors the kernel matrix (`kernel_ridge`); otherwise it sums streamed
normal equations (`direct_step`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.solver import SolverConfig, number_or_none
from streamkern.planning.memory import MAX_PANEL_OUTPUTS, PRODUCT_TILE, Buffers, MemoryNeeds
from streamkern.planning.op_counts import NO_WORK, OpCounts
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import Sizes, batch_candidates
from streamkern.solver.base import Solver
from streamkern.solver.direct_step import HELD_OUT_SLICES, DirectSolver
from streamkern.solver.equations import KERNEL_SLAB_ROWS
from streamkern.solver.kernel_ridge import PRODUCT_COLUMNS, KernelRidgeSolver
from streamkern.solver.left_out import INVERSE_COLUMNS, add_left_out
from streamkern.solver.method import Method, Report, Samples, Setup, Work
from streamkern.solver.posterior import POSTERIOR_MATRICES
from streamkern.solver.precondition.held_out import BITS_SLAB, n_parts
from streamkern.solver.precondition.noise import MAX_NOISE_EXPONENT
from streamkern.solver.ridge_curve import (
    KNOWN_ROWS,
    MAX_COLUMNS,
    MEASURED_ROWS,
    QUADRATURE,
)

NARROW_ROWS = 4096
"""Number of rows from which the kernel matrix of all rows is factored in float32."""
MAX_WIDE_ROWS = 16_384
"""Largest number of rows at which kernel values of all rows may be in float64. With more rows, the
products of the refinement, about a hundred for functions without noise, would take most of a
fit."""
MIN_ROUNDING = 0.01
"""Smallest ratio of rounding errors to residuals at which float64 is worth its time."""
DIRECT_TRIALS = 8
"""Approximate number of ridges that a search tries."""
REFINEMENTS = 3
"""Typical number of products with the kernel matrix that refine a solution."""
ROUNDOFF = 2.0**-24
"""Largest relative error of a number that is rounded to float32."""
LEAVE_ONE_OUT = "leave-one-out"
"""Recorded if the ridge is refined by leave-one-out errors; True in runs of earlier versions, which
used generalised cross-validation."""
RIDGE_GROUPS = 4
"""Approximate number of different ridges of many outputs."""


@dataclass(frozen=True)
class DirectSizes(Sizes):
    """Sizes of the direct solver.

    n_sums : number of p x p sums: one over all rows, and one over each held-out part; 0 if the rows
        are the centers, see `kernel_ridge`; for `Newton` one for each output.
    """

    n_sums: int


class Direct(Method[DirectSizes]):
    """The direct solver: its settings, sizes and costs."""

    name = "direct"
    sizes = DirectSizes
    features = ("kernel", "nystrom", "fourier")
    minimises_losses = False  # see `newton`
    dense_p_by_p = True
    empty_epochs = 1
    data_parallel = reaches_minimum = True
    ridge_per_output = True
    insensitive_to_conditioning = True

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError as `Method.check`, and for early stopping or an impossible posterior.

        The model is exact after one epoch or, with random transforms, sums the rows of all epochs.
        So no epoch makes it worse, and early stopping has nothing to stop.
        """
        super().check(problem, options)
        if problem.n_validation_rows:
            raise ConfigError(
                f"{mention('run.early_stopping')} cannot be used with "
                f"{mention('solver', 'direct')}, whose model does not change with further epochs",
                "leave it out, or use another solver",
            )
        if problem.posterior:
            check_posterior(problem, options)

    def finds_ridge(self, problem: ProblemShape) -> bool:
        """Return whether the ridge can be found on held-out rows.

        This needs enough rows that are not centers, see `held_out.is_not_center`, and known copies,
        as copies of a row have to be held out together.
        """
        return not problem.hides_copies and 4 * (problem.n_rows - problem.p) >= problem.p

    def estimates_noise(self, problem: ProblemShape) -> bool:
        """Return whether the ridge is chosen automatically.

        The noise is the fallback, as all held-out rows may turn out to be equal to centers.
        """
        return problem.finds_ridge

    def takes_rows(self, sizes: DirectSizes) -> bool:
        """Return whether the rows are the centers, so that there are no sums."""
        return not sizes.n_sums

    @staticmethod
    def factor_dtype(problem: ProblemShape) -> np.dtype[np.floating]:
        """Return the dtype in which the kernel matrix of all rows is factored."""
        allowed = problem.itemsize == 4 or problem.widened
        use_float32 = allowed and problem.p >= NARROW_ROWS and not problem.posterior
        return np.dtype(np.float32 if use_float32 else np.float64)

    @staticmethod
    def may_widen(problem: ProblemShape) -> bool:
        """Return whether kernel values may be in float64 if the setting is float32."""
        return problem.posterior or problem.p <= MAX_WIDE_ROWS

    @staticmethod
    def rounding_shows(problem: ProblemShape, ridge: float, values: float = 1.0) -> bool:
        """Return whether predictions are better with kernel values in float64 than in float32.

        By the equations, the residual of row i is r_i = n ridge alpha_i. Independent relative
        errors of at most eps in the kernel values change a prediction by about
        eps sqrt(n) values |alpha|, which is eps sqrt(n) values / (n ridge) times |r|; the norms are
        root mean squares. With few rows, float64 takes little time and is always used.

        values : root mean square of the kernel values, which is at most 1 for most kernels.
        """
        n = problem.p
        always = n < NARROW_ROWS or problem.posterior
        return always or ROUNDOFF * math.sqrt(n) * values >= MIN_ROUNDING * n * ridge

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[DirectSizes]:
        """Return candidate sizes, best first, without a sample of the stream."""
        no_sums = problem.rows_are_centers and problem.ranks == 1
        n_sums: Iterable[int] = (0,) if no_sums else (1,)
        if options.ridge == "auto" and self.finds_ridge(problem):
            n_sums = dict.fromkeys((1 + n_parts(problem.p), 2))
        batch_sizes = batch_candidates(problem)
        return [sizes for n in n_sums for sizes in self._sizes_for_batches(batch_sizes, n_sums=n)]

    def n_epochs(self, problem: ProblemShape) -> int:
        """Return 1 if every epoch has the same rows, else the number of epochs."""
        return 1 if problem.repeats else problem.epochs

    def _n_summed_rows(self, problem: ProblemShape) -> int:
        """Return the number of rows that are added to the sums, over all epochs."""
        return problem.n_rows * self.n_epochs(problem)

    def _n_factors(self, problem: ProblemShape) -> int:
        """Return the approximate number of factors; outputs with similar ridges share one."""
        several_ridges = problem.several_targets and problem.finds_ridge
        final_factors = min(problem.c, RIDGE_GROUPS) if several_ridges else 1
        searches = problem.finds_ridge and self.finds_ridge(problem)
        return final_factors + DIRECT_TRIALS * n_parts(problem.p) * searches

    def op_counts(self, problem: ProblemShape, sizes: DirectSizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of the setup, none, and of the training, see the modules.

        Held-out rows are summed twice.
        """
        p, n = problem.p, self._n_summed_rows(problem)
        if self.takes_rows(sizes):
            factors = self._n_factors(problem) * p**3 / 3
            if self.factor_dtype(problem) == np.float64:
                return NO_WORK, OpCounts(kept=p * p / 2, swept=p * p, wide_factors=factors)
            # Kernel values in float32 are kept for the products, see `kernel_ridge`.
            evaluations = 1 if problem.itemsize == 4 else 1 + REFINEMENTS
            return NO_WORK, OpCounts(
                kept=evaluations * p * p / 2, swept=(1 + REFINEMENTS) * p * p, factors=factors
            )
        return NO_WORK, OpCounts(
            kept=p * n, swept=p * n, wide_products=p * p * n * (2 if sizes.n_sums > 1 else 1),
            wide_factors=self._n_factors(problem) * p**3 / 3,
        )  # fmt: skip

    def time(self, problem: ProblemShape) -> int:
        """Return the time of the training, in FLOPs at the speed of a GEMM: see `block_sizes`."""
        p, c, float64 = problem.p, problem.c, problem.float64
        if problem.rows_are_centers:
            factors = self._n_factors(problem) * p / 3
            if self.factor_dtype(problem) == np.float64:
                factors *= float64
            return int(p * p * (problem.entry_cost / 2 + factors + 2 * float64 * c))
        row_time = float64 * p * p + p * (problem.entry_cost + 2 * float64 * c)
        n_factors = self._n_factors(problem)
        return int(self._n_summed_rows(problem) * row_time + n_factors * float64 * p**3 / 3)

    def needs(self, problem: ProblemShape, sizes: DirectSizes) -> MemoryNeeds:
        """Return the memory needs; the sums are a part of every checkpoint."""
        p, c = problem.p, problem.c
        posterior = 8 * p * p * problem.posterior
        if self.takes_rows(sizes):
            return MemoryNeeds(min(p, KERNEL_SLAB_ROWS), c, sums=8 * p * (c + 1) + posterior)
        return MemoryNeeds(sizes.batch_size, c, sums=8 * sizes.n_sums * p**2 + posterior)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: DirectSizes) -> None:
        """Add the buffers of the equations, of their solution, and of a posterior."""
        if self.takes_rows(sizes):
            self._add_kernel_ridge(buffers, problem, sizes)
        else:
            self._add_sums(buffers, problem, sizes)
        self._add_posterior(buffers, problem)

    def _add_kernel_ridge(
        self, buffers: Buffers, problem: ProblemShape, sizes: DirectSizes
    ) -> None:
        """Add the buffers of `KernelRidgeSolver`."""
        add, item, p, c, m = buffers.add, problem.itemsize, problem.p, problem.c, sizes.batch_size
        panel, slab_rows = min(c, MAX_PANEL_OUTPUTS), min(p, KERNEL_SLAB_ROWS)
        add("always", "targets and weights of all rows", p, c + 1, itemsize=8)
        add("train", "targets of a batch", 2 * m, c, itemsize=item)
        # A factor in float32 needs the vectors of conjugate gradient, and tiles in float64.
        factor_item = self.factor_dtype(problem).itemsize
        is_refined = factor_item < 8
        add("train", "solutions", (10 if is_refined else 2) * p, panel, itemsize=8)
        add("train", "kernel matrix, then its factor", p, p, itemsize=factor_item)
        if is_refined:
            tile = slab_rows * PRODUCT_COLUMNS
            add("train", "factor tiles in float64", problem.threads + 24, tile, itemsize=8)
        if problem.finds_ridge:
            columns = 5 * (MAX_COLUMNS + MEASURED_ROWS) + QUADRATURE * MAX_COLUMNS
            columns = max(columns, 2 * KNOWN_ROWS)  # of `conditional_variances`
            add("train", "errors of the candidate ridges", p, columns, itemsize=8)
        add("train", "kernel matrix slab", slab_rows, p, itemsize=item)
        if problem.classes:
            columns = min(p, INVERSE_COLUMNS) + 3 * c
            add("train", "leave-one-out, to calibrate", p, columns, itemsize=8)

    @staticmethod
    def _add_sums(buffers: Buffers, problem: ProblemShape, sizes: DirectSizes) -> None:
        """Add the buffers of `DirectSolver`."""
        add, item, p, c, m = buffers.add, problem.itemsize, problem.p, problem.c, sizes.batch_size
        panel, slab_rows = min(c, MAX_PANEL_OUTPUTS), min(p, KERNEL_SLAB_ROWS)
        # Of a step: the kernel values of a batch, and the slices of its held-out rows.
        add("train", "K(X, Z)", m, p, itemsize=item)
        add("always", "tiles of a p x p matrix", problem.threads, PRODUCT_TILE**2, itemsize=8)
        if item < 8:
            add("train", "K(X, Z) in float64", m, p, itemsize=8)
        if sizes.n_sums > 1:
            add("train", "held-out rows of a batch", m // HELD_OUT_SLICES + 1, p + c, itemsize=8)
            bits_rows = min(m, BITS_SLAB) + 2
            add("train", "row bits that choose held-out rows", bits_rows, problem.d, itemsize=8)
        # Of the equations at the end of an epoch.
        add("train", "normal equations", sizes.n_sums * p, p + c, itemsize=8)
        add("train", "solutions", 4 * p, panel, itemsize=8)
        add("train", "factor of the normal equations", p, p, itemsize=8)
        add("train", "slab of K(Z, Z)", slab_rows, p, itemsize=item)
        add_left_out(buffers, problem)
        if problem.writes_checkpoints:
            phase, rows = problem.host_phase("train"), sizes.n_sums * p
            add(phase, "normal equations, checkpoint copy", rows, p + c, itemsize=8)

    @staticmethod
    def _add_posterior(buffers: Buffers, problem: ProblemShape) -> None:
        """Add the buffers of a posterior that is being computed; its arrays are on the host."""
        if problem.posterior:
            rows = POSTERIOR_MATRICES * problem.p
            name = "basis of the posterior, being computed"
            buffers.add("train", name, rows, problem.p, itemsize=8)

    def compute(self, work: Work[DirectSizes], samples: Samples, report: Report) -> Setup:
        """Return a setup without arrays, as there is nothing to compute before the first step."""
        meta = {"rules": [], "batch_size": work.sizes.batch_size}
        if self.takes_rows(work.sizes):  # recorded, as runs of earlier versions have other values
            meta["factor"] = self.factor_dtype(work.problem).name
            # A ridge that was estimated from some rows is refined with all rows.
            problem, noise = work.problem, work.noise
            is_estimate = bool(noise.trials) and noise.exponent < MAX_NOISE_EXPONENT
            has_more_rows = noise.n_rows < problem.p
            refines = problem.finds_ridge and is_estimate and has_more_rows
            meta["refines_ridge"] = LEAVE_ONE_OUT if refines else False
        return Setup({}, meta)

    def assemble(self, work: Work[DirectSizes], setup: Setup) -> Solver:
        """Return the solver, with empty sums.

        Raises ConfigError for a posterior if the noise, and so the ridge, was estimated as 0.
        """
        ridge, problem = number_or_none(work.options.ridge), work.problem
        if ridge == 0 and work.options.posterior:  # `check_posterior` refused a setting of 0
            raise ConfigError(
                f"{mention('solver.posterior', True)} needs a ridge, but the noise of the targets, "
                "which determines the ridge, was estimated as 0",
                "give a ridge above 0",
            )
        ridges = setup.arrays.get("ridges")
        if ridges is not None:
            ridges = work.op.backend.to_host(ridges)
        if self.takes_rows(work.sizes):
            criterion = setup.meta.get("refines_ridge", False)
            refines = criterion and ridges is None
            return KernelRidgeSolver(
                work.op, work.Z, ridge=None if refines else work.options.fixed_ridge,
                first_ridge=work.options.fixed_ridge,
                leaves_rows_out=criterion == LEAVE_ONE_OUT, ridges=ridges,
                judged=setup.arrays.get("judged"),
                factor_dtype=setup.meta.get("factor", "float64"), **work.solver_arguments(setup),
            )  # fmt: skip
        return DirectSolver(
            work.op, work.Z,
            ridge=ridge, n_sums=work.sizes.n_sums, n_stored=problem.n_stored or problem.n_rows,
            repeats=problem.repeats, keeps_posterior=work.options.posterior,
            ridge_per_output=problem.several_targets and ridge is None, ridges=ridges,
            **work.solver_arguments(setup),
        )  # fmt: skip


def check_posterior(problem: ProblemShape, options: SolverConfig) -> None:
    """Raise ConfigError if the assumptions of a Gaussian process do not hold for the data."""
    rule = None
    if problem.classes:
        rule = "is for values, and the data has classes; leave it out, or use calibrate"
    elif options.ridge == 0:
        rule = "needs a ridge, which stands for the noise; leave it open, or give one above 0"
    elif problem.features != "kernel":
        rule = (
            f"is not supported for {problem.features} features; use {mention('features', 'kernel')}"
        )
    elif problem.ranks > 1:
        rule = f"is not supported for {mention('ranks', problem.ranks)}; train with one rank"
    elif not problem.complete:
        rule = "cannot be used with partial_fit, which may add rows later; use fit"
    elif not problem.repeats or problem.hides_copies or problem.n_stored not in (0, problem.n_rows):
        rule = (
            "counts every row as one more observation, which copies, random transforms, weighted "
            "mixtures and rows that a function makes are not; train on the rows themselves"
        )
    if rule is not None:
        raise ConfigError(f"{mention('solver.posterior', True)} {rule}")
