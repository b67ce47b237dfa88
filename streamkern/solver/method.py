"""Base class of the training methods.

A method checks the settings of its solver, lists candidate sizes for a problem with their cost in
bytes and FLOPs, and constructs the solver in two parts. `compute` is the setup of a run: it
computes factors and eigensystems, measures step sizes, and returns all of these as named arrays and
JSON values. `assemble` makes the solver from this setup, which was either just computed or read
from a run directory. A resumed run therefore computes no setup, and continues with the same bits.
A new method is a file with a subclass of `Method`, and an entry in `methods`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.backend.rank_grid import CenterPartition, RankGrid
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.basics.errors import ConfigError, MemoryBudgetError
from streamkern.basics.message import mention
from streamkern.config.solver import SolverConfig, solver_options
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.losses.scaled import ScaledLoss
from streamkern.planning.memory import (
    EVALUATED_ROWS,
    MAX_DERIVATIVE_COLUMNS,
    MAX_ORIGINS,
    MAX_PANEL_OUTPUTS,
    METRIC_FIT_ROWS,
    METRIC_STEP_ROWS,
    Buffers,
    MemoryNeeds,
    count_products,
    count_run,
)
from streamkern.planning.op_counts import OpCounts
from streamkern.planning.problem import MiB, ProblemShape
from streamkern.planning.sizes import LOADER_SIZES, Sizes, batch_candidates, check_batch_size
from streamkern.solver.base import Solver
from streamkern.solver.precondition.noise import NO_NOISE, Noise
from streamkern.solver.precondition.partition import Centers
from streamkern.solver.precondition.samples import CenterTargets, SampleRows
from streamkern.solver.ridge_curve import noise_rows

Report = Callable[[str, dict[str, Any]], None]
_S = TypeVar("_S", bound=Sizes)
Samples = Callable[[], tuple[SampleRows, SampleRows]]
"""Function that returns the setup sample and the probe.

