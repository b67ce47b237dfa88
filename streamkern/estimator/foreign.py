"""Data of other libraries as what is read here: DLPack, xarray, data frames of pandas and Dask.

Nothing of them is imported: who has an object of theirs has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.optional import on_demand
from streamkern.basics.text import some
from streamkern.store.layout import X_DTYPES
from streamkern.stream.sources.base import UNIT_BYTES


def arrived(given: Any, name: str) -> Any:
    """`given` without the wrapping of a library that is not known further in.

    An array of xarray is what it holds, lazy where it is; one with DLPack, such as a tensor of
    PyTorch, is the same memory as NumPy sees it; a column of a Dask data frame is a Dask array.
    name : of the argument.
    """
    if _is_of("xarray", "Dataset", given):
        raise DataError(
            f'{name} is an xarray.Dataset, which holds several arrays; give one of them, {name}["'
            'name"]'
        )
    if _is_of("xarray", "DataArray", given):
        return _held(given)
    if hasattr(given, "__dask_graph__") and not isinstance(getattr(given, "ndim", None), int):
        raise DataError(
            f"{name} is a {_kind(given)}, of which Dask knows no shape; give a Dask array or data "
            "frame, by from_delayed or to_dataframe"
        )
    if is_dask_table(given):
        return given if name == "X" else with_lengths(given, name)
    if isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(given):
        raise DataError(
            f"{name} is a masked array, whose masked entries would be taken for values; fill them, "
            f"{name}.filled(value), or leave those rows out"
        )
    if isinstance(given, np.ndarray) or not hasattr(given, "__dlpack__"):
        return given
    try:
        # The library's own word where it has one: DLPack forgets that a tensor is a negative view.
        return np.asarray(given) if hasattr(given, "__array__") else np.from_dlpack(given)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise DataError(
            f"{name} is a {_kind(given)} that can not be read as an array here ({reason}); give "
            "one on the CPU, dense, without gradient and of a dtype that NumPy has"
        ) from None


def _kind(given: Any) -> str:
    return f"{type(given).__module__.partition('.')[0]}.{type(given).__name__}"


def _is_of(package: str, name: str, given: Any) -> bool:
    kind = getattr(sys.modules.get(package), name, None)
    return kind is not None and isinstance(given, kind)


def _held(array: Any) -> Any:
    """What a DataArray holds; of a file that is not read yet, a Dask array in small pieces."""
    # Its own word for it: `data` of such a one would read the file as a whole.
    if array.chunks is None and not array.variable._in_memory:
        rows = max(1, UNIT_BYTES * len(array) // max(1, array.nbytes))
        stored = array.encoding.get("preferred_chunks", {}).get(array.dims[0], 1)
        pieces = dict.fromkeys(array.dims, -1) | {array.dims[0]: stored * max(1, rows // stored)}
        array = array.chunk(pieces)
    return array.data


# ----------------------------------------------------------------------------------- data frames


def is_dask_table(given: Any) -> bool:
    """Whether it is a data frame of Dask, or a column of one."""
    return hasattr(given, "to_dask_array") and hasattr(given, "map_partitions")


def has_columns(given: Any) -> bool:
    """Whether it is a data frame, of pandas or Dask."""
    return hasattr(given, "columns") and hasattr(given, "dtypes") and getattr(given, "ndim", 2) == 2


def names_of_targets(y: Any) -> tuple[Any, ...] | None:
    """Of the columns of y, a data frame or one of its columns; None where there are none."""
    if has_columns(y):
        return tuple(y.columns)
    name = getattr(y, "name", None) if hasattr(y, "index") or is_dask_table(y) else None
    return None if name is None else (name,)


def check_names(table: Any, name: str) -> None:
    """DataError for columns of one name."""
    columns = list(map(str, table.columns))
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise DataError(
            f"{name} has more than one column called {some(twice)}; give every column a name of "
            "its own"
        )


def check_table(table: Any, name: str) -> None:
    """DataError for columns of one name, sparse ones and times, and for those of a Dask table
    that are no numbers; of a table in memory who reads it sees whether objects are."""
    columns, dtypes = list(map(str, table.columns)), list(table.dtypes)
    check_names(table, name)
    if {type(dtype).__name__ for dtype in dtypes} == {"SparseDtype"}:
        raise DataError(
            f"{name} is a data frame of sparse columns; give {name}.sparse.to_coo(), or "
            f"{name}.sparse.to_dense()"
        )
    kinds = {c: getattr(t, "kind", "") for c, t in zip(columns, dtypes, strict=True)}
    refused = "mM" if not is_dask_table(table) else "mMOSUcV"
    wrong = [column for column, kind in kinds.items() if kind and kind in refused]
    if wrong:
        raise DataError(f"{name} has {not_numbers(wrong)}")


def not_numbers(columns: list[str]) -> str:
    """Which columns are no numbers, and what to do about them."""
    return (
        f"columns that are not numbers, {some(columns)}; encode them as numbers, or leave them out"
    )


def with_lengths(table: Any, name: str, columns: list[Any] | None = None) -> Any:
    """A Dask data frame, or a column, as a Dask array whose partitions have known lengths.

    They are counted one partition at a time, which reads those that do not say theirs.
    """
    # One at a time, as they are read later.
    with on_demand("dask").config.set(scheduler="synchronous"):
        return as_dask_array(table, name, columns, lengths=True)


def as_dask_array(table: Any, name: str, columns: list[Any] | None = None, **options: Any) -> Any:
    """The same with unknown lengths, of which nothing is computed. columns : in this order."""
    if has_columns(table):
        check_table(table, name)
        numbers = np.result_type(*(_plain(dtype) for dtype in table.dtypes))
        table = table if columns is None else table[columns]
    else:
        numbers = _plain(table.dtype)
    if name == "X" and numbers not in X_DTYPES:
        numbers = np.dtype(np.float64)
    return table.astype(numbers).to_dask_array(**options)


def _plain(dtype: Any) -> np.dtype[Any]:
    """NumPy's dtype of a column; that of one which may lack entries is float64."""
    if isinstance(dtype, np.dtype):
        return dtype
    return np.dtype(np.float64 if getattr(dtype, "kind", "O") in "biuf" else object)
