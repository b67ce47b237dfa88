"""Compare Dask arrays and xarray datasets of a store with the rows that were ingested."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import streamkern as sk

N = 5000
FRAME = pd.DataFrame(np.random.default_rng(0).standard_normal((N, 3)), columns=["a", "b", "c"])


@pytest.fixture
def store(tmp_path: Path) -> sk.store.store.Store:
    """Return a store with names, two targets and weights, in chunks of about 100 rows."""
    table = FRAME.assign(u=np.arange(N), v=FRAME["a"] ** 2)
    sk.ingest_store(
        table, tmp_path / "rows.zarr", y=["u", "v"], sample_weight=np.arange(1.0, N + 1),
        chunk_mb=0.5 / 1024, shuffle=False,
    )  # fmt: skip
    return sk.open_store(tmp_path / "rows.zarr")


def test_dask_arrays_equal_rows(store: sk.store.store.Store) -> None:
    arrays = store.to_dask()
    assert list(arrays) == ["X", "y", "w"]
    X = arrays["X"]
    np.testing.assert_array_equal(X.compute(), FRAME)
    np.testing.assert_array_equal(X[37:4000:7, 1:].compute(), FRAME.to_numpy()[37:4000:7, 1:])
    np.testing.assert_array_equal(arrays["y"][:, 0].compute(), np.arange(N))
    np.testing.assert_array_equal(arrays["w"].compute(), np.arange(1.0, N + 1))
    assert arrays["X"].name == sk.open_store(store.url).to_dask()["X"].name


def test_dask_arrays_can_be_pickled(store: sk.store.store.Store) -> None:
    unpickled = pickle.loads(pickle.dumps(store.to_dask()["X"]))
    np.testing.assert_array_equal(unpickled[::-1].compute(), FRAME[::-1])
    np.testing.assert_array_equal(unpickled[4321].compute(), FRAME.loc[4321])


def test_damaged_chunk_raises_in_dask(store: sk.store.store.Store) -> None:
    X = store.to_dask()["X"]
    path = Path(store.url, store.stored_chunks.key(store.stored_chunks.x, 3))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(sk.CorruptChunkError):
        X.compute()


def test_xarray_dataset_has_names(store: sk.store.store.Store) -> None:
    dataset = store.to_xarray()
    assert dict(dataset.sizes) == {"row": N, "feature": 3, "output": 2}
    np.testing.assert_array_equal(dataset.X.sel(feature="b"), FRAME["b"])
    np.testing.assert_array_equal(dataset.y.sel(output="v"), FRAME["a"] ** 2)
    with pytest.raises(KeyError):
        dataset.X.sel(feature="d")


def test_xarray_dataset_of_images_and_classes(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (60, 4, 5, 3), dtype=np.uint8)
    words = np.array(["cat", "dog", "emu"])[np.arange(60) % 3]
    sk.ingest_store(images, tmp_path / "images.zarr", y=words, shuffle=False)
    dataset = sk.open_store(tmp_path / "images.zarr").to_xarray()
    assert dataset.X.dims == ("row", "axis_1", "axis_2", "axis_3")
    np.testing.assert_array_equal(dataset.X, images)
    np.testing.assert_array_equal(np.array(dataset.attrs["classes"])[dataset.y], words)
