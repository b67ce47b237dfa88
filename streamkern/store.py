"""Reads and writes training sets in Zarr; `layout` says what one looks like on disk.

A chunk that is missing, truncated or fails its checksum raises `CorruptChunkError` with its key;
an OSError of the storage passes through unchanged, so that the prefetcher may retry it. A store
that streamkern did not write ("foreign") is read too: its fingerprint covers only metadata, and
integer targets become classes 0..max after one pass over y.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.errors import ContainsArrayError, NodeTypeValidationError

from streamkern import layout
from streamkern.chunkfile import chunk_files
from streamkern.errors import (
    ConfigError,
    CorruptChunkError,
    DataError,
    NonFiniteError,
    StoreNotFoundError,
    StreamkernError,
)
from streamkern.layout import ATTRIBUTE, StoreSpec
from streamkern.storage import StrictStore, local_path, redact, zarr_store
from streamkern.writer import StoreWriter

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray


__all__ = ["Store", "StoreSpec", "StoreWriter", "open_store"]

MAX_INFERRED_CLASSES = 10_000  # foreign integer targets up to this many become classes


class Store:
    """The read side of a training set; made by `open_store`. Safe to share between threads.

    Attributes
    ----------
    url : str
        What it was opened with (may carry credentials: use `redact` to show it).
    spec : StoreSpec
    """

    def __init__(
        self, group: Any, url: str, spec: StoreSpec, names: tuple[str, str | None], reopen: Any
    ) -> None:
        self.url = url
        self.spec = spec
        self._group = group
        self._x = group[names[0]]
        self._y = None if names[1] is None else group[names[1]]
        arrays = [a for a in (self._x, self._y) if a is not None]
        self._files = {a.path: chunk_files(a) for a in arrays if a.chunks[0] == spec.chunk_rows}
        self._reopen = reopen

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
        X, y = self._read_stored(i)
        _check_finite(X, i, self.chunk_bounds(i)[0], self, self._key(self._x, i))
        return X, self._checked_targets(y, i)

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
            return np.empty((stop - start, 0), np.float32)
        return self._checked_targets(
            self._read_array(self._y, start, stop, self._key(self._y, i)), i
        )

    def codec_names(self) -> list[str]:
        """Names of X's codecs, in the order they encode."""
        codecs = self._x.metadata.to_dict().get("codecs") or ()
        return [codec["name"] for codec in codecs]

    def stored_bytes(self) -> int:
        """Bytes of X and y in the storage, from a listing."""
        arrays = [self._x] if self._y is None else [self._x, self._y]
        return sum(int(array.nbytes_stored()) for array in arrays)

    def absent_chunks(self) -> int:
        """Chunks of X and y (shards, where there are some) not in the storage, from a listing."""
        arrays = [self._x] if self._y is None else [self._x, self._y]
        absent = 0
        for array in arrays:
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
            X, y = self._read_stored(i)
            if not np.array_equal(layout.chunk_digest(X, y), digests[i]):
                raise CorruptChunkError(
                    f"chunk {self._key(self._x, i)} or {self._key(self._y, i)} of {self!r} "
                    "does not match its digest; ingest the data again"
                )
        spec = self.spec
        if layout.content_fingerprint(spec, spec.n_rows, digests) != spec.fingerprint:
            raise CorruptChunkError(f"the digests of {self!r} do not match its fingerprint")

    def _read_stored(self, i: int) -> tuple[NDArray[Any], NDArray[Any]]:
        start, stop = self.chunk_bounds(i)
        X = self._read_array(self._x, start, stop, self._key(self._x, i))
        if self._y is None:
            return X, np.empty((stop - start, 0), np.float32)
        return X, self._read_array(self._y, start, stop, self._key(self._y, i))

    def _read_array(self, array: Any, start: int, stop: int, key: str) -> NDArray[Any]:
        files = self._files.get(array.path)
        try:
            data = np.asarray(array[start:stop]) if files is None else files.read(key, stop - start)
        except (StreamkernError, OSError, MemoryError) as error:
            if isinstance(error, CorruptChunkError):
                raise CorruptChunkError(f"{error} {redact(self.url)}; {self._remedy()}") from error
            raise
        except Exception as error:  # whatever a codec raises on bytes it does not understand
            raise CorruptChunkError(
                f"chunk {key} of {redact(self.url)} does not decode ({error}); {self._remedy()}"
            ) from error
        return data.astype(data.dtype.newbyteorder("="), copy=False)

    def _remedy(self) -> str:
        if self.spec.foreign:
            return (
                "restore it, or, if its writer leaves out chunks that hold only the fill value, "
                'open it with missing="fill"'
            )
        return "restore it from a copy or ingest the data again"

    def _checked_targets(self, y: NDArray[Any], i: int) -> NDArray[Any]:
        start = self.chunk_bounds(i)[0]
        if self._y is None:
            return y
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
        row = i * self.spec.chunk_rows // _chunk_rows(array)
        coordinates = (row,) + (0,) * (array.ndim - 1)
        return f"{array.path}/{array.metadata.encode_chunk_key(coordinates)}"


