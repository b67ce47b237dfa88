"""Data sets of Hugging Face's library `datasets`, made of arrays; needs that library."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

datasets = pytest.importorskip("datasets", reason="datasets is not installed")
images = pytest.importorskip("PIL.Image", reason="pillow is not installed")

N = 120
NAMES = ["cat", "dog", "ant"]
rng = np.random.default_rng(0)
CODES = rng.integers(0, 3, N)
WORDS = np.array(NAMES)[CODES]
X = (rng.normal(size=(N, 4)) + CODES[:, None]).astype(np.float32)
PIXELS = rng.integers(0, 256, (N, 6, 5, 3), dtype=np.uint8)
WEIGHTS = rng.random(N) + 0.5


def features(**columns: Any) -> Any:
    """Return the features of these columns and of "label"."""
    return datasets.Features({**columns, "label": datasets.ClassLabel(names=NAMES)})


def dataset(described: Any = None, codes: Any = CODES, **columns: Any) -> Any:
    """Return a data set of columns and labels. described : features of the columns"""
    held = {name: list(values) for name, values in columns.items()}
    return datasets.Dataset.from_dict({**held, "label": list(codes)}, features=described)


def numbers() -> Any:
    columns = {f"f{k}": X[:, k] for k in range(4)}
    return dataset(features(**dict.fromkeys(columns, datasets.Value("float32"))), **columns)


def embeddings() -> Any:
    return dataset(features(emb=datasets.List(datasets.Value("float32"))), emb=X.tolist())


def pictures(pixels: Any = PIXELS, codes: Any = CODES, **options: Any) -> Any:
    """Return a data set of images, as PNG. options : of `datasets.Image`"""
    return dataset(
        features(image=datasets.Image(**options)), codes, image=[{"bytes": png(k)} for k in pixels]
    )


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    images.fromarray(np.asarray(pixels)).save(file, "png")
    return file.getvalue()
