"""Recognise runs whose kernel is open, and skewed targets that a log scale may suit better."""

from __future__ import annotations

import numpy as np

from streamkern.basics.array_types import HostArray
from streamkern.config.run_config import RunConfig
from streamkern.losses.losses import SQUARES

MIN_SKEW_ROWS = 256
"""Smallest number of rows from which skewness is recognised."""
MIN_VARIATION_COEFFICIENT, MIN_SKEWNESS = 0.25, 0.5
"""Smallest coefficient of variation (standard deviation / mean), and smallest skewness, of targets
that are treated as skewed."""


def leaves_transform_open(config: RunConfig) -> bool:
    """Return whether the settings leave it open to use a log scale of the targets.

    They do not if the user has set the kernel, the bandwidth or the metric, or no intercept, since
    these are meant for the targets as given.
    """
    model = config.model
    return (
        model.target_transform == "auto"
        and model.loss == SQUARES
        and model.fit_intercept
        and leaves_kernel_open(config)
    )


def leaves_kernel_open(config: RunConfig) -> bool:
    """Return whether the setup chooses kernel and bandwidth for any distances in floats.

    It does not if the settings give a metric, or restrict the form of a learned one.
    """
    model = config.model
    return (
        model.kernel == "auto"
        and model.bandwidth == "auto"
        and model.metric in ("auto", "none", "learn")
        and config.run.precision != "integer"
    )


def is_skew(y: HostArray) -> bool:
    """Return whether targets (n,) are not negative, and skewed to the right.

    False for fewer than `MIN_SKEW_ROWS` targets, for targets that are not finite, and for targets
    with one or two distinct values, which a log scale only shifts and rescales.
    """
    if len(y) < MIN_SKEW_ROWS or not np.isfinite(y).all() or y.min() < 0:
        return False
    if len(np.unique(y)) <= 2:
        return False
    y = y / y.max()  # cubes of tiny targets would underflow
    centred, deviation = y - y.mean(), float(y.std())
    skewness = float(((centred / deviation) ** 3).mean())
    return deviation >= MIN_VARIATION_COEFFICIENT * float(y.mean()) and skewness >= MIN_SKEWNESS
