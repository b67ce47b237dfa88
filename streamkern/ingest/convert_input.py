"""Convert rows, targets or weights that a caller passes to the types used internally.

`fit`, `predict`, `score` and `tune`, `ingest_store` and `append_store` all call `convert_input`,
so that they accept the same inputs, and refuse others with the same messages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.ingest.frames import as_frame, is_dask_table, is_frame
from streamkern.ingest.hub_datasets import hub_values, refuse_splits
from streamkern.ingest.input_files import are_paths, is_path
from streamkern.ingest.numeric import (
    GIVE_ROWS,
    array_of_list,
    column_values,
    frame_numbers,
    is_sparse,
    with_lengths,
)
from streamkern.store.packing import detect_packing
from streamkern.store.row_block import without_mask

_DASK_BLOCK_BYTES = 4 << 20  # bytes of an unread file in one block of a Dask array


def convert_input(data: Any, name: str, *, keep_missing: bool = False) -> Any:
    """Convert `data` from the types of other libraries to the types used internally.

    A table becomes a narwhals data frame, also if it is lazy, a reader or a structured array. A
    column, a list, a DataArray and anything with DLPack, such as a tensor of PyTorch, become NumPy
    arrays, or Dask arrays if they are not read yet. Anything else, such as sparse arrays, arrays
    and frames of Dask, Zarr arrays, groups, stores, sources and paths, is returned unchanged.

    Parameters
    ----------
    data : rows, targets or sample weights
    name : "X", "y" or "sample_weight", for messages
    keep_missing : as for `convert_targets`

    Raises
    ------
    DataError
        If the input cannot be rows, or holds missing values that NumPy cannot represent. Numbers
        are not checked.
    """
    if data is None and name == "X":
        raise DataError("X is None", GIVE_ROWS)
    if data is None or is_path(data) or (name == "X" and are_paths(data)):
        return data
    data = list(data) if isinstance(data, range) else data
    if name == "X" and is_of_xarray("Dataset", data) and "X" in data:
        data = data["X"]
    refuse_containers(data, name)
    # First types that would also be taken for arrays or frames below, but have rules of their own.
    if isinstance(data, memoryview | np.matrix):
        return np.asarray(data)
    if is_of_xarray("DataArray", data):
        return _dataarray_values(data, name)
    if is_dask_table(data):
        return data if name == "X" else with_lengths(data, name)
    if isinstance(data, np.ma.MaskedArray):
        return without_mask(data, name)
    # Columns of a data set of Hugging Face become lists, so they are converted before lists.
    data = hub_values(data, name)
    if isinstance(data, list | tuple):
        return array_of_list(data, name)
    # Some frames and columns also support DLPack, so they are converted before other arrays.
    frame = as_frame(data, name)
    if is_frame(frame):
        return frame
    if frame is not None and name == "X":
        remedy = "give a data frame with this column: X.to_frame()"
        remedy += "; if it is one row, X.to_frame().T" if hasattr(data, "iloc") else ""
        raise DataError(f"X is one column, {frame.name!r}", remedy)
    if frame is not None:
        return column_values(frame, name, keep_missing=keep_missing)
    _refuse_unordered(data, name)
    return _as_array(data, name)


def _refuse_unordered(data: Any, name: str) -> None:
    """Raise DataError for a set, and for an iterator, which can be read only once."""
    if isinstance(data, set | frozenset):
        raise DataError(
            f"{name} is a {type(data).__name__}, whose entries have no order",
            "give a list or an array with an entry for each row",
        )
    if is_iterator(data):
        raise DataError(
            f"{name} is a {class_name(data)}, which can be read only once",
            f"give its rows as an array, np.array(list({name})), or as a GeneratorSource if they "
            "do not fit into memory",
        )


def _as_array(data: Any, name: str) -> Any:
    """Return an array of another library as a NumPy array; return anything else unchanged."""
    converts_itself = hasattr(data, "__array__") or hasattr(data, "__array_interface__")
    if converts_itself and not hasattr(data, "shape"):
        return np.asarray(data)
    if isinstance(data, np.ndarray) or not hasattr(data, "__dlpack__"):
        return data
    try:
        # The library's own conversion is preferred: DLPack loses that a tensor is a negative view.
        return np.asarray(data) if hasattr(data, "__array__") else np.from_dlpack(data)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise DataError(
            f"{name} is a {class_name(data)} that cannot be read as an array here ({reason})",
            "give a dense array on the CPU, without gradient, and with a dtype of NumPy",
        ) from None


def convert_targets(y: Any, name: str = "y", *, keep_missing: bool = False) -> Any:
    """Convert targets or weights as `convert_input` does, and data frames to arrays.

    One column of words becomes (n,), columns of numbers become (n, c).

    keep_missing : whether missing values of a column are kept, in place of an error

    Raises DataError as `convert_input` does, and for y that is one number, and for several columns
    of which some hold words or missing values.
    """
    values = convert_input(y, name, keep_missing=keep_missing)
    if is_sparse(values):
        return values.toarray()
    if name == "y" and is_scalar(values):
        raise DataError(
            f"{mention('y', values)} is one number, but each row needs a target",
            "give a target for each row; if column k of X holds the targets, give y=X[:, k], "
            "and leave this column out of X",
        )
    if not is_frame(values):
        return values
    numbers = frame_numbers(values, name)
    if numbers is not None:
        return numbers
    if len(values.columns) == 1:
        return column_values(values.get_column(values.columns[0]), name, keep_missing=keep_missing)
    raise DataError(
        f"{name} has {len(values.columns)} columns, some with words or missing values, "
        f"{some(list(map(str, values.columns)))}",
        "give one column of labels, or numbers",
    )


def is_iterator(value: Any) -> bool:
    """Return whether `value` is a generator or other iterator, except of Arrow batches."""
    return isinstance(value, Iterator) and not hasattr(value, "__arrow_c_stream__")


def is_scalar(value: Any) -> bool:
    """Return whether a value is one number."""
    is_array = isinstance(value, np.ndarray) and value.ndim == 0
    return is_array or isinstance(value, int | float | np.generic)


def names_of_targets(y: Any) -> tuple[Any, ...] | None:
    """Return the names of the columns of y, a data frame or one of its columns; otherwise None."""
    if is_frame(y) or (hasattr(y, "columns") and hasattr(y, "dtypes")):
        return tuple(y.columns)
    if hasattr(y, "column_names") and hasattr(y, "schema"):  # a table of Arrow
        return tuple(y.column_names)
    name = getattr(y, "name", None) if hasattr(y, "to_frame") else None
    return None if name is None or name == "" else (name,)


def refuse_containers(value: Any, name: str) -> None:
    """Raise DataError for a container of arrays or frames."""
    refuse_splits(value, name)
    if is_of_xarray("Dataset", value):
        names = sorted(map(str, value.data_vars))
        raise DataError(
            f"{name} is an xarray.Dataset, which holds several arrays, {some(names)}",
            f'give one of these arrays, {name}["name"]',
        )
    if isinstance(value, Mapping) and not hasattr(value, "shape"):
        keys = ", ".join(map(str, list(value)[:3]))
        raise DataError(
            f"{name} is a {type(value).__name__} with the keys {keys}",
            f"give one of its values, or a table of all as columns, pandas.DataFrame({name})",
        )
    if hasattr(value, "__dask_graph__") and not isinstance(getattr(value, "ndim", None), int):
        raise DataError(
            f"{name} is a {class_name(value)}, whose shape Dask does not know",
            "give a Dask array or data frame, for example from dask.array.from_delayed or "
            "to_dataframe of a bag",
        )


def class_name(value: Any) -> str:
    """Return the name of the class of a value, after the name of its library."""
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"


# ------------------------------------------------- objects of xarray, which is not imported


def is_of_xarray(name: str, value: Any) -> bool:
    """Return whether a value is of this class of xarray."""
    kind = getattr(sys.modules.get("xarray"), name, None)
    return kind is not None and isinstance(value, kind)


def is_dataset(X: Any, y: Any) -> bool:
    """Return whether X is an xarray.Dataset that also holds the targets."""
    return is_of_xarray("Dataset", X) and (y is None or isinstance(y, str))


def _dataarray_values(array: Any, name: str) -> Any:
    """Return the data of a DataArray; for a file that is not loaded, a chunked Dask array.

    Raises DataError for a DataArray whose attributes declare packed numbers.
    """
    packing = detect_packing(array, name)
    if packing is not None and (packing.changes_numbers or packing.missing_values):
        reasons = ", ".join([*packing.attributes, *(text for text, _ in packing.missing_values)])
        raise DataError(
            f"{name} is a DataArray that is not decoded ({reasons})",
            f'decode it, xarray.decode_cf({name}.to_dataset(name="X"))["X"]',
        )
    # `array.data` would read the whole file; `_in_memory` is private, but tells whether it is read.
    if array.chunks is None and not array.variable._in_memory:
        rows = max(1, _DASK_BLOCK_BYTES * len(array) // max(1, array.nbytes))
        rows_of_chunk = array.encoding.get("preferred_chunks", {}).get(array.dims[0], 1)
        rows_of_block = rows_of_chunk * max(1, rows // rows_of_chunk)  # whole chunks of the file
        array = array.chunk(dict.fromkeys(array.dims, -1) | {array.dims[0]: rows_of_block})
    return array.data
