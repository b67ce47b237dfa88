"""Draw the patch features of a run from a sample of its rows, unless they are already known."""

from __future__ import annotations

import math
from typing import Any, Final

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.model import ModelConfig
from streamkern.stream.sources.augmented import AugmentedSource, without_copies
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.patch_features import (
    PATCH_ROWS,
    PATCH_STAGE,
    PatchFeatures,
    patch_size,
    patches_among,
)
from streamkern.stream.sources.transforms import is_deterministic
from streamkern.train.restart.scaling import transformed_sample

MAX_SAMPLE_ENTRIES: Final = 2 << 20
"""Largest number of entries (images x pixels x channels) of the sample, which is in float64."""
MIN_SAMPLE_IMAGES: Final = 32
"""Number of images in the sample even if they exceed `MAX_SAMPLE_ENTRIES`."""


def with_patches(
    source: BaseSource,
    scaling_text: str,
    model: ModelConfig,
    seed: int,
    known_features: PatchFeatures | None,
) -> tuple[BaseSource, str]:
    """Return the source, with patch features if `model` asks for them, and the description of its
    scaling.

    Reads a sample of the rows if the patch features are not known.

    scaling_text : description of the scaling without patch features
    known_features : patch features with which the run was started, or that belong to its initial
        weights; None if there are none

    Raises ConfigError if the rows are not images, or have too few different patches.
    """
    features = patches_among(source.feed_transforms)  # a warm start of an estimator has its own
    if not model.patch_features and features is None:
        return source, scaling_text
    size = patch_size(model.patch_size, source.row_shape)
    requested = model.patch_features, size, model.patch_grid
    if features is None:
        features = known_features
        if features is None or _parameters(features) != requested:
            features = PatchFeatures.of_sample(_sample(source, seed), *requested, seed)
        source = AugmentedSource(source, 1, [features])
    elif _parameters(features) != requested:
        raise ConfigError(
            f"{mention('model.patch_features', model.patch_features)} with patches of {size} "
            f"pixels and {mention('model.patch_grid', model.patch_grid)} differ from the fit that "
            f"this one starts from, which has {features!r}",
            f"give the values of that fit, or leave {mention('warm_start')} out",
        )
    (width,) = features.shape_after(source.row_shape)
    text = f"{width} features by {features.n_filters} patches of {features.size} pixels"
    return source, f"{scaling_text}; {text}"


def _parameters(features: PatchFeatures) -> tuple[int, int, int]:
    return features.n_filters, features.size, features.grid


def _sample(source: BaseSource, seed: int) -> Any:
    """Return a sample of images (n, h, w, channels) after the fixed transforms."""
    base = without_copies(source)
    fixed = [t for t in source.feed_transforms if is_deterministic(t)]
    max_images = max(MIN_SAMPLE_IMAGES, MAX_SAMPLE_ENTRIES // math.prod(base.row_shape))
    n = min(PATCH_ROWS, max_images, base.n_rows)
    return transformed_sample(base, fixed, n, seed, PATCH_STAGE)[1]
