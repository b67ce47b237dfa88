"""Reads and writes training sets in Zarr; `layout` says what one looks like on disk.

A chunk that is missing, truncated or fails its checksum raises `CorruptChunkError` with its key;
an OSError of the storage passes through unchanged, so that the prefetcher may retry it. A store
that streamkern did not write ("foreign") is read too: its fingerprint covers only metadata, and
integer targets become classes 0..max after one pass over y.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from streamkern import layout
from streamkern.cache import Cache
from streamkern.cachedobjects import CachedObjects
from streamkern.chunkfile import chunk_files, chunk_objects
from streamkern.errors import (
    ConfigError,
    CorruptChunkError,
    DataError,
    NonFiniteError,
    StreamkernError,
)
from streamkern.layout import ATTRIBUTE, StoreSpec
from streamkern.metadata import Arrays, Names, chunk_rows, foreign_fingerprint, read_metadata
from streamkern.objects import READS, TRAFFIC
from streamkern.storage import check_missing, local_path, redact, zarr_store
from streamkern.weights import as_weights
from streamkern.writer import StoreWriter

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray


__all__ = ["Store", "StoreSpec", "StoreWriter", "open_store"]


class Store:
    """The read side of a training set; made by `open_store`. Safe to share between threads.

    Attributes
    ----------
    url : str
        What it was opened with (may carry credentials: use `redact` to show it).
    spec : StoreSpec
    """

    def __init__(
        self,
        group: Any,
        arrays: Arrays,
        url: str,
        spec: StoreSpec,
        names: Names,
        reopen: Any,
        cache: Cache | None = None,
    ) -> None:
        self.url = url
        self.spec = spec
        self._group = group
        self._x, self._y, self._w = arrays
        self._arrays = [a for a in arrays if a is not None]
        self._known_digests: Any = None
        self._lock = threading.Lock()
        self._remote = local_path(url) is None
        whole = [a for a in self._arrays if a.chunks[0] == spec.chunk_rows]
        self._files = {a.path: chunk_files(a) for a in whole}
        self._objects = {a.path: chunk_objects(a) for a in whole}
        if cache is not None:
            self._keep_chunks(cache)
        self._reopen = reopen
        self._names = names

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
        start, stop = self.chunk_bounds(i)
        try:
            chunk = reader.decode(raw, stop - start) if reader is not None else None
        except (ValueError, RuntimeError):
            return False
        which = [array.path for array in self._arrays].index(path)
        digest = self._digests()[i].reshape(-1, layout.DIGEST_BYTES)[which]
        return chunk is not None and np.array_equal(layout.array_digest(chunk), digest)

    def _digests(self) -> Any:
        """(n_chunks, 64) uint8, checked against the fingerprint; read once."""
        with self._lock:
            if self._known_digests is None:
                digests = self._read_array(self._group["digests"], 0, self.n_chunks, "digests")
                self._check_digests(digests)
                self._known_digests = digests
        return self._known_digests

    def __repr__(self) -> str:
        shape = "x".join(str(k) for k in (self.spec.n_rows, *self.spec.row_shape))
        return f"Store({redact(self.url)!r}, {shape} {self.spec.x_dtype.name})"

    def __reduce__(self) -> Any:
        # A Dask worker opens the store anew: no open file, socket or event loop travels.
        if self._reopen is None:
            raise TypeError(
                f"{self!r} was opened from a zarr Group and can not travel; open it by URL"
            )
        return self._reopen, ()

    @property
    def features(self) -> Any:
        """X as a zarr array."""
        return self._x

    @property
    def n_chunks(self) -> int:
        """Row chunks of X; the last may be shorter."""
        return -(-self.spec.n_rows // self.spec.chunk_rows)

    def chunk_bounds(self, i: int) -> tuple[int, int]:
        """First row of chunk `i`, and the row after its last."""
        if not 0 <= i < self.n_chunks:
            raise IndexError(f"chunk {i} is outside 0..{self.n_chunks - 1} of {self!r}")
        start = i * self.spec.chunk_rows
        return start, min(start + self.spec.chunk_rows, self.spec.n_rows)

    def read_chunk(self, i: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """X (rows, *row_shape) as stored, and y (rows,) int64 class ids or (rows, c) floats.

        One chunk is decoded and nothing else is kept. y is (rows, 0) without targets.

        Raises
        ------
        CorruptChunkError
            Missing, truncated or failing its checksum; names the key, as ``X/c/12/0``.
        NonFiniteError
            NaN or infinity in X or y; names chunk, row and column.
        DataError
            A class id outside the classes.
        OSError
            The storage failed; worth a retry.
        """
        return self.read_weighted_chunk(i)[:2]

    def read_weighted_chunk(
        self, i: int
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32] | None]:
        """X and y as `read_chunk` gives them, and the sample weights (rows,), if there are some.

        Raises DataError for a weight that is negative or not finite, and what `read_chunk` does.
        """
        X, *rest = self._read_stored(i)
        start, stop = self.chunk_bounds(i)
        _check_finite(X, i, start, self, self._key(self._x, i))
        y = self._checked_targets(rest[0], i) if rest else _no_targets(stop - start)
        if self._w is None:
            return X, y, None
        where = f"{self._key(self._w, i)} of {self!r}"
        return X, y, as_weights(rest[1], stop - start, where, start)

    def read_rows(self, rows: NDArray[np.integer[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The given rows (k,), in the order asked, repeats allowed; each chunk is read once.

        Peak memory: the result and one chunk.
        """
        rows = np.asarray(rows)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise ConfigError(f"rows must be a list of integers, got {rows.dtype} {rows.shape}")
        rows = rows.astype(np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.spec.n_rows):
            bad = int(rows[(rows < 0) | (rows >= self.spec.n_rows)][0])
            raise ConfigError(f"row {bad} is outside 0..{self.spec.n_rows - 1} of {self!r}")
        spec = self.spec
        X = np.empty((len(rows), *spec.row_shape), spec.x_dtype)
        ids = spec.classes is not None
        y = np.empty(len(rows) if ids else (len(rows), spec.n_outputs), self._delivered_dtype())
        order = np.argsort(rows, kind="stable")
        chunks = rows[order] // spec.chunk_rows
        wanted, starts = np.unique(chunks, return_index=True)
        stops = np.append(starts, len(rows))[1:]
        for chunk, a, b in zip(wanted.tolist(), starts, stops, strict=True):
            places = order[a:b]
            inside = rows[places] - chunk * spec.chunk_rows
            chunk_X, chunk_y = self.read_chunk(chunk)
            X[places], y[places] = chunk_X[inside], chunk_y[inside]
        return X, y

    def read_targets(self, i: int) -> NDArray[Any]:
        """y of chunk `i` as `read_chunk` gives it, without reading X."""
        start, stop = self.chunk_bounds(i)
        if self._y is None:
            return _no_targets(stop - start)
        return self._checked_targets(
            self._read_array(self._y, start, stop, self._key(self._y, i)), i
        )

    def check_unchanged(self) -> None:
        """Raise DataError if another store is at the URL by now; one small request.

        Foreign stores are compared by their metadata only.
        """
        version: Any = self._group.metadata.zarr_format
        group: Any = zarr.open_group(
            self._group.store, path=self._group.path, mode="r", zarr_format=version
        )
        if self.spec.foreign:
            x, y, w = (None if name is None else group[name] for name in self._names)
            now = foreign_fingerprint((x, y, w), self._names)
        else:
            state: Any = group.attrs.get(ATTRIBUTE) or {}
            now = str(state.get("fingerprint"))
        if now != self.spec.fingerprint:
            raise DataError(
                f"{self!r} was changed while it was in use: its fingerprint was "
                f"{self.spec.fingerprint[:16]} and is {now[:16]}; restore it and resume, or start "
                "a new run"
            )

    def codec_names(self) -> list[str]:
        """Names of X's codecs, in the order they encode."""
        codecs = self._x.metadata.to_dict().get("codecs") or ()
        return [codec["name"] for codec in codecs]

    def stored_bytes(self) -> int:
        """Bytes of the arrays in the storage, from a listing."""
        return sum(int(array.nbytes_stored()) for array in self._arrays)

    def absent_chunks(self) -> int:
        """Chunks (shards, where there are some) not in the storage, from a listing."""
        absent = 0
        for array in self._arrays:
            unit = array.shards or array.chunks
            expected = np.prod([-(-n // k) for n, k in zip(array.shape, unit, strict=True)])
            absent += int(expected) - _stored_chunks(array)
        return absent

    def verify(self) -> None:
        """Read every chunk and compare it with its digest, then the digests with the fingerprint.

        Raises
        ------
        CorruptChunkError
            Names the first chunk that differs.
        DataError
            The store is foreign: it has no digests to compare with.
        """
        if self.spec.foreign or self._y is None:
            raise DataError(f"{self!r} has no digests to verify; ingest it to get them")
        digests = self._read_array(self._group["digests"], 0, self.n_chunks, "digests")
        for i in range(self.n_chunks):
            if not np.array_equal(layout.chunk_digest(*self._read_stored(i)), digests[i]):
                keys = " or ".join(self._key(array, i) for array in self._arrays)
                raise CorruptChunkError(
                    f"chunk {keys} of {self!r} does not match its digest; ingest the data again"
                )
        self._check_digests(digests)

    def _check_digests(self, digests: Any) -> None:
        spec = self.spec
        if layout.content_fingerprint(spec, spec.n_rows, digests) != spec.fingerprint:
            raise CorruptChunkError(f"the digests of {self!r} do not match its fingerprint")

    def _read_stored(self, i: int) -> list[NDArray[Any]]:
        """The rows of chunk `i` in each array, as stored."""
        start, stop = self.chunk_bounds(i)
        arrays = self._arrays
        keys = [self._key(array, i) for array in arrays]
        readers = [self._objects.get(array.path) for array in arrays]
        if None in readers:
            return [
                self._read_array(array, start, stop, key)
                for array, key in zip(arrays, keys, strict=True)
            ]
        return self._read_objects(readers, keys, stop - start)

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

    def _read_array(self, array: Any, start: int, stop: int, key: str) -> NDArray[Any]:
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

    def _checked_targets(self, y: NDArray[Any], i: int) -> NDArray[Any]:
        start = self.chunk_bounds(i)[0]
        if self.spec.classes is None:
            _check_finite(y, i, start, self, self._key(self._y, i))
            y = y.reshape(len(y), -1)
            return y if y.dtype.kind == "f" else y.astype(np.float64)
        ids = y.astype(np.int64)
        outside = (ids < 0) | (ids >= self.spec.n_outputs)
        if outside.any():
            row = int(np.argmax(outside))
            raise DataError(
                f"class id {ids[row]} in {self._key(self._y, i)}, row {start + row} of {self!r}, "
                f"is outside its {self.spec.n_outputs} classes"
            )
        return ids

    def _delivered_dtype(self) -> np.dtype[Any]:
        if self.spec.classes is not None:
            return np.dtype(np.int64)
        dtype = np.dtype(np.float32) if self.spec.y_dtype is None else self.spec.y_dtype
        return dtype if dtype.kind == "f" else np.dtype(np.float64)

    def _key(self, array: Any, i: int) -> str:
        row = i * self.spec.chunk_rows // chunk_rows(array)
        coordinates = (row,) + (0,) * (array.ndim - 1)
        return f"{array.path}/{array.metadata.encode_chunk_key(coordinates)}"


def _no_targets(n_rows: int) -> NDArray[Any]:
    return np.empty((n_rows, 0), np.float32)


def _native(data: NDArray[Any]) -> NDArray[Any]:
    return data.astype(data.dtype.newbyteorder("="), copy=False)


def open_store(
    url: str | os.PathLike[str] | zarr.Group,
    *,
    x: str = "X",
    y: str | None = "y",
    w: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    missing: str = "error",
    cache: Cache | None = None,
) -> Store:
    """The store at `url`, ready to read; costs three small requests for our own stores.

    Parameters
    ----------
    url : str, path or zarr.Group
        Anything `zarr_store` opens, or a group that is already open.
    x, y : str
        Array names; ``y=None`` opens without targets.
    w : str, optional
        Array of sample weights (n,) in a foreign store, of which the sums are taken in one pass.
        Stores that were ingested with weights bring them along.
    storage_options : mapping, optional
        Passed to fsspec or obstore; never shown.
    missing : {"error", "fill"}
        What an absent chunk is in a foreign store. Zarr writers leave out chunks that hold only
        the fill value unless told otherwise; "fill" believes that. Our own stores have every
        chunk, so there absence is always an error.
    cache : Cache, optional
        Keeps the chunks of a remote store of ours in a local folder.

    Raises
    ------
    StoreNotFoundError
        No group, or no such array, at the URL.
    DataError
        An unfinished ingest, a newer schema, or arrays that are not a training set.
    """
    check_missing(missing)
    if isinstance(url, zarr.Group):
        text, reopen = str(url.store_path), None
        inner, prefix = url.store, url.path
    else:
        # pathlib paths and relative strings become absolute: a worker has another directory.
        path = local_path(url)
        text = str(url) if path is None else str(path.absolute())
        reopen = partial(
            open_store,
            text,
            x=x,
            y=y,
            w=w,
            storage_options=storage_options,
            missing=missing,
            cache=cache,
        )
        inner, prefix = zarr_store(text, storage_options=storage_options), ""
    for reads_left in reversed(range(1 if local_path(text) is not None else READS)):
        try:
            group, arrays, names, spec = read_metadata(inner, prefix, text, (x, y, w), missing)
            break
        except CorruptChunkError:
            if not reads_left:
                raise
    return Store(group, arrays, text, spec, names, reopen, cache)


def _stored_chunks(array: Any) -> int:
    chunks = int(array.nchunks_initialized)
    # zarr counts the chunks inside shards
    return chunks // int(np.prod(array.shards) // np.prod(array.chunks)) if array.shards else chunks


def _check_finite(block: NDArray[Any], i: int, start: int, store: Store, key: str) -> None:
    where = layout.first_nonfinite(block)
    if where is not None:
        row, column, value = where
        raise NonFiniteError(
            f"{value} in {key} (chunk {i}) of {store!r}: row {start + row}, column {column}; "
            "clean the data and ingest it again"
        )
