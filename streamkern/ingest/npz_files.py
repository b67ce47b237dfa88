"""Read .npz archives: arrays by name, and sparse matrices as SciPy saves them."""

from __future__ import annotations

import zipfile
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.basics.text import redact
from streamkern.ingest.array_files import npy_array
from streamkern.ingest.array_reader import ArrayReader, asked_array_names, no_array, warn_of_weights
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.group_arrays import SparseRows, converted
from streamkern.ingest.input_files import FileOpener, Url


def open_npz(url: Url, asked: ReadRequest, place: FileOpener) -> ArrayReader:
    """Return a reader of the arrays X, y and w of a .npz archive, by name."""
    where, names = redact(url), asked_array_names(asked, redact(url))
    identity = [place.identity(url), *names]
    archive = place.keep(_archive(place.open(url), where))
    held = [k.removesuffix(".npy") for k in archive.namelist() if k.endswith(".npy")]

    def array(name: str) -> Any:
        return npy_array(place.keep(_entry(archive, name, where)), f"{name} of {where}", place)

    rows = names[0]
    if rows in held and getattr(array(rows).dtype, "names", None):
        raise DataError(
            f"{rows} of {where} is a structured array, whose fields are columns; give the array "
            f"itself, numpy.load({where!r})[{rows!r}], in place of the file"
        )
    for name in names:
        if name not in held:
            raise no_array(name, held, where)
    arrays = [array(name) for name in names]
    warn_of_weights(lambda name: array(name) if name in held else None, asked, arrays[0], where)
    return ArrayReader(arrays, where, identity)


def _archive(file: Any, where: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, UnicodeDecodeError, NotImplementedError) as error:  # or too new
        raise DataError(f"{where} is not a .npz file: {error}; write it by numpy.savez") from error


def sparse_names(url: Url, place: FileOpener) -> list[str] | None:
    """Return the names in an archive of scipy.sparse.save_npz; None for another archive."""
    with place.open_once(url) as file, _archive(file, redact(url)) as archive:
        names = archive.namelist()
    return names if {"format.npy", "shape.npy", "data.npy"} <= {*names} else None


def sparse_rows(url: Url, names: list[str], place: FileOpener) -> SparseRows:
    """Return the rows of a matrix that SciPy saved: CSR is read by pieces, others are converted."""
    where = redact(url)
    archive = place.keep(_archive(place.open(url), where))

    def member(name: str) -> Any:
        if f"{name}.npy" not in names:
            raise DataError(f"{where} is no sparse matrix: it has no {name}; save it again")
        return npy_array(place.keep(_entry(archive, name, where)), f"{name} of {where}", place)

    form, shape = _whole(member("format")).item(), _whole(member("shape"))
    form = form.decode() if isinstance(form, bytes) else str(form)
    if shape.shape != (2,) or shape.dtype.kind not in "iu":
        raise DataError(
            f"{where} has the shape {shape.tolist()}, and sparse rows have (n, d); save it again "
            "by scipy.sparse.save_npz"
        )
    if form == "csr":
        parts = member("data"), member("indices"), _whole(member("indptr"))
        return SparseRows(parts, (int(shape[0]), int(shape[1])), where)
    size = sum(info.file_size for info in archive.infolist())
    return converted(lambda: sp.load_npz(place.open(url)), size, where, place.memory)


def _whole(array: Any) -> NDArray[Any]:
    """Return all of a small array, also of a scalar."""
    array.shape = array.shape or (1,)
    return np.asarray(array[:])


def _entry(archive: zipfile.ZipFile, name: str, where: str) -> Any:
    """Return the open file of an array in an archive."""
    try:
        return archive.open(f"{name}.npy")
    except (RuntimeError, NotImplementedError) as error:  # encrypted, or an unknown compression
        raise DataError(f"{name} of {where} cannot be read: {error}; save it again") from error
