"""Read arrays in .npy, IDX and .npz files, and X, y and w in one file or Zarr array each.

Files are streamed, not mapped, so the same code reads local, compressed and remote ones.
"""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
from functools import cache
from typing import IO, Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from streamkern.basics.errors import ConfigError, DataError, StoreNotFoundError
from streamkern.basics.message import mention
from streamkern.basics.text import redact
from streamkern.ingest.array_reader import ArrayReader, ends_digest, named_arrays, requested_names
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.formats import IDX_DTYPES, is_idx
from streamkern.ingest.group_arrays import SparseRows, read_converted
from streamkern.ingest.input_files import FileOpener, Url, is_path
from streamkern.ingest.zarr_groups import zarr_array

# Version 3 differs from 2 only in the encoding of field names, which no plain dtype has.
_NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,
}


class FileArray:
    """An n-dimensional array in a file, read by row slices; sequential slices do not seek.

    file : the open file, at the first byte of the array
    location : name of the file, for messages
    """

    def __init__(
        self, file: IO[bytes], location: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._file, self._location = file, location
        self._data = file.tell()
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._row = 0

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(self.shape[0])
        if start != self._row:
            self._file.seek(self._data + start * self._row_bytes)
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        if n_missing := _read_into(out.reshape(-1).view(np.uint8), self._file):
            row = stop - 1 - (n_missing - 1) // self._row_bytes
            raise _truncation_error(self._location, f"row {row} of {self.shape[0]}")
        self._row = stop
        if stop == self.shape[0]:
            self._check_end()
        return out

    def _check_end(self) -> None:
        """Raise DataError if the file continues after the last row.

        Reading on also makes a compressed file verify its checksum, which follows the rows.
        """
        if self._file.read(1):
            raise DataError(
                f"{self._location} has more bytes than its {self.shape[0]} rows need",
                "the file is damaged, or holds several arrays: save each array to its own file",
            )


class FortranArray(FileArray):
    """An array in Fortran order in a seekable file, read by row slices: a piece of each column."""

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(self.shape[0])
        size = self.dtype.itemsize
        out = np.empty((*self.shape[:0:-1], stop - start), self.dtype)
        pieces = out.reshape(-1, stop - start).view(np.uint8) if out.size else out
        for k, piece in enumerate(pieces):
            self._file.seek(self._data + (k * self.shape[0] + start) * size)
            if _read_into(piece, self._file):
                raise _truncation_error(self._location, "its data")
        if stop == self.shape[0]:
            self._file.seek(self._data + math.prod(self.shape) * size)
            self._check_end()
        return out.transpose()


def _read_into(out: NDArray[np.uint8], file: Any) -> int:
    """Fill bytes (k,) from a file; return the number of bytes that it lacks."""
    unread = out.data
    while unread and (n := file.readinto(unread[: 1 << 24])):
        unread = unread[n:]
    return len(unread)


def _truncation_error(location: str, part: str) -> DataError:
    """Return the error for a file that ends inside a part of its content."""
    return DataError(
        f"{location} ends inside {part}", "the file is truncated: copy it again from its source"
    )


def npy_array(file: IO[bytes], location: str, opener: FileOpener | None = None) -> FileArray:
    """Return the array after a .npy header; nothing is unpickled.

    Raises DataError if the header is not valid, or the array holds Python objects.
    """
    try:
        version = np.lib.format.read_magic(file)
        if version not in _NPY_HEADERS:
            raise ValueError(f"its format {version} is unknown")
        shape, fortran, dtype = _NPY_HEADERS[version](file)
        if any(size < 0 for size in shape):
            raise ValueError(f"its shape is {shape}")
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError) as error:
        raise DataError(
            f"{location} is not a .npy file: {error}", "write it with numpy.save"
        ) from error
    if dtype.hasobject:
        raise DataError(
            f"{location} holds Python objects", "save numbers, for example X.astype(float)"
        )
    if fortran and len(shape) > 1:
        file = file if opener is None else opener.seekable(file)
        return FortranArray(file, location, shape, dtype)
    return FileArray(file, location, shape, dtype)


