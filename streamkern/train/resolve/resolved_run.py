"""Resolve a run before it starts: open the data, replace every "auto", and plan the memory.

`streamkern plan` prints the result of `open_run`, and `train` starts with it. Only metadata is
read, and a sample of the rows if their scaling needs one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.backend.rank_grid import check_columns
from streamkern.basics.array_types import Floats, HostArray, Ints
from streamkern.basics.errors import ConfigError, DataError, MemoryBudgetError
from streamkern.basics.machine import available_memory
from streamkern.basics.message import mention
from streamkern.centers.selectors import SELECTORS
from streamkern.config.run_config import RunConfig
from streamkern.config.solver import SolverConfig
from streamkern.kernels.fourier import FourierFeatures, check_sampled
from streamkern.kernels.points import Grid
from streamkern.losses.base import Loss
from streamkern.losses.log_link import LogLink
from streamkern.losses.losses import loss_of
from streamkern.planning.effort_levels import EFFORT_LEVELS
from streamkern.planning.memory import Buffers, default_budget, keep_stores
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import Sizes
from streamkern.solver.direct import Direct
from streamkern.solver.method import Method
from streamkern.solver.methods import find, resolve
from streamkern.solver.precondition.noise import NOISE_ROWS
from streamkern.stream.feed import CheckTargets
from streamkern.stream.sources.sampling import source_rows_of
from streamkern.train.resolve.calibration_split import NO_MEMORY_TO_CALIBRATE, check_calibrate
from streamkern.train.resolve.check_loss import (
    check_log_link,
    check_log_targets,
    check_loss,
    check_target_transform,
)
from streamkern.train.resolve.early_stopping import check_early_stopping
from streamkern.train.resolve.given_arrays import count_centers, may_take_all_rows
from streamkern.train.resolve.metric_mode import (
    CHOSEN_TO_LEARN,
    NO_MEMORY_FOR_METRIC,
    MetricMode,
    kernel_in_metric,
    looks_for_categorical,
    requested_metric_mode,
    with_max_categorical,
)
from streamkern.train.resolve.precision import resolve_precision
from streamkern.train.resolve.problem_shape import problem_shape
from streamkern.train.resolve.run_inputs import NO_INPUTS, RunInputs, centers_from
from streamkern.train.resolve.training_data import Data, open_data, storage_options_for, with_epochs
from streamkern.train.restart.parent_run import ParentRun

PLANNED_KERNELS = 16
"""Approximate number of kernels and bandwidths that are tried if both are searched for."""


@dataclass(frozen=True)
class ResolvedRun:
    """A run whose data are open and whose sizes are known, before its rows are read.

    config, inputs : settings, with the epochs as a number, and objects in place of settings
    problem, buffers : numbers that sizes and costs follow from, and planned memory
    reason, sizes_reason : why method and sizes were chosen; None if there is nothing to report
    budget_bytes : memory budget of the device on which the run computes
    grid : grid of the features, if the precision is "integer"; else None
    metric_mode : whether a metric is learned, given or not used, and why
    metric : given metric, scales (d,) or a matrix (d, r); None if none is given by itself
    kept_bytes : bytes of the stores that the loader keeps decoded, see `keep_stores`
    """

    config: RunConfig
    inputs: RunInputs
    data: Data
    problem: ProblemShape
    method: Method[Any]
    sizes: Sizes
    buffers: Buffers
    reason: str
    sizes_reason: str | None
    budget_bytes: int
    backend: Backend
    precision: str
    grid: Grid | None
    metric_mode: MetricMode
    metric: Floats | None = None
    kept_bytes: int = 0

    @property
    def loss(self) -> Loss | None:
        """The loss that is minimised, with the parameters of the settings; None for squares."""
        model = self.config.model
        return loss_of(model.loss, model.quantile)

    @property
    def check_targets(self) -> CheckTargets | None:
        """Function that raises DataError for invalid targets of a block; None if all are valid."""
        if isinstance(self.loss, LogLink):
            return self._with_source_rows(self.loss.check_targets)
        on_log_scale = self.config.model.target_transform == "log"
        return self._with_source_rows(check_log_targets) if on_log_scale else None

    def _with_source_rows(self, check: CheckTargets) -> CheckTargets:
        """Return `check`, with errors that number the rows as the user's data do."""

        def check_with_source_rows(Y: HostArray, row_ids: Ints) -> None:
            try:
                check(Y, row_ids)
            except DataError:
                check(Y, source_rows_of(self.data.source, row_ids))
                raise

        return check_with_source_rows

    @property
    def search_precision(self) -> str:
        """Precision of the models from which kernel and metric are chosen."""
        return "exact" if self.sizes.widened else self.precision

    @property
    def in_order(self) -> bool:
        """True if the centers are the rows of the training set, in store order."""
        return self.method.takes_rows(self.sizes)

    @property
    def centers_from(self) -> str:
        """Origin of the centers: a name in `SELECTORS`, "all", "given" or "file"."""
        return "all" if self.in_order else centers_from(self.config, self.inputs)


