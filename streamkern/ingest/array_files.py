"""Read arrays in .npy and IDX files by slices of rows.

Files are streamed, not mapped, so the same code reads local, compressed and remote ones.
"""

from __future__ import annotations

import math
import struct
import tokenize
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.ingest.content import IDX_DTYPES, is_idx
from streamkern.ingest.input_files import FileOpener

# Version 3 differs from 2 only in the encoding of field names, which no plain dtype has.
_NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,
}


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
                row = stop - 1 - (len(view) - 1) // self._row_bytes
                raise _truncated(self._where, f"row {row} of {self.shape[0]}")
            view = view[n:]
        self._row = stop
        if stop == self.shape[0]:
            refuse_more(self._file, self._where, stop)
        return out


class FortranArray:
    """An array in Fortran order in a seekable file, read by row slices: a piece of each column."""

    def __init__(
        self, file: IO[bytes], where: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._file, self._where, self._data = file, where, file.tell()

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(self.shape[0])
        size = self.dtype.itemsize
        out = np.empty((*self.shape[:0:-1], stop - start), self.dtype)
        pieces = out.reshape(-1, stop - start).view(np.uint8) if out.size else out
        for k, piece in enumerate(pieces):
            self._file.seek(self._data + (k * self.shape[0] + start) * size)
            view = piece.data
            while view:
                n = self._file.readinto(view)  # type: ignore[attr-defined]
                if not n:
                    raise _truncated(self._where, "its data")
                view = view[n:]
        if stop == self.shape[0]:
            self._file.seek(self._data + math.prod(self.shape) * size)
            refuse_more(self._file, self._where, stop)
        return out.transpose()


def _truncated(where: str, inside: str) -> DataError:
    return DataError(
        f"{where} ends inside {inside}; the file is truncated: get it again from where it came"
    )


def refuse_more(file: IO[bytes], where: str, n_rows: int) -> None:
    """Raise DataError if a file continues after its last row.

    Reading on also makes a compressed file verify its checksum, which follows the rows.
    """
    if file.read(1):
        raise DataError(
            f"{where} goes on after the last of its {n_rows} rows; it is damaged, or several "
            "arrays in one file: save them apart"
        )


def npy_array(
    file: IO[bytes], where: str, place: FileOpener | None = None
) -> FileArray | FortranArray:
    """Return the array after a .npy header; nothing is unpickled."""
    try:
        version = np.lib.format.read_magic(file)
        if version not in _NPY_HEADERS:
            raise ValueError(f"its format {version} is unknown")
        shape, fortran, dtype = _NPY_HEADERS[version](file)
        if any(size < 0 for size in shape):
            raise ValueError(f"its shape is {shape}")
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError) as error:
        raise DataError(f"{where} is not a .npy file: {error}; write it by numpy.save") from error
    if dtype.hasobject:
        raise DataError(f"{where} holds Python objects; save it as numbers, as by X.astype(float)")
    if fortran and len(shape) > 1:
        file = file if place is None else place.seekable(file)
        return FortranArray(file, where, shape, dtype)
    return FileArray(file, where, shape, dtype)


def idx_array(file: IO[bytes], where: str, place: FileOpener | None = None) -> FileArray:
    """Return the array of an IDX file (MNIST, FashionMNIST): 0, 0, type, rank, big-endian sizes."""
    head = file.read(4)
    if not is_idx(head):
        raise DataError(f"{where} is not an IDX file; get it again from where it came")
    sizes = file.read(4 * head[3])
    if len(sizes) != 4 * head[3]:
        raise _truncated(where, "its header")
    shape = struct.unpack(f">{head[3]}I", sizes)
    return FileArray(file, where, shape, np.dtype(IDX_DTYPES[head[2]]))
