"""Compute the mean and the scale of the targets of a run, from known or from sampled moments.

Skewed targets, which a log scale may suit better, are recognised if the kernel is left open.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.backend.base import Backend
from streamkern.basics.array_types import Floats, HostArray
from streamkern.basics.randomness import Stage
from streamkern.config.run_config import RunConfig
from streamkern.losses.losses import SQUARES
from streamkern.store.statistics import ColumnMoments
from streamkern.stream.feed import prepare
from streamkern.stream.sources.base import BaseSource, host_transforms, read_units
from streamkern.stream.sources.patch_features import PatchFeatures
from streamkern.stream.sources.transforms import TRANSFORM_KINDS
from streamkern.stream.target_scale import TargetScale

INTERCEPT_SAMPLE_STAGE = 42
"""Index of the random stream from which units are drawn for the moments of the targets."""
MAX_TARGET_UNITS = 16
"""Largest number of units, of about 4 MiB each, that are read for the moments of the targets."""


def target_scale(
    backend: Backend,
    source: BaseSource,
    factors: Floats | None,
    *,
    fit_intercept: bool,
    seed: int,
    dtype: Any,
    n_outputs: int,
) -> TargetScale:
    """Return mean and scale of the targets over an epoch of `source`, with the sample weights.

    The scale of classes is 1. Statistics that the source records are used; otherwise a few random
    units are read. Mix-up does not change the mean.

    factors : factors of the classes from `weight_factors`
    fit_intercept : if False, the mean is 0
    n_outputs : number of outputs of the model: one for each target, or several for a single target

    Raises DataError if the variance overflows float64, or all weights are 0.
    """
    if source.classes is not None and not fit_intercept:
        return TargetScale(np.zeros(source.n_outputs), np.ones(source.n_outputs))
    moments = target_moments(backend, source, factors, seed, dtype)
    moments_scale = TargetScale.from_moments(moments, fit_intercept)
    if source.classes is not None:
        return TargetScale(moments_scale.mean, np.ones(source.n_outputs))
    return TargetScale(
        *(np.broadcast_to(a, n_outputs).copy() for a in (moments_scale.mean, moments_scale.scale))
    )


def target_moments(
    backend: Backend, source: BaseSource, factors: Floats | None, seed: int,
    dtype: Any,
) -> ColumnMoments:  # fmt: skip
    """Return the moments of the targets over an epoch, known or estimated from a sample."""
    moments = None if changes_targets(source) else known_moments(source, factors)
    if moments is None:
        moments = sampled_moments(backend, source, factors, seed, dtype)
    return moments


def changes_targets(source: BaseSource) -> bool:
    """Return whether a transform may change the mean of the targets.

    Only user-defined functions may: mix-up mixes targets, but keeps their mean.
    """
    kinds = (*TRANSFORM_KINDS.values(), PatchFeatures)
    built_in_classes = tuple(kind for kind in kinds if isinstance(kind, type))
    transforms = (*host_transforms(source), *source.feed_transforms)
    return not all(isinstance(transform, built_in_classes) for transform in transforms)


def known_moments(source: BaseSource, factors: Floats | None) -> ColumnMoments | None:
    """Return the moments of the targets if the source records them, else None.

    The moments of classes follow from the total weight of each class.
    """
    if source.classes is None:
        return source.target_moments()
    if source.totals is None:
        return None
    weights = source.totals if factors is None else source.totals * factors
    shares = weights / weights.sum()
    return ColumnMoments.from_statistics(1.0, shares, np.sqrt(shares * (1 - shares)))


def sampled_moments(
    backend: Backend,
    source: BaseSource,
    factors: Floats | None,
    seed: int,
    dtype: Any,
    targets: TargetScale | None = None,
) -> ColumnMoments:
    """Return the moments of the targets of up to `MAX_TARGET_UNITS` random units of epoch 0.

    The transforms of the training are applied.

    targets : mean and scale by which the targets are transformed; None to take them as they are
    """
    rng = np.random.default_rng([seed, Stage.SAMPLE, INTERCEPT_SAMPLE_STAGE])
    units = np.sort(rng.permutation(source.n_units)[:MAX_TARGET_UNITS])
    moments = ColumnMoments(source.n_outputs)
    for block in read_units(source, units, seed, 0):
        _, Y, w = prepare(
            backend, block, factors, transforms=source.feed_transforms, dtype=dtype, seed=seed,
            epoch=0, n_classes=source.n_classes, targets=targets,
        )  # fmt: skip
        moments.add(backend.to_host(Y), None if w is None else backend.to_host(w))
    return moments


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
