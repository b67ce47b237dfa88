"""Read training sets in Zarr, as `layout` describes them on disk.

A chunk that is missing, truncated or fails its checksum raises `CorruptChunkError` with its key; an
OSError of the storage passes through unchanged, so that the prefetcher may retry it. A store that
streamkern did not write ("foreign") is read too: its fingerprint covers only metadata, and integer
targets become the classes 0..max after one pass over y.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from streamkern.basics.errors import ConfigError, CorruptChunkError, DataError, NonFiniteError
from streamkern.basics.text import redact
from streamkern.basics.warning import renamed_attribute
from streamkern.filesystem.cache import Cache
from streamkern.filesystem.icechunk_repository import (
    icechunk_snapshot,
    is_icechunk,
    snapshot_url,
    unwrap_icechunk_store,
)
from streamkern.filesystem.objects import MAX_READS
from streamkern.filesystem.urls import check_missing, local_path, zarr_store
from streamkern.store import layout
from streamkern.store.facts import store_facts, store_html
from streamkern.store.lazy_arrays import dask_arrays, torch_dataset, xarray_dataset
from streamkern.store.metadata import fingerprints_now, read_metadata, rows_appended_error
from streamkern.store.row_block import by_unit
from streamkern.store.sample_weights import as_weights, warn_of_unused
from streamkern.store.stored_chunks import StoredChunks, StoredRows

if TYPE_CHECKING:
    import threading

    from numpy.typing import NDArray


class Store:
    """The read side of a training set; made by `open_store`. Safe to share between threads.

    Attributes
    ----------
    url : str
        The URL with which the store was opened. It may hold credentials: `redact` it to show it.
    spec : StoreSpec
    stored_chunks : StoredChunks
        The chunks in the storage.
    """

    stored = renamed_attribute("stored", "stored_chunks")

    def __init__(self, chunks: StoredChunks, reopen: Any) -> None:
        self.url, self.spec, self.stored_chunks = chunks.url, chunks.spec, chunks
        self._reopen = reopen

    def __repr__(self) -> str:
        return repr(self.stored_chunks)

    def _repr_html_(self) -> str:
        return store_html(self.stored_chunks)

    def __reduce__(self) -> Any:
        # A Dask worker opens the store again: no open file, socket or event loop is pickled.
        if self._reopen is None:
            raise TypeError(
                f"{self!r} was opened from a zarr Group and cannot be pickled; open it by URL"
            )
        return _reopen_unchanged, (self._reopen, self.spec.fingerprint)

    def with_stop_event(self, stopped: threading.Event) -> Store:
        """Return the same store, whose requests raise StorageError once `stopped` is set."""
        return Store(self.stored_chunks.with_stop_event(stopped), self._reopen)

    @property
    def rows(self) -> dict[str, StoredRows]:
        """The arrays X, y and w that exist; slices are read and checked as chunks are."""
        chunks = self.stored_chunks
        arrays = zip(("X", "y", "w"), (chunks.x, chunks.y, chunks.w), strict=True)
        return {name: StoredRows(chunks, a) for name, a in arrays if a is not None}

    def to_dask(self) -> dict[str, Any]:
        """Return X, y and w, if they exist, as lazy arrays of Dask, as stored.

        Chunks are read and checked where and when they are computed; small ones are grouped to
        about 8 MiB.

        Raises
        ------
        DataError
            The rows are sparse.
        """
        return dask_arrays(self)

    def to_xarray(self) -> Any:
        """Return an `xarray.Dataset` of the arrays of `to_dask`, with the names of the columns.

        The dimensions are row, and feature or axis_1, axis_2, …; the attribute `classes` holds the
        names of the classes. Raises as `to_dask`, and MissingDependencyError without xarray.
        """
        return xarray_dataset(self)

    def to_torch(self, batch_size: int, **options: Any) -> Any:
        """Return a dataset of PyTorch with shuffled batches of this store.

        The same as ``Loader(store, batch_size, **options).to_torch()``: see there for the options,
        the dataset and the errors.
        """
        return torch_dataset(self, batch_size, options)

    @property
    def n_chunks(self) -> int:
        """Number of row chunks of X; the last may be shorter."""
        return self.spec.n_chunks

    def chunk_bounds(self, i: int) -> tuple[int, int]:
        """Return the first row of chunk `i`, and the row after its last."""
        return self.stored_chunks.bounds(i)

    def read_chunk(self, i: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return X (rows, *row_shape) as stored, and y, (rows,) int64 ids or (rows, c) floats.

        One chunk is decoded and nothing else is kept. y is (rows, 0) without targets.

        Raises
        ------
        CorruptChunkError
            If the chunk is missing or truncated, or its checksum is wrong. The message names the
            key, such as ``X/c/12/0``.
        NonFiniteError
            If X or y has NaN or infinity. The message names chunk, row and column.
        DataError
            If a class id is outside the classes.
        OSError
            If the storage failed; a retry may succeed.
        """
        return self.read_weighted_chunk(i)[:2]

    def read_weighted_chunk(
        self, i: int
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32] | None]:
        """Return X and y as `read_chunk`, and the sample weights (rows,), or None without weights.

        Raises DataError for a weight that is negative or not finite, and otherwise as `read_chunk`.
        """
        X, *targets_and_weights = self.stored_chunks.read(i)
        self._check_finite(X, i, self.stored_chunks.x)
        if not targets_and_weights:
            return X, _no_targets(len(X)), None
        y, *weights = targets_and_weights
        w = self._checked_weights(weights[0], i) if weights else None
        return X, self._checked_targets(y, i), w

    def read_rows(self, rows: NDArray[np.integer[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return X and y of the given rows (k,), in their order, repeats allowed.

        Each chunk is read once. Peak memory: the result and one chunk. Raises ConfigError unless
        the rows are integers from 0 to `spec.n_rows` - 1, and otherwise as `read_chunk`.
        """
        rows = np.asarray(rows)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise ConfigError(f"rows is {rows.dtype} {rows.shape}", "give a list of integers")
        rows = rows.astype(np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.spec.n_rows):
            row = int(rows[(rows < 0) | (rows >= self.spec.n_rows)][0])
            raise ConfigError(f"row {row} is not in {self!r}", f"give 0 to {self.spec.n_rows - 1}")
        spec = self.spec
        X = np.empty((len(rows), *spec.row_shape), spec.x_dtype)
        y_shape = () if spec.classes is not None else (spec.n_outputs,)
        y = np.empty((len(rows), *y_shape), spec.target_dtype)
        edges = np.arange(self.n_chunks + 1) * spec.chunk_rows
        for i, index, index_in_chunk in by_unit(edges, rows):
            chunk_X, chunk_y = self.read_chunk(i)
            X[index], y[index] = chunk_X[index_in_chunk], chunk_y[index_in_chunk]
        return X, y

    def read_targets(self, i: int) -> NDArray[Any]:
        """Return y of chunk `i`, without reading X; raises as `read_chunk`."""
        start, stop = self.chunk_bounds(i)
        if self.stored_chunks.y is None:
            return _no_targets(stop - start)
        return self._checked_targets(self.stored_chunks.read_array(self.stored_chunks.y, i), i)

    def read_values(self, i: int) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
        """Return y of chunk `i` and its sample weights, if there are some, without reading X."""
        y, w = self.read_targets(i), self.stored_chunks.w
        if w is None:
            return y, None
        return y, self._checked_weights(self.stored_chunks.read_array(w, i), i)

    def source_rows(self, i: int) -> NDArray[np.uint64]:
        """Return the number of each row of chunk `i` in its source, (rows,) uint64.

        The numbers count the rows of all `spec.files`; in foreign stores they are the positions in
        the store. Raises as `read_chunk`.
        """
        if self.stored_chunks.row is None:
            return np.arange(*self.chunk_bounds(i), dtype=layout.ROW_NUMBER_DTYPE)
        rows: NDArray[np.uint64] = self.stored_chunks.read_array(self.stored_chunks.row, i)
        return rows

    def check_unchanged(self) -> None:
        """Raise DataError if the store at the URL was replaced or deleted; costs one small request.

        Foreign stores are compared by their metadata only. Rows appended since follow the rows of
        this store, which are unchanged.
        """
        fingerprints = fingerprints_now(self.stored_chunks.contents, self.url)
        if not fingerprints:
            raise DataError(
                f"{self!r} was deleted while it was in use",
                "restore it and resume, or start a new run",
            )
        if self.spec.fingerprint not in fingerprints:
            raise _changed_error(self, self.spec.fingerprint, fingerprints[0])

    def codec_names(self) -> list[str]:
        """Return the names of X's codecs, in the order of encoding."""
        names: list[str] = store_facts(self.stored_chunks)["codecs"]
        return names

    def stored_bytes(self) -> int:
        """Return the bytes of the arrays in the storage, from a listing."""
        return sum(int(array.nbytes_stored()) for array in self.stored_chunks.arrays)

    def verify(self) -> None:
        """Compare the digests with the fingerprint, then read every chunk and compare its digest.

        Raises
        ------
        CorruptChunkError
            If the digests or a chunk differ. The message names the first such chunk.
        DataError
            If the store is foreign, and has no digests to compare with; or if it was opened without
            targets, which the digests include.
        """
        chunks = self.stored_chunks
        if self.spec.foreign or chunks.y is None:
            reason, remedy = "has no digests", "ingest the data again"
            if not self.spec.foreign:
                reason, remedy = "was opened without its targets", "open it with them"
            raise DataError(f"{self!r} {reason}, so it cannot be verified", remedy)
        digests = chunks.read_digests()
        for i in range(self.n_chunks):
            parts = [*chunks.read(i), self.source_rows(i)]
            if not np.array_equal(layout.chunk_digest(*parts), digests[i]):
                keys = " or ".join(chunks.key(array, i) for array in (*chunks.arrays, chunks.row))
                raise CorruptChunkError(
                    f"chunk {keys} of {self!r} does not match its digest", "ingest the data again"
                )

    def _checked_targets(self, y: NDArray[Any], i: int) -> NDArray[Any]:
        """Return stored targets of chunk `i` as `read_chunk` does; raise if they are invalid."""
        if self.spec.classes is None:
            self._check_finite(y, i, self.stored_chunks.y)
            y = y.reshape(len(y), -1)
            return y if y.dtype.kind == "f" else y.astype(np.float64)
        ids = y.astype(np.int64)
        is_outside = (ids < 0) | (ids >= self.spec.n_outputs)
        if is_outside.any():
            row = int(np.argmax(is_outside))
            key, start = self.stored_chunks.key(self.stored_chunks.y, i), self.chunk_bounds(i)[0]
            raise DataError(
                f"class id {ids[row]} in {key}, row {start + row} of {self!r}, "
                f"is outside its {self.spec.n_outputs} classes",
                "correct it and ingest the data again",
            )
        return ids

    def _checked_weights(self, w: NDArray[Any], i: int) -> NDArray[np.float32]:
        """Return the stored sample weights of chunk `i`; raise DataError if they are invalid."""
        location = f"{self.stored_chunks.key(self.stored_chunks.w, i)} of {self!r}"
        return as_weights(w, len(w), location, self.chunk_bounds(i)[0])

    def _check_finite(self, block: NDArray[Any], i: int, array: Any) -> None:
        """Raise NonFiniteError for NaN or infinity in chunk `i` of an array."""
        nonfinite = layout.first_nonfinite(block)
        if nonfinite is not None:
            row, column, value = nonfinite
            raise NonFiniteError(
                f"{value} in {self.stored_chunks.key(array, i)} (chunk {i}) of {self!r}: row "
                f"{self.chunk_bounds(i)[0] + row}, column {column}",
                "clean the data and ingest it again",
            )


def _reopen_unchanged(reopen: Callable[[], Store], fingerprint: str) -> Store:
    """Reopen a store in another process; raise DataError unless it has the same rows.

    fingerprint : fingerprint of the store that was pickled
    """
    store = reopen()
    if store.spec.fingerprint != fingerprint:
        old_states = store.stored_chunks.contents.mark.get("before", [])
        old_row_counts = {old_fingerprint: n_rows for n_rows, old_fingerprint in old_states}
        if fingerprint in old_row_counts:
            raise rows_appended_error(store.url, old_row_counts[fingerprint])
        raise _changed_error(store, fingerprint, store.spec.fingerprint)
    return store


def _changed_error(store: Store, old_fingerprint: str, fingerprint: str) -> DataError:
    return DataError(
        f"{store!r} was changed while it was in use: its fingerprint was {old_fingerprint[:16]} "
        f"and is {fingerprint[:16]}",
        "restore it and resume, or start a new run",
    )


def _no_targets(n_rows: int) -> NDArray[Any]:
    """Return the targets of `n_rows` rows of a store without targets, (n_rows, 0)."""
    return np.empty((n_rows, 0), np.float32)


def open_store(
    url: Any,
    *,
    x: str = "X",
    y: str | None = "y",
    w: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    missing: str = "error",
    foreign: bool = False,
    cache: Cache | None = None,
) -> Store:
    """Open the store at `url` for reading; costs few small requests.

    Parameters
    ----------
    url : str, path or zarr.Group
        Anything `zarr_store` opens, or a group that is already open; for icechunk a repository (its
        branch main), a read-only session or the store of one.
    x, y : str
        Array names; ``y=None`` opens without targets.
    w : str, optional
        Array of sample weights (n,) in a foreign store, which are summed in one pass. Stores
        ingested with weights need no name.
    storage_options : mapping, optional
        Passed to fsspec or obstore; never shown.
    missing : {"error", "fill"}
        Meaning of an absent chunk in a foreign store. Zarr writers leave out chunks that hold only
        the fill value by default; "fill" reads absent chunks as such. Stores of streamkern have
        every chunk, so there absence is always an error.
    foreign : bool
        Read the arrays of a store of streamkern, perhaps a damaged one, as if another program had
        written them: without classes, weights, statistics and checks.
    cache : Cache, optional
        Keeps the chunks of a remote store of streamkern in a local folder.

    Raises
    ------
    StoreNotFoundError
        No group, or no such array, at the URL.
    CorruptChunkError
        The metadata of a store of streamkern are altered.
    DataError
        An unfinished ingest, another schema, or arrays that are not a training set.
    ConfigError
        An invalid argument, such as storage options for a local path.
    StorageError
        The storage cannot be reached or refuses the access.
    """
    check_missing(missing)
    inner: Any
    # The zarr store, the path in it, the URL as text, and a call that another process can make.
    if isinstance(url, zarr.Group):
        text, reopen = str(url.store_path), None
        inner, prefix = url.store, url.path
    elif not isinstance(url, str | os.PathLike):  # an object of icechunk
        inner, prefix = unwrap_icechunk_store(url), ""
        text = f"icechunk+session:///@snapshot={icechunk_snapshot(inner)}"
        reopen = partial(open_store, inner, x=x, y=y, w=w, missing=missing, foreign=foreign)
    else:
        # Absolute, because a worker that opens the store has another working directory.
        path = local_path(url)
        text = str(url) if path is None else str(path.absolute())
        if is_icechunk(text):  # a worker may open it after another commit to the branch
            text = snapshot_url(text, storage_options)
        reopen = partial(
            open_store, text, x=x, y=y, w=w, storage_options=storage_options, missing=missing,
            foreign=foreign, cache=cache,
        )  # fmt: skip
        inner, prefix = zarr_store(text, storage_options=storage_options), ""
    # Retried on a disk, too: rows may be appended between the reads of two files.
    n_reads = MAX_READS if local_path(text) is None else 2
    for reads_left in reversed(range(n_reads)):
        try:
            contents = read_metadata(inner, prefix, text, (x, y, w), missing, foreign)
            break
        except CorruptChunkError:
            if not reads_left:
                raise
    warn_of_unused(contents.unused_weights, contents.spec.n_rows, redact(text))
    return Store(StoredChunks(contents, text, cache), reopen)