def idx_array(file: IO[bytes], location: str, opener: FileOpener | None = None) -> FileArray:
    """Return the array of an IDX file (MNIST, FashionMNIST): 0, 0, type, rank, big-endian sizes.

    Raises DataError if the header is not valid.
    """
    head = file.read(4)
    if not is_idx(head):
        raise DataError(f"{location} is not a valid IDX file", "copy it again from its source")
    sizes = file.read(4 * head[3])
    if len(sizes) != 4 * head[3]:
        raise _truncation_error(location, "its header")
    shape = struct.unpack(f">{head[3]}I", sizes)
    return FileArray(file, location, shape, np.dtype(IDX_DTYPES[head[2]]))


def open_npz(url: Url, request: ReadRequest, opener: FileOpener) -> ArrayReader:
    """Return a reader of the arrays X, y and w of a .npz archive, by name.

    Raises
    ------
    ConfigError
        If a requested array is not a name.
    StoreNotFoundError
        If there is no array of a requested name.
    DataError
        If the file is not a .npz archive, or an array in it cannot be read.
    """
    location = redact(url)
    file_identity, archive = _shared_archive(url, opener)
    identity = [file_identity, *requested_names(request, location)]
    names = [entry.removesuffix(".npy") for entry in archive.namelist() if entry.endswith(".npy")]

    @cache
    def open_array(name: str) -> Any:
        if name not in names:
            return None
        return npy_array(
            opener.keep(_open_entry(archive, name, location)), f"{name} of {location}", opener
        )

    def read_array(i: int, name: str) -> Any:
        array = open_array(name)
        if array is None:
            raise StoreNotFoundError(
                f"{location} has no array {name!r}",
                f"it has {', '.join(names) or 'none'}: name them with {mention('x=')} and "
                f"{mention('y=')}; if each is a column, give a data frame of them",
            )
        if i == 0 and getattr(array.dtype, "names", None):
            raise DataError(
                f"{name} of {location} is a structured array, whose fields are columns",
                f"give the array itself, numpy.load({location!r})[{name!r}], instead of the file",
            )
        return array

    return ArrayReader(named_arrays(open_array, read_array, request, location), location, identity)


def _shared_archive(url: Url, opener: FileOpener) -> tuple[dict[str, str], zipfile.ZipFile]:
    """Return the identity of a .npz archive, and the archive, which each opener opens once.

    Raises DataError for any other file.
    """
    if url not in opener.archives:
        identity = opener.identity(url)
        try:
            archive = zipfile.ZipFile(opener.open(url))
        except (zipfile.BadZipFile, UnicodeDecodeError, NotImplementedError) as error:  # or too new
            raise DataError(
                f"{redact(url)} is not a .npz file: {error}", "write it with numpy.savez"
            ) from error
        opener.archives[url] = identity, opener.keep(archive)
    return opener.archives[url]


def sparse_names(url: Url, opener: FileOpener) -> list[str] | None:
    """Return the names in an archive of scipy.sparse.save_npz; None for another archive."""
    names = _shared_archive(url, opener)[1].namelist()
    return names if {"format.npy", "shape.npy", "data.npy"} <= {*names} else None


def sparse_rows(url: Url, names: list[str], opener: FileOpener) -> SparseRows:
    """Return the rows of a matrix of scipy.sparse.save_npz; only CSR is read by pieces.

    names : names of the files in the archive, from `sparse_names`

    Raises DataError if an array is missing, or the arrays are not a matrix, and MemoryBudgetError
    if a matrix of another form than CSR is too large to convert.
    """
    location, (_, archive) = redact(url), _shared_archive(url, opener)

    def read_member(name: str) -> Any:
        if f"{name}.npy" not in names:
            raise DataError(f"{location} is not a sparse matrix: it has no {name}", "save it again")
        return npy_array(
            opener.keep(_open_entry(archive, name, location)), f"{name} of {location}", opener
        )

    form, shape = _read_all(read_member("format")).item(), _read_all(read_member("shape"))
    form = form.decode() if isinstance(form, bytes) else str(form)
    if shape.shape != (2,) or shape.dtype.kind not in "iu":
        raise DataError(
            f"{location} has the shape {shape.tolist()}, but sparse rows must have the shape (n, "
            "d)",
            "save it again with scipy.sparse.save_npz",
        )
    if form == "csr":
        parts = read_member("data"), read_member("indices"), _read_all(read_member("indptr"))
        return SparseRows(parts, (int(shape[0]), int(shape[1])), location)
    size = sum(info.file_size for info in archive.infolist())
    return read_converted(lambda: sp.load_npz(opener.open(url)), size, location, opener.memory)