def open_run(
    config: RunConfig, inputs: RunInputs = NO_INPUTS, *, fixed_sizes: Sizes | None = None,
    complete: bool = True, scores: bool | None = None,
) -> ResolvedRun:  # fmt: skip
    """Open the data and resolve the sizes. The caller closes `ResolvedRun.backend`.

    fixed_sizes : sizes with which the run was started; None for a new run
    complete : whether no other rows will follow, as they may in `partial_fit`
    scores : whether the run was started with quantile scores; None: `with_scores` decides

    Raises ConfigError, DataError, or MemoryBudgetError if the run does not fit in the memory.
    """
    config = inputs.settings(config)
    try:
        return _open(config, inputs, fixed_sizes, complete, scores=scores)
    except MemoryBudgetError:
        # Ranks must set the same rows aside, but each measures its own memory.
        if config.run.calibrate != "auto" or fixed_sizes is not None or config.run.n_ranks > 1:
            raise
    # Retry without calibration rows, whose evaluation takes memory.
    return _open(config, inputs, fixed_sizes, complete, NO_MEMORY_TO_CALIBRATE, scores)


def _open(
    config: RunConfig, inputs: RunInputs, fixed_sizes: Sizes | None, complete: bool,
    no_memory: str | None = None, scores: bool | None = None,
) -> ResolvedRun:  # fmt: skip
    """Open the data, and resolve the run with and, if it needs too much memory, without a metric.

    no_memory : why no calibration rows can be set aside, or None
    """
    has_initial_weights = bool(inputs.warm_start or inputs.continued)
    check_early_stopping(config, complete=complete, has_initial_weights=has_initial_weights)
    why_none = check_calibrate(config, complete=complete, has_initial_weights=has_initial_weights)
    why_none = why_none or no_memory
    check_columns(config.run.n_ranks, config.run.center_ranks)
    keeps_rows = inputs.keeps_calibration_rows(config, complete=complete)
    if not complete or inputs.metric is not None:
        scores = False
    elif scores is None and inputs.warm_start is not None:  # its weights need the same features
        scores = any(t.get("mode") == "quantiles" for t in inputs.warm_start.setup.meta["scaling"])
    data = open_data(
        config, inputs.source, inputs.continued, why_none,
        keeps_calibration_rows=keeps_rows, scores=scores, patches=inputs.known_patches(config),
    )  # fmt: skip
    if data.calibration_rows is None and not data.unused:
        config = config.with_overrides({"run.calibrate": False})
    has_initial_weights = has_initial_weights or config.solver.warm_start is not None
    check_loss(config, data, complete=complete, has_initial_weights=has_initial_weights)
    check_log_link(config, data, complete=complete, has_initial_weights=has_initial_weights)
    check_target_transform(config, data)
    mode = requested_metric_mode(config, data, has_initial_weights=has_initial_weights)
    config = with_epochs(config, data.source.n_rows)
    try:
        return _with_metric(config, inputs, data, mode, fixed_sizes, complete)
    except MemoryBudgetError:
        if mode is not CHOSEN_TO_LEARN:
            raise
    return _with_metric(config, inputs, data, NO_MEMORY_FOR_METRIC, fixed_sizes, complete)


