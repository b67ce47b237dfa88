"""Collect the numbers of a run from which its sizes, memory and costs follow.

One of them is run.precision, the arithmetic of the distances, resolved for the data and the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from streamkern.backend.base import Backend
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.run_config import RunConfig
from streamkern.config.solver import number_or_none, solver_options
from streamkern.filesystem.urls import local_path
from streamkern.kernels.base import Kernel
from streamkern.kernels.points import (
    Grid,
    check_precision,
    left_bytes,
    point_bytes,
    point_width,
    scratch_bytes,
)
from streamkern.losses.losses import SQUARES
from streamkern.planning.memory import METRIC_STEP_FIT_ROWS
from streamkern.planning.problem import ProblemShape
from streamkern.stream.batch_reader import MAX_THREADS
from streamkern.stream.feed import transform_dtype
from streamkern.stream.sources.base import n_read_ahead, target_bytes
from streamkern.stream.sources.mixture import stored_rows
from streamkern.stream.sources.patch_features import patches_among
from streamkern.stream.sources.quantile_scores import shape_after
from streamkern.stream.sources.random_transforms import GaussianNoise
from streamkern.stream.sources.split import max_rows_read
from streamkern.stream.sources.transforms import Scale, Transform, integers_stay, transform_name
from streamkern.stream.sources.unit_edges import unit_sizes
from streamkern.train.resolve.calibration_split import MIN_CALIBRATED_ROWS
from streamkern.train.resolve.training_data import Data

SAVE_CHUNK_BYTES = 128 << 20
"""Bytes that a save needs in addition to its arrays, for the chunks that `checksums` holds."""


def widths(row_shape: tuple[int, ...], transforms: Sequence[Transform]) -> list[int]:
    """Return the number of columns of a row after each transform; without transforms, of a row."""
    shapes = [shape_after(transforms[:k], row_shape) for k in range(1, len(transforms) + 1)]
    return [math.prod(shape) for shape in shapes or [row_shape]]


def _left_bytes(d: int, p: int, precision: str, backend: Backend, kernel: Kernel) -> int:
    """Return the bytes of prepared left points (centers or rows) that a product holds at once."""
    rows = min(backend.threads * backend.tile_rows, max(p, METRIC_STEP_FIT_ROWS))
    return rows * left_bytes(d, precision, backend, kernel)


def _tile_bytes(p: int, width: int, itemsize: int, backend: Backend, kernel: Kernel) -> int:
    """Return the bytes of a tile of a kernel matrix, and of the arrays of `add_unequal` and
    `add_count_of_unequal`.

    width : columns of a prepared row
    """
    compared_bytes = itemsize + 2 if kernel.n_compared else 0
    return backend.tile_rows * min(backend.tile_width(width), p) * (itemsize + compared_bytes)


def _scratch_bytes(
    data: Data, backend: Backend, precision: str, kernel: Kernel, itemsize: int
) -> int:
    """Return the scratch memory, in bytes, of a thread or of a device while it prepares rows.

    itemsize : bytes of an entry in the transforms
    """
    prepared = backend.prepare_rows * scratch_bytes(data.d, precision, kernel)
    patches, shape = patches_among(data.fixed_transforms), data.source.row_shape
    if patches is None:
        return prepared
    return max(prepared, patches.tile_bytes(shape, itemsize, on_host=backend.staging == 0))


def plans_left_out(config: RunConfig, data: Data, p: int) -> bool:
    """Return whether the memory plan includes leave-one-out predictions after training.

    They are made if there are too few rows for calibrate="auto" to set some aside. Methods whose
    centers are all rows need no memory for them.
    """
    has_few_rows = p <= data.source.n_rows < MIN_CALIBRATED_ROWS and config.run.n_ranks == 1
    return (
        data.split.allows_leave_one_out
        and has_few_rows
        and data.repeats
        and config.data.class_sampling is None
    )


def problem_shape(
    config: RunConfig, data: Data, p: int, backend: Backend, precision: str, on_cluster: bool,
    kernel: Kernel,
) -> ProblemShape:  # fmt: skip
    """Return the shape of the problem with p centers.

    on_cluster : whether a Dask cluster reads the rows
    """
    source, run_dir, levels = data.source, config.run.run_dir, config.model.quantile
    calibration_rows = data.split.calibration_rows
    waits = on_cluster or config.data.dask is not None or source.remote  # for a network
    uploads = run_dir is not None and local_path(run_dir) is None
    itemsize = 8 if precision == "float64" else 4
    width = point_width(data.d, precision, backend, kernel)
    floating = np.dtype(f"f{itemsize}")
    transformed = transform_dtype(source.dtype, floating, source.feed_transforms).itemsize
    columns = widths(source.row_shape, source.feed_transforms)
    return ProblemShape(
        n_rows=source.n_rows,
        epochs=config.data.n_epochs,
        d=data.d,
        c=len(levels) if isinstance(levels, tuple) else source.n_outputs,
        p=p,
        batch_size=number_or_none(config.data.batch_size),
        row_bytes=math.prod(source.row_shape) * source.dtype.itemsize + target_bytes(source),
        unit_rows=int(unit_sizes(source).max()),
        itemsize=itemsize,
        threads=backend.threads,
        width=width,
        costs=backend.costs(precision),
        draws=len(data.fixed_transforms) < len(source.feed_transforms),
        tile_bytes=_tile_bytes(p, width, itemsize, backend, kernel),
        left_bytes=_left_bytes(data.d, p, precision, backend, kernel),
        library_bytes=backend.library_bytes,
        feed_arrays=1 + transformed // itemsize * -(-sum(columns) // data.d),
        transform_itemsize=transformed * -(-max(columns) // data.d),
        point_bytes=point_bytes(data.d, precision, backend, kernel),
        scratch_bytes=_scratch_bytes(data, backend, precision, kernel, transformed),
        staging=backend.staging,
        readers=MAX_THREADS if waits else 0,  # `in_flight_bytes` bounds pending reads of a network
        units_in_hand=n_read_ahead(waits),
        upload_bytes=SAVE_CHUNK_BYTES if uploads else 0,
        writes_checkpoints=run_dir is not None,
        repeats=data.repeats,
        ridge=config.solver.ridge != 0 and "ridge" in solver_options(config.solver.name),
        finds_ridge=config.solver.ridge == "auto",
        finds_bandwidth="auto" in (config.model.bandwidth, config.model.kernel),
        metric_bytes=0 if kernel.metric is None else kernel.metric.size * 8,
        n_stored=stored_rows(source).n_rows,
        hides_copies=source.hides_copies,
        float64=1.0 if itemsize == 8 else backend.float64_cost,
        features=config.model.features,
        classes=source.classes is not None,
        several_targets=source.classes is None and source.n_outputs > 1,
        posterior=config.solver.posterior,
        squares=config.model.loss == SQUARES,
        n_validation_rows=0 if data.validation_rows is None else data.validation_rows.n_rows,
        n_calibration_rows=0 if calibration_rows is None else calibration_rows.n_rows,
        left_out=plans_left_out(config, data, p),
        ranks=config.run.n_ranks,
        center_ranks=config.run.center_ranks,
        has_initial_weights=config.solver.warm_start is not None,
        read_rows=max_rows_read(source),
    )


def resolve_precision(
    requested: str,
    dtype: np.dtype[Any],
    transforms: Sequence[Transform],
    backend: Backend,
    kernel: Kernel | None = None,
) -> tuple[str, Grid | None]:
    """Return the precision and, if it is "integer", the grid on which the features lie.

    Parameters
    ----------
    requested : "auto" or one of `kernels.PRECISIONS`. "auto" is the fastest mode whose distances
        are as accurate as in float32: "integer" or "high" on tensor cores, "exact" elsewhere.
    dtype : dtype of the stored features.
    transforms : all transforms that are applied to a row after it is read.
    backend : backend of the run.
    kernel : None for a kernel of distances without a metric or categorical features.

    Raises
    ------
    ConfigError
        "integer" is requested and the features are not integers when they reach the kernel, or the
        kernel does not support the requested mode.
    """
    if kernel is not None and (
        kernel.geometry != "distance" or kernel.metric is not None or kernel.n_compared
        or kernel.sparse
    ):  # fmt: skip
        check_precision("exact" if requested == "auto" else requested, kernel)
        if requested != "auto":
            return requested, None
        reads_values = bool(kernel.n_compared) or kernel.sparse
        allows_high = kernel.geometry == "distance" and not reads_values
        return "high" if allows_high and backend.tensor_cores else "exact", None
    if requested not in ("auto", "integer"):
        return requested, None
    if requested == "auto" and not backend.tensor_cores:
        return "exact", None
    grid = _grid(dtype, transforms)
    if isinstance(grid, Grid):
        return "integer", grid
    if requested == "integer":
        raise ConfigError(
            f"{mention('run.precision', 'integer')} needs rows of uint8 that stay integers until "
            f"they are scaled by one mean and one factor, but {grid}",
            f"give {mention('precision', 'auto')}",
        )
    return "high", None


def _grid(dtype: np.dtype[Any], transforms: Sequence[Transform]) -> Grid | str:
    """Return the grid of the transformed features, or the reason why they do not lie on one."""
    if dtype != np.uint8:
        return f"they are {dtype}"
    offset, step = 0.0, 1.0
    for transform in transforms:
        name = transform_name(transform)
        if isinstance(transform, Scale) and transform.mode == "global":
            mean, scale = float(transform.mean), float(transform.scale)
            offset, step = (offset - mean) / scale, step / scale
        elif not integers_stay([transform]):
            remedy = " (round=true would keep them)" if isinstance(transform, GaussianNoise) else ""
            return f"they go through {name!r}, which does not keep them such{remedy}"
        elif (offset, step) != (0.0, 1.0) and getattr(transform, "mode", "") != "none":
            return f"they go through {name!r} after they were scaled; put it before"
    return Grid(offset, step)
