"""EigenPro 3 and 4: their settings, costs and construction; see `eigenpro_step`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.backend.rank_grid import CenterPartition
from streamkern.config.solver import SolverConfig, number_or_none
from streamkern.kernels.points import Points
from streamkern.planning.memory import RANK_SLAB_BYTES, Buffers, MemoryNeeds
from streamkern.planning.op_counts import OpCounts
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import batch_candidates, check_between, n_steps
from streamkern.solver.base import Solver, initial_buffer_rows
from streamkern.solver.eigenpro_step import TEMPORARY_ARRAYS, DelayedProjectionSolver, temporary_ids
from streamkern.solver.low_rank import (
    MANY_CENTERS,
    LowRank,
    LowRankSizes,
    compute_preconditioner,
    load_preconditioner,
    lower_batch_size,
    report_setup,
    sample_bytes,
)
from streamkern.solver.method import Report, Samples, Setup, Work
from streamkern.solver.precondition.low_rank import LowRankPreconditioner
from streamkern.solver.precondition.norm import jittered_cholesky
from streamkern.solver.precondition.partition import BROADCAST_CENTERS, Centers, Partition
from streamkern.solver.precondition.step_rule import StepRule
from streamkern.solver.projection import (
    INNER_NYSTROM,
    ExactProjection,
    IterativeProjection,
    PartitionedProjection,
    Projection,
    inner_centers,
    inner_rule,
)


@dataclass(frozen=True)
class ProjectedSizes(LowRankSizes):
    """Sizes of EigenPro 3 and 4.

    period : number of steps from one projection to the next.
    projection : kind of projection, see the module `projection`.
    projection_epochs : epochs over the centers in an iterative projection.
    projection_nystrom : number of centers in the sample of an iterative projection.
    projection_level : number of damped directions in it; 0: a tenth of the sample.
    projection_batch : centers in a step of it; 0: the critical batch, but at most `batch_size`.

    The setup measures the critical batch, and may then lower the batch size and raise the period.
    """

    period: int
    projection: str
    projection_epochs: int = 1
    projection_nystrom: int = INNER_NYSTROM
    projection_level: int = 0
    projection_batch: int = 0


class EigenPro3(LowRank[ProjectedSizes]):
    """EigenPro 3.0, which projects after every step: its settings, sizes and costs."""

    name = "eigenpro3"
    data_parallel = partitions_centers = True
    column_array_prefixes = ("projection.L",)
    sizes = ProjectedSizes

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError as `Method.check`, and for a period or projection out of range."""
        super().check(problem, options)
        p = problem.p
        n_nystrom = number_or_none(options.projection_nystrom) or INNER_NYSTROM
        check_between("period", options.period, 1, n_steps(problem), "the steps of the run, ")
        check_between("solver.projection_nystrom", options.projection_nystrom, 2, p, "n_centers=")
        largest_level = min(n_nystrom, p) - 1
        check_between(
            "solver.projection_level", options.projection_level, 1, largest_level,
            "the centers of its sample less one, ",
        )  # fmt: skip
        check_between("solver.projection_batch", options.projection_batch, 1, p, "n_centers=")

    def _period(self, problem: ProblemShape, options: SolverConfig, m: int) -> int:
        return 1

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[ProjectedSizes]:
        """Return candidate sizes, best first; a projection that needs little memory comes last."""
        s, h, level = self._sample_sizes(problem, options)
        projections = [options.projection]
        if options.projection == "auto":
            projections = ["exact" if problem.p <= MANY_CENTERS else "resident", "inexact"]
        inner = {
            "projection_epochs": options.projection_epochs,
            "projection_nystrom": number_or_none(options.projection_nystrom) or INNER_NYSTROM,
            "projection_level": number_or_none(options.projection_level) or 0,
            "projection_batch": number_or_none(options.projection_batch) or 0,
        }
        return [
            sizes
            for projection in projections
            for m in batch_candidates(problem)
            for sizes in self._sizes_for_batches(
                [m], s, h, level=level, period=self._period(problem, options, m),
                projection=projection, **inner,
            )
        ]  # fmt: skip

    def op_counts(self, problem: ProblemShape, sizes: ProjectedSizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of the setup and of the training.

        The setup computes an eigensystem and, for an exact projection, the factor of K(Z, Z). Each
        row takes K(X, Z), twice K(X, X_s) and the temporary centers of half a period; each period
        takes a projection.
        """
        n, p, m = problem.n_rows * problem.epochs, problem.p, sizes.batch_size
        s, setup = sizes.n_sample, self.setup_op_counts(sizes)
        gamma_entries = s if sizes.period > 1 else 0
        row = self.correction(sizes) + OpCounts(
            kept=p, swept=p, entries=gamma_entries + (sizes.period - 1) * m / 2
        )
        projection = OpCounts(entries=p * s)
        if sizes.projection == "exact":
            setup += OpCounts(kept=p * p, factors=p**3 / 3)
            projection += OpCounts(swept=p * p)
        elif sizes.projection == "resident":
            setup += OpCounts(kept=p * p)
            projection += OpCounts(swept=p * p, entries=p * s).scaled(sizes.projection_epochs)
        else:
            projection += OpCounts(entries=p * (p + s)).scaled(sizes.projection_epochs)
        return setup, row.scaled(n) + projection.scaled(-(-n // m) / sizes.period)

    def needs(self, problem: ProblemShape, sizes: ProjectedSizes) -> MemoryNeeds:
        """Return the memory needs; a projection evaluates K(Z, X_s), and K(Z, Z)."""
        m, s, h, p = sizes.batch_size, sizes.n_sample, sizes.n_probe, problem.p
        factor = p * p if sizes.projection == "exact" else 0
        saved = s * (problem.d + sizes.level) + factor
        largest = max(m, h, s, problem.centers_per_rank(p), sizes.projection_batch)
        return MemoryNeeds(largest, problem.c, setup=saved)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: ProjectedSizes) -> None:
        """Add the buffers of the sample, the projection and the temporary centers."""
        add, item, p, c = buffers.add, problem.itemsize, problem.p, problem.c
        partitioned, q = problem.center_ranks > 1, problem.centers_per_rank(p)
        add("always", "Nystrom rows, eigenvectors", sample_bytes(problem, sizes))
        super().add_buffers(buffers, problem, sizes)
        if sizes.projection != "inexact" and not partitioned:
            add("always", "K(Z, Z)", p, p, itemsize=item)
        if sizes.projection != "exact":
            inner = min(sizes.projection_nystrom, p)
            probe = inner_centers(p, sizes.projection_nystrom)
            add("setup", "eigensystem of the projection", 3 * inner, inner, itemsize=item)
            add("setup", "K(probe, probe) of the projection", probe, probe, itemsize=item)
        m = sizes.batch_size
        add("train", "K(X, Z)", initial_buffer_rows(problem, m), q, itemsize=item)
        # If the setup lowers the batch size, a period has more steps but no more rows.
        n_temporary = sizes.period * m if sizes.period > 1 else 0
        row_bytes = problem.prepared_row_bytes + c * item
        add("train", "temporary centers", problem.centers_per_rank(n_temporary), row_bytes)
        if n_temporary and problem.writes_checkpoints:  # rank 0 gathers those of all ranks
            phase = problem.host_phase("train")
            add(phase, "temporary centers, checkpoint copy", n_temporary, row_bytes)
        add("train", "values at the centers", 3 * q, c, itemsize=item)
        if sizes.projection_batch and not partitioned:
            add("train", "batch of the projection", sizes.projection_batch, c, itemsize=item)
        if partitioned:
            _add_partitioned_buffers(buffers, problem, sizes, n_temporary)

    def compute(self, work: Work[ProjectedSizes], samples: Samples, report: Report) -> Setup:
        """Compute the preconditioner, the batch size and the projection, all of them on rank 0."""
        sizes, Z = work.sizes, work.centers
        if work.ranks.rank:  # this rank only takes part in the two collective calls
            samples()
            _centers_of_projection(work, Z)
            return Setup({}, {})
        P, arrays = compute_preconditioner(work, samples)
        projection_arrays, meta = _compute_projection(work, Z)
        batch, period = lower_batch_size(work, P.rule), sizes.period
        if period > 1:
            period = max(1, round(period * sizes.batch_size / batch))
        meta |= report_setup(P, report, batch_size=batch, period=period)
        return Setup(arrays | projection_arrays, meta)

    def assemble(self, work: Work[ProjectedSizes], setup: Setup) -> Solver:
        """Return the solver with the preconditioner and projection of `setup`."""
        partition = self.center_partition(work.problem, work.sizes, work.ranks)
        Z = work.Z.each(partition.part)
        return DelayedProjectionSolver(
            work.op, Z, load_preconditioner(work, setup),
            _assemble_projection(work, setup, Z, partition),
            columns=work.op.columns(setup.arrays["sample"].shape[1]), period=setup.meta["period"],
            center_partition=partition, **work.solver_arguments(setup),
        )  # fmt: skip

    def rows_of(
        self, name: str, n: int, partition: CenterPartition
    ) -> npt.NDArray[np.int64] | None:
        """Return the rows of a checkpoint's array that a rank has; None: all of them.

        Temporary centers are distributed over the columns of the grid; all ranks have `gamma`.
        """
        if name in TEMPORARY_ARRAYS:
            return np.array(temporary_ids(partition.grid, 0, n), np.int64)
        return None if name == "gamma" else partition.ids


class EigenPro4(EigenPro3):
    """EigenPro 4, which projects after as many rows as there are centers."""

    name = "eigenpro4"

    def _period(self, problem: ProblemShape, options: SolverConfig, m: int) -> int:
        return number_or_none(options.period) or max(1, round(problem.p / m))


def _add_partitioned_buffers(
    buffers: Buffers, problem: ProblemShape, sizes: ProjectedSizes, n_temporary: int
) -> None:
    """Add further buffers, needed if the centers are partitioned over ranks.

    The buffers of the setup are on rank 0, which computes the projection alone.
    """
    add, item, p, c = buffers.add, problem.itemsize, problem.p, problem.c
    exact, q, m = sizes.projection == "exact", problem.centers_per_rank(p), sizes.batch_size
    # The setup's arrays: the sample, and the centers of the projection.
    numbers = (sizes.n_sample + sizes.n_probe) * (problem.d + c)
    add("sample", "sample and probe being broadcast", numbers, itemsize=item)
    n_centers = p if exact else inner_centers(p, sizes.projection_nystrom)
    add("setup", "centers that build the projection", n_centers, problem.prepared_row_bytes)
    # The arrays of a step, among them the temporary centers.
    slab_rows = min(p, -(-RANK_SLAB_BYTES // (c * item)))
    add("train", "sums of a step over ranks", m + slab_rows, c, itemsize=item)
    if not problem.on_device:
        add("train", "values at the centers, copy on rank 0", p, c, itemsize=item)
    if n_temporary:
        row_bytes = problem.prepared_row_bytes + c * item
        slab_bytes = min(RANK_SLAB_BYTES, n_temporary * row_bytes)
        add("train", "temporary centers being sent to rank 0", slab_bytes)
        if problem.ranks > problem.center_ranks:
            add("train", "batch being added to the temporary centers", m, row_bytes)
    # The arrays of the projection.
    if exact:
        add("setup", "K(Z, Z)", p, p, itemsize=item)
        add("train", "this rank's part of the factor of K(Z, Z)", q, p, itemsize=item)
        add("train", "solutions of the projection, being exchanged", 2 * q, c, itemsize=item)
        return
    n_nystrom = min(sizes.projection_nystrom, p)
    if sizes.projection == "resident":
        rows = problem.rows_per_rank(p) + problem.ranks // problem.center_ranks
        add("train", "this rank's part of K(Z, Z)", rows, q, itemsize=item)
    batch = sizes.projection_batch or min(sizes.batch_size, p)
    n_broadcast = min(p, max(BROADCAST_CENTERS, batch))
    add("train", "centers being broadcast", n_broadcast, problem.prepared_row_bytes)
    rows, columns = problem.rows_per_rank(batch), min(n_nystrom, q)
    add("train", "K(batch, sample) of the projection", rows, columns, itemsize=item)
    add("train", "batch of the projection", 2 * batch + n_nystrom, c, itemsize=item)


def _centers_of_projection(work: Work[ProjectedSizes], Z: Centers) -> Points:
    """Return the centers from which a projection is computed, on all ranks. Collective call."""
    exact = work.sizes.projection == "exact"
    p = len(Z)
    n = p if exact else inner_centers(p, work.sizes.projection_nystrom)
    return Z.block(slice(0, n))


def _compute_projection(
    work: Work[ProjectedSizes], centers: Centers
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the arrays of the projection, and its numbers, for the setup."""
    op = work.op
    p = len(centers)
    Z = _centers_of_projection(work, centers)
    if work.sizes.projection == "exact":
        L, jitter = jittered_cholesky(op, Z)
        return {"projection.L": L}, {"jitter": jitter}
    sizes = work.sizes
    level = sizes.projection_level or max(1, min(sizes.projection_nystrom, p) // 10)
    P, batch = inner_rule(
        op, Z, p, level=level, n_nystrom=sizes.projection_nystrom, max_batch=sizes.batch_size,
        seed=work.seed,
    )  # fmt: skip
    arrays = {"projection.E": P.E, "projection.D": P.D}
    # The step rule is safe for every batch size, so the user's setting may exceed the critical one.
    batch = sizes.projection_batch or batch
    return arrays, {"projection_rule": asdict(P.rule), "projection_batch": batch}


def _assemble_projection(
    work: Work[ProjectedSizes], setup: Setup, Z: Points, partition: CenterPartition
) -> Projection:
    """Return the projection of a setup."""
    op, arrays, meta = work.op, setup.arrays, setup.meta
    partition = Partition(partition.blocks, partition.grid, work.ranks, op.backend)
    if work.sizes.projection == "exact":
        return ExactProjection(arrays["projection.L"], partition)
    E, D = arrays["projection.E"], arrays["projection.D"]
    P = LowRankPreconditioner(Z[: len(E)], E, D, StepRule(**meta["projection_rule"]))
    options: dict[str, Any] = {
        "batch": meta["projection_batch"], "resident": work.sizes.projection == "resident",
        "epochs": work.sizes.projection_epochs,
    }  # fmt: skip
    if partition.is_replicated:
        return IterativeProjection(op, Z, P, **options)
    return PartitionedProjection(op, Z, P, partition, **options)
