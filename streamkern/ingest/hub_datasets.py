"""Read data sets of Hugging Face's library `datasets`: labels by their names, images as pixels.

Their columns of numbers, text and dates form a table. A column of lists, of arrays (`Array2D`, ...)
or of images holds whole rows, and is then the only column of features. Everything is read by
`datasets` itself, in batches, so that selected, filtered and shuffled rows come in their order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, MissingDependencyError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.ingest.columns import as_list
from streamkern.ingest.tables.arrow import (
    arrow,
    as_array,
    compute,
    is_list_type,
    is_of_kind,
    unwrap_column,
    with_null,
)
from streamkern.ingest.tables.cells import RowsInFile, row_number

_BATCH_ROWS = 1000  # rows of a batch by default, as in `datasets`
_CHANNELS_OF_MODE = {"L": 1, "RGB": 3, "RGBA": 4}  # channels of the image modes with uint8 pixels


def _is_of_hub(value: Any, *class_names: str) -> bool:
    """Return whether `value` is of one of these classes of `datasets`, without importing it."""
    library = sys.modules.get("datasets")
    classes = tuple(k for n in class_names if isinstance(k := getattr(library, n, None), type))
    return isinstance(value, classes)


def is_hub_dataset(value: Any) -> bool:
    """Return whether `value` is a `datasets.Dataset` or an `IterableDataset`."""
    return _is_of_hub(value, "Dataset", "IterableDataset")


def refuse_splits(value: Any, name: str) -> None:
    """Raise DataError for a `DatasetDict`, which holds a data set for each split."""
    if _is_of_hub(value, "DatasetDict", "IterableDatasetDict"):
        splits = list(map(str, value))
        example = splits[0] if splits else "train"
        raise DataError(
            f"{name} holds one data set for each split ({some(splits) or 'none'})",
            f'give one of them, {name}["{example}"]',
        )


class HubColumns:
    """The columns of a data set, as Arrow tables in which a `ClassLabel` is the name of its class.

    Attributes
    ----------
    n_rows : number of rows; None for an `IterableDataset`
    schema : Arrow schema of the tables, in which the columns `wide_names` are lists of numbers
    wide_names : names of the columns whose cells are whole rows: lists, arrays and images
    """

    def __init__(self, data: Any) -> None:
        self.n_rows: int | None = None
        if _is_of_hub(data, "Dataset"):
            self.n_rows = len(data)
            if data.format["type"] == "custom":
                raise DataError(
                    "X has a transform that changes rows when they are read, which would not be "
                    "applied here",
                    "apply the transform with X.map(...), or remove it with X.with_format(None)",
                )
            columns = data.format["columns"]
            self._data = data.with_format("arrow", columns=columns).select_columns(columns)
        else:
            self._data = data.with_format("arrow")
        self._features = self._data.features
        if self._features is None:  # such as after a `map`: the first rows decide
            table = next(self._batches(_BATCH_ROWS, None), None)
            if table is None:
                raise DataError("X is an IterableDataset without rows", "give a data set with rows")
            self._features = sys.modules["datasets"].Features.from_arrow_schema(table.schema)
        self._stored_schema = self._features.arrow_schema
        self.schema, self.wide_names = self._table_schema()

    def _table_schema(self) -> tuple[Any, list[str]]:
        """Return the schema of the tables, and the names of columns whose cells are rows."""
        fields, wide = [], []
        for field in self._stored_schema:
            feature, kind = self._features[field.name], field.type
            if _is_of_hub(feature, "ClassLabel"):
                kind = arrow.dictionary(arrow.int32(), arrow.string())
            elif _is_of_hub(feature, "Image"):
                kind = arrow.list_(arrow.uint8())
            elif _is_of_hub(feature, "Array2D", "Array3D", "Array4D", "Array5D"):
                kind = arrow.list_(arrow.type_for_alias(feature.dtype))
            if is_list_type(kind) and is_of_kind(kind.value_type, "integer", "floating", "boolean"):
                wide.append(field.name)
            fields.append(field.with_type(kind))
        return arrow.schema(fields), wide

    def tables(
        self, rows: int = _BATCH_ROWS, columns: Sequence[str] | None = None
    ) -> Iterator[Any]:
        """Yield all rows as tables with the types of `schema`, wide columns as they are stored.

        rows : largest number of rows of a table
        columns : names of the columns to read, by default all
        """
        for table in self.stored_tables(rows, columns):
            for k, field in enumerate(table.schema):
                if field.name not in self.wide_names:
                    cells = self._cells(table.column(k), field.name)
                    table = table.set_column(k, self.schema.field(field.name), cells)
            yield table

    def stored_tables(self, rows: int, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Yield tables of at most `rows` rows as `datasets` stores them. columns : as `tables`."""
        for table in self._batches(rows, columns):
            yield table.select(list(self._stored_schema.names if columns is None else columns))

    def _batches(self, rows: int, columns: Sequence[str] | None) -> Iterator[Any]:
        """Yield Arrow tables of the columns, by default all, in any order."""
        data = self._data if columns is None else self._data.select_columns(list(columns))
        with _explain_type_changes(arrow.ArrowException):  # such as numbers, and then words
            yield from data.iter(batch_size=rows)

    def _cells(self, column: Any, name: str) -> Any:
        """Return the cells in the type of the schema, labels as names."""
        feature, kind = self._features[name], self._stored_schema.field(name).type
        if not _is_of_hub(feature, "ClassLabel"):
            with _explain_type_changes(ValueError, arrow.ArrowException):
                return column if column.type == kind else column.cast(kind)
        codes = unwrap_column(column).cast(arrow.int32())
        codes = with_null(codes, compute.equal(codes, -1))  # a label that is not known
        names = arrow.array(feature.names, arrow.string())
        try:
            return arrow.DictionaryArray.from_arrays(codes, names)
        except arrow.ArrowException:
            raise DataError(
                f"column {name!r} of X holds numbers that are not classes of its {len(names)} "
                "names",
                f"correct its ClassLabel, X.cast_column({name!r}, ClassLabel(...))",
            ) from None

    # ---------------------------------------------------------------------- whole rows in a cell

    def wide_column(
        self, x: Any = None, target_names: Sequence[Any] = (), dropped: Sequence[str] = (), *,
        must_be_alone: bool = True,
    ) -> str | None:  # fmt: skip
        """Return the column whose cells are the rows; None if the features form a table.

        x : the columns of features, if they were named
        target_names : columns of targets and weights
        dropped : columns that are left out
        must_be_alone : whether other feature columns next to a column of rows are an error; if
            False, they are ignored

        Raises DataError if a column of rows is a target or weight, is one of two among the
        features, or is not alone although it must be.
        """
        for name in target_names:
            if name in self.wide_names:
                raise DataError(
                    f"column {name!r} of X holds lists, arrays or images, which cannot be "
                    "targets or weights",
                    "give one number or label for each row, and several targets as columns",
                )
        names = as_list(x)
        if x is None:
            left_out = {*target_names, *dropped}
            names = [name for name in self.schema.names if name not in left_out]
        wide: list[str] = [name for name in names if name in self.wide_names]
        if not wide:
            return None
        if len(wide) == 1 and (len(names) == 1 or not must_be_alone):
            return wide[0]
        other_columns = [name for name in names if name != wide[0]]
        raise DataError(
            f"column {wide[0]!r} of X holds whole rows (lists, an array or an image), and "
            f"{some(list(map(str, other_columns)))} would be further features",
            f"name targets with {mention('y=')}, and leave out other columns, "
            f"X.remove_columns({other_columns})",
        )

    def wide_column_reader(self, name: str) -> WideColumn:
        """Return the reader of a column whose cells are rows; the first cell gives their shape."""
        table = next(self.stored_tables(1, [name]), None)
        if table is None:
            raise DataError("X has no rows", "give at least one row")
        return WideColumn(self._features[name], name, table.column(0))


