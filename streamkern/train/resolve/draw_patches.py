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

SAMPLED_ENTRIES: Final = 2 << 20
"""Largest number of entries of the sample, which is in float64."""
FEWEST_IMAGES: Final = 32
"""Number of images that the sample may have in any case."""


def with_patches(
    source: BaseSource, words: str, model: ModelConfig, seed: int, known: PatchFeatures | None
) -> tuple[BaseSource, str]:
    """Return the source, with patch features if `model` asks for them, and the description of its
    scaling.

    Reads a sample of the rows if the patch features are not known.

    words : description of the scaling without patch features
    known : patch features with which the run was started, or that belong to its initial weights;
        None if there are none

    Raises ConfigError if the rows are not images, or have too few different patches.
    """
    found = patches_among(source.feed_transforms)  # a warm start of an estimator brings its own
    if not model.patch_features and found is None:
        return source, words
    size = patch_size(model.patch_size, source.row_shape)
    asked = model.patch_features, size, model.patch_grid
    if found is None:
        found = known
        if found is None or _numbers(found) != asked:
            found = PatchFeatures.of_sample(_sample(source, seed), *asked, seed)
        source = AugmentedSource(source, 1, [found])
    elif _numbers(found) != asked:
        raise ConfigError(
            f"{mention('model.patch_features', model.patch_features)} with patches of {size} "
            f"pixels and {mention('model.patch_grid', model.patch_grid)}, and the fit that this "
            f"one starts from has {found!r}",
            f"set them as they were there, or leave {mention('warm_start')} out",
        )
    (width,) = found.shape_after(source.row_shape)
    return source, f"{words}; {width} features by {found.n_filters} patches of {found.size} pixels"


def _numbers(found: PatchFeatures) -> tuple[int, int, int]:
    return found.n_filters, found.size, found.grid


def _sample(source: BaseSource, seed: int) -> Any:
    """Return a sample of images (n, h, w, channels) after the fixed transforms."""
    base = without_copies(source)
    fixed = [t for t in source.feed_transforms if is_deterministic(t)]
    most = max(FEWEST_IMAGES, SAMPLED_ENTRIES // math.prod(base.row_shape))
    n = min(PATCH_ROWS, most, base.n_rows)
    return transformed_sample(base, fixed, n, seed, PATCH_STAGE)[1]