It is a function so that `compute` can free the raw rows once it has prepared them. If the centers
are the training rows, sample and probe are training rows as well.
"""


@dataclass
class Setup:
    """Results of the setup.

    arrays : arrays on the device, by name.
    meta : numbers, which are also written to the log.
    sample_rows : row numbers of the setup sample, if they are known.
    """

    arrays: dict[str, Array]
    meta: dict[str, Any]
    sample_rows: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Work(Generic[_S]):
    """Arguments of `Method.compute` and `Method.assemble`.

    op : products with the kernel matrix.
    Z : points of the centers; in `compute`, if the centers are partitioned over ranks,
        the centers of this rank's stripe.
    problem, sizes : sizes of the problem, and of the method's plan for it.
    options : the settings of the solver, with the ridge as a number, unless the method finds it.
    seed : seed of the random draws of the setup and of the steps.
    center_targets : targets of the rows that are centers, if the method uses them.
    noise : noise of the targets, if the method uses it.
    n_effective_rows : effective number of rows of the run, if the noise determines the ridge; else
        None. A method that estimates the noise again returns the new ridge as `meta["ridge"]`.
    ranks : communicator of the ranks that share the steps.
    loss : the loss of the outputs; None: the squared error.
    """

    op: KernelOperator
    Z: Points
    problem: ProblemShape
    sizes: _S
    options: SolverConfig
    seed: int
    center_targets: CenterTargets | None = None
    noise: Noise = NO_NOISE
    n_effective_rows: float | None = None
    ranks: Communicator = SINGLE
    loss: ScaledLoss | None = None

    @property
    def centers(self) -> Centers:
        """The centers. Each rank has all of them or, if they are partitioned, its stripe."""
        problem, backend = self.problem, self.op.backend
        is_partitioned = problem.center_ranks > 1
        return Centers.of(self.Z, backend, self.ranks, problem.p, is_partitioned=is_partitioned)

    def solver_arguments(self, setup: Setup) -> dict[str, Any]:
        """Return the arguments that every solver receives."""
        return {
            "n_outputs": self.problem.c, "max_batch": setup.meta["batch_size"],
            "average": self.options.average, "ranks": self.ranks, "loss": self.loss,
        }  # fmt: skip


class Method(Generic[_S]):
    """Base class of the methods, which have no state."""

    name: str
    sizes: type[_S]
    features: tuple[str, ...] = ("kernel",)
    """Values of model.features that the method trains."""
    minimises_squares = True
    """Whether the method minimises the squared error."""
    minimises_losses = True
    """Whether the method minimises other losses."""
    in_place = False
    """Whether the centers are the rows of the training set, in store order."""
    needs_same_rows = False
    """Whether every epoch has to have the same rows in the same batches, with the same draws.

    `Solver.why_finished` ends the run of such a method.
    """
    empty_epochs = 0
    """Number of epochs after which the model is still 0.

    It is above 0 for a method that changes its weights only at the end of an epoch.
    """
    uses_center_targets = False
    """Whether setup uses the targets of rows that are centers, and the noise of the targets."""
    insensitive_to_conditioning = False
    """Whether the convergence is independent of the condition number of K, the kernel matrix."""
    min_penalty = 0.0
    """Smallest penalty with which the method learns fast, relative to the mean k(x, x).

    With a kernel that needs a smaller penalty to fit the data, the method would learn slowly.
    """
    data_parallel = False
    """Whether several ranks can share the rows of a step."""
    partitions_centers = False
    """Whether the centers can be partitioned over ranks."""
    center_array_prefixes: tuple[str, ...] = ()
    """Prefixes of the names of setup arrays with a row for each center.

    An array whose name ends in .k has the rows of block k, any other the rows of all centers.
    """
    sharded_arrays: tuple[str, ...] = ()
    """Prefixes of triangular setup arrays, of which a rank needs its `Communicator.triangle`."""
    computes_in_stripes = False
    """Whether each rank computes its stripes of `sharded_arrays`; otherwise rank 0 computes all."""
    column_array_prefixes: tuple[str, ...] = ()
    """Prefixes of the names of setup arrays; a rank needs only the rows of its centers.

    The centers of a rank are then consecutive.
    """
    ridge_per_output = False
    """Whether each of several outputs has its own ridge, if the ridge is chosen automatically."""
    reaches_minimum = False
    """Whether every run ends near the minimum of the squared error with the ridge.

    The leave-one-out predictions of the minimum are then also used for the model.
    """
    alternative = "another solver"
    """Alternative that the error names if the centers are not the training rows."""
    dense_p_by_p = False
    """Whether the method holds p x p matrices for any memory budget."""

    # -- settings --------------------------------------------------------------------------

    def check_ranks(self, ranks: int, center_ranks: int) -> None:
        """Raise ConfigError if the method cannot run on this many ranks or columns of ranks."""
        if ranks > 1 and not self.data_parallel:
            raise ConfigError(
                f"{mention('run.ranks', ranks)} cannot share the steps of "
                f"{mention('solver', self.name)}",
                f"use one rank, or train with {mention('solver', 'block')} or another solver that "
                "supports several ranks",
            )
        if center_ranks > 1 and not self.partitions_centers:
            raise ConfigError(
                f"{mention('run.center_ranks', center_ranks)} cannot partition the centers of "
                f"{mention('solver', self.name)}",
                f"set it to 1, or train with {mention('solver', 'block')}, "
                f"{mention('solver', 'eigenpro3')}, {mention('solver', 'eigenpro4')} or "
                f"{mention('solver', 'falkon')}",
            )

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError if a setting contradicts the data."""
        check_batch_size(problem)
        self.check_ranks(problem.ranks, problem.center_ranks)
        if self.in_place and problem.p != problem.n_rows:
            raise ConfigError(
                f"{mention('solver', self.name)} needs every training row as a center, but "
                f"{mention('n_centers', problem.p)} and n_rows={problem.n_rows}",
                f"give {mention('centers', 'all')} without random augmentation, or use "
                f"{self.alternative}",
            )

    def takes_rows(self, sizes: _S) -> bool:
        """Return whether the centers are the rows of the training set, in store order."""
        return self.in_place

    def finds_ridge(self, problem: ProblemShape) -> bool:
        """Return whether training finds the ridge, if it is chosen automatically."""
        return False

    def estimates_ridge(self, problem: ProblemShape) -> bool:
        """Return whether the estimated noise of the targets determines the ridge."""
        takes_ridge = "ridge" in solver_options(self.name)
        return problem.finds_ridge and takes_ridge and not self.finds_ridge(problem)

    def estimates_noise(self, problem: ProblemShape) -> bool:
        """Return whether the setup has to estimate the noise of the targets.

        Losses other than the squared error need the same rows to fit their parameters.
        """
        return self.uses_center_targets or not problem.squares or self.estimates_ridge(problem)

    # -- sizes -----------------------------------------------------------------------------

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[_S]:
        """Return candidate sizes, from the best to the smallest; here they have no setup sample."""
        return self._sizes_for_batches(batch_candidates(problem))

    def _sizes_for_batches(
        self, batch_sizes: Iterable[int], n_sample: int = 0, n_probe: int = 0, **sizes: Any
    ) -> list[_S]:
        """Return sizes with each batch size and, for each of these, each size of read-ahead."""
        make_sizes: Callable[..., _S] = self.sizes
        return [
            make_sizes(self.name, m, n_sample, n_probe, *loader, **sizes)
            for m in batch_sizes
            for loader in LOADER_SIZES
        ]

    def plan(
        self, problem: ProblemShape, options: SolverConfig, budget_bytes: int
    ) -> tuple[_S, Buffers]:
        """Return the best sizes that fit `budget_bytes`, and their buffers.

        Raises
        ------
        MemoryBudgetError
            No candidate fits; the error names the smallest sufficient budget.
        ConfigError
            A setting contradicts the data.
        """
        self.check(problem, options)
        peaks = []
        for sizes in self.candidates(problem, options):
            buffers = self.count(problem, sizes)
            if buffers.peak <= budget_bytes:
                return sizes, buffers
            peaks.append(buffers.peak)
        remedy = "raise memory or lower " + "n_centers or " * (not self.in_place) + "batch_size"
        remedy += f", or use {self.alternative}" * self.in_place  # all rows are its centers
        if problem.library_bytes:
            remedy += f", or give {mention('accelerator', 'none')}"
        if self.dense_p_by_p and 8 * problem.p**2 > min(peaks) // 8:
            remedy += f", or use {mention('solver', 'auto')}: {self.name!r} holds p x p matrices"
        if budget_bytes < MiB:
            remedy += "; a number without a unit is bytes"
        raise MemoryBudgetError(
            f"{mention(f'memory={_mib(budget_bytes)}')} is not enough for "
            f"{mention('n_centers', problem.p)}, d={problem.d}; the smallest plan needs "
            f"{_mib(min(peaks))}; {remedy}",
            needed=min(peaks),
        )

    def reason(self, problem: ProblemShape, options: SolverConfig, sizes: _S) -> str | None:
        """Return the reason for the sizes, as text for the user; None if there is none."""
        return None

    def count(self, problem: ProblemShape, sizes: _S) -> Buffers:
        """Return all buffers of the run."""
        buffers = count_run(problem, sizes, self.needs(problem, sizes))
        if problem.finds_bandwidth or self.estimates_noise(problem):
            self._count_noise(buffers, problem, sizes)
        if problem.search_rows:
            _count_search(buffers, problem)
        self.add_buffers(buffers, problem, sizes)
        return buffers

    def _count_noise(self, buffers: Buffers, problem: ProblemShape, sizes: _S) -> None:
        """Add the buffers of `find_noise`, which runs before the rest of setup."""
        add, n, item = buffers.add, noise_rows(problem), problem.itemsize
        if problem.center_ranks == 1 and not problem.on_device:
            add("noise", "raw centers", problem.p, problem.d * item)
        raw_row_bytes = (problem.d + problem.c) * item
        row_bytes = raw_row_bytes + problem.prepared_row_bytes
        add("noise", "rows that estimate the noise", n, row_bytes)
        product_rows = count_products(buffers, problem, n, "noise")
        columns = min(problem.c, MAX_PANEL_OUTPUTS)
        add("noise", "targets of the noise rows in float64", 4 * n, columns, itemsize=8)
        if not problem.repeats or problem.hides_copies:
            # Copies are found by the origins of the rows, and drawn again to be averaged.
            n_origins = min(problem.n_rows, MAX_ORIGINS + problem.unit_rows)
            if problem.hides_copies:
                add("noise", "origins of the rows", 8 * n_origins, itemsize=8)
            read_bytes = problem.row_bytes + problem.feed_arrays * problem.d * item
            add("noise", "redrawn copies of the noise rows", n, read_bytes + row_bytes)
        if problem.features == "fourier":
            add("noise", "random features of the noise rows", n, problem.p, itemsize=item)
        for phase in ("centers", "sample"):
            if problem.finds_bandwidth and (phase == "sample" or problem.selection is not None):
                add(phase, "rows that estimate the noise", n, raw_row_bytes)
        if problem.c > 2 * n:
            add("noise", "products of the noise rows' targets", 4 * n, n, itemsize=8)
        matrices = 3 * n + product_rows
        add("noise", "noise rows: kernel matrix, factor, inverse", matrices, n, itemsize=8)

    def needs(self, problem: ProblemShape, sizes: _S) -> MemoryNeeds:
        """Return the sizes from which the buffers of every run are counted."""
        raise NotImplementedError

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: _S) -> None:
        """Add the method's own buffers. They have to match its setup and its step."""
        raise NotImplementedError

    def op_counts(self, problem: ProblemShape, sizes: _S) -> tuple[OpCounts, OpCounts]:
        """Return the operations of the setup and of the training, leading terms only."""
        raise NotImplementedError

    def outputs(self, problem: ProblemShape) -> int:
        """Return the number of columns that K(X, Z) is multiplied with in a step."""
        return problem.c

    def n_epochs(self, problem: ProblemShape) -> int:
        """Return the largest number of epochs whose rows are read."""
        return problem.epochs

    def center_partition(
        self, problem: ProblemShape, sizes: _S, ranks: Communicator
    ) -> CenterPartition:
        """Return the partition of the centers in the steps."""
        grid = RankGrid(ranks.rank, ranks.size, problem.center_ranks)
        return CenterPartition([slice(0, problem.p)], grid)

    def setup_together(self, problem: ProblemShape) -> bool:
        """Return whether all ranks compute the setup; otherwise one process computes it before."""
        return self.computes_in_stripes or problem.center_ranks > 1

    def rows_of(
        self, name: str, n: int, partition: CenterPartition
    ) -> npt.NDArray[np.int64] | None:
        """Return the rows of a checkpoint's array that a rank has; None: all of them.

        It is called only if the centers are partitioned.

        name, n : name and number of rows of the array.
        """
        return partition.ids

    # -- the solver ------------------------------------------------------------------------

    def compute(self, work: Work[_S], samples: Samples, report: Report) -> Setup:
        """Compute factors, eigensystems and step rules."""
        raise NotImplementedError

    def assemble(self, work: Work[_S], setup: Setup) -> Solver:
        """Return the solver that `setup` describes."""
        raise NotImplementedError


