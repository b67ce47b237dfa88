"""Convert Dask data frames to Dask arrays of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.optional import on_demand
from streamkern.basics.text import some
from streamkern.ingest.frames import check_different
from streamkern.ingest.tables.long_numbers import array_is_rounded, warn_of_rounded
from streamkern.store.layout import X_DTYPES


def check_dask_table(table: Any, name: str) -> None:
    """Raise DataError for columns with the same name, and for columns that are not numbers."""
    columns = list(map(str, table.columns))
    check_different(columns, name)
    kinds = [getattr(dtype, "kind", "O") for dtype in table.dtypes]
    wrong = [column for column, kind in zip(columns, kinds, strict=True) if kind not in "biuf"]
    if wrong:
        raise DataError(
            f"{name} has columns that are not numbers, {some(wrong)}; encode them as numbers, or "
            f"leave them out, or give a frame in memory, which is encoded: {name}.compute()"
        )


def with_lengths(table: Any, name: str, columns: list[Any] | None = None) -> Any:
    """Return a Dask data frame, or a column, as a Dask array whose partitions have known lengths.

    Rows are counted one partition at a time, which reads partitions of unknown length.
    """
    # One at a time, as in the later reading.
    with on_demand("dask").config.set(scheduler="synchronous"):
        return as_dask_array(table, name, columns, lengths=True)


def as_dask_array(table: Any, name: str, columns: list[Any] | None = None, **options: Any) -> Any:
    """Return a Dask array of unknown lengths; nothing is computed. columns : their order."""
    if table.ndim == 2:
        check_dask_table(table, name)
        numbers = np.result_type(*(_plain(dtype) for dtype in table.dtypes))
        table = table if columns is None else table[columns]
    else:
        numbers = _plain(table.dtype)
    if name == "X" and numbers not in X_DTYPES:
        numbers = np.dtype(np.float64)
    if name == "X" and numbers.kind == "f" and any(_is_long(k) for k in np.ravel(table.dtypes)):
        table = table.map_partitions(_with_warnings, meta=table._meta)
    return table.astype(numbers).to_dask_array(**options)


def _is_long(dtype: Any) -> bool:
    return getattr(dtype, "kind", "O") in "iu" and dtype.itemsize == 8


def _with_warnings(part: Any) -> Any:
    """Return a partition, and warn of its columns of integers that floats do not hold."""
    for name, dtype in part.dtypes.items():
        if isinstance(dtype, np.dtype) and array_is_rounded(part[name].to_numpy()):
            warn_of_rounded(f"column {name!r}")
    return part


def _plain(dtype: Any) -> np.dtype[Any]:
    """Return NumPy's dtype of a column; float64 for a nullable one."""
    if isinstance(dtype, np.dtype):
        return dtype
    return np.dtype(np.float64 if getattr(dtype, "kind", "O") in "biuf" else object)
