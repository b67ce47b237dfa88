"""Reads the chunks of a store as they are stored: each the shortest way, and again after a fault.

Where `chunkfile` understands the arrays, chunks are files or objects, the latter perhaps kept in a
cache; else zarr reads them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern import layout
from streamkern.cache import Cache
from streamkern.cachedobjects import CachedObjects
from streamkern.chunkfile import chunk_files, chunk_objects
from streamkern.errors import CorruptChunkError, StreamkernError
from streamkern.layout import StoreSpec
from streamkern.metadata import Arrays, chunk_rows
from streamkern.objects import READS, TRAFFIC
from streamkern.storage import local_path, redact

if TYPE_CHECKING:
    from numpy.typing import NDArray


class StoredChunks:
    """The arrays of a store, read by chunks of rows. Safe to share between threads.

    Attributes
    ----------
    x, y, w : zarr arrays; y and w may be None. arrays : those that are there, in this order.
    row : zarr array of the numbers that rows have in their source; None in foreign stores.
    group : the zarr group; url, spec : as of the store.
    """

    def __init__(
        self,
        group: Any,
        arrays: Arrays,
        row: Any,
        url: str,
        spec: StoreSpec,
        cache: Cache | None = None,
    ) -> None:
        self.group, self.url, self.spec = group, url, spec
        self.x, self.y, self.w = arrays
        self.arrays = [a for a in arrays if a is not None]
        self.row = row
        self._known_digests: Any = None
        self._lock = threading.Lock()
        self._remote = local_path(url) is None
        held = self.arrays if self.row is None else [*self.arrays, self.row]
        whole = [a for a in held if a.chunks[0] == spec.chunk_rows]
        self._files = {a.path: chunk_files(a) for a in whole}
        self._objects = {a.path: chunk_objects(a) for a in whole}
        if cache is not None:
            self._keep_chunks(cache)

    def __repr__(self) -> str:
        shape = "x".join(str(k) for k in (self.spec.n_rows, *self.spec.row_shape))
        return f"Store({redact(self.url)!r}, {shape} {self.spec.x_dtype.name})"

    @property
    def n_chunks(self) -> int:
        """Row chunks of X; the last may be shorter."""
        return -(-self.spec.n_rows // self.spec.chunk_rows)

    def bounds(self, i: int) -> tuple[int, int]:
        """First row of chunk `i`, and the row after its last."""
        if not 0 <= i < self.n_chunks:
            raise IndexError(f"chunk {i} is outside 0..{self.n_chunks - 1} of {self!r}")
        start = i * self.spec.chunk_rows
        return start, min(start + self.spec.chunk_rows, self.spec.n_rows)

    def key(self, array: Any, i: int) -> str:
        """Of chunk `i` of an array in the storage, as ``X/c/12/0``."""
        row = i * self.spec.chunk_rows // chunk_rows(array)
        coordinates = (row,) + (0,) * (array.ndim - 1)
        return f"{array.path}/{array.metadata.encode_chunk_key(coordinates)}"

    def read(self, i: int) -> list[NDArray[Any]]:
        """The rows of chunk `i` in each array, as stored; raises as `Store.read_chunk`."""
        readers = [self._objects.get(array.path) for array in self.arrays]
        if None in readers:
            return [self.read_array(array, i) for array in self.arrays]
        start, stop = self.bounds(i)
        return self._read_objects(readers, [self.key(a, i) for a in self.arrays], stop - start)

    def read_array(self, array: Any, i: int) -> NDArray[Any]:
        """The rows of chunk `i` in one of the arrays."""
        return self._read_rows(array, *self.bounds(i), self.key(array, i))

    def read_digests(self) -> Any:
        """(n_chunks, 96) uint8, or (n_chunks, 128) with sample weights, as stored."""
        return self._read_rows(self.group["digests"], 0, self.n_chunks, "digests")

    def check_digests(self, digests: Any) -> None:
        """CorruptChunkError unless the fingerprint was made of `digests`."""
        spec = self.spec
        if layout.content_fingerprint(spec, spec.n_rows, digests) != spec.fingerprint:
            raise CorruptChunkError(f"the digests of {self!r} do not match its fingerprint")

    def _trusted_digests(self) -> Any:
        """The digests, checked; read once."""
        with self._lock:
            if self._known_digests is None:
                digests = self.read_digests()
                self.check_digests(digests)
                self._known_digests = digests
        return self._known_digests

    def _read_objects(self, readers: list[Any], keys: list[str], n_rows: int) -> list[Any]:
        """A chunk of each array, requested at once; one that arrives altered is asked for again."""
        objects, parts = readers[0].objects, dict[str, Any]()
        for reads_left in reversed(range(READS)):
            missing = [key for key in keys if key not in parts]
            fresh = reads_left < READS - 1
            try:
                raw = objects.get_many(missing, fresh=fresh)
            except FileNotFoundError as error:
                raise CorruptChunkError(f"chunk {error}; {self._remedy()}") from error
            for key, data in zip(missing, raw, strict=True):
                with self._explained(key, retry=reads_left > 0):
                    parts[key] = _native(readers[keys.index(key)].decode(data, n_rows))
            if len(parts) == len(keys):
                break
        return [parts[key] for key in keys]

    def _read_rows(self, array: Any, start: int, stop: int, key: str) -> NDArray[Any]:
        files, data = self._files.get(array.path), None
        for reads_left in reversed(range(READS if self._remote else 1)):
            with self._explained(key, retry=reads_left > 0):
                if files is None:
                    data = np.asarray(array[start:stop])
                else:
                    data = files.read(key, stop - start)
                break
        assert data is not None
        return _native(data)

    @contextmanager
    def _explained(self, key: str, *, retry: bool) -> Iterator[None]:
        """Names the chunk that does not decode, or lets it pass if it will be read again."""
        try:
            yield
        except (StreamkernError, OSError, MemoryError) as error:
            if isinstance(error, CorruptChunkError):
                raise CorruptChunkError(f"{error} {redact(self.url)}; {self._remedy()}") from error
            raise
        except Exception as error:  # whatever a codec raises on bytes it does not understand
            if retry:
                TRAFFIC.add(retries=1)
                return
            raise CorruptChunkError(
                f"chunk {key} of {redact(self.url)} does not decode ({error}); {self._remedy()}"
            ) from error

    def _remedy(self) -> str:
        if self.spec.foreign:
            return (
                "restore it, or, if its writer leaves out chunks that hold only the fill value, "
                'open it with missing="fill"'
            )
        return "restore it from a copy or ingest the data again"

    # -- the cache

    def _keep_chunks(self, cache: Cache) -> None:
        """Read the chunks of a remote store through `cache`; local ones are near enough."""
        if self.spec.foreign and self._remote:
            warnings.warn(
                f"{redact(self.url)} is not cached: streamkern did not write it, and a change of "
                "its chunks would not be noticed; ingest it",
                stacklevel=4,
            )
            return
        for reader in self._objects.values():
            if reader is not None:
                reader.objects = CachedObjects(
                    reader.objects, cache, self.spec.fingerprint, self._is_written
                )

    def _is_written(self, key: str, raw: Any) -> bool:
        """Whether an object is the chunk of an array that the fingerprint was made of."""
        path, _, place = key.partition("/c/")
        reader, i = self._objects[path], int(place.partition("/")[0])
        start, stop = self.bounds(i)
        try:
            chunk = reader.decode(raw, stop - start) if reader is not None else None
        except (ValueError, RuntimeError):
            return False
        which = [array.path for array in self.arrays].index(path) if path != self.row.path else -1
        digest = self._trusted_digests()[i].reshape(-1, layout.DIGEST_BYTES)[which]
        return chunk is not None and np.array_equal(layout.array_digest(chunk), digest)


def _native(data: NDArray[Any]) -> NDArray[Any]:
    return data.astype(data.dtype.newbyteorder("="), copy=False)