@contextmanager
def _explain_type_changes(*errors: type[Exception]) -> Iterator[None]:
    """Raise DataError for an error caused by cells of another type than their column."""
    try:
        yield
    except errors as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"X has columns whose type changes ({reason})",
            "give rows with values of one type in each column",
        ) from error


def hub_names(data: Any) -> list[str]:
    """Return the names of the columns; raise DataError for an `IterableDataset`."""
    return list(_with_length(data).column_names)


def hub_table(data: Any, columns: Sequence[str] | None = None) -> Any:
    """Return columns of a data set as one Arrow table, by default all."""
    hub_columns = HubColumns(_with_length(data))
    tables = list(hub_columns.tables(columns=columns))
    empty = hub_columns.schema.empty_table()
    return arrow.concat_tables(tables) if tables else empty.select(columns or empty.column_names)


def hub_values(data: Any, name: str) -> Any:
    """Return a column of a data set as a list, and a data set whose cells are rows as an array.

    Anything else is returned unchanged.

    name : "X", "y" or "sample_weight"; only cells of X may be rows
    """
    if type(data).__module__.startswith("datasets.") and hasattr(data, "column_name"):
        return data[:]
    rows = hub_rows(data, must_be_alone=False) if name == "X" and is_hub_dataset(data) else None
    return data if rows is None else rows


def hub_rows(
    data: Any, target_names: Sequence[Any] = (), *, must_be_alone: bool = True
) -> NDArray[Any] | None:
    """Return the rows (n, ...) of a data set whose features are one wide column; else None.

    target_names, must_be_alone : as in `HubColumns.wide_column`
    """
    hub_columns = HubColumns(_with_length(data))
    column = hub_columns.wide_column(None, target_names, must_be_alone=must_be_alone)
    if column is None:
        return None
    wide, start = hub_columns.wide_column_reader(column), 0
    dtype = hub_columns.schema.field(column).type.value_type.to_pandas_dtype()
    rows = np.empty((len(data), *wide.shape), dtype)
    for table in hub_columns.tables(columns=[column]):
        part = wide.rows(table.column(0), start)
        rows[start : start + len(part)] = part
        start += len(part)
    return rows


