"""Convert lists, objects, data frames and Dask data frames to arrays of numbers."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, NotNumbersError
from streamkern.basics.message import mention
from streamkern.basics.optional import on_demand
from streamkern.basics.text import some
from streamkern.ingest.conform import without_long_doubles
from streamkern.ingest.frames import arrow_table, check_different
from streamkern.ingest.tables.arrow import arrow, is_of_kind
from streamkern.ingest.tables.key_columns import (
    cells_are_rounded,
    objects_are_rounded,
    warn_of_rounded_columns,
    warn_of_rounded_integers,
)
from streamkern.store.layout import X_DTYPES
from streamkern.store.row_block import without_mask

GIVE_ROWS = "give rows: an array, a data frame, a path or a store"


def array_of_list(values: Any, name: str) -> Any:
    """Return a list as an array, of objects if it mixes numbers and text."""
    for masked in (entry for entry in values if isinstance(entry, np.ma.MaskedArray)):
        without_mask(masked, name)  # a row, for example; `np.asarray` would drop its mask
    try:
        array = np.asarray(values)
    except ValueError:
        if isinstance(values, tuple) and name == "X" and len(values) in (2, 3):
            raise DataError(
                f"X is a tuple of {len(values)}",
                "give rows, targets and weights as three arguments: X, y and sample_weight",
            ) from None
        raise DataError(
            f"{name} is a {type(values).__name__} whose rows differ in length",
            "give rows of equal length",
        ) from None
    if array.dtype.kind == "f" and objects_are_rounded(values, array):
        warn_of_rounded_integers(name)
    if array.dtype.kind == "U" and array.ndim == 1 and array.tolist() != list(values):
        return np.fromiter(values, object, len(values))  # NumPy made text of numbers, or cut some
    return array


def is_sparse(a: Any) -> bool:
    """Return whether an object is a sparse array or matrix of SciPy."""
    return hasattr(a, "tocsr") and hasattr(a, "nnz")


def no_rows(X: Any) -> DataError:
    """Return the error for input without rows and columns."""
    if not hasattr(X, "shape"):
        return DataError(f"X={reprlib.repr(X)} has no rows", GIVE_ROWS)
    shape = tuple(X.shape)
    if shape == (0,):
        return DataError("X is empty", GIVE_ROWS)
    if len(shape) != 1:
        return DataError(f"X has the shape {shape}", "give rows and columns, (n, d)")
    return DataError(
        f"X has the shape {shape}, but must have rows and columns. Reshape your data: "
        "X.reshape(-1, 1) if it has one feature, X.reshape(1, -1) if it is one row"
    )


def numeric(X: Any) -> Any:
    """Return an array of rows unchanged, or as float64 if its dtype is object.

    Raises NotNumbersError for text, even text of numbers, for dates and for complex numbers: a data
    frame declares the types of its columns, an array does not.
    """
    dtype = getattr(X, "dtype", None)
    kind = getattr(dtype, "kind", "")
    if kind == "O" and isinstance(X, np.ndarray):
        return _numbers_of_objects(X)
    nouns = {
        "M": "dates",
        "m": "durations",
        "c": "complex numbers",
        **dict.fromkeys("USTV", "text"),
    }
    if kind not in nouns:
        return without_long_doubles(X, "X") if isinstance(X, np.ndarray) else X
    prefix, remedy = "", "give a data frame, whose columns are encoded"
    if kind == "c":
        prefix = "Complex data not supported: "  # the words that scikit-learn's checks look for
        remedy = "give real and imaginary parts as columns of their own"
    elif kind in "UST":
        remedy = "give X.astype(float) where all is written as numbers, else a data frame"
    raise NotNumbersError(
        f"{prefix}X is an array of {nouns[kind]} ({dtype}), but arrays must hold numbers here",
        remedy,
    )


def _numbers_of_objects(X: NDArray[Any]) -> NDArray[np.float64]:
    """Return an array of objects as float64; raise NotNumbersError for other cells."""
    try:
        numbers = X.astype(np.float64)
        if not any(isinstance(cell, str | bytes) for cell in X.flat):
            if objects_are_rounded(X, numbers):
                warn_of_rounded_integers("X")
            return numbers
    except (TypeError, ValueError):
        pass
    index = next(index for index in np.ndindex(X.shape) if not _is_number(X[index]))
    row, *columns = index
    raise NotNumbersError(
        f"X holds {str(X[index])[:40]!r} in row "
        f"{row}{', column ' if columns else ''}{', '.join(map(str, columns))}, but a cell of "
        "this argument must be neither a string nor another object, but a number",
        "if the table contains words, give a data frame, such as "
        'pandas.DataFrame(X).infer_objects().add_prefix("x")',
    )


def _is_number(cell: Any) -> bool:
    """Return whether an object is a number, or None, which NumPy converts to NaN."""
    if isinstance(cell, str | bytes):
        return False
    try:
        float(cell)
    except (TypeError, ValueError):
        return cell is None
    return True


def frame_numbers(frame: Any, name: str) -> NDArray[Any] | None:
    """Return numbers (n, d) in a dtype that holds all; None if a column has other cells or gaps."""
    kinds = [_number_kind(dtype) for dtype in frame.schema.values()]
    if set(kinds) <= {"number"}:
        rows: NDArray[Any] = np.asarray(frame.to_numpy())
        if rows.dtype.kind == "O":  # booleans, perhaps with missing values
            if any(frame.get_column(column).is_null().any() for column in frame.columns):
                return None
            all_boolean = all(dtype.is_boolean() for dtype in frame.schema.values())
            return rows.astype(bool if all_boolean else np.float64)
        if rows.dtype.kind == "f":
            integers = [column for column, dtype in frame.schema.items() if dtype.is_integer()]
            warn_of_rounded_columns(
                (column, frame.get_column(column).to_numpy()) for column in integers
            )
        return rows if rows.dtype.kind in "biuf" and not _has_nan(rows) else None
    if not set(kinds) <= {"number", "perhaps"}:
        return None
    table = arrow_table(frame, name)
    # Without an index of pandas, which follows the columns.
    columns = [_column_numbers(table.column(k)) for k in range(len(kinds))]
    if any(column is None or _has_nan(column) for column in columns):
        return None
    rows = np.stack([column for column in columns if column is not None], axis=1)
    for k, column in enumerate(frame.columns):
        if rows.dtype.kind == "f" and cells_are_rounded(table.column(k)):
            warn_of_rounded_integers(f"column {column!r}")
    return rows


def _number_kind(dtype: Any) -> str:
    """Return "number", "perhaps" for decimals and objects, which may be numbers, or "no"."""
    narwhals = on_demand("narwhals.stable.v2")
    if dtype in (narwhals.Decimal, narwhals.Object, narwhals.Unknown):
        return "perhaps"
    return "number" if dtype.is_numeric() or dtype == narwhals.Boolean else "no"


def _has_nan(values: NDArray[Any]) -> bool:
    """Return whether an array holds NaN."""
    return values.dtype.kind == "f" and bool(np.isnan(values).any())


def _column_numbers(column: Any) -> NDArray[Any] | None:
    """Return the numbers of an Arrow column, decimals as float64; None if it is not numeric."""
    if is_of_kind(column.type, "decimal"):
        column = column.cast(arrow.float64(), safe=False)
    if column.null_count or not is_of_kind(column.type, "boolean", "integer", "floating"):
        return None
    return np.asarray(column.to_numpy())


def column_values(series: Any, name: str, *, keep_missing: bool = False) -> NDArray[Any]:
    """Return the values of a narwhals series (n,): numbers, or an object array of anything else.

    Categories that are not text, such as the intervals of `pandas.cut`, become their text. A
    missing value is NaN among floats, and otherwise raises DataError.

    keep_missing : whether a missing value becomes None or NaT in place of an error
    """
    narwhals = on_demand("narwhals.stable.v2")
    kind = _number_kind(series.dtype)
    if kind == "number" and (series.dtype.is_float() or not series.is_null().any()):
        return np.asarray(series.to_numpy())
    if kind == "perhaps":
        numbers = frame_numbers(series.alias(name).to_frame(), name)
        if numbers is not None:
            return numbers[:, 0]
    # Other values become objects, dates keep their type, and categories become their text.
    is_missing = np.asarray(series.is_null().to_numpy(), bool)
    if is_missing.any() and not keep_missing:
        raise DataError(
            f"{name} has no value in row {int(np.argmax(is_missing))}",
            "leave such rows out, or fill them in",
        )
    if series.dtype.is_temporal():
        if getattr(series.dtype, "time_zone", None) is not None:
            raise DataError(
                f"{name} has dates with a time zone, from row 0 on, and NumPy does not keep time "
                f"zones; give {mention(f'{name}=')}list(map(str, {name})), for example, if the "
                "dates are labels, and numbers, such as the days since a date, if they are "
                "values"
            )
        return np.asarray(series.to_numpy())
    values = series.to_list()
    if series.dtype in (narwhals.Categorical, narwhals.Enum):
        plain_types = (str, int, float, bool)
        other_values = [v for v in values if v is not None and not isinstance(v, plain_types)]
        if other_values and name == "y":
            example = other_values[0]
            raise DataError(
                f"y is a column of categories that are not text, such as {example} "
                f"({type(example).__name__}), but predictions would be text, which equals none "
                "of these categories",
                "give y.astype(str)",
            )
        values = [v if v is None or isinstance(v, plain_types) else str(v) for v in values]
    return np.fromiter(values, object, len(values))


def with_lengths(table: Any, name: str) -> Any:
    """Return a Dask data frame, or a column, as a Dask array whose partitions have known lengths.

    Rows are counted one partition at a time, which reads partitions of unknown length.
    """
    # One at a time, as in the later reading.
    with on_demand("dask").config.set(scheduler="synchronous"):
        return as_dask_array(table, name, lengths=True)


def as_dask_array(table: Any, name: str, columns: list[Any] | None = None, **options: Any) -> Any:
    """Return a Dask array of unknown lengths; nothing is computed.

    table : Dask data frame or column
    name : name of the argument, for messages
    columns : names of the columns in the order of the result; by default all
    options : arguments of Dask's `to_dask_array`

    Raises DataError for columns with the same name, and for columns that are not numbers.
    """
    if table.ndim == 2:
        names = list(map(str, table.columns))
        check_different(names, name)
        pairs = zip(names, table.dtypes, strict=True)
        other_columns = [column for column, dtype in pairs if _kind_of(dtype) not in "biuf"]
        if other_columns:
            raise DataError(
                f"{name} has columns that are not numbers, {some(other_columns)}",
                "encode them as numbers, or leave them out, or give a frame in memory, which is "
                f"encoded: {name}.compute()",
            )
        common_dtype = np.result_type(*(_numpy_dtype(dtype) for dtype in table.dtypes))
        table = table if columns is None else table[columns]
    else:
        common_dtype = _numpy_dtype(table.dtype)
    if name == "X" and common_dtype not in X_DTYPES:
        common_dtype = np.dtype(np.float64)
    if name == "X" and common_dtype.kind == "f":
        dtypes = np.ravel(table.dtypes)
        if any(_kind_of(dtype) in "iu" and dtype.itemsize == 8 for dtype in dtypes):
            table = table.map_partitions(_warn_of_rounded_partition, meta=table._meta)
    return table.astype(common_dtype).to_dask_array(**options)


def _warn_of_rounded_partition(part: Any) -> Any:
    """Return a partition, and warn of its columns of integers that floats do not hold."""
    plain = [name for name, dtype in part.dtypes.items() if isinstance(dtype, np.dtype)]
    warn_of_rounded_columns((name, part[name].to_numpy()) for name in plain)
    return part


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return NumPy's dtype of a column; float64 for a nullable one."""
    if isinstance(dtype, np.dtype):
        return dtype
    return np.dtype(np.float64 if _kind_of(dtype) in "biuf" else object)


def _kind_of(dtype: Any) -> str:
    """Return the kind of a dtype of NumPy or pandas, "O" if it has none."""
    return str(getattr(dtype, "kind", "O"))
