"""Whole chunks of a store, read and written without zarr's machinery.

Zarr passes every chunk through an event loop and other threads, once to read it and once for each
codec: 0.6 ms a chunk whatever its size, and a copy of it. Stores of one chunk per row range with
the codecs that `layout` writes do not need that: here a chunk is one read (a file, or one request),
one checksum and at most one decompression, on the calling thread. Everything else stays with zarr,
which is also what the tests compare with.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
from numcodecs.zstd import Zstd
from zarr.codecs import Crc32cCodec, ZstdCodec

from streamkern.durable import LocalFiles
from streamkern.errors import CorruptChunkError
from streamkern.storage import StrictStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from streamkern.objects import Objects

_CHECKSUM_BYTES = 4
# Read and checked in pieces that stay in cache between the two: 1.15x on two threads, also because
# the checksum holds the interpreter's lock.
_PIECE = 1 << 20
_DECODERS: tuple[list[type], ...] = ([], [Crc32cCodec], [ZstdCodec], [ZstdCodec, Crc32cCodec])


class _Chunks:
    """How the chunks of one array are decoded."""

    def __init__(self, array: Any) -> None:
        codecs = [type(codec) for codec in array.metadata.codecs]
        self._checked, self._compressed = Crc32cCodec in codecs, ZstdCodec in codecs
        self._shape, self._dtype = array.chunks, np.dtype(array.dtype).newbyteorder("<")
        self._bytes = int(np.prod(self._shape)) * self._dtype.itemsize

    def _decoded(self, raw: Any, n_rows: int) -> NDArray[Any]:
        """The first `n_rows` rows, from the bytes before the checksum."""
        if self._compressed:
            raw = np.frombuffer(Zstd().decode(raw), np.uint8)
        if raw.nbytes != self._bytes:
            raise ValueError(f"it has {raw.nbytes} bytes and should have {self._bytes}")
        chunk: NDArray[Any] = raw.view(self._dtype).reshape(self._shape)
        return chunk[:n_rows]


class ChunkFiles(_Chunks):
    """The chunks of one array in a local folder. Safe to share between threads."""

    def __init__(self, folder: Path, array: Any) -> None:
        super().__init__(array)
        self._folder = folder

    def read(self, key: str, n_rows: int) -> NDArray[Any]:
        """The first `n_rows` rows of the chunk at `key`, little-endian.

        Raises
        ------
        CorruptChunkError
            There is no such file.
        ValueError, RuntimeError
            Its bytes are not a chunk: the checksum, the frame or the length is wrong.
        """
        return self._decoded(self._stored(key), n_rows)

    def _stored(self, key: str) -> NDArray[np.uint8]:
        """The bytes of the file, checked, without the checksum."""
        done = crc = 0
        try:
            with (self._folder / key).open("rb", buffering=0) as file:
                raw = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
                end = raw.size - _CHECKSUM_BYTES if self._checked else raw.size
                while n := file.readinto(raw[done : done + _PIECE].data):
                    if self._checked:
                        crc = google_crc32c.extend(crc, raw[done : min(done + n, end)])
                    done += n
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise CorruptChunkError(f"chunk {key} is missing from the store") from error
        if self._checked and crc != int.from_bytes(raw[end:done].tobytes(), "little"):
            raise ValueError("its checksum does not match")
        return raw[: min(done, end)]


class ChunkEncoder(_Chunks):
    """Writes the chunks of one array in a local folder. Safe to share between threads."""

    def __init__(self, files: LocalFiles, array: Any) -> None:
        super().__init__(array)
        self._files, self._array = files, array
        self._zstd = [c for c in array.metadata.codecs if isinstance(c, ZstdCodec)]

    def write(self, i: int, rows: NDArray[Any]) -> None:
        """Write chunk `i` of the first axis, whose last rows may be left out and become 0."""
        rows = np.ascontiguousarray(rows, self._dtype)
        padding = np.zeros(self._bytes - rows.nbytes, np.uint8)
        parts: list[Any] = [rows.reshape(-1).view(np.uint8), padding]
        if self._zstd:
            codec = Zstd(level=self._zstd[0].level, checksum=self._zstd[0].checksum)
            parts = [np.frombuffer(codec.encode(np.concatenate(parts)), np.uint8)]
        if self._checked:
            crc = 0
            for part in parts:
                crc = google_crc32c.extend(crc, part)
            parts.append(crc.to_bytes(_CHECKSUM_BYTES, "little"))
        place = self._array.metadata.encode_chunk_key((i,) + (0,) * (self._array.ndim - 1))
        self._files.write(f"{self._array.path}/{place}", parts)


class ChunkObjects(_Chunks):
    """The chunks of one array on remote storage. Safe to share between threads."""

    def __init__(self, objects: Objects, array: Any) -> None:
        super().__init__(array)
        self.objects = objects

    def decode(self, raw: Any, n_rows: int) -> NDArray[Any]:
        """The first `n_rows` rows of a chunk, from its object; ValueError or RuntimeError."""
        data = np.frombuffer(raw, np.uint8)
        if self._checked:
            data, crc = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
            if google_crc32c.value(data) != int.from_bytes(crc.tobytes(), "little"):
                raise ValueError("its checksum does not match")
        return self._decoded(data, n_rows)


def chunk_files(array: Any) -> ChunkFiles | None:
    """A reader for a local zarr array in which a missing chunk is an error, or None."""
    store = array.store_path.store
    folder = store.folder if isinstance(store, StrictStore) else None
    return None if folder is None or not _is_plain(array) else ChunkFiles(folder, array)


def chunk_encoder(array: Any) -> ChunkEncoder | None:
    """A writer for a local zarr array of such chunks, or None."""
    store = array.store_path.store
    plain = isinstance(store, LocalFiles) and _is_plain(array)
    return ChunkEncoder(store, array) if plain else None


def chunk_objects(array: Any) -> ChunkObjects | None:
    """The same for an array on remote storage."""
    store = array.store_path.store
    objects = store.objects if isinstance(store, StrictStore) else None
    return None if objects is None or not _is_plain(array) else ChunkObjects(objects, array)


def _is_plain(array: Any) -> bool:
    """Whether a chunk is an object, and its codecs are ones that are known here."""
    if array.metadata.zarr_format != 3 or array.shards is not None:
        return False
    first, *others = array.metadata.codecs
    # A string or an enumeration of one, depending on the version of zarr.
    order = getattr(first, "endian", "big")
    little = getattr(order, "value", order) in (None, "little")
    rows_only = array.chunks[1:] == array.shape[1:]
    return little and rows_only and [type(codec) for codec in others] in _DECODERS
