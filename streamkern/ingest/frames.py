"""Convert data frames of any library, by narwhals, to NumPy numbers, Arrow tables and columns.

pandas, polars (also lazy), pyarrow tables, batches, readers and data sets, DuckDB relations,
data sets of Hugging Face and structured arrays of NumPy all become one narwhals data frame, whose
cells are read in one way.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.basics.optional import import_optional, on_demand
from streamkern.basics.text import some
from streamkern.basics.warning import warn
from streamkern.ingest.hub_datasets import hub_table, is_hub_dataset
from streamkern.ingest.tables.arrow import arrow, is_of_kind
from streamkern.ingest.tables.key_columns import index_columns, warn_of_index

_DUCKDB_METADATA = {b"streamkern.library": b"duckdb"}
"""Mark of the Arrow table that replaces a relation of DuckDB, which has other methods."""
_NARWHALS = "narwhals.stable.v2"


def as_frame(data: Any, name: str) -> Any:
    """Return a table as a narwhals data frame and a column as a series; None for anything else.

    Lazy frames are collected, and readers are read to their end. None is also returned for Dask
    frames, which are read by partition.

    name : name of the argument, for messages; of "X", an index of the rows is left out

    Raises DataError for two columns of one name, and for a structured array that is no table.
    """
    is_plain_array = isinstance(data, np.ndarray) and data.dtype.names is None
    if is_plain_array or is_dask_table(data):
        return None
    narwhals = on_demand("narwhals.stable.v2")
    data = _as_supported_by_narwhals(data)
    try:
        frame = narwhals.from_native(data, pass_through=True, allow_series=True)
        is_narwhals = isinstance(frame, narwhals.DataFrame | narwhals.LazyFrame | narwhals.Series)
        if not is_narwhals and _exports_arrow(data):
            frame = narwhals.from_native(_arrow_copy(data))
        if isinstance(frame, narwhals.DataFrame):
            list(frame.schema)
    except on_demand("narwhals.exceptions").DuplicateError:
        columns = getattr(data, "column_names", None) or data.columns
        check_different(list(map(str, columns)), name)
        raise
    if isinstance(frame, narwhals.LazyFrame):
        frame = frame.collect(backend="polars" if frame.implementation.is_polars() else "pyarrow")
    if not isinstance(frame, narwhals.DataFrame):
        return frame if isinstance(frame, narwhals.Series) else None
    index: list[str] = []
    if name == "X":  # an index of the rows that was saved as a column is no feature
        index = index_columns(frame.columns, lambda column: frame[column].dtype.is_integer())
    for column in index:
        warn_of_index(column, name)
    return frame.drop(index) if index else frame


def is_frame(value: Any) -> bool:
    """Return whether `value` is a data frame returned by `as_frame`."""
    narwhals = sys.modules.get(_NARWHALS)
    return narwhals is not None and isinstance(value, narwhals.DataFrame)


def is_dask_table(value: Any) -> bool:
    """Return whether `value` is a data frame of Dask, or a column of one."""
    return hasattr(value, "to_dask_array") and hasattr(value, "map_partitions")


def _as_supported_by_narwhals(data: Any) -> Any:
    """Return `data`, or an equivalent that narwhals supports."""
    if isinstance(data, np.ndarray):
        return data if data.dtype.names is None else _table_of_fields(data)
    if is_hub_dataset(data):
        return hub_table(data)
    library = type(data).__module__
    if "pyarrow" in sys.modules and isinstance(data, arrow.Array):
        return arrow.chunked_array([data])
    if library.startswith("pyarrow") and hasattr(data, "to_table"):
        return data.to_table()  # a data set, or a scanner of one
    if "duckdb" in library and _exports_arrow(data):
        return _arrow_copy(data).replace_schema_metadata(_DUCKDB_METADATA)
    return data


def is_of_duckdb(frame: Any) -> bool:
    """Return whether a frame of `as_frame` was made from a relation of DuckDB, for remedies."""
    is_table = frame.implementation.is_pyarrow()
    return bool(is_table and frame.to_native().schema.metadata == _DUCKDB_METADATA)


def _arrow_copy(data: Any) -> Any:
    """Return an object that exports Arrow data as a table of pyarrow."""
    return import_optional("pyarrow", "reading data frames").table(data)


def _exports_arrow(value: Any) -> bool:
    """Return whether an object exports Arrow data."""
    return hasattr(value, "__arrow_c_stream__") or hasattr(value, "__arrow_c_array__")


def _table_of_fields(array: NDArray[Any]) -> Any:
    """Return the table of a structured array, with a column for each field."""
    names = list(array.dtype.names or ())
    nested_names = [
        name for name in names if array.dtype[name].subdtype is not None or array.dtype[name].names
    ]
    complex_names = [name for name in names if array.dtype[name].kind == "c"]
    if complex_names:
        raise DataError(
            f"a structured array has complex numbers in {some(complex_names)}",
            "give their real and imaginary parts as two fields",
        )
    if array.ndim != 1 or nested_names:
        problem = (
            f"several values in {some(nested_names)}"
            if nested_names
            else f"the shape {array.shape}"
        )
        raise DataError(
            f"a structured array has {problem}",
            "give an array of one dimension with one value in each field",
        )
    import_optional("pyarrow", "reading structured arrays")
    return arrow.table({name: arrow.array(_field_values(array[name])) for name in names})


def _field_values(values: NDArray[Any]) -> Any:
    """Return the values of a field for Arrow, dates with their unit."""
    dtype = values.dtype.newbyteorder("=")
    if dtype.kind not in "biufmM":
        return values.tolist()
    if dtype.kind == "f":  # Arrow has no long doubles, and few functions of half floats
        dtype = np.dtype(f"f{min(max(dtype.itemsize, 4), 8)}")
    elif dtype.kind in "mM":
        unit = np.datetime_data(dtype)[0]
        if unit not in ("ms", "us", "ns"):  # Arrow has these units itself
            days = dtype.kind == "M" and unit in "YMWD"
            unit = "D" if days else "ns" if unit in ("ps", "fs", "as") else "s"
        dtype = np.dtype(f"{dtype.kind}8[{unit}]")
    return np.ascontiguousarray(values, dtype)


def check_different(columns: Sequence[str], name: str) -> None:
    """Raise DataError for columns with the same name."""
    repeated = sorted({column for column in columns if columns.count(column) > 1})
    if repeated:
        raise DataError(
            f"{name} has more than one column called {some(repeated)}",
            "give each column another name",
        )


def warn_of_other_order(X: Any, values: Any, name: str) -> None:
    """Warn if `values` have the index of X in another order, as rows are matched by position.

    X, values : any objects; only data frames and columns of pandas have an index
    name : name of the argument `values`, for the message
    """
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(X, pandas.DataFrame):
        return
    if not isinstance(values, pandas.DataFrame | pandas.Series) or len(values) != len(X):
        return
    if X.index.nlevels != values.index.nlevels or X.index.equals(values.index):
        return
    if not (X.index.is_unique and values.index.is_unique):
        return
    if X.index.dtype != values.index.dtype:  # pandas may not be able to compare them
        return
    if X.index.isin(values.index).all():
        warn(
            f"{name} has the index of X in another order, but the rows are matched by their "
            f"position; give {name}.loc[X.index] to match them by the index, or {name}.to_numpy() "
            "if the positions are right"
        )


def names_of_columns(frame: Any) -> tuple[str, ...] | None:
    """Return the column names if all are text, as in scikit-learn; otherwise None."""
    names = list(frame.columns)
    return tuple(names) if all(isinstance(name, str) for name in names) else None


def are_names(y: Any, frame: Any) -> bool:
    """Return whether y are names of columns of a table, and not targets of its rows.

    frame : a narwhals data frame, or a data set of Hugging Face
    """
    if isinstance(y, str):
        return True
    if not isinstance(y, list | tuple) or not all(isinstance(name, str) for name in y):
        return False
    names = frame.column_names or () if is_hub_dataset(frame) else frame.columns
    n_rows = len(frame) if hasattr(frame, "__len__") else None
    return len(y) > 0 and (len(y) != n_rows or all(name in names for name in y))


# ------------------------------------------------------------------------------- as cells


def arrow_table(frame: Any, name: str) -> Any:
    """Return a frame as an Arrow table, with an index of pandas after its columns.

    Categories of intervals and the like become text, and so do numbers beside text in a column of
    objects. Periods become their first date.
    Raises DataError naming a column that Arrow has no type for.
    """
    import_optional("pyarrow", "a data frame with words, dates or missing values")
    narwhals = on_demand("narwhals.stable.v2")
    if frame.implementation.is_pandas_like():
        frame = narwhals.from_native(_plain_pandas(frame.to_native(), name))
    try:
        table = frame.to_arrow()
    except _conversion_errors() as error:
        raise _unsupported_column(frame, name, error) from None
    for k, field in enumerate(table.schema):
        kind = _plain_type(field.type)
        if kind != field.type:
            table = table.set_column(k, field.with_type(kind), table.column(k).cast(kind))
    return table


def _conversion_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a conversion to Arrow; a function, as pyarrow is imported late."""
    return arrow.ArrowException, TypeError, OverflowError, ValueError


