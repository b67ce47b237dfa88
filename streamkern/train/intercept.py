"""The mean and scale of the targets, from metadata if possible, otherwise from rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Backend
from streamkern.basics.randomness import Stage
from streamkern.store.statistics import ColumnMoments
from streamkern.stream.feed import prepare
from streamkern.stream.sources.base import BaseSource, host_transforms, read_units
from streamkern.stream.sources.transforms import TRANSFORM_KINDS
from streamkern.stream.target_scale import TargetScale

INTERCEPT_SAMPLE_STAGE = 42
SAMPLED_UNITS = 16
"""Units to sample, of about 4 MiB, if rows are made by functions."""


def target_scale(
    backend: Backend,
    source: BaseSource,
    factors: npt.NDArray[np.float64] | None,
    *,
    fit_intercept: bool,
    seed: int,
    dtype: Any,
) -> TargetScale:
    """Return mean and scale of the targets over an epoch of `source`, weighted by sample weights.

    factors : factors of the classes from `weight_factors`

    For classes the counts are known, and the scale is 1. Values are read, without X if the source
    can do so, or known from the statistics of a store; if a function of the user makes or changes
    them, the rows of a few random units represent all. Mix-up does not change the mean.

    Raises DataError if the variance overflows float64, or all weights are 0.
    """
    if source.classes is not None and not fit_intercept:
        return TargetScale(np.zeros(source.n_outputs), np.ones(source.n_outputs))
    moments = None if changes_targets(source) else known_moments(source, factors)
    if moments is None:
        moments = sampled_moments(backend, source, factors, seed, dtype)
    found = TargetScale.from_moments(moments, fit_intercept)
    if source.classes is not None:
        return TargetScale(found.mean, np.ones(source.n_outputs))
    return found


def changes_targets(source: BaseSource) -> bool:
    """Return whether a transform may change the targets, which only a function of the user does."""
    own = tuple(kind for kind in TRANSFORM_KINDS.values() if isinstance(kind, type))
    return not all(isinstance(t, own) for t in (*host_transforms(source), *source.feed_transforms))


def known_moments(
    source: BaseSource, factors: npt.NDArray[np.float64] | None
) -> ColumnMoments | None:
    """Return moments from the weight of each class, or from what the source knows of its values.

    None if neither is known.
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
    factors: npt.NDArray[np.float64] | None,
    seed: int,
    dtype: Any,
) -> ColumnMoments:
    """Return moments of the rows of `SAMPLED_UNITS` random units of epoch 0, as training gets
    them."""
    rng = np.random.default_rng([seed, Stage.SAMPLE, INTERCEPT_SAMPLE_STAGE])
    units = np.sort(rng.permutation(source.n_units)[:SAMPLED_UNITS])
    moments = ColumnMoments(source.n_outputs)
    for block in read_units(source, units, seed, 0):
        _, Y, w = prepare(
            backend, block, factors, transforms=source.feed_transforms, dtype=dtype, seed=seed,
            epoch=0, n_outputs=source.n_outputs, classes=source.classes,
        )  # fmt: skip
        moments.add(backend.to_host(Y), None if w is None else backend.to_host(w))
    return moments
