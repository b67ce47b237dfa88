"""Resolve a run before it starts: open the data, replace every "auto", and plan the memory.

`streamkern plan` prints the result of `open_run`, and `train` starts with it. Rows are read only as
by `training_data.open_data`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
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
from streamkern.kernels.base import Kernel
from streamkern.kernels.fourier import FourierFeatures, check_has_frequencies
from streamkern.kernels.points import Grid
from streamkern.losses.base import Loss
from streamkern.losses.log_link import LogLink
from streamkern.losses.losses import make_loss
from streamkern.planning.memory import Buffers, default_budget, keep_stores
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import EFFORT_LEVELS, Sizes
from streamkern.solver.direct import Direct
from streamkern.solver.method import Method
from streamkern.solver.methods import find, resolve
from streamkern.solver.precondition.noise import NOISE_ROWS
from streamkern.stream.feed import CheckTargets
from streamkern.stream.sources.sampling import rows_in_source
from streamkern.train.resolve.calibration_split import NO_MEMORY_TO_CALIBRATE, check_calibrate
from streamkern.train.resolve.check_loss import check_log_targets, check_loss
from streamkern.train.resolve.early_stopping import check_early_stopping
from streamkern.train.resolve.given_arrays import count_centers, may_take_all_rows
from streamkern.train.resolve.metric_mode import (
    CHOSEN_TO_LEARN,
    NO_MEMORY_FOR_METRIC,
    MetricMode,
    kernel_in_metric,
    looks_for_categorical,
    may_have_trees,
    requested_metric_mode,
    with_placeholders,
)
from streamkern.train.resolve.problem_shape import problem_shape, resolve_precision
from streamkern.train.resolve.run_inputs import NO_INPUTS, RunInputs, centers_from
from streamkern.train.resolve.training_data import Data, open_data, with_epochs

PLANNED_KERNELS = 16
"""Approximate number of kernels and bandwidths that are tried if both are searched for."""


@dataclass(frozen=True)
class ResolvedRun:
    """A run whose data are open and whose sizes are known, before its setup.

    config : settings, with the epochs as a number
    inputs : objects in place of settings
    data : the opened training rows
    problem : numbers that sizes and costs follow from
    method, sizes : the solver's method, and its sizes
    buffers : planned memory
    reason : why the method was chosen
    sizes_reason : why the sizes were chosen; None if there is nothing to report
    budget_bytes : memory budget of the device on which the run computes
    backend : backend of the run
    precision : resolved run.precision
    grid : grid of the features, if the precision is "integer"; else None
    metric_mode : whether a metric is learned, given or not used, and why
    metric : given metric, scales (d,) or a matrix (d, r); None if none is given by itself
    kept_bytes : bytes of the stores that the reader keeps decoded, see `keep_stores`
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
        return make_loss(model.loss, model.quantile)

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
                check(Y, rows_in_source(self.data.source, row_ids))
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
        return _open(config, inputs, fixed_sizes, complete, scores)
    except MemoryBudgetError:
        # Ranks must set the same rows aside, but each measures its own memory.
        if config.run.calibrate != "auto" or fixed_sizes is not None or config.run.n_ranks > 1:
            raise
    # Retry without calibration rows, whose evaluation takes memory.
    return _open(config, inputs, fixed_sizes, complete, scores, NO_MEMORY_TO_CALIBRATE)


def _open(
    config: RunConfig, inputs: RunInputs, fixed_sizes: Sizes | None, complete: bool,
    scores: bool | None, no_memory: str | None = None,
) -> ResolvedRun:  # fmt: skip
    """Open the data, and resolve the run.

    If "auto" has chosen to learn a metric, and that needs too much memory, none is learned.

    no_memory : why no calibration rows can be set aside, or None
    """
    warm_start, parent = inputs.warm_start, inputs.continued_run
    has_initial_weights = inputs.has_initial_weights(config)
    check_early_stopping(config, complete=complete, has_initial_weights=has_initial_weights)
    why_none = check_calibrate(config, complete=complete, has_initial_weights=has_initial_weights)
    check_columns(config.run.n_ranks, config.run.center_ranks)
    keeps_rows = inputs.keeps_calibration_rows(config, complete=complete)
    pixels = inputs.pixels
    if not complete or inputs.metric is not None:
        scores = False
    elif scores is None and warm_start is not None:  # its weights need the same features
        modes = [transform.get("mode") for transform in warm_start.setup.meta["scaling"]]
        scores, pixels = "quantiles" in modes, "global" in modes
    data = open_data(
        config, inputs.source, parent, why_none or no_memory,
        keeps_calibration_rows=keeps_rows, scores=scores, patches=inputs.known_patches(config),
        pixels=pixels,
    )  # fmt: skip
    if data.split.calibration_rows is None and not data.split.leaves_rows_unused:
        config = config.with_overrides({"run.calibrate": False})
    check_loss(config, data, complete=complete, has_initial_weights=has_initial_weights)
    mode = requested_metric_mode(config, data, has_initial_weights=has_initial_weights)
    config = with_epochs(config, data.source.n_rows)
    opened_run = _OpenedRun(config, inputs, data, fixed_sizes, complete)
    try:
        return opened_run.run_in(mode)
    except MemoryBudgetError:
        if not (mode is CHOSEN_TO_LEARN or mode.searches_trees):
            raise
    return opened_run.run_in(NO_MEMORY_FOR_METRIC)