def _read_all(array: Any) -> NDArray[Any]:
    """Return all of a small array, also of a scalar."""
    array.shape = array.shape or (1,)
    return np.asarray(array[:])


def _open_entry(archive: zipfile.ZipFile, name: str, location: str) -> Any:
    """Return the open file of an array in an archive."""
    try:
        return archive.open(f"{name}.npy")
    except (RuntimeError, NotImplementedError) as error:  # encrypted, or an unknown compression
        raise DataError(f"{name} of {location} cannot be read: {error}", "save it again") from error


# Formats of files with a single array, for which y and w are given separately.
SINGLE_ARRAY_FORMATS = {"npy": npy_array, "idx": idx_array}


def holds_one_array(url: Url, format_name: str, opener: FileOpener) -> bool:
    """Return whether a file or Zarr store of this format is one array."""
    if format_name == "zarr":
        return zarr_array(url, opener) is not None
    is_sparse = format_name == "npz" and sparse_names(url, opener) is not None
    return is_sparse or format_name in SINGLE_ARRAY_FORMATS


def open_single_array(
    format_name: str, url: Url, request: ReadRequest, opener: FileOpener
) -> ArrayReader:
    """Return a reader of a file or Zarr array of X alone, with y and w in others or in memory.

    If y is None and X is an IDX file named as the images of MNIST, y is its file of labels.

    Raises
    ------
    ConfigError
        If targets are read but not given, or y or w is a file that holds more than one array.
    DataError
        If a file is damaged, X is a structured array, or the arrays differ in their rows.
    MemoryBudgetError
        If a sparse matrix of another form than CSR is too large to convert.
    """
    location = redact(url)
    arrays_and_identities = [_array_in(url, format_name, opener)]
    if getattr(arrays_and_identities[0][0].dtype, "names", None):
        raise DataError(
            f"{location} holds a structured array, whose fields are columns",
            f"give the array itself, numpy.load({location!r}), instead of the file",
        )
    if request.targets:
        target = request.y
        if target is None and format_name == "idx":
            target = _labels_file_of_images(url)
        if target is None:
            raise ConfigError(
                f"{location} holds only X", f"give {mention('y=')}, a file or an array"
            )
        arrays_and_identities.append(
            _array_of_source(target, "y", opener, location, keep_missing=request.drop_missing)
        )
    if request.reads_weights:
        arrays_and_identities.append(_array_of_source(request.w, "sample_weight", opener, location))
    arrays, identities = zip(*arrays_and_identities, strict=True)
    chunks = getattr(arrays[0], "shards", None) or getattr(arrays[0], "chunks", None)
    return ArrayReader(arrays, location, list(identities), aligned=(chunks or (1,))[0])


def _array_in(
    url: Url, format_name: str, opener: FileOpener, *, keep_missing: bool = False
) -> tuple[Any, Any]:
    """Return the array of a file or store that holds X alone, and its identity."""
    if format_name == "zarr":
        array: Any = zarr_array(url, opener, keep_missing=keep_missing)
        return array, ["zarr", redact(url), list(array.shape), str(array.dtype)]
    identity = opener.identity(url)
    if format_name == "npz" and (names := sparse_names(url, opener)) is not None:
        return sparse_rows(url, names, opener), identity
    return SINGLE_ARRAY_FORMATS[format_name](opener.open(url), redact(url), opener), identity


def _array_of_source(
    source: Any, name: str, opener: FileOpener, location: str, *, keep_missing: bool = False
) -> tuple[Any, Any]:
    """Return the array of `source`, a file or data in memory, and its identity.

    name, location : "y" or "sample_weight" and the file of X, for messages
    """
    if not is_path(source):
        array = np.asarray(source)
        return array, ends_digest(array)
    format_name = opener.format_name(source)
    if not holds_one_array(source, format_name, opener):
        raise ConfigError(
            f"{mention(f'{name}={redact(source)}')} cannot be used with {location}; give a .npy or "
            "IDX file, or a Zarr array"
        )
    return _array_in(source, format_name, opener, keep_missing=keep_missing)


def _labels_file_of_images(url: Url) -> str | None:
    """Return the URL of the labels of a file of images named as in MNIST; otherwise None."""
    text = str(url)
    for images, labels in (("images-idx3", "labels-idx1"), ("images.idx3", "labels.idx1")):
        if images in text:
            return text.replace(images, labels)
    return None