def _unsupported_column(frame: Any, name: str, error: Exception) -> DataError:
    """Return the error for a column that Arrow has no type for."""
    column_text, wrong_column = "", "..."
    for column in frame.columns:
        try:
            frame.select([column]).to_arrow()
        except _conversion_errors() as column_error:
            column_text, wrong_column, error = f", {column!r},", column, column_error
            break
    reason = str(error.args[0] if error.args else error).partition("\n")[0].rstrip(".")
    drop_code, category_code = remedies(frame, wrong_column)
    category_remedy = ""
    if category_code:
        category_remedy = f"if its values are words make them a category, {category_code}, else "
    return DataError(
        f"{name} has a column{column_text} that does not hold only numbers, only words or only "
        f"dates ({reason})",
        f"{category_remedy}leave it out, {drop_code}",
    )


def remedies(frame: Any, column: str) -> tuple[str, str]:
    """Return Python code that drops a column of X, and code that makes it a category.

    The second is "" for libraries other than pandas.
    """
    if frame.implementation.is_pandas_like():
        return f"X.drop(columns={column!r})", f'X.astype({{{column!r}: "category"}})'
    if is_of_duckdb(frame):
        return f"""X.select('* EXCLUDE ("{column}")')""", ""
    method = "drop" if frame.implementation.is_polars() else "drop_columns"
    return f"X.{method}({column!r})", ""


