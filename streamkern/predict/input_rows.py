"""Open the rows to evaluate: stores, or files, which are converted as in `ingest`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention
from streamkern.basics.text import redact, some
from streamkern.basics.values import json_digest
from streamkern.filesystem.urls import check_missing, local_path
from streamkern.ingest.array_files import holds_one_array
from streamkern.ingest.array_reader import requested_names
from streamkern.ingest.columns import ReadRequest, RecordedArrays
from streamkern.ingest.conform import FeatureConverter, RawBlock
from streamkern.ingest.formats import DEFAULT_FORM, TABLES, FileForm
from streamkern.ingest.input_files import FileOpener
from streamkern.ingest.original_columns import OriginalColumns
from streamkern.ingest.path_patterns import expand_paths
from streamkern.ingest.reader import Reader, encoded_reader
from streamkern.ingest.readers import existing_column, open_reader
from streamkern.ingest.tables.encoder import Encoder
from streamkern.ingest.targets import TargetConverter
from streamkern.ingest.zarr_groups import foreign_group, has_array, own_columns, own_state
from streamkern.store.class_labels import KnownClasses
from streamkern.store.row_block import RowBlock, concatenate_blocks
from streamkern.stream.sources.alignment import ColumnSubset, column_index, targets_in_order
from streamkern.stream.sources.base import UNIT_BYTES, BaseSource
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import Transform


class FileRows:
    """Source of the rows of files or arrays, in their order, each read once.

    Parameters
    ----------
    reader : reader of files or arrays, opened with or without targets
    schema : the model, or the schema of its data, whose order named targets get
    targets : whether blocks have targets

    Attributes
    ----------
    original_columns : the unchanged columns of the files, if they are written beside the
        predictions
    """

    feed_transforms: tuple[Transform, ...] = ()
    original_columns: OriginalColumns | None = None

    def __init__(self, reader: Reader, schema: Any, *, targets: bool) -> None:
        self._reader, classes = reader, schema.classes
        first_block = next(reader.blocks(0, UNIT_BYTES), None)
        if first_block is None or not len(first_block.X):
            raise DataError("the input has no rows", "give a file with at least one row")
        # Rows keep their dtype, so that nothing is rounded to the dtype of the training store.
        dtype = reader.natural_dtype
        self._features = FeatureConverter(
            first_block,
            np.float64 if dtype is None else None,
            dtype,
            packed=reader.width is not None,
        )
        self._targets = None
        self.row_shape, self.n_rows = self._features.row_shape, reader.n_rows
        self.columns, self.files, self.encoder = reader.columns, reader.files, reader.encoder
        self.file_form = reader.file_form
        self.classes: tuple[str, ...] | None = None
        self.n_outputs = 0
        self.target_columns: tuple[str, ...] | None = None
        if targets:
            names = reader.target_columns
            self.target_columns = targets_in_order(names, schema.target_columns, "the data")
            self._target_index = column_index(names, self.target_columns)
            self._targets = TargetConverter(
                first_block,
                "values" if classes is None else "classes",
                as_text=reader.targets_as_text,
            )
            self.classes = classes
            self._known_classes = KnownClasses(classes or (), schema.label_dtype)
            self.n_outputs = self._targets.shape[0] if classes is None else len(classes)
        row_bytes = int(np.prod(self.row_shape)) * self._features.dtype.itemsize
        self._unit_rows = max(1, UNIT_BYTES // row_bytes)

    @property
    def n_left_out(self) -> int:
        """Number of rows without a target that were left out of the blocks read so far."""
        return self._reader.n_dropped

    @property
    def fingerprint(self) -> str:
        """Digest of the identity of the input, such as the names, sizes and times of files."""
        return "name:" + json_digest(self._reader.identity)

    def blocks(self) -> Iterator[RowBlock]:
        """Yield all rows in order, as blocks."""
        return (block for _, block in self.numbered_blocks(0))

    def numbered_blocks(self, start: int) -> Iterator[tuple[int, RowBlock]]:
        """Yield numbered blocks as `BaseSource` does; their lengths do not depend on `start`."""
        # The rows from `first_row` to `end` are read, but not yet yielded.
        first_row = end = start - start % self._unit_rows
        unyielded: list[RowBlock] = []
        for raw in self._reader.blocks(first_row, UNIT_BYTES):
            unyielded.append(self._block(raw, end))
            end += len(raw.X)
            while end - first_row >= self._unit_rows:
                rows = concatenate_blocks(unyielded)
                yield first_row, rows.take(slice(self._unit_rows))
                unyielded = [rows.take(slice(self._unit_rows, None))]
                first_row += self._unit_rows
        if end > first_row:
            yield first_row, concatenate_blocks(unyielded)
        self.n_rows = end

    def _block(self, raw: RawBlock, first_row: int) -> RowBlock:
        """Return the converted rows of a block, numbered from `first_row` on."""
        y: NDArray[Any] = np.empty((len(raw.X), 0), np.float32)
        if self._targets is not None:
            y = self._targets.convert(raw)
            if self.classes is None:
                y = np.ascontiguousarray(y[:, self._target_index])
            else:
                y = self._class_ids(raw, self._targets, y)
        rows = np.arange(first_row, first_row + len(raw.X))
        return RowBlock(self._features.convert(raw), y, raw.weights(), rows)

    def _class_ids(
        self, raw: RawBlock, targets: TargetConverter, codes: NDArray[Any]
    ) -> NDArray[np.int64]:
        """Return class ids of the model; raise DataError for an unknown label."""
        positions = map(self._known_classes.find, targets.labels)
        class_ids = np.array([-1 if k is None else k for k in positions], np.int64)
        ids: NDArray[np.int64] = class_ids[codes]
        if (ids < 0).any():
            row = int(np.argmin(ids))
            raise DataError(
                f"the label of {raw.cell_location(row)} is {targets.labels[codes[row]]!r}, which "
                f"is not a class of the model ({some(self._known_classes.names)})",
                "leave such rows out, or train on rows of all classes",
            )
        return ids


def open_rows(
    inputs: Sequence[str], files: ExitStack, schema: Any, *, targets: bool, x: Any = None,
    y: Any = None, sample_weight: Any = None, input_options: Mapping[str, Any] | None = None,
    missing: str = "error", external: bool = False, foreign: bool = False,
    with_input: bool = False, form: FileForm = DEFAULT_FORM, drop_missing_targets: bool = False,
) -> BaseSource | FileRows:  # fmt: skip
    """Open the rows of one store or of several, or of raw files as `ingest` takes them.

    Parameters
    ----------
    inputs : paths or URLs, folders and patterns as in `ingest`. Files are read one after another in
        the given order.
    files : closes everything that is opened
    schema : the model, or the schema of its data, with the default names of arrays, target columns
        and weight column, and the encoder of a table. These target columns and the weight column
        are left out if they exist and are not read.
    targets : whether targets and sample weights are read
    x, y, sample_weight : as in `ingest`
    input_options : options of remote inputs
    missing, external, foreign : as in `ingest`
    with_input : whether all columns of CSV and Parquet files are written beside the predictions;
        additional columns are then allowed
    form : the format of the files, and how CSV files are written
    drop_missing_targets : whether rows of files without a target are left out

    Raises ConfigError if stores and files are given together, or if a file has no column names
    although the model has some, and the errors of `ingest`.
    """
    check_missing(missing)
    urls = expand_paths(inputs, input_options)
    inputs = urls if isinstance(urls, list) else [urls]
    arrays = schema.arrays.with_columns(schema.target_columns, schema.weight_column)
    form = form._replace(earlier_record=arrays.add_to_record(schema.file_form) or {})
    opener = FileOpener(
        input_options, files, missing=missing, external=external, foreign=foreign, form=form
    )
    # Opened before rows are read, so that later changes are detected.
    original_columns = OriginalColumns(inputs, opener) if with_input else None
    encoder = None if schema.encoder is None else Encoder.from_json(schema.encoder, "the model")
    expected_columns = schema.columns if encoder is None else encoder.columns
    if original_columns is not None and x is None and expected_columns is not None:
        x = list(expected_columns)
    # Stores: each is a source.
    formats = {opener.format_name(url) for url in inputs}
    if formats == {"zarr"} and not any(holds_one_array(url, "zarr", opener) for url in inputs):
        request = ReadRequest(x, y, sample_weight, targets)
        stores = [_open_store(url, request, opener, arrays) for url in inputs]
        return stores[0] if len(stores) == 1 else MixtureSource(stores)
    if "zarr" in formats and len(formats) > 1:
        raise ConfigError(
            "stores and other files cannot be read together", "give only stores, or only files"
        )
    # Files: one reader, with the columns of the model.
    # Weights of an HDF5 table are recorded by the name of an array.
    weight_column = arrays.sample_weight if schema.columns else schema.weight_column
    if y is None and formats <= {*TABLES}:
        y = schema.target_columns
    if targets and sample_weight is None and weight_column not in (expected_columns or ()):
        sample_weight = existing_column(weight_column, inputs, opener.form, input_options)
    open_files = partial(open_reader, inputs[0] if len(inputs) == 1 else inputs, opener=opener)
    known_names = (*(schema.target_columns or ()), *([weight_column] if weight_column else []))
    features = {*(expected_columns or ())}
    unused = [name for name in known_names if name != sample_weight and name not in features]
    request = ReadRequest(
        x, y, sample_weight, targets, drop_missing=drop_missing_targets,
        dropped_columns=unused if encoder is not None or schema.columns else (),
    )  # fmt: skip
    if encoder is not None:
        _check_table(formats)
        reader: Reader = encoded_reader(open_files, request, encoder)
    else:
        reader = open_files(request._replace(columns=schema.columns))
    if "csv" in formats and x is None:
        _check_header(reader, schema.columns)
    rows = FileRows(reader, schema, targets=targets)
    rows.original_columns = original_columns
    return rows


def _check_header(reader: Reader, columns: Sequence[str] | None) -> None:
    """Raise ConfigError for a CSV without a header if the model has column names."""
    if columns is not None and reader.columns is None:
        raise ConfigError(
            f"{reader.files[0][0]} has no header line, but the columns of the model have names "
            f"({some(columns)})",
            f"give it a header, or give the positions of these columns with {mention('x=')}",
        )


def _check_table(formats: set[str]) -> None:
    """Raise ConfigError for input that cannot be encoded like the table of the model."""
    if not formats <= {*TABLES}:
        raise ConfigError(
            f"the model was trained on a table, but the rows are of {', '.join(sorted(formats))}",
            f"give a CSV, a Parquet file or a store made with {mention('like=')}",
        )


def _open_store(
    url: str, request: ReadRequest, opener: FileOpener, arrays: RecordedArrays
) -> BaseSource:
    """Return the source of a store.

    request : names of columns of a store of streamkern, or of arrays of a foreign store
    arrays : default names of the arrays of a foreign store
    """
    options = opener.options if local_path(url) is None else {}
    mark = own_state(url, opener)
    subset = None
    if mark is not None:
        unresolved, columns, _, order = own_columns(mark, request, redact(url))
        _check_requested_names(unresolved, mark, redact(url))
        request = ReadRequest(targets=request.targets)
        subset = None if order is None else columns
    else:
        group = foreign_group(url, options or None, any_mark=opener.foreign)
        request = arrays.apply_to(request, partial(has_array, group))
    x, y, *w = requested_names(request._replace(targets=True), redact(url))
    source = ZarrSource(
        url, x=x, y=y if request.targets else None, w=w[0] if w and request.targets else None,
        storage_options=options or None, missing=opener.missing, foreign=opener.foreign,
    )  # fmt: skip
    return source if subset is None else ColumnSubset(source, subset)


def _check_requested_names(unresolved: ReadRequest, mark: Mapping[str, Any], location: str) -> None:
    """Raise ConfigError for a requested name that is not a column of a streamkern store."""
    store_texts = {
        name: f"with {name} of {some(mark[key])}" if mark.get(key) is not None else "without names"
        for name, key in (("x", "columns"), ("y", "target_columns"))
    }
    store_texts["sample_weight"] = "with its own weights"
    requested = {"x": unresolved.x, "y": unresolved.y}
    if unresolved.w != "w":  # "w" is the array of the store's own weights
        requested["sample_weight"] = unresolved.w
    for name, value in requested.items():
        if value is not None:
            raise ConfigError(
                f"{mention(name, value)} cannot be used with {location}, a store of streamkern "
                f"{store_texts[name]}",
                f"leave {mention(f'{name}=')} out",
            )
