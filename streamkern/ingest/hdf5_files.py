"""Read datasets of HDF5 files.

Incomplete datasets, and datasets stored in other files, are refused unless the caller allows them.
HDF5 itself returns the fill value, mostly 0, for data that was never written and for virtual data
whose source is missing, and it follows links to any other file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, StoreNotFoundError, StreamkernError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.basics.text import redact
from streamkern.ingest.array_reader import ArrayReader, named_arrays
from streamkern.ingest.column_roles import ColumnRoles, assign_columns
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.group_arrays import decoded_array, enumeration_as_names, without_padding
from streamkern.ingest.input_files import FileOpener, Url
from streamkern.ingest.tables.key_columns import warn_of_rounded_columns
from streamkern.store.conventions import is_group, missing_member_text

_MAX_DEPTH = 8
"""Largest depth to which virtual datasets may be nested."""


def open_hdf5(url: Url, request: ReadRequest, opener: FileOpener) -> ArrayReader:
    """Return a reader of datasets of an HDF5 file by name, or of the columns of its table.

    Raises
    ------
    MissingDependencyError
        If h5py is not installed.
    StoreNotFoundError
        If there is no dataset of a requested name.
    DataError
        If the file is damaged, a dataset is refused, or a column does not exist.
    ConfigError
        If the file has no table, and a requested array is not a name.
    MemoryBudgetError
        If a sparse matrix that is stored by columns is too large to convert.
    """
    location, identity = redact(url), [opener.identity(url), request.json()]
    h5py, data = import_optional("h5py"), opener.local_copy(url)
    columns = targets = None
    try:
        open_file = opener.keep(h5py.File(data, "r"))
        file = Hdf5File(open_file, location, opener)
        table = file.table(request)
        if table is None:
            arrays = named_arrays(open_file.get, partial(file.array, request), request, location)
        else:
            arrays, roles = table
            columns, targets = roles.features, roles.targets
    except (StreamkernError, MemoryError):
        raise
    except Exception as error:  # whatever the library raises for damage
        raise DataError(
            f"{location} is not a readable HDF5 file: {error}",
            "copy it again from its source, or write it again",
        ) from error
    aligned = (arrays[0].chunks or (1,))[0]
    reader = ArrayReader(
        arrays, location, identity, aligned=aligned, columns=columns, target_columns=targets
    )
    reader.unused = () if table is None else roles.unused
    return reader


class Hdf5File:
    """An open HDF5 file.

    file : an open `h5py.File`
    location : name of the file in error messages
    opener : opener whose options `memory`, `missing` and `external` apply
    """

    def __init__(self, file: Any, location: str, opener: FileOpener) -> None:
        self._file, self._location, self._memory = file, location, opener.memory
        self._fill, self._external = opener.missing == "fill", opener.external
        self._netcdf = "_NCProperties" in file.attrs

    def array(self, request: ReadRequest, i: int, name: str) -> Any:
        """Return the decoded dataset `name`, which is the i-th of X, y and w.

        Raises StoreNotFoundError if it is missing, and DataError if it is refused.
        """
        member, location = self._file.get(name), f"{name} of {self._location}"
        is_dataset = not is_group(member)
        member = self._dataset(name) if is_dataset else member
        if ("MATLAB_class" if is_dataset else "MATLAB_sparse") in member.attrs:
            raise DataError(
                f"{location} was written by MATLAB, which stores arrays transposed, and may hold "
                "text as codes",
                "write the rows again in Python, for example with np.savez('data.npz', "
                "X=file['X'][:].T, y=file['y'][:].ravel()), or read the file with scipy.io or "
                "mat73",
            )
        array = decoded_array(
            member, lambda part: self._dataset(f"{name}/{part}"), location, self._memory,
            keep_missing=request.keeps_missing(i),
            **({"netcdf": self._netcdf} if is_dataset else {}),
        )  # fmt: skip
        if array is None:
            raise StoreNotFoundError(missing_member_text(name, self._file, self._location))
        if not is_dataset:
            return array
        return without_padding(enumeration_as_names(array, member, location, labels=i == 1), member)

    def table(self, request: ReadRequest) -> tuple[list[Any], ColumnRoles] | None:
        """Return the requested columns of the table as X, y and w; None if there is none.

        The table is the compound dataset that x names. If x names columns or nothing, it is the
        compound dataset X, or else the only compound dataset in the file's root.
        """
        name = request.x if isinstance(request.x, str) else "X"
        if name not in self._file and not isinstance(request.x, str):
            compound_names = [k for k in self._file if self._is_compound(k)]
            name = compound_names[0] if len(compound_names) == 1 else name
        if not self._is_compound(name):
            return None
        table = self._dataset(name)
        names, location = list(table.dtype.names), f"{name} of {self._location}"
        columns = request._replace(x=None) if isinstance(request.x, str) else request
        roles = assign_columns(names, columns, location)
        for column in (*roles.features, *roles.targets, *roles.weights):
            if table.dtype[column].shape:
                raise DataError(
                    f"column {column!r} of {location} holds arrays",
                    "save each array as a dataset",
                )
        arrays = [_CompoundColumns(table, roles.features)]
        if request.targets:
            arrays.append(_CompoundColumns(table, roles.targets, is_flat=len(roles.targets) == 1))
        if roles.weights:
            arrays.append(_CompoundColumns(table, roles.weights, is_flat=True))
        return arrays, roles

    def _is_compound(self, name: str) -> bool:
        """Return whether a member is a compound dataset that may be read."""
        link = self._file.get(name, getlink=True)
        if not isinstance(link, import_optional("h5py").HardLink) and not self._external:
            return False
        member = self._file.get(name)
        return bool(getattr(getattr(member, "dtype", None), "names", None))

    def _dataset(self, name: str) -> Any:
        """Return a checked dataset.

        Raises StoreNotFoundError if it is missing, and DataError if it is refused.
        """
        member = self._file.get(name)
        if member is None or not hasattr(member, "shape"):
            raise StoreNotFoundError(missing_member_text(name, self._file, self._location))
        object_info = import_optional("h5py").h5o.get_info
        if object_info(member.id).fileno != object_info(self._file.id).fileno:
            self._refuse_external(name, "is a link to another file")
        self._require_complete(member, name, 0)
        return member

    def _require_complete(self, dataset: Any, name: str, depth: int) -> None:
        """Raise DataError if a part of the dataset is missing, damaged or in other files.

        name : the requested dataset, for error messages; `dataset` may be one of its sources
        depth : number of virtual datasets that lead from `name` to `dataset`
        """
        if dataset.shape is None:
            raise DataError(
                f"{name} of {self._location} is an empty dataset",
                f"write rows to it, or name another one with {mention('x=')} and {mention('y=')}",
            )
        creation = dataset.id.get_create_plist()
        if creation.get_external_count():
            self._refuse_external(name, "is stored in other files")
            self._check_external(creation, name)
        elif dataset.is_virtual:
            self._check_virtual(dataset, name, depth)
        elif not self._fill and not _is_fully_written(dataset, creation):
            self._refuse_unwritten(name, "has parts that were never written")
        elif (offset := _damaged_chunk(dataset, creation)) is not None:
            raise DataError(
                f"the chunk at row {offset[0]} of {name} of {self._location} is damaged",
                "copy the file again from its source",
            )

    def _check_external(self, creation: Any, name: str) -> None:
        """Raise DataError if a file that stores a part of the dataset is missing or too short."""
        for i in range(creation.get_external_count()):
            path, offset, size = creation.get_external(i)
            length = os.path.getsize(path) if os.path.exists(path) else -1
            if length < 0 or (size < 1 << 62 and length < offset + size):  # larger sizes: unlimited
                self._refuse_unwritten(name, f"lacks data in {os.fsdecode(path)}")

    def _check_virtual(self, dataset: Any, name: str, depth: int) -> None:
        """Raise DataError if a virtual dataset lacks data, or has some in other files."""
        if depth == _MAX_DEPTH:
            raise DataError(
                f"{name} of {self._location} nests virtual datasets more than {_MAX_DEPTH} deep",
                "write the rows to one dataset",
            )
        covered = 0
        for space, path, source, _ in dataset.virtual_sources():
            covered += space.get_select_npoints()
            if path != ".":
                self._refuse_external(name, "is made of data in other files")
            if not self._fill:
                self._check_source(path, source, name, depth)
        if not self._fill and covered < math.prod(dataset.shape):
            self._refuse_unwritten(name, "has virtual parts without a source")

    def _check_source(self, path: str, source: str, name: str, depth: int) -> None:
        """Raise DataError if a source of a virtual dataset is missing or incomplete.

        path : file of the source; "." for this file
        source : name of the source in that file
        """
        with ExitStack() as files:
            file = self._file
            if path != ".":
                path = os.path.join(os.path.dirname(file.filename), path)
                file = {}
                if os.path.exists(path):
                    file = files.enter_context(import_optional("h5py").File(path, "r"))
            dataset = file.get(source)
            if dataset is None:
                self._refuse_unwritten(
                    name, f"has virtual parts whose source, {path}, is not there"
                )
            self._require_complete(dataset, name, depth + 1)

    def _refuse_external(self, name: str, state: str) -> None:
        """Raise DataError unless data in other files are allowed."""
        if not self._external:
            raise DataError(
                f"{name} of {self._location} {state}",
                f"give {mention('external', True)} if you trust the file",
            )

    def _refuse_unwritten(self, name: str, state: str) -> None:
        """Raise DataError for data that was never written, or whose source is missing."""
        raise DataError(
            f"{name} of {self._location} {state}",
            f"give {mention('missing', 'fill')} to read the fill value there",
        )


def _is_fully_written(dataset: Any, creation: Any) -> bool:
    """Return whether all parts of a dataset in the file itself were written.

    creation : the property list of the dataset's creation
    """
    layout, h5d = creation.get_layout(), import_optional("h5py").h5d
    if layout == h5d.CHUNKED:
        chunks = zip(dataset.shape, dataset.chunks, strict=True)
        return bool(dataset.id.get_num_chunks() == math.prod(-(-n // k) for n, k in chunks))
    return bool(layout == h5d.COMPACT or dataset.size == 0 or dataset.id.get_offset() is not None)


def _damaged_chunk(dataset: Any, creation: Any) -> Any:
    """Return the offset of a chunk whose length does not match its rows; None if there is none.

    Each chunk records which filters were skipped. If that record is damaged, HDF5 returns arbitrary
    memory. A chunk that was not compressed must therefore be as long as its rows and checksum.

    creation : the property list of the dataset's creation
    """
    h5py = import_optional("h5py")
    if creation.get_layout() != h5py.h5d.CHUNKED or dataset.dtype.hasobject:
        return None  # strings of variable length are stored outside of the chunks
    n_bytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
    filters = [creation.get_filter(i)[0] for i in range(creation.get_nfilters())]
    # Bytes that a filter adds to a chunk; other filters compress, and check the length themselves.
    added_bytes = {h5py.h5z.FILTER_SHUFFLE: 0, h5py.h5z.FILTER_FLETCHER32: 4}

    def offset_if_damaged(chunk: Any) -> Any:
        # Bit i of the mask is set if filter i was skipped.
        applied = [kind for i, kind in enumerate(filters) if not chunk.filter_mask >> i & 1]
        if any(kind not in added_bytes for kind in applied):
            return None
        expected = n_bytes + sum(added_bytes[kind] for kind in applied)
        return None if chunk.size == expected else chunk.chunk_offset

    return dataset.id.chunk_iter(offset_if_damaged)


class _CompoundColumns:
    """Columns of a compound dataset as an array (n, k), or (n,) for one column if `is_flat`."""

    def __init__(self, table: Any, names: Sequence[str], *, is_flat: bool = False) -> None:
        self.chunks = table.chunks
        self.dtype = np.result_type(*(table.dtype[name] for name in names))
        self.shape = table.shape if is_flat else (*table.shape, len(names))
        self._table, self._names, self._is_flat = table, names, is_flat

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        records = self._table.fields(list(self._names))[rows]
        if self._is_flat:
            return np.asarray(records[self._names[0]])
        if self.dtype.kind == "f":
            warn_of_rounded_columns((name, records[name]) for name in self._names)
        return np.stack([records[name] for name in self._names], axis=-1)
