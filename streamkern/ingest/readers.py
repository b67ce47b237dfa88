"""Open readers of blocks of rows for the formats that training data comes in.

A reader yields `RawBlock`s of consecutive rows in source order, of about the requested bytes,
starting at any row. Its `identity` decides whether an interrupted ingest may be resumed with these
data: files are identified by their sizes and times, NumPy arrays by a checksum, other arrays by a
digest of their first and last rows, and iterables by a digest of their first block. Arrays on disk
are streamed, not mapped: the same code reads local, compressed and remote files, and memory stays
bounded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from functools import partial
from typing import Any

import zarr

from streamkern.basics.errors import (
    ConfigError,
    DataError,
    RowShapeError,
    StoreNotFoundError,
    StreamkernError,
)
from streamkern.basics.message import mention
from streamkern.basics.text import redact, some
from streamkern.ingest.array_files import holds_one_array, open_npz, open_single_array
from streamkern.ingest.array_reader import open_dask_table, open_memory
from streamkern.ingest.arrow_files import TYPED_READERS
from streamkern.ingest.columns import ReadRequest, RecordedArrays, unused_columns
from streamkern.ingest.csv_files import open_csv
from streamkern.ingest.formats import NAMED_ARRAYS, TABLES, FileForm
from streamkern.ingest.frames import is_dask_table, is_frame
from streamkern.ingest.hdf5_files import open_hdf5
from streamkern.ingest.hub_datasets import is_hub_dataset
from streamkern.ingest.input_files import FileOpener, Url, data_ending, explained_damage, is_path
from streamkern.ingest.netcdf_files import open_netcdf
from streamkern.ingest.object_reader import BlockReader, FrameReader, HubReader
from streamkern.ingest.path_patterns import expand_paths
from streamkern.ingest.reader import FileReader, ManyReader, Reader, TargetedRows
from streamkern.ingest.svmlight_files import number_features_alike, open_svmlight
from streamkern.ingest.zarr_groups import arrays_of_group, has_array, open_zarr, own_state
from streamkern.store.sparse_rows import sparse_features, stays_sparse


def open_reader(inputs: Any, request: ReadRequest, opener: FileOpener) -> Reader:
    """Return a reader for `inputs`, whose files `opener` opens and closes.

    The inputs are a path or URL, several of them, an array, a Zarr group, a data frame (also of
    Dask), a data set of Hugging Face, or an iterable of blocks (X, y) or (X, y, w).

    Raises ConfigError for other inputs and for targets or weights that do not fit the inputs,
    StoreNotFoundError for a file or array that does not exist, and DataError for files that are
    damaged or contradict each other.
    """
    earlier_record = opener.form.earlier_record
    if request.columns is not None and request.x is None:  # the user may choose an unused column
        dropped_columns = (*request.dropped_columns, *unused_columns(earlier_record))
        request = request._replace(dropped_columns=dropped_columns)
    request = request._replace(drop_missing=request.drop_missing and request.targets)
    reader = _reader(inputs, request, opener)
    _pack_sparse(reader, earlier_record)
    return TargetedRows(reader, request.markers) if request.drop_missing else reader


def _pack_sparse(reader: Reader, earlier_record: Mapping[str, Any] | None) -> None:
    """Keep sparse rows packed if the earlier rows are packed; other sparse rows become dense.

    Without earlier rows, `stays_sparse` decides.

    earlier_record : the form of earlier files of the same data, if there are some
    """
    if reader.sparse_shape is None:
        return
    n_features, longest = reader.sparse_shape
    n_earlier_features = sparse_features(earlier_record)
    if n_earlier_features is None:
        if earlier_record is None and stays_sparse(n_features, longest):
            reader.pack(longest)
    elif n_earlier_features != n_features:
        raise RowShapeError(
            f"the rows have {n_features:,} features, but the rows before have "
            f"{n_earlier_features:,}",
            "give rows with the same features",
        )
    else:
        reader.pack(longest)


def _reader(inputs: Any, request: ReadRequest, opener: FileOpener) -> Reader:
    """Return the reader for `inputs`, depending on their type."""
    if is_path(inputs):
        return _file_reader(inputs, request, opener)
    if is_frame(inputs):
        return FrameReader(inputs, request)
    if is_hub_dataset(inputs):
        return HubReader(inputs, request)
    if is_dask_table(inputs):
        return open_dask_table(inputs, request)
    if isinstance(inputs, zarr.Group):
        return _open_group(inputs, request, opener)
    if hasattr(inputs, "shape") and hasattr(inputs, "dtype"):
        reader = open_memory(inputs, request)
        reader.file_form = RecordedArrays.from_form(opener.form.earlier_record).add_to_record(None)
        return reader
    if isinstance(inputs, Sequence) and inputs and all(is_path(path) for path in inputs):
        readers = list(_file_readers(inputs, request, opener))
        number_features_alike(readers, request.x)
        return ManyReader(readers)
    if isinstance(inputs, Iterable) and not isinstance(inputs, Mapping):
        if request.y is not None or request.w is not None:
            raise ConfigError(
                "y or sample_weight was given with an iterable of blocks",
                "put them into the blocks: the blocks must be pairs (X, y), or (X, y, w) with "
                "sample weights",
            )
        return BlockReader(inputs, request)
    raise ConfigError(
        f"cannot ingest a {type(inputs).__name__}",
        "give a path, paths, arrays, a data frame, or an iterable of (X, y) blocks",
    )


def _file_readers(
    urls: Sequence[Url], request: ReadRequest, opener: FileOpener
) -> Iterator[FileReader]:
    """Yield a reader for each file; later files need the columns of the first, in its order."""
    format_name = opener.format_name(urls[0])
    y, w = request.y, request.w
    has_separate_targets = holds_one_array(urls[0], format_name, opener)
    if has_separate_targets:
        y, w = expand_paths(y, opener.options), expand_paths(w, opener.options)
    targets = _one_for_each_file(y, len(urls), has_separate_targets, "y")
    weights = _one_for_each_file(w, len(urls), has_separate_targets, "sample weights")
    first_reader: FileReader | None = None
    for url, y, w in zip(urls, targets, weights, strict=True):
        file_request = request._replace(y=y, w=w)
        if first_reader is not None and first_reader.columns is not None:
            file_request = file_request._replace(columns=first_reader.columns)
            if format_name in TABLES:
                file_request = _request_by_name(file_request, first_reader)
        elif first_reader is not None and format_name == "csv":
            # Without a header, columns may be positions: later files use the positions of the first
            # file, by an opener with another form. The caller's opener keeps its form.
            record = {"format": "csv", **(opener.form.earlier_record or {})}
            positions = first_reader.reader.positions
            record["positions"] = positions or record.get("positions") or {}
            opener = copy(opener)
            opener.form = opener.form._replace(earlier_record=record)
        reader = _file_reader(url, file_request, opener)
        first_reader = first_reader or reader
        if (reader.columns is None) != (first_reader.columns is None):
            raise DataError(
                f"one of {first_reader.files[0][0]} and {reader.files[0][0]} has a header, the "
                "other has none",
                "give all files a header, or give none a header",
            )
        yield reader


def _request_by_name(request: ReadRequest, first_reader: Reader) -> ReadRequest:
    """Return the request with the columns of the first file by name; positions may differ."""
    if isinstance(request.w, int):
        raise ConfigError(
            f"{mention('sample_weight', request.w)} is a position, but may be another column in "
            "each file",
            "give the name of the column",
        )
    x = None if request.x is None else first_reader.columns
    return request._replace(x=x, y=first_reader.target_columns if request.targets else request.y)


def _one_for_each_file(values: Any, n_files: int, is_separate: bool, noun: str) -> list[Any]:
    """Return the targets or weights of each file. is_separate : whether they are in other files."""
    if not is_separate or values is None:
        return [values] * n_files
    if not isinstance(values, list | tuple):
        values = [values]
    if len(values) != n_files:
        raise ConfigError(
            f"X has {n_files} files, but {noun} has {len(values)}",
            "give one file for each file of X, and put patterns in quotes in a shell",
        )
    return list(values)


def _open_group(group: zarr.Group, request: ReadRequest, opener: FileOpener) -> Reader:
    """Return the reader of a Zarr group that is already open."""
    root = getattr(group.store, "root", None)
    if root is not None:
        return _file_reader(os.path.join(root, group.path), request, opener)
    names = RecordedArrays.from_form(opener.form.earlier_record)
    request = names.apply_to(request, partial(has_array, group))
    X, *targets_and_weights = arrays_of_group(group, request, opener)
    y, w = (*targets_and_weights, None, None)[:2]
    reader = open_memory(X, request._replace(y=y, w=w))
    reader.file_form = RecordedArrays.from_request(request).add_to_record(None)
    return reader


def is_table(inputs: Any, form: FileForm | None = None) -> bool:
    """Return whether targets are columns of the inputs, besides the features."""
    if is_frame(inputs) or is_hub_dataset(inputs):
        return True
    if is_dask_table(inputs):
        return bool(inputs.ndim == 2)  # a column of Dask has one dimension
    path = inputs[0] if isinstance(inputs, list | tuple) and inputs else inputs
    with ExitStack() as files:
        return is_path(path) and FileOpener({}, files, form=form).format_name(path) in TABLES


def check_header(reader: Reader, columns: Sequence[str] | None, x: Any) -> None:
    """Raise DataError for a CSV without a header if the store has column names."""
    if columns is not None and reader.columns is None and reader.as_text and x is None:
        raise DataError(
            f"{reader.files[0][0]} has no header line, but the columns of the store have names, "
            f"{some(columns)}",
            f"add one, or give the positions of these columns with {mention('x=')}",
        )


def existing_column(
    name: str | None, inputs: Any, form: FileForm, input_options: Mapping[str, Any] | None = None
) -> str | None:
    """Return `name` if the inputs are a table with a column of this name; otherwise None."""
    if name is None or not is_table(inputs, form):
        return None
    with ExitStack() as files:
        opener = FileOpener(input_options, files, form=form)
        reader = open_reader(inputs, ReadRequest(targets=False), opener)
    return name if name in (reader.columns or ()) else None


# ------------------------------------------------------------------------------ a reader of a file


def _file_reader(url: Url, request: ReadRequest, opener: FileOpener) -> FileReader:
    """Return the reader of a file.

    A DataError suggests another format if the content looks like one.
    """
    with explained_damage(url):
        format_name = opener.format_name(url)
    try:
        with explained_damage(url):  # the header may be damaged
            return _reader_of_format(format_name, url, request, opener)
    except DataError as error:
        if (error_text := opener.wrong_format_text(url, format_name)) is None:
            raise
        raise DataError(error_text) from error


def _reader_of_format(
    format_name: str, url: Url, request: ReadRequest, opener: FileOpener
) -> FileReader:
    """Return the reader of a file of this format, with the form for later files."""
    if holds_one_array(url, format_name, opener):
        return FileReader(open_single_array(format_name, url, request, opener), url)
    if request.w is not None and not isinstance(request.w, str | int):
        raise ConfigError(
            f"the sample weights of {redact(url)} must be one of its arrays or columns",
            f"give its name as {mention('sample_weight=')}",
        )
    open_file = _READERS[format_name]
    form_of_file = opener.form.for_format(format_name)
    form: Mapping[str, Any] | None = form_of_file.record(format_name, data_ending(url))
    has_named_arrays = format_name in NAMED_ARRAYS or (
        format_name == "zarr" and own_state(url, opener) is None
    )
    if has_named_arrays:
        names = RecordedArrays.from_form(opener.form.earlier_record)
        request = names.apply_to(request, partial(_has_array, open_file, url, opener))
        form = RecordedArrays.from_request(request).add_to_record(form)
    reader = open_file(url, request, opener)
    if reader.positions is not None:
        form = {**(form or {"format": format_name}), "positions": reader.positions}
    return FileReader(reader, url, form)


def _has_array(open_file: Callable[..., Reader], url: Url, opener: FileOpener, name: str) -> bool:
    """Return whether a file has an array of this name, or an HDF5 table such a column."""
    try:
        open_file(url, ReadRequest(name, targets=False), opener)
    except StoreNotFoundError:
        return open_file is open_hdf5 and _has_column(url, opener, name)
    except StreamkernError:  # it exists, but not as an array of rows and columns
        return True
    return True


def _has_column(url: Url, opener: FileOpener, name: str) -> bool:
    """Return whether the table of an HDF5 file has a column of this name; False without a table."""
    try:
        reader = open_hdf5(url, ReadRequest(y=(), targets=False), opener)
    except StreamkernError:
        return False
    return name in (reader.columns or ())


_READERS: dict[str, Callable[[Url, ReadRequest, FileOpener], Reader]] = {
    "npz": open_npz,
    "csv": open_csv,
    **TYPED_READERS,
    "hdf5": open_hdf5,
    "netcdf": open_netcdf,
    "svmlight": open_svmlight,
    "zarr": open_zarr,
}
