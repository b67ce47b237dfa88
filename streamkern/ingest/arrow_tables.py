"""Read tables of typed columns in blocks, by pyarrow: the base class of readers of such tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, NotNumbersError, StreamkernError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.basics.warning import warn
from streamkern.ingest.column_roles import assign_columns
from streamkern.ingest.columns import ReadRequest, as_list
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.reader import Reader
from streamkern.ingest.tables.arrow import (
    arrow,
    as_array,
    as_mask,
    compute,
    is_list_type,
    is_of_kind,
    is_text_type,
    plain_cells,
    unwrap_column,
    value_mask,
)
from streamkern.ingest.tables.cells import MISSING, RowsInFile, row_number
from streamkern.ingest.tables.key_columns import (
    array_is_rounded,
    cells_are_rounded,
    index_columns,
    warn_of_index,
    warn_of_rounded_integers,
)


def _natural_dtype(types: Sequence[Any]) -> np.dtype[Any] | None:
    """Return the common dtype of columns of these types; None if they are not all numbers."""
    dtypes = []
    for kind in types:
        number = kind.value_type if is_list_type(kind) else kind
        try:
            dtypes.append(np.dtype(number.to_pandas_dtype()))
        except (NotImplementedError, TypeError):
            return None
    return np.result_type(*dtypes) if all(dtype.kind in "biuf" for dtype in dtypes) else None


def _data_columns(schema: Any, request: ReadRequest, location: str) -> list[str]:
    """Return the names of the columns, without an index that was not requested by name."""
    metadata = schema.pandas_metadata
    metadata = metadata.get("index_columns", ()) if isinstance(metadata, dict) else ()
    index = {name for name in metadata if isinstance(name, str)}  # a range index has no column
    roles = (request.x, request.y, request.w, request.columns)
    requested = {name for role in roles for name in as_list(role) if isinstance(name, str)}
    unnamed = index_columns(
        schema.names, lambda name: is_of_kind(schema.field(name).type, "integer")
    )
    for name in unnamed:
        if not request.reads_all_columns and name not in requested | index:
            warn_of_index(name, location)
            index.add(name)
    return [name for name in schema.names if name not in index - requested]


class ArrowReader(Reader):
    """Reader of Arrow record batches; X may be a column of lists, by its name or if named X."""

    has_types = True  # text is never a number, even if it looks like one

    def __init__(
        self, location: str, schema: Any, n_rows: int | None, request: ReadRequest, identity: Any
    ) -> None:
        self._n_rows, self.identity, self._location = n_rows, identity, location
        is_default = request.x is None and request.targets
        name = "X" if request.x is None else request.x
        is_list_column = name in schema.names and is_list_type(schema.field(name).type)
        self._lists = is_list_column and not request.as_table
        if self._lists:
            request = request._replace(x=name, columns=None)
        columns = _data_columns(schema, request, location)
        roles = assign_columns(columns, request, location)
        if self._lists and is_default:
            used = {*roles.all_columns, *request.dropped_columns}
            unused = [name for name in columns if name not in used]
            if unused:
                warn(
                    f"the lists in column {name!r} of {location} are all of the features, and its "
                    f"columns {some(unused)} are not used; give {mention('x', name)} to confirm "
                    "this"
                )
        self.columns = None if self._lists else roles.features
        self.target_columns = roles.targets
        self.weight_column = roles.weight_column
        self.unused = () if self._lists else roles.unused
        self._features = roles.features
        self._targets = roles.targets
        self._weights = roles.weights
        self._columns_read = roles.all_columns
        self._markers, self._drop_missing = request.markers, request.drop_missing
        self._bytes_columns: set[str] = set()  # names of columns of bytes, whose warning was given
        self._rounded_columns: set[str] = set()  # names of rounded columns, likewise
        self._as_table, self.can_be_table = request.as_table, not self._lists
        self.natural_dtype = _natural_dtype([schema.field(name).type for name in roles.features])

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        row = 0
        for batch in self._read(block_bytes, self._columns_read):
            skip = min(max(start - row, 0), len(batch))
            row += len(batch)
            if skip < len(batch):
                yield self._block(batch.slice(skip), row - len(batch) + skip)

    def original_blocks(self, block_bytes: int) -> Iterator[list[Any]]:
        """Yield all columns as Arrow arrays, for the same rows in the same order as `blocks`."""
        for batch in self._read(block_bytes, None):
            if len(batch):
                yield batch.columns

    def _read(self, block_bytes: int, columns: list[str] | None) -> Iterator[Any]:
        """Yield record batches that hold at least these columns, by default all."""
        raise NotImplementedError

    def _block(self, batch: Any, start: int) -> RawBlock:
        """Return the rows of a batch. start : number of its first row."""
        batch = self._with_texts(batch, start)
        is_missing = self._missing_targets(batch)
        rows = None
        # Rows that lack a target are left out, or refused.
        if is_missing.any():
            if not self._drop_missing:
                row = start + int(np.argmax(is_missing))
                raise DataError(
                    f"the target of {self._location}, row {row} is missing",
                    f"{mention('drop_missing_targets', True)} leaves such rows out",
                )
            rows = start + np.flatnonzero(~is_missing)
            batch = batch.filter(arrow.array(~is_missing))
        row_numbers = start if rows is None else rows
        self._refuse_nulls(batch, row_numbers)
        # Features: a table, the lists of one column, or columns of numbers.
        if self._as_table:
            X: Any = arrow.Table.from_batches([batch.select(list(self._features))])
        elif self._lists:
            X = self._rows_of_lists(batch.column(self._features[0]), row_numbers)
        else:
            columns = [self._numbers(batch.column(name), name) for name in self._features]
            X = self._stack(columns, self._features)
        targets = [self._values(batch.column(name), name, start) for name in self._targets]
        if len(targets) > 1:
            y = self._stack(targets, self._targets)
        else:
            y = targets[0] if targets else np.empty((len(X), 0))
        weights = None
        for name in self._weights:
            try:
                weights = self._numbers(batch.column(name), name)
            except NotNumbersError as error:
                raise DataError(str(error)) from None
        return RawBlock(
            X,
            y,
            self._location,
            start,
            None if self._lists else self._features,
            weights,
            rows,
            int(is_missing.sum()) if self._drop_missing else 0,
        )

    def _stack(self, columns: Sequence[NDArray[Any]], names: Sequence[str]) -> NDArray[Any]:
        """Stack columns, and warn of integers that become floats and are rounded."""
        rows = np.stack(columns, axis=1)
        if rows.dtype.kind != "f":
            return rows
        for values, name in zip(columns, names, strict=True):
            if name not in self._rounded_columns and array_is_rounded(values):
                self._warn_of_rounded_column(name)
        return rows

    def _floats(self, decimals: Any, name: str) -> Any:
        """Return a column of decimals as float64, and warn if large ones are rounded."""
        if name not in self._rounded_columns and cells_are_rounded(decimals):
            self._warn_of_rounded_column(name)
        return decimals.cast(arrow.float64(), safe=False)

    def _warn_of_rounded_column(self, name: str) -> None:
        self._rounded_columns.add(name)
        warn_of_rounded_integers(f"column {name!r}")

    def _missing_targets(self, batch: Any) -> NDArray[np.bool_]:
        """Return a mask (k,) of rows that lack a target: null, or a user's missing marker."""
        missing = np.zeros(len(batch), bool)
        for name in self._targets:
            column = batch.column(name)
            missing |= as_mask(column.is_null())
            if self._markers is not None and self._markers.texts:
                missing |= self._markers.mask_of(plain_cells(column))
            if self._drop_missing:
                missing |= ~value_mask(column)
                cells = plain_cells(column)
                if is_text_type(cells.type):
                    texts = arrow.array(list(MISSING), cells.type)
                    missing |= as_mask(compute.is_in(cells, texts))
        return missing

    def _refuse_nulls(self, batch: Any, rows: RowsInFile) -> None:
        """Raise DataError for a null among features that are numbers, or among weights."""
        features = () if self._as_table else self._features
        for name in (*features, *self._weights):
            column = batch.column(name)
            if column.null_count:
                error_class = NotNumbersError if name in features else DataError
                row = row_number(rows, column.is_null().index(True).as_py())
                raise error_class(
                    f"{self._location}, row {row}, column {name!r} is null; fill in or drop such "
                    "rows"
                )

    def _with_texts(self, batch: Any, start: int) -> Any:
        """Decode columns of bytes as text, which old Parquet files store that way."""
        for k, field in enumerate(batch.schema):
            if not is_of_kind(field.type, "binary", "large_binary", "fixed_size_binary"):
                continue
            try:
                column = batch.column(k).cast(arrow.binary()).cast(arrow.large_string())
            except (UnicodeDecodeError, arrow.ArrowException) as error:
                remedy = "leave it out" if field.name in self._features else "write it as text"
                raise DataError(
                    f"{self._location}, column {field.name!r} is {field.type} and holds bytes "
                    f"after row {start} that are not text in UTF-8",
                    remedy,
                ) from error
            if field.name not in self._bytes_columns:
                self._bytes_columns.add(field.name)
                warn(
                    f"column {field.name!r} of {self._location} is {field.type}, and is read as "
                    "text in UTF-8, which it may be"
                )
            batch = batch.set_column(k, field.with_type(arrow.large_string()), column)
        return batch

    def _rows_of_lists(self, lists: Any, rows: RowsInFile) -> NDArray[Any]:
        """Return lists as rows; raise DataError unless they have equal lengths and no nulls."""
        name = self._features[0]
        sizes = as_array(compute.list_value_length(lists))
        differs = sizes != sizes[:1]
        if differs.any():
            k = int(np.argmax(differs))
            raise DataError(
                f"{self._location}, row {row_number(rows, k)}: the list in {name!r} has {sizes[k]} "
                f"numbers, but the list of row {row_number(rows, 0)} has {sizes[0]}",
                "give lists of equal length",
            )
        flat = lists.flatten()
        if flat.null_count:
            k = flat.is_null().index(True).as_py() // int(sizes[0])
            raise DataError(
                f"{self._location}, row {row_number(rows, k)}: the list in {name!r} holds a null",
                "fill in or drop such rows",
            )
        width = int(sizes[0]) if len(sizes) else 1
        return self._numbers(flat, name).reshape(len(lists), width)

    def _numbers(self, column: Any, name: str) -> NDArray[Any]:
        """Return a column of numbers; raise NotNumbersError for others, and for categories."""
        if is_of_kind(column.type, "decimal"):
            column = self._floats(column, name)
        if not is_of_kind(column.type, "integer", "floating", "boolean"):
            raise NotNumbersError(
                f"{self._location}, column {name!r} is {column.type}",
                "features and weights must be numbers here: encode the column, or leave it out",
            )
        return as_array(column)

    def _values(self, column: Any, name: str, start: int) -> NDArray[Any]:
        """Return targets as a NumPy array.

        Decimals of at most 18 digits without a fraction become integers, other decimals floats.
        """
        try:
            column = unwrap_column(column)
            if is_of_kind(column.type, "decimal"):
                is_integer = column.type.scale <= 0 and column.type.precision <= 18
                column = column.cast(arrow.int64()) if is_integer else self._floats(column, name)
            return as_array(column)
        except (UnicodeDecodeError, arrow.ArrowException) as error:
            raise DataError(
                f"{self._location}, column {name!r} holds targets after row {start} that cannot be "
                f"read ({error})",
                "write them again",
            ) from error


@contextmanager
def readable_file(location: str, kind: str) -> Iterator[None]:
    """Raise DataError for data that pyarrow cannot read as a file of this kind."""
    try:
        yield
    except StreamkernError:
        raise
    except (ValueError, arrow.ArrowException) as error:  # ValueError: names not UTF-8
        raise DataError(
            f"{location} is not a readable {kind} file: {error}", "copy it again from its source"
        ) from error
