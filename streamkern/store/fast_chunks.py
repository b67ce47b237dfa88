"""Read and write whole chunks of a store without zarr, on the calling thread.

Zarr passes every chunk through an event loop and other threads, once to read it and once for each
codec, and copies it. Arrays that are chunked by rows only, with the codecs that `layout` writes, do
not need that: here a chunk is one read (a file, or one request), one checksum and at most one
decompression. All other arrays are read by zarr, which is also the reference in the tests.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
from numcodecs.zstd import Zstd
from zarr.buffer import default_buffer_prototype
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.sync import sync

from streamkern.basics.errors import CorruptChunkError
from streamkern.filesystem.durable import LocalFiles
from streamkern.filesystem.urls import MISSING_CHUNK_TEXT, StrictStore
from streamkern.store.layout import ZSTD_LEVEL

if TYPE_CHECKING:
    import threading

    from numpy.typing import NDArray

    from streamkern.filesystem.objects import Objects

_CHECKSUM_BYTES = 4
# A piece of a file is checked while it is still in the processor's cache. Small pieces also keep
# the checksum from holding the interpreter's lock for long.
_READ_BYTES = 1 << 20
_KNOWN_CODECS: tuple[list[type], ...] = ([], [Crc32cCodec], [ZstdCodec], [ZstdCodec, Crc32cCodec])


class Chunks:
    """Encodes and decodes the chunks of one array. Safe to share between threads."""

    def __init__(self, array: Any) -> None:
        codecs = [type(codec) for codec in array.metadata.codecs]
        self._has_checksum, self._is_compressed = Crc32cCodec in codecs, ZstdCodec in codecs
        self._shape, self._dtype = array.chunks, np.dtype(array.dtype).newbyteorder("<")
        self._bytes: int = int(np.prod(self._shape)) * self._dtype.itemsize

    def decode(self, raw: Any, n_rows: int) -> tuple[NDArray[Any], int | None]:
        """Return the first `n_rows` rows of a stored chunk, little-endian, and its checksum.

        The checksum is None for an array without checksums.

        Raises ValueError or RuntimeError if the checksum, the frame or the length is wrong.
        """
        data, crc = np.frombuffer(raw, np.uint8), None
        if self._has_checksum:
            data, trailer = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
            crc = google_crc32c.value(data)
            _check_checksum(crc, trailer)
        return self._decode_content(data, n_rows), crc

    def encode(self, rows: NDArray[Any]) -> tuple[list[Any], int]:
        """Return the stored bytes, in parts, of a chunk that begins with `rows`, and its checksum.

        The bytes are those that zarr would write; missing rows of the chunk are zeros.
        """
        if len(rows) < self._shape[0]:
            chunk = np.zeros(self._shape, self._dtype)
            chunk[: len(rows)] = rows
            rows = chunk
        data: Any = np.ascontiguousarray(rows, self._dtype).reshape(-1).view(np.uint8)
        if self._is_compressed:
            data = Zstd(level=ZSTD_LEVEL).encode(data)
        crc: int = google_crc32c.value(data)
        return [data, crc.to_bytes(_CHECKSUM_BYTES, "little")], crc

    @property
    def _max_stored_bytes(self) -> int:
        """Upper bound on the bytes of a stored chunk; compression may enlarge a chunk slightly."""
        growth = self._bytes // 8 + 1024 if self._is_compressed else 0
        return self._bytes + _CHECKSUM_BYTES + growth

    def _decode_content(self, data: NDArray[np.uint8], n_rows: int) -> NDArray[Any]:
        """Return the first `n_rows` rows. data : the bytes before the checksum"""
        if self._is_compressed:
            # A damaged frame must not get more memory than a chunk of this array takes.
            size = _frame_bytes(data)
            if size not in (None, self._bytes):
                raise ValueError(f"it holds {size} bytes and should hold {self._bytes}")
            data = Zstd().decode(data, np.empty(self._bytes, np.uint8))
        if data.nbytes != self._bytes:
            raise ValueError(f"it has {data.nbytes} bytes and should have {self._bytes}")
        chunk: NDArray[Any] = data.view(self._dtype).reshape(self._shape)
        return chunk[:n_rows]


class ChunkFiles(Chunks):
    """The chunks of one array in a local folder."""

    def __init__(self, folder: Path, array: Any) -> None:
        super().__init__(array)
        self._folder = folder

    def read(self, key: str, n_rows: int) -> tuple[NDArray[Any], int | None]:
        """Return `decode` of the file `key`; raise CorruptChunkError if there is none."""
        n_read = crc_read = 0
        try:
            with (self._folder / key).open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size > self._max_stored_bytes:
                    raise ValueError(f"it has {size} bytes, more than a chunk can have")
                raw = np.empty(size, np.uint8)
                data_end = max(raw.size - _CHECKSUM_BYTES, 0) if self._has_checksum else raw.size
                while n := file.readinto(raw[n_read : n_read + _READ_BYTES].data):
                    if self._has_checksum:
                        new_data = raw[n_read : min(n_read + n, data_end)]
                        crc_read = google_crc32c.extend(crc_read, new_data)
                    n_read += n
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise CorruptChunkError(f"chunk {key} {MISSING_CHUNK_TEXT}") from error
        crc = crc_read if self._has_checksum else None
        if crc is not None:
            _check_checksum(crc, raw[data_end:n_read])
        return self._decode_content(raw[: min(n_read, data_end)], n_rows), crc


class ChunkObjects(Chunks):
    """The chunks of one array on remote storage."""

    def __init__(self, objects: Objects, array: Any) -> None:
        super().__init__(array)
        self.objects = objects

    def with_stop_event(self, stopped: threading.Event) -> ChunkObjects:
        """Return the same chunks, see `Objects.with_stop_event`."""
        stoppable = copy.copy(self)
        stoppable.objects = self.objects.with_stop_event(stopped)
        return stoppable


class ChunkValues(Chunks):
    """The chunks of one array in any other zarr store, such as one in memory, read through zarr."""

    def __init__(self, store: StrictStore, array: Any) -> None:
        super().__init__(array)
        self._store = store

    def read(self, key: str, n_rows: int) -> tuple[NDArray[Any], int | None]:
        """Return `decode` of the value of `key`; raise CorruptChunkError if there is none."""
        value = sync(self._store.get(key, default_buffer_prototype()))
        assert value is not None  # as a StrictStore raises
        return self.decode(value.to_bytes(), n_rows)


class ChunkWriter(Chunks):
    """Writes and reads back the chunks of one array in a store opened by `zarr_store`."""

    def __init__(self, array: Any) -> None:
        super().__init__(array)
        self._array, self._store = array, array.store_path.store

    def write(self, i: int, rows: NDArray[Any], *, replaces: bool = False) -> int:
        """Store chunk `i`, which begins with `rows`; return its checksum.

        replaces : whether a chunk in use is replaced, which must be durable
        """
        parts, crc = self.encode(rows)
        key = chunk_key(self._array, i)
        if isinstance(self._store, LocalFiles):
            write_file = self._store.replace if replaces else self._store.write
            write_file(key, parts)
        else:
            self._store.objects.put(self._store.key(key), b"".join(parts))
        return crc

    def read(self, i: int, n_rows: int) -> tuple[NDArray[Any], int | None]:
        """Return `decode` of chunk `i`; raise FileNotFoundError if there is none."""
        if isinstance(self._store, LocalFiles):
            raw = (self._store.root / chunk_key(self._array, i)).read_bytes()
        else:
            raw = self._store.objects.get(self._store.key(chunk_key(self._array, i)))
        return self.decode(raw, n_rows)


def chunk_key(array: Any, i: int) -> str:
    """Return the key of chunk `i` of an array that is chunked by rows only, below its store."""
    name = array.metadata.encode_chunk_key((i,) + (0,) * (array.ndim - 1))
    return f"{array.path}/{name}"


def chunk_reader(array: Any) -> ChunkFiles | ChunkValues | ChunkObjects | None:
    """Return a reader of an array in which missing chunks are errors; None to leave it to zarr."""
    store = array.store_path.store
    if not isinstance(store, StrictStore) or not _is_supported(array):
        return None
    if store.folder is not None:
        return ChunkFiles(store.folder, array)
    if store.objects is not None:
        return ChunkObjects(store.objects, array)
    return ChunkValues(store, array)


def _is_supported(array: Any) -> bool:
    """Return whether each chunk is one object whose codecs are implemented here."""
    if array.metadata.zarr_format != 3 or array.shards is not None:
        return False
    bytes_codec, *compressors = array.metadata.codecs
    # The byte order is a string or an enumeration member, depending on the version of zarr.
    order = getattr(bytes_codec, "endian", "big")
    is_little_endian = getattr(order, "value", order) in (None, "little")
    has_whole_rows = array.chunks[1:] == array.shape[1:]
    has_known_codecs = [type(codec) for codec in compressors] in _KNOWN_CODECS
    return is_little_endian and has_whole_rows and has_known_codecs


def _check_checksum(crc: int, trailer: NDArray[np.uint8]) -> None:
    """Raise ValueError unless `trailer`, the last bytes of a chunk, holds the checksum `crc`."""
    if trailer.size != _CHECKSUM_BYTES or crc != int.from_bytes(trailer.tobytes(), "little"):
        raise ValueError("its checksum does not match")


def _frame_bytes(data: NDArray[np.uint8]) -> int | None:
    """Return the content size in a zstd frame header (RFC 8878, 3.1.1.1); None without one."""
    head = data[:18].tobytes()
    if head[:4] != b"\x28\xb5\x2f\xfd" or len(head) < 6:
        raise ValueError("it is not a zstd frame")
    # After the magic number and the descriptor: window (absent for a single segment), dictionary
    # id, size of the content.
    descriptor = head[4]
    single_segment = descriptor >> 5 & 1
    start = 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3]
    size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
    if size_bytes == 0:
        return None
    size = int.from_bytes(head[start : start + size_bytes], "little")
    return size + 256 if size_bytes == 2 else size  # two bytes hold the size minus 256