@dataclass(frozen=True)
class _OpenedRun:
    """A run whose data are open, with the arguments of `open_run`."""

    config: RunConfig
    inputs: RunInputs
    data: Data
    fixed_sizes: Sizes | None
    complete: bool

    def run_in(self, mode: MetricMode) -> ResolvedRun:
        """Resolve the run with a metric mode: find the number of centers, and the precision."""
        if self.inputs.centers is not None:
            return self._run_of(mode, len(self.inputs.centers))
        sizes, features = self.fixed_sizes, self.config.model.features
        # A run that was started keeps its choice.
        is_allowed = sizes is None or find(sizes.solver, features).takes_rows(sizes)
        if self.complete and is_allowed and may_take_all_rows(self.config, self.data):
            with contextlib.suppress(MemoryBudgetError):
                run = self._run_of(mode, self.data.base.n_rows)
                if run.in_order:
                    return run
                run.backend.close()
        n_centers = count_centers(self.config, self.data, complete=self.complete)
        return self._run_of(mode, n_centers)

    def _run_of(self, mode: MetricMode, p: int) -> ResolvedRun:
        """Resolve the run with p centers, in float64 if "auto" means that."""
        run = self._run_with(mode, p)
        if self.fixed_sizes is None and _may_use_float64(run):
            with contextlib.suppress(MemoryBudgetError):
                widened_run = self._run_with(mode, p, widened=True)
                if widened_run.in_order == run.in_order:
                    run.backend.close()
                    return widened_run
                widened_run.backend.close()
        return run

    def _run_with(self, mode: MetricMode, p: int, *, widened: bool = False) -> ResolvedRun:
        """Resolve the run with p centers. widened : whether precision "auto" is float64."""
        config, inputs, data, settings = self.config, self.inputs, self.data, self.config.run
        kernel, metric = kernel_in_metric(config, inputs, mode, data)
        threads = None if settings.threads == "auto" else settings.threads
        n_kernel_values = _n_kernel_values(config, data, p)
        backend = get_backend(settings.device, threads, settings.accelerator, n_kernel_values)
        try:
            budget = settings.memory if backend.name == "cpu" else settings.device_memory
            if budget == "auto":
                budget = default_budget(backend.memory_available()) // self._ranks_per_host
            budget_bytes, origin = int(budget), centers_from(config, inputs)
            selector = SELECTORS.get(origin)
            rows_as_centers = origin == "all" if selector is None else selector.selects_rows
            # Centers that are no rows, such as means of rows, need not be integers.
            may_be_integer = rows_as_centers or settings.precision == "integer"
            dtype = data.source.dtype if may_be_integer else np.dtype(np.float32)
            if config.model.features == "fourier":
                check_has_frequencies(kernel)
                kernel = FourierFeatures(p, kernel.describe())
            widened = widened or (self.fixed_sizes is not None and self.fixed_sizes.widened)
            transforms = data.source.feed_transforms
            precision = resolve_precision(settings.precision, dtype, transforms, backend, kernel)
            precision = ("float64", None) if widened else precision
            settings_of_search = config, data, precision[0], origin
            trees = may_have_trees(*settings_of_search, mode)
            n_categorical = data.d if looks_for_categorical(*settings_of_search) else 0
            kernel = with_placeholders(kernel, n_categorical, trees=trees)
            problem = self._problem(
                mode, p, backend, precision[0], kernel, widened=widened, trees=trees
            )
            if origin in (*SELECTORS, "all") and config.model.features != "fourier":
                if selector is not None:
                    selection = selector.plan(problem, data.base.n_rows, budget_bytes)
                    problem = replace(problem, selection=selection)
                streams_centers = problem.center_ranks > 1 and problem.selection is None
                problem = replace(problem, streams_centers=streams_centers)
            method, sizes, buffers, reasons = self._method_and_sizes(problem, budget_bytes)
            _check_centers(config, origin, data, method)
            kept_bytes = self._kept_bytes(problem, buffers, budget_bytes)
        except BaseException:
            backend.close()
            raise
        return ResolvedRun(
            config, inputs, data, problem, method, sizes, buffers, *reasons, budget_bytes,
            backend, *precision, mode, metric, kept_bytes,
        )  # fmt: skip

    def _problem(
        self, mode: MetricMode, p: int, backend: Backend, precision: str, kernel: Kernel, *,
        widened: bool, trees: bool,
    ) -> ProblemShape:  # fmt: skip
        """Return the shape of the problem. p : number of centers, trees : see `may_have_trees`"""
        config, inputs, data = self.config, self.inputs, self.data
        on_cluster = inputs.client is not None
        problem = problem_shape(config, data, p, backend, precision, on_cluster, kernel)
        search_rows = min(EFFORT_LEVELS[config.model.effort].metric_rows, problem.n_rows)
        # Rank 0 needs all Fourier features to estimate the noise.
        partitions_centers = problem.center_ranks > 1 and problem.features != "fourier"
        may_be_rows = problem.features == "kernel" and centers_from(config, inputs) in (
            "random", "all",
        )  # fmt: skip
        are_all_rows = problem.p == data.base.n_rows == problem.n_rows and data.repeats
        return replace(
            problem, complete=self.complete, widened=widened,
            rows_are_centers=self.complete and may_be_rows and are_all_rows,
            metric_rows=search_rows if mode.learns else 0,
            tree_rows=search_rows if trees else 0,
            reads_stripes=partitions_centers and inputs.continued_run is not None,
        )  # fmt: skip

    def _method_and_sizes(
        self, problem: ProblemShape, budget_bytes: int
    ) -> tuple[Method[Any], Sizes, Buffers, tuple[str, str | None]]:
        """Return the method, its sizes and buffers, and the reasons for method and sizes."""
        options, sizes = self.config.solver, self.fixed_sizes
        if sizes is None:
            method, sizes, buffers, reason = resolve(problem, options, budget_bytes)
            reasons = reason, method.reason(problem, options, sizes)
            return method, replace(sizes, widened=problem.widened), buffers, reasons
        method = find(sizes.solver, problem.features, squares=problem.squares)
        method.check(problem, options)
        if problem.ranks > 1 and method.takes_rows(sizes):
            raise ConfigError(
                f"{mention('run.ranks', problem.ranks)} cannot share the steps of a run whose "
                "centers are all of its rows",
                "leave ranks out, or start a new run with ranks in another run_dir",
            )
        return method, sizes, method.count(problem, sizes), ("as when the run was started", None)

    def _kept_bytes(self, problem: ProblemShape, buffers: Buffers, budget_bytes: int) -> int:
        """Return the bytes of decoded stores that the reader keeps, or 0; see `keep_stores`.

        If a cluster reads the rows, none are kept.
        """
        if self.inputs.client is not None or self.config.data.dask is not None:
            return 0
        if problem.staging > 0:
            budget_bytes = default_budget(available_memory()) // self._ranks_per_host
        return keep_stores(buffers, problem, self.data.source.decoded_bytes, budget_bytes)

    @property
    def _ranks_per_host(self) -> int:
        """Number of ranks that share the memory of this machine."""
        on_cluster = self.config.run.cluster is not None or self.inputs.client is not None
        return 1 if on_cluster else self.config.run.n_ranks