def _with_metric(
    config: RunConfig, inputs: RunInputs, data: Data, mode: MetricMode, fixed_sizes: Sizes | None,
    complete: bool,
) -> ResolvedRun:  # fmt: skip
    """Resolve the run with a metric mode: find the number of centers, and the precision "auto"."""

    def with_centers(p: int) -> ResolvedRun:
        resolved = partial(_with_centers, config, inputs, data, mode, fixed_sizes, complete, p)
        run = resolved()
        if fixed_sizes is None and _may_use_float64(run):
            with contextlib.suppress(MemoryBudgetError):
                widened_run = resolved(widened=True)
                if widened_run.in_order == run.in_order:
                    run.backend.close()
                    return widened_run
                widened_run.backend.close()
        return run

    if inputs.centers is not None:
        return with_centers(len(inputs.centers))
    features = config.model.features
    allowed = fixed_sizes is None or find(fixed_sizes.solver, features).takes_rows(fixed_sizes)
    if complete and allowed and may_take_all_rows(config, data):
        with contextlib.suppress(MemoryBudgetError):
            run = with_centers(data.base.n_rows)
            if run.in_order:
                return run
            run.backend.close()
    return with_centers(count_centers(config, data, complete=complete))


def _with_centers(
    config: RunConfig, inputs: RunInputs, data: Data, mode: MetricMode, fixed_sizes: Sizes | None,
    complete: bool, p: int, *, widened: bool = False,
) -> ResolvedRun:  # fmt: skip
    """Resolve the run with p centers. widened : whether precision "auto" is float64."""
    kernel, metric = kernel_in_metric(config, inputs, mode, data)
    settings = config.run
    threads = None if settings.threads == "auto" else settings.threads
    n_kernel_values = _kernel_values(config, data, p)
    backend = get_backend(settings.device, threads, settings.accelerator, n_kernel_values)
    try:
        budget = settings.memory if backend.name == "cpu" else settings.device_memory
        if budget == "auto":
            budget = default_budget(backend.memory_available()) // _ranks_per_host(config, inputs)
        budget_bytes = int(budget)
        transforms = data.source.feed_transforms
        origin = centers_from(config, inputs)
        selector = SELECTORS.get(origin)
        rows_as_centers = origin == "all" if selector is None else selector.selects_rows
        # Centers that are no rows, such as means of rows, need not be integers.
        may_be_integer = rows_as_centers or settings.precision == "integer"
        dtype = data.source.dtype if may_be_integer else np.dtype(np.float32)
        if config.model.features == "fourier":
            check_sampled(kernel)
            kernel = FourierFeatures(p, kernel.describe())
        widened = widened or (fixed_sizes is not None and fixed_sizes.widened)
        precision = resolve_precision(settings.precision, dtype, transforms, backend, kernel)
        precision = ("float64", None) if widened else precision
        on_cluster = inputs.client is not None
        if looks_for_categorical(config, data, precision[0], origin):
            kernel = with_max_categorical(kernel, data.d)
        problem = problem_shape(config, data, p, backend, precision[0], on_cluster, kernel)
        rows_are_centers = complete and _are_centers(config, origin, data, problem)
        metric_rows = min(EFFORT_LEVELS[config.model.effort].metric_rows, problem.n_rows)
        problem = replace(
            problem, complete=complete, rows_are_centers=rows_are_centers, widened=widened,
            metric_rows=metric_rows if mode.learns else 0,
            reads_stripes=_reads_stripes(problem, inputs),
        )  # fmt: skip
        if origin in (*SELECTORS, "all") and config.model.features != "fourier":
            if selector is not None:
                selection = selector.plan(problem, data.base.n_rows, budget_bytes)
                problem = replace(problem, selection=selection)
            streams_centers = problem.center_ranks > 1 and problem.selection is None
            problem = replace(problem, streams_centers=streams_centers)
        if fixed_sizes is None:
            method, sizes, buffers, reason = resolve(problem, config.solver, budget_bytes)
            sizes_reason = method.reason(problem, config.solver, sizes)
            sizes = replace(sizes, widened=widened)
        else:
            sizes, sizes_reason = fixed_sizes, None
            method, buffers, reason = _started_with(problem, config.solver, fixed_sizes)
        _check_centers(config, origin, data, method)
        kept_bytes = _keep_stores(config, inputs, data, problem, buffers, budget_bytes)
    except BaseException:
        backend.close()
        raise
    return ResolvedRun(
        config, inputs, data, problem, method, sizes, buffers, reason, sizes_reason, budget_bytes,
        backend, *precision, mode, metric, kept_bytes,
    )  # fmt: skip


