"""A run before it starts: the data opened, everything "auto" resolved, memory counted.

`open_run` is what `streamkern plan` prints and what `train` begins with; it reads metadata only,
and a sample of the rows where their scaling needs one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.basics.errors import ConfigError
from streamkern.config.run_config import RunConfig
from streamkern.filesystem.urls import local_path
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.fourier import FourierFeatures, check_sampled
from streamkern.kernels.points import Grid, point_bytes, point_width, scratch_bytes
from streamkern.planning.alternatives import block_reason
from streamkern.planning.auto_solver import choose
from streamkern.planning.budget import default_budget
from streamkern.planning.center_costs import ROW_METHODS, Selection, selection
from streamkern.planning.memory import Buffers, count
from streamkern.planning.sizes import ON_FEATURES, Problem, Sizes, Wishes
from streamkern.stream.feed import transform_dtype
from streamkern.stream.loader import MAX_THREADS
from streamkern.stream.sources.base import Source, read_ahead, target_bytes, unit_sizes
from streamkern.train.precision import resolve_precision
from streamkern.train.training_data import Data, count_centers, open_data, with_epochs
from streamkern.train.warm_start import WarmStart

OF_STEPS = ("damping", "average", "step_scale")  # of the block solver, and not of "direct"
SAVING = 128 << 20  # beside the arrays, while `checksums` has chunks of them on their way


IN_MEMORY = "in memory"


@dataclass(frozen=True)
class Given:
    """What the caller of a run hands over in place of what its settings name.

    source, test : of data.train and data.test. centers : (p, d) or (p, *row_shape) rows in storage
    form, of model.centers. client : of data.dask, a `distributed.Client`. warm : of
    solver.warm_start.
    """

    source: Source | None = None
    test: Source | None = None
    centers: npt.NDArray[Any] | None = None
    client: Any = None
    warm: WarmStart | None = None


NOTHING = Given()


@dataclass(frozen=True)
class Run:
    """Everything `plan` prints and `train` needs before the first row is read.

    config : with the epochs as a number. given : in place of what the settings name.
    reason : why it is this solver. block_reason : why its blocks have this size, if it was chosen.
    """

    config: RunConfig
    given: Given
    data: Data
    problem: Problem
    sizes: Sizes
    buffers: Buffers
    reason: str
    block_reason: str | None
    budget_bytes: int
    backend: Backend
    precision: str
    grid: Grid | None


def open_run(config: RunConfig, given: Given = NOTHING, *, fixed_sizes: Sizes | None = None) -> Run:
    """Open the data and resolve the sizes.

    fixed_sizes : those a run was started with. The caller closes `Run.backend`.
    """
    kernel, centers = get_kernel(config.model.kernel), given.centers
    if centers is not None:
        config = config.with_overrides({"model.centers": IN_MEMORY})
    data = open_data(config, given.source)
    config = with_epochs(config, data.source.n_rows)
    p = count_centers(config, data) if centers is None else len(centers)
    settings = config.run
    threads = None if settings.threads == "auto" else settings.threads
    backend = get_backend(settings.device, threads, settings.accelerator)
    try:
        budget = settings.memory if backend.name == "cpu" else settings.device_memory
        budget_bytes = default_budget(backend.memory_available()) if budget == "auto" else budget
        transforms = data.source.feed_transforms
        own = config.model.centers in (*ROW_METHODS, "all")
        # Centers from elsewhere need not be integers, and means are none.
        integers = own or settings.precision == "integer"
        dtype = data.source.dtype if integers else np.dtype(np.float32)
        if config.model.features == "fourier":
            check_sampled(kernel)
            kernel = FourierFeatures(p, kernel.describe())
        precision = resolve_precision(settings.precision, dtype, transforms, backend, kernel)
        on_cluster = given.client is not None
        problem = _problem(config, data, p, backend, precision[0], on_cluster, kernel)
        if config.model.features != "fourier":
            problem = replace(problem, selection=_selection(config, data, problem, budget_bytes))
        if fixed_sizes is None:
            wishes, ridge = _wishes(config), config.solver.ridge
            sizes, buffers, reason = choose(problem, wishes, ridge, int(budget_bytes))
            block = block_reason(problem, wishes, sizes)
        else:
            sizes, buffers = fixed_sizes, count(problem, fixed_sizes)
            reason, block = "as when the run was started", None
        _check_method(config, data, sizes)
    except BaseException:
        backend.close()
        raise
    return Run(
        config, given, data, problem, sizes, buffers, reason, block, int(budget_bytes), backend,
        *precision,
    )  # fmt: skip


def _check_method(config: RunConfig, data: Data, sizes: Sizes) -> None:
    if config.solver.ridge and sizes.solver == "eigenpro1" and not sizes.linear:
        raise ConfigError(
            f"solver.ridge={config.solver.ridge:g} is not defined for solver "
            f"{sizes.solver!r} on a kernel; set it to 0 or use solver 'block', 'direct' or 'falkon'"
        )
    if sizes.solver == "falkon" and config.data.passes < 2:
        raise ConfigError(
            f"data.epochs={config.data.passes} must be at least 2 with solver 'falkon', whose "
            "first pass is no iteration yet; set it to the iterations wished for and 1 more"
        )
    if not sizes.in_place:
        return
    instead = "another solver"
    if sizes.solver in ON_FEATURES:
        instead += ", or features='nystrom' for chosen centers"
    if data.augmented:
        raise ConfigError(
            f"solver={sizes.solver!r} takes the training rows themselves as centers and can not be "
            f"used with random transforms, copies or weights; use {instead}"
        )
    model, n = config.model, data.base.n_rows
    if model.centers not in ("random", "all") or model.n_centers not in ("auto", n):
        count = "" if model.n_centers == "auto" else f"n_centers={model.n_centers}: "
        raise ConfigError(
            f"{count}solver={sizes.solver!r} takes all {n} training rows as centers; leave centers "
            f"and n_centers out, or use {instead}"
        )


def _selection(
    config: RunConfig, data: Data, problem: Problem, budget_bytes: int
) -> Selection | None:
    return selection(
        config.model.centers, data.base.n_rows, problem.p, problem.d,
        row_bytes=problem.row_bytes, point_bytes=problem.point_bytes or 0,
        itemsize=problem.itemsize, threads=problem.threads, budget_bytes=budget_bytes,
    )  # fmt: skip


def _problem(
    config: RunConfig, data: Data, p: int, backend: Backend, precision: str, on_cluster: bool,
    kernel: Kernel,
) -> Problem:  # fmt: skip
    source, run_dir = data.source, config.run.run_dir
    # For a network or a cluster, rather than for this machine.
    waits = on_cluster or config.data.dask is not None or source.remote
    width = point_width(data.d, precision, backend, kernel)
    itemsize = 8 if precision == "float64" else 4
    row_bytes = data.d * source.dtype.itemsize + target_bytes(source)
    unit_rows = int(unit_sizes(source).max())
    floating = np.dtype(f"f{itemsize}")
    transformed = transform_dtype(source.dtype, floating, source.feed_transforms).itemsize
    return Problem(
        n_rows=source.n_rows,
        epochs=config.data.passes,
        d=data.d,
        c=source.n_outputs,
        p=p,
        row_bytes=row_bytes,
        unit_rows=unit_rows,
        itemsize=itemsize,
        threads=backend.threads,
        width=width,
        tile_bytes=backend.tile_rows * min(backend.tile_width(width), p) * itemsize,
        library_bytes=backend.library_bytes,
        feed_arrays=1 + transformed // itemsize * max(1, len(source.feed_transforms)),
        transformed=transformed,
        point_bytes=point_bytes(data.d, precision, backend, kernel),
        scratch_bytes=backend.prepare_rows * scratch_bytes(data.d, precision, kernel),
        staging=backend.staging,
        # Where reads wait for a network, as many are under way as `in_flight_bytes` allows.
        readers=MAX_THREADS if waits else 0,
        units_in_hand=read_ahead(waits),
        saving=SAVING if run_dir is not None and local_path(run_dir) is None else 0,
        kept=run_dir is not None,
        repeats=data.repeats,
        ridge=config.solver.ridge > 0,
        float64=1.0 if itemsize == 8 else backend.float64,
    )


def _wishes(config: RunConfig) -> Wishes:
    solver = config.solver

    def fixed(value: Any) -> Any:
        return None if value == "auto" else value

    return Wishes(
        solver=solver.name,
        features=config.model.features,
        batch_size=fixed(config.data.batch_size),
        block_size=fixed(solver.block_size),
        n_nystrom=fixed(solver.n_nystrom),
        level=fixed(solver.level),
        period=fixed(solver.period),
        projection=fixed(solver.projection),
        steps=next((name for name in OF_STEPS if name in solver.changed), None),
    )
