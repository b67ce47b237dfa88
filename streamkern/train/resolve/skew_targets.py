"""Targets that may be simpler on a log scale: not below 0, and most of them small."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.config.run_config import RunConfig
from streamkern.losses.losses import SQUARES

MIN_SKEW_ROWS = 256
"""Smallest number of rows that show whether targets are skew."""
MIN_VARIATION, MIN_SKEWNESS = 0.25, 0.5
"""Standard deviation over the mean, and skewness, from which on they are."""


def leaves_transform_open(config: RunConfig) -> bool:
    """Return whether the settings allow a log scale that nobody asked for.

    A user who gives kernel, bandwidth or metric, or no intercept, means other targets by them.
    """
    model = config.model
    return (
        model.target_transform == "auto"
        and model.loss == SQUARES
        and model.kernel == "auto"
        and model.bandwidth == "auto"
        and model.metric in ("auto", "none", "learn")
        and model.fit_intercept
        and config.run.precision != "integer"
    )


def is_skew(y: npt.NDArray[Any]) -> bool:
    """Return whether targets (n,) may be simpler on a log scale.

    One or two values are as simple on any scale.
    """
    if len(y) < MIN_SKEW_ROWS or not np.isfinite(y).all() or y.min() < 0:
        return False
    if len(np.unique(y)) <= 2:
        return False
    y = y / y.max()  # rows without the largest ones may be tiny: their cubes would underflow
    centred, deviation = y - y.mean(), float(y.std())
    skewness = float(((centred / deviation) ** 3).mean())
    return deviation >= MIN_VARIATION * float(y.mean()) and skewness >= MIN_SKEWNESS
