"""Choose the scaling of the features of a run, and compute its statistics.

The scaling is applied after the transforms that the settings ask for, which get rows in their
stored units. Its statistics are computed from rows without augmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from streamkern.basics.array_types import Floats
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.randomness import RowRandom, Stage
from streamkern.store.row_block import RowBlock
from streamkern.store.sample_weights import ClassWeight, weigh_rows, weight_factors
from streamkern.store.sparse_rows import is_packed
from streamkern.store.statistics import RunningStatistics
from streamkern.stream.sources.augmented import without_copies
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.mixture import MixtureSource, mixed_moments
from streamkern.stream.sources.sampling import SAMPLE_UNITS, sample_rows
from streamkern.stream.sources.transforms import (
    CONSTANT_FEATURE,
    Moments,
    Scale,
    Transform,
    apply_transforms,
    is_deterministic,
)

SCALE_STAGE = 41
"""Index of the random stream from which the sample for the scaling is drawn."""
MAX_SCALING_ROWS, MIN_SCALING_ROWS, MAX_SCALING_SAMPLE_BYTES = 20_000, 256, 16 << 20
"""Largest and smallest number of rows of this sample, and its largest size in bytes with more than
the smallest number of rows. From n rows of a normal distribution, the standard deviation has a
relative error of 1 / sqrt(2 n)."""


MIN_PIXELS = 64
"""Smallest number of features that are taken for pixels: 8 x 8, as in small images of digits.
Tables of a few amounts or counts have similar moments."""


class _KnownMoments(NamedTuple):
    """Stand-in for a source whose shape, dtype and moments are known, for `Scale.bind`."""

    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    moments: Moments

    def statistics(self) -> Moments:
        return self.moments


_MODE_TEXTS = {
    "none": "features are not scaled",
    "global": "one mean and one standard deviation for all features",
    "feature": "every feature by its own mean and standard deviation",
    "quantiles": "every feature by its own mean and standard deviation, and quantile scores",
}


def find_scale(
    source: BaseSource,
    requested: str,
    seed: int,
    class_weight: ClassWeight | None = None,
    pixels: bool | None = None,
) -> tuple[Scale | None, str]:
    """Return the scaling to append to the transforms of `source`, and its description.

    The scaling is None if the transforms have one already, if the encoder of a table has scaled the
    features, if the rows are sparse, or if `requested` is "none".

    Reads a sample of the rows if the source does not know their statistics, if a deterministic
    transform changes them, or if a class has the weight 0.

    requested : setting data.scale: "auto", "feature", "global", "none" or "quantiles"; the last is
        "feature" here, and `with_scores` adds the scores
    class_weight : setting data.class_weight; rows of classes of weight 0 are ignored
    pixels : whether "auto" took the rows for pixels when the run was started; None: it decides

    Raises
    ------
    ConfigError
        `requested` contradicts a scale that is among the transforms, or the rows are sparse.
    """
    # A scale among the transforms takes the place of data.scale.
    scales = [t for t in source.feed_transforms if isinstance(t, Scale)]
    if scales:
        if requested not in ("auto", *(t.mode for t in scales)):
            raise ConfigError(
                f"{mention('data.scale', requested)} contradicts the scale in "
                f"{mention('data.transforms')}, which has mode="
                f'"{scales[-1].mode}" and takes its place',
                "leave one of them out",
            )
        return None, f"{_MODE_TEXTS[scales[-1].mode]}, as in transforms"
    if requested == "none":
        return None, _MODE_TEXTS[requested]
    if is_packed(source.row_shape):
        if requested != "auto":
            raise ConfigError(
                f"{mention('data.scale', requested)} would change the zeros of sparse rows",
                "leave it out, and scale the features before the rows are stored",
            )
        return None, "features of sparse rows are not scaled"
    if requested in ("auto", "quantiles") and source.encoder is not None:
        return None, "as the encoder of the table has scaled every feature"
    # The rows are scaled by their statistics.
    requested = "feature" if requested == "quantiles" else requested
    fixed = [t for t in source.feed_transforms if is_deterministic(t)]
    factors = None
    if class_weight is not None and class_weight != "balanced":
        factors = weight_factors(source, class_weight)
    moments, n_sampled = _moments(source, fixed, seed, factors)
    mode, reason = requested, ""
    if requested == "auto" and pixels is None:
        mode, reason = automatic_mode(source.row_shape, source.dtype, moments)
    elif requested == "auto":
        mode, reason = "global" if pixels else "feature", " (as when the run was started)"
    scale = Scale(mode).bind(_KnownMoments(source.row_shape, source.dtype, moments))
    sample_text = f", from a sample of {n_sampled:,} rows" if n_sampled else ""
    return scale, f"{_MODE_TEXTS[mode]}{reason}{sample_text}"


def automatic_mode(
    row_shape: Sequence[int], dtype: np.dtype[np.generic], moments: Moments
) -> tuple[str, str]:
    """Return the mode of the scaling, "global" or "feature", and the reason as text.

    Pixels share a unit, and a pixel that is nearly always dark must not be amplified to the size of
    the others. The columns of a table have different units.

    moments : statistics of the rows, as `BaseSource.statistics` returns them
    """
    if len(row_shape) == 3:
        return "global", " (images)"
    if dtype == np.uint8:
        return "global", " (rows of uint8 are taken for pixels)"
    if _look_like_pixels(*moments[2:]):
        return "global", " (taken for pixels: what varies least is nearly always 0)"
    return "feature", ""


def _look_like_pixels(mean: np.ndarray | None, scale: np.ndarray | None) -> bool:
    """Return whether the moments suggest that all features share a unit, as pixels do.

    This is the case if four conditions hold:

    - There are at least `MIN_PIXELS` features.
    - Each mean is positive and at most 5 standard deviations.
    - Some feature has a standard deviation below a tenth of the largest.
    - Each such feature is nearly always 0, but not small where it is not 0: its E[x^2] / E[x] is at
      least 1/256 of the largest.

    mean, scale : (d,) means and standard deviations; None if they are not known
    """
    if mean is None or scale is None or len(mean) < MIN_PIXELS:
        return False
    varies = scale > np.abs(mean) * CONSTANT_FEATURE
    mean, scale = mean[varies], scale[varies]
    if not len(mean) or (mean <= 0).any() or (mean > 5 * scale).any():
        return False
    nonzero_size = mean + scale**2 / mean
    varies_little = scale < scale.max() / 10
    is_mostly_zero = (mean < scale / 2) & (nonzero_size > nonzero_size.max() / 256)
    return bool(varies_little.any() and is_mostly_zero[varies_little].all())


def _moments(
    source: BaseSource, fixed: Sequence[Transform], seed: int, factors: Floats | None
) -> tuple[Moments, int]:
    """Return statistics of the rows after the transforms `fixed`, and the number of sampled rows.

    The number is 0 if the source records the statistics.

    factors : (c,) factors of the classes; None if all classes count
    """
    source = without_copies(source)
    if isinstance(source, MixtureSource):
        part_moments = [_moments(part, fixed, seed, factors) for part in source.parts]
        n_rows = sum(n for _, n in part_moments)
        return mixed_moments([moments for moments, _ in part_moments], source.shares), n_rows
    counts_all_classes = factors is None or bool(factors.all())
    if counts_all_classes and not fixed and not source.statistics_read:
        moments = source.statistics()
        if moments[0] is not None and moments[2] is not None:
            return moments, 0
    return _sample_moments(source, fixed, seed, None if counts_all_classes else factors)


def _sample_moments(
    source: BaseSource, fixed: Sequence[Transform], seed: int, factors: Floats | None
) -> tuple[Moments, int]:
    """Return statistics of a sample of rows, and the number of its rows; see `_moments`."""
    row_bytes = int(np.prod(source.row_shape)) * source.dtype.itemsize
    n_rows = max(MIN_SCALING_ROWS, min(MAX_SCALING_ROWS, MAX_SCALING_SAMPLE_BYTES // row_bytes))
    block, X = transformed_sample(source, fixed, min(n_rows, source.n_rows), seed, SCALE_STAGE)
    running = RunningStatistics(int(np.prod(source.row_shape)))
    w = block.w
    if factors is not None:
        w = weigh_rows(block.y, w, (factors > 0).astype(np.float64))
    running.add(X, block.y, w)
    statistics = running.result()
    global_moments = statistics.global_mean, statistics.global_scale
    return (*global_moments, statistics.mean, statistics.scale), len(X)


def transformed_sample(
    source: BaseSource, fixed: Sequence[Transform], n: int, seed: int, stage: int
) -> tuple[RowBlock, np.ndarray]:
    """Return n random rows, and their features after the transforms `fixed`.

    stage : index of the random stream from which the rows are drawn
    """
    block = sample_rows(source, n, seed, stage=stage, max_units=SAMPLE_UNITS)
    X = block.X
    if fixed:
        X, _, _ = apply_transforms(
            fixed, X.astype(np.float64), block.y.reshape(len(X), -1), epoch=0,
            random=lambda number: RowRandom(
                np, seed, 0, (Stage.SAMPLE, stage, number), block.row_ids, np.float64
            ),
        )  # fmt: skip
    return block, X