def open_store(
    url: str | os.PathLike[str] | zarr.Group,
    *,
    x: str = "X",
    y: str | None = "y",
    storage_options: Mapping[str, Any] | None = None,
    missing: str = "error",
) -> Store:
    """The store at `url`, ready to read; costs three small requests for our own stores.

    Parameters
    ----------
    url : str, path or zarr.Group
        Anything `zarr_store` opens, or a group that is already open.
    x, y : str
        Array names; ``y=None`` opens without targets.
    storage_options : mapping, optional
        Passed to fsspec or obstore; never shown.
    missing : {"error", "fill"}
        What an absent chunk is in a foreign store. Zarr writers leave out chunks that hold only
        the fill value unless told otherwise; "fill" believes that. Our own stores have every
        chunk, so there absence is always an error.

    Raises
    ------
    StoreNotFoundError
        No group, or no such array, at the URL.
    DataError
        An unfinished ingest, a newer schema, or arrays that are not a training set.
    """
    if missing not in ("error", "fill"):
        raise ConfigError(f'missing="{missing}" is unknown; use "error" or "fill"')
    if isinstance(url, zarr.Group):
        text, reopen = str(url.store_path), None
        inner, prefix = url.store, url.path
    else:
        # pathlib paths and relative strings become absolute: a worker has another directory.
        path = local_path(url)
        text = str(url) if path is None else str(path.absolute())
        reopen = partial(
            open_store, text, x=x, y=y, storage_options=storage_options, missing=missing
        )
        inner, prefix = zarr_store(text, storage_options=storage_options), ""
    group = _strict_group(inner, prefix, text)
    state = group.attrs.get(ATTRIBUTE)
    ours = isinstance(state, Mapping) and x == "X" and y in ("y", None)
    if ours:
        layout.check_state(state, text)
    elif missing == "fill":
        group = zarr.open_group(inner, path=group.path, mode="r")
    names = (x, y)
    for name in (n for n in names if n is not None):
        if not isinstance(group.get(name), zarr.Array):
            raise StoreNotFoundError(
                f"{redact(text)} has no array {name!r}; it has {_array_names(group)}"
            )
    spec = (
        layout.spec_from_attributes(group, state, y, text)
        if ours
        else _foreign_spec(group, names, text)
    )
    return Store(group, text, spec, names, reopen)


def _strict_group(store: Any, path: str, url: str) -> zarr.Group:
    """The group on `store` with missing chunks turned into errors."""
    try:
        return zarr.open_group(StrictStore(store), path=path, mode="r")
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"there is no zarr store at {redact(url)}") from error
    except (ContainsArrayError, NodeTypeValidationError) as error:
        raise DataError(
            f"{redact(url)} is a single zarr array; give the group that holds X and y"
        ) from error
    except (OSError, StreamkernError):
        raise
    except Exception as error:
        raise DataError(f"the metadata of {redact(url)} can not be read: {error}") from error