def _mib(size: int) -> str:
    return f"{-(-size // MiB)} MiB" if size >= MiB else f"{size} bytes"


def _count_search(buffers: Buffers, problem: ProblemShape) -> None:
    """Add the buffers of the search for a metric and for trees, which precedes everything else."""
    add, item, d, c = buffers.add, problem.itemsize, problem.d, problem.c
    rows, n = problem.search_rows, min(METRIC_FIT_ROWS, problem.n_rows)
    add("metric", "rows to learn the metric", rows, d + c + 1, itemsize=item)
    add("metric", "rows to learn the metric, as read", rows, problem.row_bytes + (d + c) * item)
    add("metric", "prepared rows for the metric", 12 * n, problem.prepared_row_bytes)
    matrices = 7 * n + count_products(buffers, problem, n, "metric")
    targets = 6 * n + 4 * (2 * n)  # of fitted and of held-out rows
    add("metric", "kernel matrices and a factor for the metric", matrices, n, itemsize=8)
    add("metric", "targets and weights for the metric in float64", targets, c, itemsize=8)
    if not problem.metric_rows:
        return
    add("metric", "rows of a metric step", min(METRIC_STEP_ROWS, rows), 6 * d + 4 * c, itemsize=8)
    columns = max(d + 1, min(MAX_DERIVATIVE_COLUMNS, c * (d + 1)))
    add("metric", "kernel slopes times centers", n + 2 * EVALUATED_ROWS, columns, itemsize=item)
    add("metric", "metrics and their gradients", 8 * d, d, itemsize=8)
