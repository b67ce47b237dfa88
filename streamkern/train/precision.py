"""How a run takes its distances: `run.precision`, and what "auto" means for the data at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamkern.backend.base import Backend
from streamkern.basics.errors import ConfigError
from streamkern.kernels.base import Kernel
from streamkern.kernels.points import Grid
from streamkern.kernels.products import check_precision
from streamkern.stream.sources.transforms import Scale, Transform, transform_name


def resolve_precision(
    wish: str,
    dtype: np.dtype[Any],
    transforms: Sequence[Transform],
    backend: Backend,
    kernel: Kernel | None = None,
) -> tuple[str, Grid | None]:
    """The precision, and the grid that the features lie on where it is "integer".

    Parameters
    ----------
    wish : "auto" or one of `kernels.PRECISIONS`. "auto" is the fastest whose distances are as good
        as float32's: "integer" or "high" on tensor cores, "exact" anywhere else.
    dtype : of the stored features. transforms : all that a row goes through after it was read.
    kernel : None for one of distances in no metric of its own.

    Raises
    ------
    ConfigError
        "integer" is asked for and the features are no integers when they reach the kernel, or a
        mode of distances for a kernel that takes none.
    """
    if kernel is not None and (kernel.geometry != "distance" or kernel.metric is not None):
        check_precision("exact" if wish == "auto" else wish, kernel)
        high = kernel.geometry == "distance" and backend.tensor_cores
        return (("high" if high else "exact") if wish == "auto" else wish), None
    if wish not in ("auto", "integer"):
        return wish, None
    if wish == "auto" and not backend.tensor_cores:
        return "exact", None
    grid = _grid(dtype, transforms)
    if isinstance(grid, Grid):
        return "integer", grid
    if wish == "integer":
        raise ConfigError(
            f"run.precision='integer' needs rows of uint8 that are moved and scaled as a whole at "
            f"most, but {grid}; set precision='auto'"
        )
    return "high", None


def _grid(dtype: np.dtype[Any], transforms: Sequence[Transform]) -> Grid | str:
    """The grid, or why there is none."""
    if dtype != np.uint8:
        return f"they are {dtype}"
    offset, step = 0.0, 1.0
    for transform in transforms:
        if not isinstance(transform, Scale) or transform.mode == "feature":
            return f"they go through {transform_name(transform)!r}"
        if transform.mode == "global":
            mean, scale = float(transform.mean), float(transform.scale)
            offset, step = (offset - mean) / scale, step / scale
    return Grid(offset, step)