def _keep_stores(
    config: RunConfig, inputs: RunInputs, data: Data, problem: ProblemShape, buffers: Buffers,
    budget_bytes: int,
) -> int:  # fmt: skip
    """Return the bytes of decoded stores that the loader keeps; 0 if a cluster reads the rows."""
    if inputs.client is not None or config.data.dask is not None:
        return 0
    host_budget = budget_bytes
    if problem.staging > 0:
        host_budget = default_budget(available_memory()) // _ranks_per_host(config, inputs)
    return keep_stores(buffers, problem, data.source.decoded_bytes, host_budget)


def _may_use_float64(run: ResolvedRun) -> bool:
    """Return whether precision "auto" may become float64.

    It may for regressions whose centers are all rows, and if the initial weights come from a run in
    float64. In float32, the rounding errors of kernel values are multiplied by large weights, which
    limits the accuracy for targets without noise. Once the noise is estimated, float32 is used if
    the noise exceeds the rounding errors, see `Direct.rounding_shows`.
    """
    if (run.config.run.precision, run.precision, run.backend.name) != ("auto", "exact", "cpu"):
        return False
    if run.inputs.continued:
        return False
    parent_path, parent = run.config.solver.warm_start, run.inputs.warm_start
    if parent_path is not None:
        options = storage_options_for(run.config, parent_path)
        parent = ParentRun.find(parent_path, options, load_centers=False, load_weights=False)
    if parent is not None:
        return parent.centers.dtype == np.float64
    return (
        run.in_order
        and isinstance(run.method, Direct)
        and run.method.may_widen(run.problem)
        and not run.problem.classes
    )


def _reads_stripes(problem: ProblemShape, inputs: RunInputs) -> bool:
    """Return whether each rank reads its stripe of the centers from the parent run.

    Fourier features are excluded, because rank 0 needs all of them to estimate the noise.
    """
    partitions_centers = problem.center_ranks > 1 and problem.features != "fourier"
    return partitions_centers and inputs.continued is not None


def _ranks_per_host(config: RunConfig, inputs: RunInputs) -> int:
    """Return the number of ranks that share the memory of this machine."""
    on_cluster = config.run.cluster is not None or inputs.client is not None
    return 1 if on_cluster else config.run.n_ranks


def _kernel_values(config: RunConfig, data: Data, p: int) -> int:
    """Return the approximate number of kernel values that the run evaluates.

    Some rows are needed to choose the kernel, all in each epoch, or once if all rows are centers.
    """
    n = data.source.n_rows
    passes = 1 if p == n else config.data.passes
    return n * passes * p + PLANNED_KERNELS * min(n, NOISE_ROWS) ** 2


def _are_centers(config: RunConfig, origin: str, data: Data, problem: ProblemShape) -> bool:
    """Return whether the centers are all rows, and the rows do not change between epochs."""
    are_rows = config.model.features == "kernel" and origin in ("random", "all")
    unchanged = data.repeats and not data.augmented
    return are_rows and unchanged and problem.p == data.base.n_rows == problem.n_rows


def _started_with(
    problem: ProblemShape, options: SolverConfig, sizes: Sizes
) -> tuple[Method[Any], Buffers, str]:
    """Return method, buffers and reason of a run that was started with these sizes."""
    method = find(sizes.solver, problem.features, squares=problem.squares)
    method.check(problem, options)
    if problem.ranks > 1 and method.takes_rows(sizes):
        raise ConfigError(
            f"{mention('run.ranks', problem.ranks)} cannot share the steps of a run whose centers "
            "are all of its rows",
            "leave ranks out, or start a new run with ranks in another run_dir",
        )
    return method, method.count(problem, sizes), "as when the run was started"


def _check_centers(config: RunConfig, origin: str, data: Data, method: Method[Any]) -> None:
    """Raise ConfigError if a method that takes all rows as centers cannot do so."""
    if not method.in_place:
        return
    if data.augmented:
        raise ConfigError(
            f"{mention('solver', method.name)} takes the training rows themselves as centers and "
            "cannot be used with random transforms, copies, weights or class_sampling",
            f"use {method.instead}",
        )
    model, n = config.model, data.base.n_rows
    if origin not in ("random", "all") or model.n_centers not in ("auto", n):
        count = "" if model.n_centers == "auto" else f"{mention('n_centers', model.n_centers)}: "
        raise ConfigError(
            f"{count}{mention('solver', method.name)} takes all {n} training rows as centers",
            f"leave centers and n_centers out, or use {method.instead}",
        )
