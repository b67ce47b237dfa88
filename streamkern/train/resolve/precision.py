"""Resolve run.precision, the arithmetic of the distances of a run, for its data and its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamkern.backend.base import Backend
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.kernels.base import Kernel
from streamkern.kernels.points import Grid, check_precision
from streamkern.stream.sources.random_transforms import GaussianNoise
from streamkern.stream.sources.transforms import Scale, Transform, integers_stay, transform_name


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
        kernel.geometry != "distance" or kernel.metric is not None or kernel.categorical
        or kernel.sparse
    ):  # fmt: skip
        check_precision("exact" if requested == "auto" else requested, kernel)
        if requested != "auto":
            return requested, None
        reads_values = bool(kernel.categorical) or kernel.sparse
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