def _with_length(data: Any) -> Any:
    """Return the data set; raise DataError for an `IterableDataset`, which has no length."""
    if _is_of_hub(data, "IterableDataset"):
        raise DataError(
            "X is an IterableDataset, whose number of rows is unknown",
            f"write a store, streamkern.ingest_store(X, 'rows.zarr', {mention('y=')}...), and "
            "give the store",
        )
    return data


# ------------------------------------------------------------------------- whole rows in a cell


class WideColumn:
    """A column of a data set whose cells are rows of one shape.

    feature : the type of the column, as the data set describes it
    name : name of the column, for messages
    first_cell : a column of the first cell, which gives the shape if `feature` declares none

    Attributes
    ----------
    shape : shape of a row, (d,) or (height, width, channels)
    """

    def __init__(self, feature: Any, name: str, first_cell: Any) -> None:
        self._feature, self._name = feature, name
        self._has_images = _is_of_hub(feature, "Image")
        self.shape: tuple[int, ...] = ()
        if self._has_images:
            self.shape = self.rows(first_cell, 0).shape[1:]
            return
        declared = getattr(feature, "shape", None)
        if declared is None:
            declared = (len(unwrap_column(first_cell)[0].as_py() or ()),)
        elif None in declared:
            raise DataError(
                f"column {name!r} of X holds arrays of the shape {tuple(declared)}",
                "give it without None: rows have one shape",
            )
        self._sizes = tuple(declared)
        self.shape = self._sizes if len(self._sizes) == 3 else (math.prod(self._sizes),)

    def rows(self, column: Any, numbers: RowsInFile) -> NDArray[Any]:
        """Return cells as rows (k, ...). numbers : row numbers of the cells, for messages"""
        cells = unwrap_column(column)
        if cells.null_count:
            raise self._cell_error(numbers, cells.is_null().index(True).as_py(), "is null")
        if self._has_images:
            return np.stack([self._pixels(c, numbers, k) for k, c in enumerate(cells.to_pylist())])
        # Unpack one level of lists for each axis; all lists of a level must have the same length.
        values, width = cells, 1
        for size in self._sizes:
            lengths = compute.list_value_length(values)
            differs = as_array(lengths) != size  # NaN for null
            if differs.any():
                k = int(np.argmax(differs))
                problem = f"holds {lengths[k].as_py()} values where others hold {size}"
                raise self._cell_error(numbers, k // width, problem)
            values, width = values.flatten(), width * size
        if values.null_count:
            k = values.is_null().index(True).as_py() // width
            raise self._cell_error(numbers, k, "holds a null")
        return as_array(values).reshape(len(cells), *self.shape)

    def _cell_error(self, numbers: RowsInFile, k: int, problem: str, remedy: str = "") -> DataError:
        """Return the error for the k-th of these cells."""
        return DataError(
            f"X, row {row_number(numbers, k)}: column {self._name!r} {problem}",
            remedy or "correct such rows, or leave them out",
        )

    def _pixels(self, cell: Any, numbers: RowsInFile, k: int) -> NDArray[np.uint8]:
        """Return the k-th image as (height, width, channels)."""
        try:
            image = type(self._feature)(mode=self._feature.mode).decode_example(cell)
            image.load()
        except ImportError as error:
            raise MissingDependencyError(
                f"column {self._name!r} of X holds images, which cannot be read without Pillow; "
                "install it: pip install pillow"
            ) from error
        except Exception as error:  # whatever Pillow raises for bytes that are not an image
            problem = f"holds an image that cannot be read ({type(error).__name__})"
            raise self._cell_error(numbers, k, problem) from error
        size = image.height, image.width
        channels = _CHANNELS_OF_MODE.get(image.mode)
        height, width, expected_channels = self.shape or (*size, None)
        if channels is None or channels != (expected_channels or channels):
            remedy = f'X.cast_column({self._name!r}, Image(mode="RGB"))'
            if image.mode[0] in "IF":  # Pillow would cut off their numbers
                remedy = "and give their pixels as a column of Array3D"
            expected_modes = [
                m for m, c in _CHANNELS_OF_MODE.items() if expected_channels in (None, c)
            ]
            raise self._cell_error(
                numbers, k,
                f"holds an image of mode {image.mode!r} in place of {some(expected_modes)}",
                f"convert all, {remedy}",
            )  # fmt: skip
        if size != (height, width):
            raise self._cell_error(
                numbers, k,
                f"holds an image of {size[0]} x {size[1]} pixels where others have {height} x "
                f"{width}",
                "give images of one size, as image.resize makes them in X.map",
            )  # fmt: skip
        return np.asarray(image, np.uint8).reshape(*size, channels)
