"""Read rows of arrays of any kind: anything with ``shape``, ``dtype`` and row slices."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import (
    ConfigError,
    CorruptChunkError,
    DataError,
    MemoryBudgetError,
    StreamkernError,
)
from streamkern.basics.message import mention
from streamkern.basics.text import size_text
from streamkern.filesystem.urls import MISSING_CHUNK_TEXT
from streamkern.ingest.column_roles import assign_columns
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.decompress import DAMAGE
from streamkern.ingest.frames import names_of_columns
from streamkern.ingest.group_arrays import SparseRows, StoredSparseRows, decoded_array
from streamkern.ingest.numeric import is_sparse, no_rows, numeric, with_lengths
from streamkern.ingest.reader import Reader
from streamkern.store.conventions import check_dimensions
from streamkern.store.row_block import without_mask
from streamkern.store.sample_weights import warn_of_unused
from streamkern.store.sparse_rows import PackedRows, longest_row

# First and last rows, which identify an array that is not in memory.
_END_SLICES = (slice(0, 256), slice(-256, None))
_SLAB_BYTES = 2**20  # bytes of an array that are made contiguous and digested at a time


class ArrayReader(Reader):
    """Reader of X, y and perhaps sample weights, given as anything with ``shape`` and row slices.

    Parameters
    ----------
    arrays : X; X and y; or X, y and w
    location : name of the input in messages
    identity : JSON that must be equal for an interrupted ingest to be resumed, see `readers`
    aligned : rows per block are a multiple of this where possible (chunks of Zarr and HDF5)
    labels : labels of classes; y then holds indices into them
    columns : names of the columns of X, as returned; None if they have none
    target_columns : names of the columns of y; None if they have none
    order : indices of the columns of X to return; by default all in their order
    encoder : JSON of the encoder that made the columns
    """

    def __init__(
        self, arrays: Sequence[Any], location: str, identity: Any, *, aligned: int = 1,
        labels: NDArray[Any] | None = None, columns: Sequence[str] | None = None,
        target_columns: Sequence[str] | None = None, order: Sequence[int] | None = None,
        encoder: Any = None,
    ) -> None:  # fmt: skip
        X, y, w = (*arrays, None, None)[:3]
        if len(X.shape) < 2:
            stack_lists = ""
            if np.dtype(X.dtype) == object:
                stack_lists = ", numpy.stack(X[:]) if it holds lists"
            raise DataError(
                f"X of {location} has the shape {tuple(X.shape)}, but must have rows and columns",
                f"write it as (n, d), X.reshape(-1, 1) if it is one feature{stack_lists}",
            )
        if y is not None and (len(y.shape) < 1 or X.shape[0] != y.shape[0]):
            raise DataError(
                f"X of {location} has {X.shape[0]} rows, but y has the shape {tuple(y.shape)}",
                "give a target for each row",
            )
        if w is not None and tuple(w.shape) != (X.shape[0],):
            raise DataError(
                f"the sample weights of {location} have shape {tuple(w.shape)}",
                f"give one number for each of its {X.shape[0]} rows",
            )
        self._n_rows = int(X.shape[0])
        self.natural_dtype, self.identity = np.dtype(X.dtype), identity
        self._X, self._y, self._w, self._location = X, y, w, location
        self._aligned, self._labels = aligned, labels
        # The length of the longest row is needed if sparse rows stay packed.
        if is_sparse(X):
            self.sparse_shape = int(X.shape[1]), longest_row(X.indptr, X.shape[1])
        elif isinstance(X, SparseRows | StoredSparseRows):
            self.sparse_shape = int(X.shape[1]), X.longest
        self._order = None if order is None else np.array(order)
        self.encoder = encoder
        self.columns = None if columns is None else tuple(columns)
        self.target_columns = None if target_columns is None else tuple(target_columns)

    def pack(self, width: int) -> None:
        super().pack(width)
        X, csr = self._X, getattr(self._X, "csr", None)
        csr = csr or (lambda start, stop: X[start:stop])
        self._X = PackedRows(csr, X.shape, width, X.dtype)
        self.natural_dtype = self._X.dtype

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        n_rows = int(self._X.shape[0])
        arrays = [a for a in (self._X, self._y, self._w) if a is not None]
        row_bytes = max(1, sum(math.prod(a.shape[1:]) * a.dtype.itemsize for a in arrays))
        # At least a chunk at a time: a smaller slice would decode the same chunk again.
        rows = max(block_bytes // row_bytes, self._aligned, 1)
        rows -= rows % self._aligned
        check_row_bytes(row_bytes, min(self._aligned, n_rows), self._location, block_bytes)
        while start < n_rows:
            stop = min(start - start % rows + rows, n_rows)
            try:
                X, w = _read_slice(self._X, start, stop, "X"), None
                y = np.empty((len(X), 0))
                if self._y is not None:
                    y = _read_slice(self._y, start, stop, "y")
                if self._w is not None:
                    w = _read_slice(self._w, start, stop, "sample_weight")
            except CorruptChunkError as error:
                if not str(error).endswith(MISSING_CHUNK_TEXT):
                    raise
                raise CorruptChunkError(
                    f"{error} {self._location}",
                    f"restore it, or, if its writer leaves out chunks that "
                    f"hold only the fill value, pass {mention('missing', 'fill')}",
                ) from error
            except (OSError, MemoryError, StreamkernError, *DAMAGE):
                raise
            except Exception as error:  # a codec, a truncated file: whatever the library raises
                raise DataError(
                    f"{self._location}, rows {start} to {stop - 1}, cannot be read: {error}",
                    "if it is damaged, copy it again from its source, or write it again",
                ) from error
            if self._order is not None:
                X = X[:, self._order]
            if y.dtype.kind == "T":  # strings of any length, some perhaps missing
                y = y.astype(object)
            if self._labels is not None:
                y = self._labels[y.astype(np.int64)]
            yield RawBlock(X, y, self._location, start, w=w)
            start = stop


def check_row_bytes(row_bytes: int, rows: int, location: str, block_bytes: int) -> None:
    """Raise MemoryBudgetError if rows that are read at once take more than eight blocks."""
    limit = 8 * block_bytes
    if row_bytes * rows > limit:
        noun = "a row" if rows == 1 else f"a chunk ({rows} rows)"
        raise MemoryBudgetError(
            f"{noun} of {location} takes {size_text(row_bytes * rows)}, but {mention('memory=')} "
            f"allows only {size_text(limit)}",
            f"raise {mention('memory=')}, or write smaller ones",
        )


def requested_names(request: ReadRequest, location: str) -> list[str]:
    """Return the names of X, y and w; raise ConfigError for anything but a name."""
    for parameter, name in zip(("x", "y", "sample_weight"), request.arrays, strict=False):
        if not isinstance(name, str):
            name_text = name if isinstance(name, int | list | tuple) else type(name).__name__
            frame = "; if each array is a column, give a data frame of them in place of the file"
            raise ConfigError(
                f"{mention(f'{parameter}={name_text}')} must be the name of an array of {location}"
                f"{frame if isinstance(name, list | tuple) else ''}"
            )
    return request.arrays


def named_arrays(
    find: Callable[[str], Any],
    read_array: Callable[[int, str], Any],
    request: ReadRequest,
    location: str,
) -> list[Any]:
    """Return the arrays X, y and w that are requested by name from a file or group.

    find : returns a member by its name, None if there is none
    read_array : returns the decoded array, given its index among X, y and w and its name
    """
    names = requested_names(request, location)
    X, *targets_and_weights = map(find, names)
    check_dimensions(X, *zip(names[1:], targets_and_weights, strict=True))
    arrays = [read_array(i, name) for i, name in enumerate(names)]
    warn_of_weights(find, request, arrays[0], location)
    return arrays


def warn_of_weights(
    find: Callable[[str], Any], request: ReadRequest, X: Any, location: str
) -> None:
    """Warn of an unused array "w" that could be weights. find : returns a member by its name."""
    if not request.targets or "w" in request.arrays:
        return
    try:
        weights = find("w")
    except (OSError, StreamkernError, ValueError, TypeError, KeyError):  # not requested by the user
        return
    warn_of_unused(weights, X.shape[0], location)


def _read_slice(array: Any, start: int, stop: int, name: str) -> NDArray[Any]:
    """Return rows start … stop - 1 of an array as a dense array; raise DataError for a mask."""
    part = array[start:stop]
    of_dask = hasattr(part, "__dask_graph__")
    if of_dask:  # NumPy would compute it, too, but drop its mask
        part = part.compute()
    if is_sparse(part):  # the blocks of a Dask array may be sparse, too
        part = part.toarray()
    location = f" of rows {start} to {stop - 1}"
    return np.asarray(without_mask(part, name, location, of_dask=of_dask))


def open_memory(X: Any, request: ReadRequest) -> ArrayReader:
    """Return a reader of X, y and w: arrays in memory, or of Zarr or Dask, read in slices.

    Raises
    ------
    ConfigError
        If targets are read and `request.y` is None.
    DataError
        If a shape is wrong or unknown, or X is not numeric.
    """
    if request.y is None and request.targets:
        raise ConfigError(
            "X is an array, which contains no targets", f"give them as {mention('y=')}"
        )
    X = numeric(X.tocsr() if is_sparse(X) else X)
    if len(X.shape) < 2:
        raise no_rows(X)
    roles = [a for a in (request.y, request.w) if a is not None and request.targets]
    inputs = [X, *(a if hasattr(a, "shape") else np.asarray(a) for a in roles)]
    names = ("X", "y", "sample_weight")
    for array, name in zip(inputs, names, strict=False):
        if any(size != size for size in array.shape):  # NaN: rows that Dask has not counted
            raise DataError(
                f"{name} is a Dask array with an unknown number of rows",
                f"call {name}.compute_chunk_sizes()",
            )
    # Arrays of zarr, h5py and xarray are decoded by their attributes.
    arrays: list[Any] = [
        decoded_array(a, a.__getitem__, names[i], 0, keep_missing=request.keeps_missing(i))
        if hasattr(a, "attrs") else a
        for i, a in enumerate(inputs)
    ]  # fmt: skip
    identity: dict[str, Any] = {
        "kind": "arrays",
        "arrays": [[list(a.shape), str(a.dtype)] for a in arrays],
    }
    parts = [
        part for a in arrays for part in ([a.data, a.indices, a.indptr] if is_sparse(a) else [a])
    ]
    # Arrays in memory are identified by all of their values, others by the first and last rows of X
    # and y, and all weights.
    if all(type(a) is np.ndarray for a in parts):
        identity |= {"kind": "arrays in memory", "contents": [content_checksum(a) for a in parts]}
    else:  # reading them may take as long as the ingest
        identity["ends"] = ends_digest(
            *(np.asarray(a[part]) for a in arrays[:2] for part in _END_SLICES)
        )
        if request.reads_weights:
            identity["w"] = ends_digest(np.asarray(arrays[2]))
    chunks = getattr(X, "chunks", None)
    rows = np.ravel(chunks[0])[0] if chunks else 1  # zarr and h5py: (k, ...); dask: ((k, ...), ...)
    return ArrayReader(arrays, "the array", identity, aligned=max(int(rows), 1))


def open_dask_table(table: Any, request: ReadRequest) -> ArrayReader:
    """Return a reader of a Dask data frame of numbers, by partition.

    Raises
    ------
    ConfigError
        If `request.as_table`, because its columns cannot be encoded.
    DataError
        If a requested column does not exist or has two roles, or if a column is not numeric.
    """
    if request.as_table:
        raise ConfigError(
            "X is a data frame of Dask, whose columns cannot be encoded",
            "give a frame in memory, which is encoded: X.compute()",
        )
    roles = None
    y_is_named = request.y is None or isinstance(request.y, str | int | list | tuple)
    if y_is_named or isinstance(request.w, str | int):
        named = request if y_is_named else request._replace(y=())
        roles = assign_columns([str(name) for name in table.columns], named, "X")
        y, w = (
            with_lengths(table[k[0] if len(k) == 1 else list(k)], "y") if k else None
            for k in (roles.targets, roles.weights)
        )
        request = request._replace(y=y if y_is_named else request.y, w=w)
        table = table[list(roles.features)]
    reader = open_memory(with_lengths(table, "X"), request)
    reader.columns = names_of_columns(table)
    if roles is not None:
        reader.target_columns, reader.unused = roles.targets or None, roles.unused
        reader.weight_column = roles.weight_column
    return reader


def content_checksum(array: NDArray[Any]) -> str:
    """Return the CRC-32C of an array as text.

    For objects, strings of variable length and scalars it is `ends_digest` of the whole array.
    """
    if array.dtype.hasobject or array.dtype.kind == "T" or not array.ndim:
        return ends_digest(array)
    crc, rows = 0, max(1, _SLAB_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        slab = np.ascontiguousarray(array[start : start + rows])
        crc = google_crc32c.extend(crc, slab.reshape(-1).view(np.uint8))
    return f"crc32c:{crc:08x}"


def ends_digest(*arrays: NDArray[Any]) -> str:
    """Return the SHA-256 of the shapes, dtypes and values of arrays of any dtype."""
    digest = hashlib.sha256()
    for array in arrays:
        plain = array
        if array.dtype.kind in "OT":  # hex, because Python refuses to write long integers decimally
            plain = np.array([hex(k) if type(k) is int else str(k) for k in array.ravel().tolist()])
        digest.update(f"{plain.shape} {plain.dtype}".encode())
        digest.update(np.ascontiguousarray(plain).tobytes())
    return digest.hexdigest()
