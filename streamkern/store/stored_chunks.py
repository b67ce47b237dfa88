"""Read the chunks of a store as stored, and again after a fault of the storage.

If `fast_chunks` supports the arrays, chunks are files or objects, the latter perhaps kept in a
cache; otherwise zarr reads them. A chunk of streamkern's own stores is compared with the recorded
checksum of its place, so a chunk of another place or store is an error.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from streamkern.basics.errors import CorruptChunkError, StreamkernError
from streamkern.basics.message import mention
from streamkern.basics.text import redact
from streamkern.basics.warning import warn
from streamkern.filesystem.cache import Cache
from streamkern.filesystem.cached_objects import CachedObjects
from streamkern.filesystem.objects import MAX_READS
from streamkern.filesystem.traffic import Traffic
from streamkern.filesystem.urls import MISSING_CHUNK_TEXT, StrictStore, local_path
from streamkern.store import layout
from streamkern.store.conventions import rows_of_slice
from streamkern.store.fast_chunks import ChunkObjects, chunk_key, chunk_reader
from streamkern.store.metadata import (
    GroupContents,
    fingerprints_now,
    rows_appended_error,
    unit_rows,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _Part(NamedTuple):
    """Rows `start` to `stop` of an array, stored in chunk `key`.

    crc : recorded CRC-32C of the chunk; None in foreign stores
    """

    array: Any
    key: str
    start: int
    stop: int
    crc: int | None = None


class StoredChunks:
    """The arrays of a store, read by chunks of rows. Safe to share between threads.

    Attributes
    ----------
    contents : contents of the group
    url, spec : as in `Store`
    x, y, w : zarr arrays; y and w may be None
    arrays : x, y and w, in this order, without the ones that are None
    row : zarr array of the row numbers in the source; None in foreign stores
    objects : the storage, if the chunks are objects, or None
    traffic : counts of the objects' requests and bytes
    cache : cache of the chunks, or None
    """

    def __init__(self, contents: GroupContents, url: str, cache: Cache | None = None) -> None:
        self.contents, self.url, self.spec = contents, url, contents.spec
        self.x, self.y, self.w, self.row = contents.x, contents.y, contents.w, contents.row
        self.arrays = [a for a in (self.x, self.y, self.w) if a is not None]
        store = contents.x.store_path.store
        self.objects = store.objects if isinstance(store, StrictStore) else None
        self.traffic = Traffic() if self.objects is None else self.objects.traffic
        self.cache: Cache | None = None
        # Empty until the first use; a list, because the copies of `with_stop_event` share it.
        self._known_crcs: list[Any] = []
        self._last_chunk_digest: NDArray[np.uint8] | None = None  # read with the checksums
        self._lock = threading.Lock()
        self._remote = local_path(url) is None
        tables = (contents.row, contents.digests, contents.crc)
        aligned = [a for a in self.arrays if a.chunks[0] == contents.spec.chunk_rows]
        self._readers = {a.path: chunk_reader(a) for a in (*aligned, *tables) if a is not None}
        if cache is not None:
            self._use_cache(cache)

    def __repr__(self) -> str:
        shape = "x".join(map(str, (self.spec.n_rows, *self.spec.row_shape)))
        return f"Store({redact(self.url)!r}, {shape} {self.spec.x_dtype.name})"

    def with_stop_event(self, stopped: threading.Event) -> StoredChunks:
        """Return the same chunks; requests end once `stopped` is set, except reads by zarr."""
        if self.objects is None:
            return self
        stoppable = copy.copy(self)
        stoppable._readers = {
            path: reader.with_stop_event(stopped) if isinstance(reader, ChunkObjects) else reader
            for path, reader in self._readers.items()
        }
        return stoppable

    def absent_chunks(self) -> int:
        """Return the number of chunks (of shards, if there are some) that a listing lacks."""
        n_absent = 0
        for array in self.arrays:
            unit = array.shards or array.chunks
            expected = np.prod([-(-n // k) for n, k in zip(array.shape, unit, strict=True)])
            # `nchunks_initialized` counts the chunks inside shards.
            chunks_per_shard = int(np.prod(unit) // np.prod(array.chunks))
            n_absent += int(expected) - int(array.nchunks_initialized) // chunks_per_shard
        return n_absent

    def bounds(self, i: int) -> tuple[int, int]:
        """Return the first row of chunk `i`, and the row after its last."""
        if not 0 <= i < self.spec.n_chunks:
            raise IndexError(f"chunk {i} is outside 0..{self.spec.n_chunks - 1} of {self!r}")
        start = i * self.spec.chunk_rows
        return start, min(start + self.spec.chunk_rows, self.spec.n_rows)

    def key(self, array: Any, i: int) -> str:
        """Return the key of chunk `i` of an array in the storage, such as ``X/c/12/0``."""
        return chunk_key(array, i * self.spec.chunk_rows // unit_rows(array))

    def read(self, i: int) -> list[NDArray[Any]]:
        """Return the rows of chunk `i` in each array, as stored; raises as `Store.read_chunk`."""
        return self._read([self._part(array, i) for array in self.arrays])

    def read_array(self, array: Any, i: int) -> NDArray[Any]:
        """Return the rows of chunk `i` in one of the arrays."""
        return self._read([self._part(array, i)])[0]

    def read_digests(self) -> Any:
        """Return the checked digests, (n_chunks, 96) uint8, or (n_chunks, 128) with weights."""
        with self._explain_appends():
            digests, spec = self._read_table(self.contents.digests), self.spec
        if layout.content_fingerprint(spec, digests) != spec.fingerprint:
            raise CorruptChunkError(
                f"the digests of {self!r} do not match its fingerprint", self._remedy()
            )
        return digests

    def read_crcs(self) -> NDArray[np.uint32]:
        """Return the checksums of the stored chunks, (n_chunks, 3 or 4); read by the first call."""
        with self._lock:
            if not self._known_crcs:
                with self._explain_appends():
                    table = self._read_table(self.contents.crc)
                    self._last_chunk_digest = self._read_last_chunk_digest()
                if layout.array_digest(table).tobytes().hex() != self.contents.mark["crc"]:
                    raise CorruptChunkError(
                        f"the checksums in crc of {self!r} do not match their digest",
                        self._remedy(),
                    )
                self._known_crcs.append(table)
        crcs: NDArray[np.uint32] = self._known_crcs[0]
        return crcs

    @contextmanager
    def _explain_appends(self) -> Iterator[None]:
        """Raise `rows_appended_error` if a second append removed a table that is read inside."""
        try:
            yield
        except (CorruptChunkError, FileNotFoundError) as error:
            earlier_fingerprints = fingerprints_now(self.contents, self.url)[1:]
            if self.spec.fingerprint in earlier_fingerprints:
                raise rows_appended_error(self.url, self.spec.n_rows) from error
            raise

    def _part(self, array: Any, i: int) -> _Part:
        return _Part(array, self.key(array, i), *self.bounds(i), self._crc(array, i))

    def _crc(self, array: Any, i: int) -> int | None:
        """Return the recorded checksum of a chunk; None in foreign stores."""
        if self.contents.crc is None:
            return None
        crcs = self.read_crcs()
        return int(crcs[i, layout.row_arrays(crcs.shape[1] == 4).index(array.basename)])

    def _read_table(self, array: Any) -> NDArray[Any]:
        """Return all values of a small array of a store that streamkern wrote."""
        n_rows, chunk_rows = array.shape[0], array.chunks[0]
        parts = [
            _Part(array, chunk_key(array, i), start, min(start + chunk_rows, n_rows))
            for i, start in enumerate(range(0, n_rows, chunk_rows))
        ]
        return np.concatenate(self._read(parts))

    def _read(self, parts: Sequence[_Part]) -> list[NDArray[Any]]:
        """Return the rows of each part; a part that arrives altered is requested again."""
        readers = [self._readers.get(part.array.path) for part in parts]
        if all(isinstance(reader, ChunkObjects) for reader in readers):
            return self._read_objects(readers, parts)
        return [
            self._read_objects([reader], [part])[0]
            if isinstance(reader, ChunkObjects)
            else self._read_part(reader, part)
            for reader, part in zip(readers, parts, strict=True)
        ]

    def _read_objects(self, readers: list[Any], parts: Sequence[_Part]) -> list[Any]:
        """Return the rows of each part, all requested at once.

        Parts that do not decode are requested again, up to `MAX_READS` times in all.
        """
        objects = readers[0].objects
        rows: dict[str, Any] = {}  # of the parts that have decoded, by key
        for reads_left in reversed(range(MAX_READS)):
            remaining = [(r, p) for r, p in zip(readers, parts, strict=True) if p.key not in rows]
            refetch = reads_left < MAX_READS - 1
            try:
                raw = objects.get_many([part.key for _, part in remaining], refetch=refetch)
            except FileNotFoundError as error:
                raise CorruptChunkError(f"chunk {error}", self._remedy(missing=True)) from error
            for (reader, part), data in zip(remaining, raw, strict=True):
                with self._explain_errors(part.key, retry=reads_left > 0):
                    rows_and_crc = reader.decode(data, part.stop - part.start)
                    rows[part.key] = self._checked_rows(part, *rows_and_crc)
            if len(rows) == len(parts):
                break
        return [rows[part.key] for part in parts]

    def _read_part(self, reader: Any, part: _Part) -> NDArray[Any]:
        """Return the rows of a part that is no object. reader : None if zarr reads the array"""
        rows = None
        n_reads = MAX_READS if self._remote else 1
        for reads_left in reversed(range(n_reads)):
            with self._explain_errors(part.key, retry=reads_left > 0):
                if reader is None:
                    rows = _native_byte_order(np.asarray(part.array[part.start : part.stop]))
                else:
                    rows = self._checked_rows(part, *reader.read(part.key, part.stop - part.start))
                break
        assert rows is not None
        return rows

    def _checked_rows(self, part: _Part, rows: NDArray[Any], crc: int | None) -> NDArray[Any]:
        """Return the rows; raise ValueError unless they are the ones written at this place."""
        if part.crc is not None and crc != part.crc and not self._was_extended(part, rows):
            raise ValueError(
                "it is intact, but not the chunk that was written there: its checksum differs"
            )
        return _native_byte_order(rows)

    def _was_extended(self, part: _Part, rows: NDArray[Any]) -> bool:
        """Return whether this is the last chunk, and rows were appended to it since the opening."""
        if part.stop - part.start == self.spec.chunk_rows:
            return False
        digest = self._last_chunk_digest
        if digest is None:
            return False
        # The digest of a chunk joins the digests of its arrays; four arrays if there are weights.
        names = layout.row_arrays(len(digest) == 4 * layout.DIGEST_BYTES)
        start = names.index(part.array.basename) * layout.DIGEST_BYTES
        old_digest = digest[start : start + layout.DIGEST_BYTES]
        return np.array_equal(layout.array_digest(rows), old_digest)

    def _read_last_chunk_digest(self) -> NDArray[np.uint8] | None:
        """Return the digest of the last chunk if rows may be appended to it, else None.

        It is read with the checksums, because the second append removes its table.
        """
        if self.spec.n_rows % self.spec.chunk_rows == 0 or self._remote:
            return None
        digest: NDArray[np.uint8] = self._read_table(self.contents.digests)[-1].copy()
        return digest

    @contextmanager
    def _explain_errors(self, key: str, *, retry: bool) -> Iterator[None]:
        """Name the chunk in errors of a block; with `retry`, suppress errors of decoding."""
        try:
            yield
        except (StreamkernError, OSError, MemoryError) as error:
            if isinstance(error, CorruptChunkError):
                remedy = self._remedy(missing=str(error).endswith(MISSING_CHUNK_TEXT))
                raise CorruptChunkError(f"{error} {redact(self.url)}", remedy) from error
            raise
        except Exception as error:  # any error of a codec on bytes it cannot decode
            if retry:
                self.traffic.add(retries=1)
                return
            raise CorruptChunkError(
                f"chunk {key} of {redact(self.url)} does not decode ({error})", self._remedy()
            ) from error

    def _remedy(self, *, missing: bool = False) -> str:
        """Return the remedy for a damaged chunk. missing : whether the chunk does not exist"""
        if self.spec.foreign and not missing:
            return "restore it from a copy"
        if self.spec.foreign:
            return (
                "restore it, or, if its writer leaves out chunks that hold only the fill value, "
                f"ingest it, or open it in Python, with {mention('missing', 'fill')}"
            )
        return "restore it from a copy or ingest the data again"

    # -- the cache

    def _use_cache(self, cache: Cache) -> None:
        """Read the chunks of a remote store through `cache`; local chunks are not cached."""
        if self.spec.foreign and self._remote:
            warn(
                f"{redact(self.url)} is not cached: streamkern did not write it, and a change of "
                "its chunks would not be noticed; ingest it"
            )
            return
        for array in self.arrays:
            reader = self._readers.get(array.path)
            if isinstance(reader, ChunkObjects):
                self.cache = cache
                reader.objects = CachedObjects(
                    reader.objects, cache, self.spec.fingerprint, self._belongs_to_store
                )

    def _belongs_to_store(self, key: str, raw: Any) -> bool:
        """Return whether an object is the chunk of this store that `key` names, by its checksum."""
        path, _, number = key.partition("/c/")
        array = next(array for array in self.arrays if array.path == path)
        reader: Any = self._readers[path]
        i = int(number.partition("/")[0])
        try:
            return bool(reader.decode(raw, 0)[1] == self._crc(array, i))
        except (ValueError, RuntimeError):
            return False


class StoredRows:
    """One array of a store by slices of rows, read and checked as its chunks are."""

    def __init__(self, chunks: StoredChunks, array: Any) -> None:
        self.shape, self.dtype, self.chunks = array.shape, np.dtype(array.dtype), array.chunks
        self.shards, self.ndim = array.shards, array.ndim
        self._chunks, self._array = chunks, array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        return rows_of_slice(rows, self.shape[0], self._read)

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows `start` to `stop`."""
        chunk_rows = self._chunks.spec.chunk_rows
        parts = [np.empty((0, *self.shape[1:]), self.dtype)]  # the result for no rows
        for i in range(start // chunk_rows, -(-stop // chunk_rows)):
            chunk, chunk_start = self._chunks.read_array(self._array, i), i * chunk_rows
            parts.append(chunk[max(start - chunk_start, 0) : stop - chunk_start])
        return np.concatenate(parts[1:]) if len(parts) > 2 else parts[-1]


def _native_byte_order(data: NDArray[Any]) -> NDArray[Any]:
    return data.astype(data.dtype.newbyteorder("="), copy=False)