def _plain_pandas(frame: Any, name: str) -> Any:
    """Return a pandas frame whose columns have types that Arrow supports."""
    converted_columns = {}
    for k, (column, dtype) in enumerate(zip(frame.columns, frame.dtypes, strict=True)):
        kind, values = type(dtype).__name__, frame.iloc[:, k]
        if kind == "SparseDtype":
            raise DataError(
                f"{name} has sparse columns, such as {column!r}",
                f"give {name}.sparse.to_coo() where all are sparse, else "
                f"{name}.astype({{{column!r}: {dtype.subtype.name!r}}})",
            )
        if getattr(dtype, "kind", "") == "c":
            raise DataError(
                f"{name} has complex numbers in column {str(column)!r}",
                "give their real and imaginary parts as two columns",
            )
        if kind == "CategoricalDtype":
            inner = dtype.categories.dtype
            if not (isinstance(inner, np.dtype) and inner.kind in "biufMm"):
                converted_columns[k] = _with_text(values, column, name)
        elif kind == "IntervalDtype":
            converted_columns[k] = _with_text(values.astype("category"), column, name)
        elif kind == "PeriodDtype":
            converted_columns[k] = values.dt.to_timestamp()
        elif kind == "ObjectDType" and _mixes_numbers_and_text(values):
            # As text, like cells of a CSV: the encoder decides whether the numbers are codes.
            converted_columns[k] = values.map(_cell_text, na_action="ignore")
    if not converted_columns:
        return frame
    frame = frame.copy(deep=False)
    for k, values in converted_columns.items():
        frame.isetitem(k, values)
    return frame


def _mixes_numbers_and_text(values: Any) -> bool:
    """Return whether a pandas column of objects has numbers and text, and nothing else."""
    types = set(map(type, values.dropna()))
    text_types = {kind for kind in types if issubclass(kind, str)}
    are_numbers = (
        issubclass(kind, int | float | np.integer | np.floating) and kind is not bool
        for kind in types - text_types
    )
    return 0 < len(text_types) < len(types) and all(are_numbers)


def _cell_text(value: Any) -> str:
    """Return a number as text, and text as it is: `str` gives the name of a member of an enum."""
    return str.__str__(value) if isinstance(value, str) else str(value)


def _with_text(values: Any, column: Any, name: str) -> Any:
    """Return a column of categories with the categories as text."""
    texts = [str(category) for category in values.cat.categories]
    check_different(texts, f"{name}, column {str(column)!r},")
    return values.cat.rename_categories(texts)


def _plain_type(arrow_type: Any) -> Any:
    """Return an Arrow type that Arrow's functions support, in place of views."""
    if is_of_kind(arrow_type, "dictionary"):
        inner = _plain_type(arrow_type.value_type)
        is_plain = inner == arrow_type.value_type
        return arrow_type if is_plain else arrow.dictionary(arrow_type.index_type, inner)
    if is_of_kind(arrow_type, "string_view"):
        return arrow.large_string()
    return arrow.large_binary() if is_of_kind(arrow_type, "binary_view") else arrow_type
