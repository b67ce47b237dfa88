"""Arrays read by row slices: what is in memory, in Zarr and HDF5, and .npy and IDX files.

Files are streamed, not mapped, so the same code reads local, compressed and remote ones.
"""

from __future__ import annotations

import math
import struct
import tokenize
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, MemoryBudgetError, StreamkernError
from streamkern.basics.text import size_text
from streamkern.ingest.columns import Files
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.decompress import DAMAGE

# Version 3 differs from 2 in the names of fields alone, which are no plain dtype.
_NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,
}
_IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class ArrayReader:
    """X, y and perhaps sample weights as anything with ``shape``, ``dtype`` and row slices.

    Parameters
    ----------
    arrays : X; X and y; or X, y and w
    where : str
        Name in messages.
    identity : JSON
    aligned : int
        Rows per block are a multiple of this where possible (chunks of Zarr and HDF5).
    names : sequence of str, optional
        Class names; y then holds their positions.
    columns, target_columns : sequences of str, optional
        Names of the columns of X, as they are handed on, and of y.
    order : sequence of int, optional
        The columns of X to hand on; by default all as they are.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        where: str,
        identity: Any,
        *,
        aligned: int = 1,
        names: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        target_columns: Sequence[str] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        X, y, w = (*arrays, None, None)[:3]
        if len(X.shape) < 2:
            raise DataError(f"X of {where} has shape {tuple(X.shape)}; it must be (n, ...)")
        if y is not None and (len(y.shape) < 1 or X.shape[0] != y.shape[0]):
            raise DataError(
                f"X of {where} has {X.shape[0]} rows and y has shape {tuple(y.shape)}; "
                "they must have the same rows"
            )
        if w is not None and tuple(w.shape) != (X.shape[0],):
            raise DataError(
                f"the sample weights of {where} have shape {tuple(w.shape)}; give one number for "
                f"each of its {X.shape[0]} rows"
            )
        self.n_rows: int | None = int(X.shape[0])
        self.natural_dtype: np.dtype[Any] | None = None
        self.identity = identity
        self._X, self._y, self._w, self._where = X, y, w, where
        self._aligned, self._names = aligned, None if names is None else np.array(names)
        self._order = None if order is None else np.array(order)
        self.files: Files = ()
        self.columns = None if columns is None else tuple(columns)
        self.target_columns = None if target_columns is None else tuple(target_columns)

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        assert self.n_rows is not None
        held = [a for a in (self._X, self._y, self._w) if a is not None]
        row_bytes = max(1, sum(math.prod(a.shape[1:]) * a.dtype.itemsize for a in held))
        # At least a chunk at a time: a smaller slice would decode the same chunk again.
        rows = max(block_bytes // row_bytes, self._aligned, 1)
        rows -= rows % self._aligned
        check_row_bytes(row_bytes, min(self._aligned, self.n_rows), self._where, block_bytes)
        while start < self.n_rows:
            stop = min(start - start % rows + rows, self.n_rows)
            try:
                X = np.asarray(self._X[start:stop])
                y = np.empty((len(X), 0)) if self._y is None else np.asarray(self._y[start:stop])
                w = None if self._w is None else np.asarray(self._w[start:stop])
            except (OSError, MemoryError, StreamkernError, *DAMAGE):
                raise
            except Exception as error:  # a codec, a truncated file: whatever the library raises
                raise DataError(
                    f"{self._where}, rows {start} to {stop - 1}, can not be read: {error}"
                ) from error
            if self._order is not None:
                X = X[:, self._order]
            if y.dtype.kind == "T":  # numpy's variable-width strings
                y = y.astype(str)
            if self._names is not None:
                y = self._names[y.astype(np.int64)]
            yield RawBlock(X, y, self._where, start, w=w)
            start = stop


def check_row_bytes(row_bytes: int, rows: int, where: str, block_bytes: int) -> None:
    """MemoryBudgetError where so many rows, which are read at once, take far more than a block."""
    limit = 8 * block_bytes
    if row_bytes * rows > limit:
        what = "a row" if rows == 1 else f"a chunk ({rows} rows)"
        raise MemoryBudgetError(
            f"{what} of {where} takes {size_text(row_bytes * rows)}, and the memory given allows "
            f"{size_text(limit)}; raise memory=, or make it smaller"
        )


class FileArray:
    """An n-dimensional array in a file, read by row slices; sequential slices do not seek."""

    def __init__(
        self, file: IO[bytes], where: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._file, self._where = file, where
        self._data = file.tell()
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._row = 0

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(self.shape[0])
        if start != self._row:
            self._file.seek(self._data + start * self._row_bytes)
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        view = out.reshape(-1).view(np.uint8).data
        while view:
            n = self._file.readinto(view[: 1 << 24])  # type: ignore[attr-defined]
            if not n:
                raise DataError(
                    f"{self._where} ends inside row {stop - 1 - (len(view) - 1) // self._row_bytes}"
                    f" of {self.shape[0]}; the file is truncated"
                )
            view = view[n:]
        self._row = stop
        # Reading on also makes a compressed file compare its checksum, which follows the rows.
        if stop == self.shape[0] and self._file.read(1):
            raise DataError(
                f"{self._where} goes on after the last of its {stop} rows; it is damaged, or "
                "several arrays in one file: save them apart"
            )
        return out


def npy_array(file: IO[bytes], where: str) -> FileArray:
    """The array behind a .npy header; nothing is unpickled."""
    try:
        version = np.lib.format.read_magic(file)
        if version not in _NPY_HEADERS:
            raise ValueError(f"its format {version} is unknown")
        shape, fortran, dtype = _NPY_HEADERS[version](file)
        if any(size < 0 for size in shape):
            raise ValueError(f"its shape is {shape}")
    except (ValueError, SyntaxError, tokenize.TokenError, RecursionError) as error:
        raise DataError(f"{where} is not a .npy file: {error}") from error
    if dtype.hasobject:
        raise DataError(f"{where} holds Python objects; save it with a plain dtype")
    if fortran and len(shape) > 1:
        raise DataError(
            f"{where} is in Fortran order, which can not be streamed by rows; save it again with "
            "np.ascontiguousarray"
        )
    return FileArray(file, where, shape, dtype)


def idx_array(file: IO[bytes], where: str) -> FileArray:
    """The array of an IDX file (MNIST, FashionMNIST): 0, 0, type, rank, big-endian sizes."""
    head = file.read(4)
    if not is_idx(head):
        raise DataError(f"{where} is not an IDX file")
    sizes = file.read(4 * head[3])
    if len(sizes) != 4 * head[3]:
        raise DataError(f"{where} ends inside its header; the file is truncated")
    shape = struct.unpack(f">{head[3]}I", sizes)
    return FileArray(file, where, shape, np.dtype(_IDX_DTYPES[head[2]]))


def is_idx(head: bytes) -> bool:
    """Whether a file beginning with these four bytes is an IDX file."""
    return len(head) == 4 and head[:2] == b"\0\0" and head[2] in _IDX_DTYPES and head[3] > 0
