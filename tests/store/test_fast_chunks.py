"""Compare chunks read as files with the same chunks read by zarr."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ZstdCodec
from zarr.storage import LocalStore, MemoryStore

from streamkern.basics.errors import CorruptChunkError
from streamkern.filesystem.urls import StrictStore, zarr_store
from streamkern.store.fast_chunks import ChunkFiles, ChunkValues, ChunkWriter, chunk_reader
from streamkern.store.layout import ZSTD_LEVEL

DATA = np.random.default_rng(0).integers(0, 200, (23, 5))


def open_strict(array: zarr.Array[Any]) -> Any:
    """Return the array on a store in which a missing chunk is an error."""
    return zarr.open_array(StrictStore(array.store), path=array.path, mode="r")


def create(store: Any, dtype: str = "float32", **options: Any) -> Any:
    """Create an array of DATA in `store`; return it as `open_strict` does."""
    options = {"chunks": (8, 5), "compressors": None, **options}
    array = zarr.create_array(store, name="a", shape=DATA.shape, dtype=dtype, **options)
    array[:] = DATA
    return open_strict(array)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32", "float64"])
@pytest.mark.parametrize(
    "codecs", [[], [Crc32cCodec()], [ZstdCodec(level=3)], [ZstdCodec(), Crc32cCodec()]]
)
def test_chunk_reader_equals_zarr(tmp_path: Path, dtype: str, codecs: list[Any]) -> None:
    for store, kind in ((LocalStore(tmp_path), ChunkFiles), (MemoryStore(), ChunkValues)):
        array = create(store, dtype, compressors=codecs or None)
        reader = chunk_reader(array)
        assert isinstance(reader, kind)
        for i, (start, stop) in enumerate([(0, 8), (8, 16), (16, 23)]):
            chunk, crc = reader.read(f"a/c/{i}/0", stop - start)
            assert chunk.dtype == array.dtype
            np.testing.assert_array_equal(chunk, array[start:stop])
            stored_bytes = (tmp_path / f"a/c/{i}/0").read_bytes()
            checked = bool(codecs) and isinstance(codecs[-1], Crc32cCodec)
            assert crc == (int.from_bytes(stored_bytes[-4:], "little") if checked else None)


@pytest.mark.parametrize("compressed", [False, True])
def test_encoded_chunks_equal_zarr(tmp_path: Path, compressed: bool) -> None:
    codecs = [*([ZstdCodec(level=ZSTD_LEVEL)] if compressed else []), Crc32cCodec()]
    store = zarr_store(tmp_path, read_only=False)
    array = zarr.create_array(
        store, name="a", shape=DATA.shape, dtype="uint8", chunks=(8, 5), compressors=codecs
    )
    array[:] = DATA
    files = sorted((tmp_path / "a/c").rglob("0"))
    by_zarr = [path.read_bytes() for path in files if path.is_file()]
    writer, rows = ChunkWriter(array), DATA.astype(np.uint8)
    crcs = [writer.write(i, rows[8 * i : 8 * i + 8]) for i in range(3)]
    assert [path.read_bytes() for path in files if path.is_file()] == by_zarr
    assert crcs == [int.from_bytes(raw[-4:], "little") for raw in by_zarr]
    np.testing.assert_array_equal(writer.read(2, 7)[0], rows[16:])


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
def test_other_layouts_use_zarr(tmp_path: Path, options: dict[str, Any]) -> None:
    assert chunk_reader(create(LocalStore(tmp_path), **options)) is None


def test_stores_with_fill_values_use_zarr(tmp_path: Path) -> None:
    """Check stores whose missing chunks are fill values."""
    create(LocalStore(tmp_path))
    assert chunk_reader(zarr.open_array(LocalStore(tmp_path), path="a", mode="r")) is None


def test_truncated_chunk_without_checksum_is_refused(tmp_path: Path) -> None:
    files = chunk_reader(create(LocalStore(tmp_path)))
    assert isinstance(files, ChunkFiles)
    path = tmp_path / "a/c/1/0"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="has 159 bytes and should have 160"):
        files.read("a/c/1/0", 8)
    path.unlink()
    with pytest.raises(CorruptChunkError, match="a/c/1/0 is missing"):
        files.read("a/c/1/0", 8)


def test_checksum_covers_several_pieces(tmp_path: Path) -> None:
    shape = (3, 1 << 18)
    array = zarr.create_array(
        LocalStore(tmp_path), name="a", shape=shape, chunks=shape, dtype="float64",
        compressors=[Crc32cCodec()],
    )  # fmt: skip
    array[:] = np.random.default_rng(0).random(shape)
    files = chunk_reader(open_strict(array))
    assert isinstance(files, ChunkFiles)
    np.testing.assert_array_equal(files.read("a/c/0/0", 3)[0], array[:])
    path = tmp_path / "a/c/0/0"
    damaged = bytearray(path.read_bytes())
    damaged[5 << 20] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="checksum"):
        files.read("a/c/0/0", 3)