def _foreign_spec(group: zarr.Group, names: tuple[str, str | None], url: str) -> StoreSpec:
    X: Any = group[names[0]]
    y: Any = None if names[1] is None else group[names[1]]
    where = f"{names[0]!r} of {redact(url)}"
    if X.ndim < 2 or X.shape[0] < 1:
        raise DataError(f"{where} has shape {X.shape}; it needs rows along a first axis")
    x_dtype = np.dtype(X.dtype).newbyteorder("=")
    layout.check_row_layout(X.shape[1:], x_dtype, where)
    classes, counts, n_outputs = None, None, 0
    if y is not None:
        if y.ndim not in (1, 2) or y.shape[0] != X.shape[0]:
            raise DataError(
                f"{names[1]!r} of {redact(url)} has shape {y.shape}; {X.shape[0]} rows of X need "
                f"({X.shape[0]},) class ids or ({X.shape[0]}, c) values"
            )
        n_outputs = 1 if y.ndim == 1 else y.shape[1]
        if y.ndim == 1 and np.dtype(y.dtype).kind in "iub":
            counts = _scan_classes(y, f"{names[1]!r} of {redact(url)}")
            classes, n_outputs = tuple(str(k) for k in range(len(counts))), len(counts)
        elif np.dtype(y.dtype).kind not in "iuf":
            raise DataError(f"{names[1]!r} of {redact(url)} has dtype {y.dtype}; ingest it first")
    description = [
        [name, list(a.shape), np.dtype(a.dtype).str, list(a.chunks), dict(a.attrs)]
        for name, a in zip(names, (X, y), strict=True)
        if a is not None
    ]
    return StoreSpec(
        n_rows=X.shape[0],
        row_shape=tuple(X.shape[1:]),
        x_dtype=x_dtype,
        chunk_rows=min(_chunk_rows(X), X.shape[0]),
        n_outputs=n_outputs,
        classes=classes,
        mean=None,
        scale=None,
        global_mean=None,
        global_scale=None,
        class_counts=counts,
        fingerprint=layout.metadata_fingerprint(description),
        y_dtype=None if y is None else np.dtype(y.dtype).newbyteorder("="),
    )


def _scan_classes(y: Any, where: str) -> tuple[int, ...]:
    """Rows per class id 0..max of a foreign integer y, in one pass of a chunk at a time."""
    counts = np.zeros(0, np.int64)
    step = max(_chunk_rows(y), 1 << 16)
    for start in range(0, y.shape[0], step):
        try:
            ids = np.asarray(y[start : start + step]).astype(np.int64)
        except (StreamkernError, OSError, MemoryError):
            raise
        except Exception as error:
            raise CorruptChunkError(f"{where} does not decode near row {start}: {error}") from error
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= MAX_INFERRED_CLASSES:
            raise DataError(
                f"{where} holds the integer {low if low < 0 else high}; integers are taken for "
                f"class ids 0..{MAX_INFERRED_CLASSES - 1}: ingest the store to map its labels"
            )
        block = np.bincount(ids, minlength=len(counts))
        block[: len(counts)] += counts
        counts = block
    return tuple(int(k) for k in counts)


def _stored_chunks(array: Any) -> int:
    chunks = int(array.nchunks_initialized)
    # zarr counts the chunks inside shards
    return chunks // int(np.prod(array.shards) // np.prod(array.chunks)) if array.shards else chunks


def _chunk_rows(array: Any) -> int:
    """Rows of the unit of reading: the shard where there is one."""
    return int((array.shards or array.chunks)[0])


def _array_names(group: zarr.Group) -> str:
    try:
        names = sorted(name for name, _ in group.arrays())
    except Exception:  # plain HTTP can not list
        return "no names to list"
    return ", ".join(names) if names else "no arrays"


def _check_finite(block: NDArray[Any], i: int, start: int, store: Store, key: str) -> None:
    where = layout.first_nonfinite(block)
    if where is not None:
        row, column, value = where
        raise NonFiniteError(
            f"{value} in {key} (chunk {i}) of {store!r}: row {start + row}, column {column}; "
            "clean the data and ingest it again"
        )
