"""Chunks read as files against the same chunks read by zarr."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ZstdCodec
from zarr.storage import LocalStore, MemoryStore

from streamkern.chunkfile import chunk_files
from streamkern.errors import CorruptChunkError
from streamkern.storage import StrictStore

DATA = np.random.default_rng(0).integers(0, 200, (23, 5))


def strict(array: zarr.Array[Any]) -> Any:
    """The array on a store in which a missing chunk is an error."""
    return zarr.open_array(StrictStore(array.store), path=array.path, mode="r")


def create(store: Any, dtype: str = "float32", **options: Any) -> Any:
    options = {"chunks": (8, 5), "compressors": None, **options}
    array = zarr.create_array(store, name="a", shape=DATA.shape, dtype=dtype, **options)
    array[:] = DATA
    return strict(array)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32", "float64"])
@pytest.mark.parametrize(
    "codecs", [[], [Crc32cCodec()], [ZstdCodec(level=3)], [ZstdCodec(), Crc32cCodec()]]
)
def test_the_rows_are_those_of_zarr(tmp_path: Path, dtype: str, codecs: list[Any]) -> None:
    array = create(LocalStore(tmp_path), dtype, compressors=codecs or None)
    files = chunk_files(array)
    assert files is not None
    for i, (start, stop) in enumerate([(0, 8), (8, 16), (16, 23)]):
        chunk = files.read(f"a/c/{i}/0", stop - start)
        assert chunk.dtype == array.dtype
        np.testing.assert_array_equal(chunk, array[start:stop])


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (8, 3)},
        {"chunks": (4, 5), "shards": (8, 5)},
        {"compressors": [GzipCodec()]},
        {"compressors": [Crc32cCodec(), ZstdCodec()]},
        {"serializer": BytesCodec(endian="big")},
        {"zarr_format": 2},
    ],
    ids=str,
)
def test_other_layouts_are_left_to_zarr(tmp_path: Path, options: dict[str, Any]) -> None:
    assert chunk_files(create(LocalStore(tmp_path), **options)) is None


def test_other_stores_are_left_to_zarr(tmp_path: Path) -> None:
    assert chunk_files(create(MemoryStore())) is None
    create(LocalStore(tmp_path))
    # A plain store would give fill values for a missing chunk.
    assert chunk_files(zarr.open_array(LocalStore(tmp_path), path="a", mode="r")) is None


def test_damage_without_a_checksum(tmp_path: Path) -> None:
    files = chunk_files(create(LocalStore(tmp_path)))
    assert files is not None
    path = tmp_path / "a/c/1/0"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="has 159 bytes and should have 160"):
        files.read("a/c/1/0", 8)
    path.unlink()
    with pytest.raises(CorruptChunkError, match="a/c/1/0 is missing"):
        files.read("a/c/1/0", 8)


def test_a_checksum_over_several_pieces(tmp_path: Path) -> None:
    shape = (3, 1 << 18)
    array = zarr.create_array(
        LocalStore(tmp_path), name="a", shape=shape, chunks=shape, dtype="float64",
        compressors=[Crc32cCodec()],
    )  # fmt: skip
    array[:] = np.random.default_rng(0).random(shape)
    files = chunk_files(strict(array))
    assert files is not None
    np.testing.assert_array_equal(files.read("a/c/0/0", 3), array[:])
    path = tmp_path / "a/c/0/0"
    damaged = bytearray(path.read_bytes())
    damaged[5 << 20] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="checksum"):
        files.read("a/c/0/0", 3)