def _may_use_float64(run: ResolvedRun) -> bool:
    """Return whether precision "auto" may become float64.

    It may for regressions whose centers are all rows, and if the initial weights come from a run in
    float64. In float32, the rounding errors of kernel values are multiplied by large weights, which
    limits the accuracy for targets without noise. Once the noise is estimated, float32 is used if
    the noise exceeds the rounding errors, see `Direct.rounding_shows`.
    """
    if (run.config.run.precision, run.precision, run.backend.name) != ("auto", "exact", "cpu"):
        return False
    if run.inputs.continued_run:
        return False
    parent = run.inputs.weights_from(run.config)
    if parent is not None:
        return parent.centers.dtype == np.float64
    return (
        run.in_order
        and isinstance(run.method, Direct)
        and run.method.may_widen(run.problem)
        and not run.problem.classes
    )


def _n_kernel_values(config: RunConfig, data: Data, p: int) -> int:
    """Return the approximate number of kernel values that the run evaluates.

    Some rows are needed to choose the kernel, all in each epoch, or once if all rows are centers.
    """
    n = data.source.n_rows
    n_epochs = 1 if p == n else config.data.n_epochs
    return n * n_epochs * p + PLANNED_KERNELS * min(n, NOISE_ROWS) ** 2


def _check_centers(config: RunConfig, origin: str, data: Data, method: Method[Any]) -> None:
    """Raise ConfigError if a method that takes all rows as centers cannot do so."""
    if not method.in_place:
        return
    if data.is_augmented:
        raise ConfigError(
            f"{mention('solver', method.name)} takes the training rows themselves as centers and "
            "cannot be used with random transforms, copies, weights or class_sampling",
            f"use {method.alternative}",
        )
    model, n = config.model, data.base.n_rows
    if origin not in ("random", "all") or model.n_centers not in ("auto", n):
        count = "" if model.n_centers == "auto" else f"{mention('n_centers', model.n_centers)}: "
        raise ConfigError(
            f"{count}{mention('solver', method.name)} takes all {n} training rows as centers",
            f"leave centers and n_centers out, or use {method.alternative}",
        )
