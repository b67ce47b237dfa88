"""Small images, and copies of them that transforms make on the way."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.transforms import GaussianNoise, RandomFlip, Scale

rng = np.random.default_rng(0)
N, COPIES = 170, 4
IMAGES = rng.integers(0, 256, (N, 3, 4, 1)).astype(np.uint8)
LABELS = rng.integers(0, 3, N)
CHUNK_MB = 31 * 48 / 2**20  # 31 rows of float32, 22 chunks, the last one short
NOISY = (RandomFlip(), Scale("global"), GaussianNoise(0.3))


def base(**options: Any) -> ArraySource:
    """Return the images with their classes, in units of 20."""
    return ArraySource(IMAGES, LABELS, classes=("a", "b", "c"), unit_rows=20, **options)


def augmented(*transforms: Any) -> AugmentedSource:
    """Return four copies of each image."""
    return AugmentedSource(base(), COPIES, transforms)
