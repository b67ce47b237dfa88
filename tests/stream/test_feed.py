"""Check batches on the device: casts, one-hot rows, transforms, reused memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.backend.batch import Batch
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.feed import Feed, prepare
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.sampling import sample_rows
from streamkern.stream.sources.transforms import GaussianNoise, MixUp, RandomCrop, Scale

rng = np.random.default_rng(0)
IMAGES = rng.integers(0, 256, (90, 4, 5, 2)).astype(np.uint8)
LABELS = rng.integers(0, 3, 90)
FLOATS = rng.normal(size=(90, 6)).astype(np.float32)
VALUES = rng.normal(size=(90, 2))


@pytest.fixture
def backend() -> Any:
    with Backend(threads=2) as new_backend:
        yield new_backend


def copies_of(batches: Any) -> list[Batch]:
    """Return batches whose arrays are not reused."""
    return [
        replace(b, X=b.X.copy(), Y=b.Y.copy(), row_ids=b.row_ids.copy(), w=None) for b in batches
    ]


def collect(
    source: Source, backend: Backend, batch_size: int = 20, dtype: Any = np.float32
) -> list[Batch]:
    """Return copies of the batches of an epoch."""
    with (
        BatchReader(source, batch_size=batch_size, seed=1) as reader,
        Feed(reader, backend, dtype=dtype, seed=1) as feed,
    ):
        return copies_of(feed.epoch(2))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_images_become_flat_floats_and_ids_one_hot(backend: Backend, dtype: Any) -> None:
    batches = collect(ArraySource(IMAGES, LABELS), backend, dtype=dtype)
    assert [len(b.row_ids) for b in batches] == [20, 20, 20, 20, 10]
    for b in batches:
        assert b.X.dtype == b.Y.dtype == dtype
        np.testing.assert_array_equal(b.X, IMAGES[b.row_ids].reshape(len(b.row_ids), 40))
        np.testing.assert_array_equal(b.Y, np.eye(3)[LABELS[b.row_ids]])


def test_regression_targets_and_missing_targets_are_kept(backend: Backend) -> None:
    """Check that values in float64 stay in float64, because their mean is not subtracted yet."""
    for b in collect(ArraySource(FLOATS, VALUES), backend):
        np.testing.assert_array_equal(b.Y, VALUES[b.row_ids])
        assert b.Y.dtype == VALUES.dtype
    for b in collect(ArraySource(FLOATS), backend):
        assert b.Y.shape == (len(b.row_ids), 0)


def test_transforms_equal_their_formulas(backend: Backend) -> None:
    source = ArraySource(IMAGES, LABELS, [Scale("global")])
    exact = (IMAGES - IMAGES.mean(dtype=np.float64)) / IMAGES.std(dtype=np.float64)
    for b in collect(source, backend):
        # one rounding each in the subtraction and the division, values below 3
        np.testing.assert_allclose(b.X, exact[b.row_ids].reshape(-1, 40), rtol=1e-6, atol=1e-6)


def augmented_images() -> Source:
    """Return three replicas of the images with transforms of all kinds."""
    transforms = [RandomCrop(1), Scale("feature"), GaussianNoise(0.3)]
    return AugmentedSource(ArraySource(IMAGES, LABELS), 3, transforms)


def test_prepare_equals_rows_of_the_feed(backend: Backend) -> None:
    source = augmented_images()
    batches = collect(source, backend)
    rows = np.concatenate([b.row_ids for b in batches])
    X = np.concatenate([b.X for b in batches])[np.argsort(rows)]
    Y = np.concatenate([b.Y for b in batches])[np.argsort(rows)]
    block = sample_rows(source, 60, 1, epoch=2)
    sample_X, sample_Y, _ = prepare(
        backend,
        block,
        transforms=source.feed_transforms,
        dtype=np.float32,
        seed=1,
        epoch=2,
        n_classes=3,
    )
    np.testing.assert_array_equal(sample_X, X[block.row_ids])
    np.testing.assert_array_equal(sample_Y, Y[block.row_ids])


def test_untransformed_rows_are_not_copied(backend: Backend) -> None:
    with BatchReader(ArraySource(FLOATS, VALUES), batch_size=30, seed=0) as reader:
        feed = Feed(reader, backend, dtype=np.float32, seed=0)
        for b in feed.epoch(0):
            assert np.shares_memory(b.X, reader._buffers[0].rows.X)
            # The solver may upload row numbers at any time, which no event of the reader covers.
            assert not np.shares_memory(b.row_ids, reader._buffers[0].rows.row_ids)
        assert b.index == 2
    with BatchReader(ArraySource(IMAGES, LABELS), batch_size=30, seed=0) as reader:
        feed = Feed(reader, backend, dtype=np.float32, seed=0)
        first_address, *addresses = (b.X.ctypes.data for b in feed.epoch(0))
        assert addresses == [first_address, first_address]


def test_every_batch_reuses_the_same_memory(backend: Backend) -> None:
    transforms = [Scale("feature"), GaussianNoise(0.3)]
    source = AugmentedSource(ArraySource(IMAGES, LABELS), 2, transforms)
    with (
        BatchReader(source, batch_size=40, seed=0) as reader,
        Feed(reader, backend, dtype=np.float32, seed=0) as feed,
    ):
        places = {(b.X.ctypes.data, b.Y.ctypes.data) for b in feed.epochs(0, 3)}
        assert len(places) == 1
        assert len(feed._arrays._arrays) == 4  # X cast, scaled and noisy, Y


def test_transforms_never_write_into_reader_buffers(backend: Backend) -> None:
    source = ArraySource(FLOATS, VALUES, [Scale("feature"), GaussianNoise(1.0), MixUp(1.0)])
    with (
        BatchReader(source, batch_size=30, seed=0) as reader,
        Feed(reader, backend, dtype=np.float32, seed=0) as feed,
    ):
        for _ in feed.epoch(0):
            pass
        buffer_rows = reader._buffers[0].rows
        np.testing.assert_array_equal(buffer_rows.X, FLOATS[buffer_rows.row_ids])
        np.testing.assert_array_equal(buffer_rows.y, VALUES[buffer_rows.row_ids])


def test_leaving_the_feed_stops_reading(backend: Backend) -> None:
    with (
        BatchReader(ArraySource(FLOATS, VALUES), batch_size=10, seed=0) as reader,
        Feed(reader, backend, dtype=np.float32, seed=0) as feed,
    ):
        batches = feed.epoch(0)
        next(batches)
        run = reader._iteration
        assert run is not None
        assert not run.stopped.is_set()
        batches.close()  # type: ignore[attr-defined]
        assert run.stopped.is_set()
