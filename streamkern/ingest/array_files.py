"""Files that are arrays: .npy and IDX, with y and weights in files of their own, and .npz.

Files are streamed, not mapped, so the same code reads local, compressed and remote ones.
"""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.text import redact
from streamkern.ingest.array_reader import ArrayReader, array_names, digest, no_array
from streamkern.ingest.columns import Asked
from streamkern.ingest.input_files import IDX_DTYPES, Place, Url, is_idx, is_path

# Version 3 differs from 2 in the names of fields alone, which are no plain dtype.
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
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError) as error:
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
    return FileArray(file, where, shape, np.dtype(IDX_DTYPES[head[2]]))


# What holds one array: y and w are apart from X.
APART = {"npy": npy_array, "idx": idx_array}


def open_apart(kind: str, url: Url, asked: Asked, place: Place) -> ArrayReader:
    """A .npy or IDX file of X, with y and w in other such files or in memory."""
    where = redact(url)
    found = [_array_in(url, kind, place)]
    if asked.targets:
        target = _labels_beside(url) if kind == "idx" and asked.y is None else asked.y
        if target is None:
            raise ConfigError(f"{where} holds X alone; give y=, a file or an array")
        found.append(_array_beside(target, "y", place, where))
    if asked.weighted:
        found.append(_array_beside(asked.w, "sample_weight", place, where))
    arrays, identities = zip(*found, strict=True)
    return ArrayReader(arrays, where, list(identities))


def _array_in(url: Url, kind: str, place: Place) -> tuple[Any, Any]:
    """The array of a .npy or IDX file, and its identity."""
    identity = place.identity(url)
    return APART[kind](place.open(url), redact(url)), identity


def _array_beside(given: Any, name: str, place: Place, where: str) -> tuple[Any, Any]:
    """The same of `given`, which may also be in memory."""
    if not is_path(given):
        array = np.asarray(given)
        return array, digest(array)
    kind = place.kind(given)
    if kind not in APART:
        raise ConfigError(f"{name}={redact(given)} must be a .npy or IDX file like {where}")
    return _array_in(given, kind, place)


def _labels_beside(url: Url) -> str | None:
    """The labels file by MNIST's naming, if the images file follows it."""
    text = str(url)
    for old, new in (("images-idx3", "labels-idx1"), ("images.idx3", "labels.idx1")):
        if old in text:
            return text.replace(old, new)
    return None


def open_npz(url: Url, asked: Asked, place: Place) -> ArrayReader:
    """The arrays X, y and w of a .npz archive, by name."""
    where, names = redact(url), array_names(asked, redact(url))
    identity = [place.identity(url), *names]
    try:
        archive = place.keep(zipfile.ZipFile(place.open(url)))
    except (zipfile.BadZipFile, UnicodeDecodeError, NotImplementedError) as error:  # or too new
        raise DataError(f"{where} is not a .npz file: {error}") from error
    held = [k.removesuffix(".npy") for k in archive.namelist() if k.endswith(".npy")]
    for name in names:
        if name not in held:
            raise no_array(name, held, where)
    arrays = [
        npy_array(place.keep(_entry(archive, name, where)), f"{name} of {where}") for name in names
    ]
    return ArrayReader(arrays, where, identity)


def _entry(archive: zipfile.ZipFile, name: str, where: str) -> Any:
    """An array's file in an archive, open."""
    try:
        return archive.open(f"{name}.npy")
    except (RuntimeError, NotImplementedError) as error:  # encrypted; a compression of others
        raise DataError(f"{name} of {where} can not be read: {error}; save it again") from error
