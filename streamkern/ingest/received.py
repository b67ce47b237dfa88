"""Convert the rows, targets and weights that a caller passes to the types used internally.

`fit`, `predict`, `score` and `tune`, `ingest_store` and `append_store` all call `convert_received`,
so that they accept the same inputs, and refuse others with the same messages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.ingest.columns import DEFAULT_ARRAYS, ReadRequest, RecordedArrays, split_columns
from streamkern.ingest.formats import NO_OPTIONS, FileForm
from streamkern.ingest.frames import are_names, as_frame, is_dask_table, is_frame
from streamkern.ingest.hub_datasets import (
    hub_names,
    hub_rows,
    hub_table,
    hub_values,
    is_hub_dataset,
    refuse_splits,
)
from streamkern.ingest.numeric import (
    GIVE_ROWS,
    array_of_list,
    column_values,
    frame_numbers,
    is_sparse,
    with_lengths,
)
from streamkern.store.conventions import check_dimensions
from streamkern.store.packing import detect_packing
from streamkern.store.sample_weights import warn_of_unused

_DASK_BLOCK_BYTES = 4 << 20  # bytes of an unread file in one block of a Dask array


def convert_received(data: Any, name: str, *, keep_missing: bool = False) -> Any:
    """Convert `data` from the types of other libraries to the types used internally.

    A table becomes a narwhals data frame, also if it is lazy, a reader or a structured array. A
    column, a list, a DataArray and anything with DLPack, such as a tensor of PyTorch, become NumPy
    arrays, or Dask arrays if they are not read yet. Anything else, such as sparse arrays, arrays
    and frames of Dask, Zarr arrays, groups, stores, sources and paths, is returned unchanged.

    Parameters
    ----------
    name : "X", "y" or "sample_weight", for messages
    keep_missing : as for `received_targets`

    Raises
    ------
    DataError
        The input cannot be rows, or it holds missing values that NumPy cannot represent. Numbers
        are not checked.
    """
    if data is None and name == "X":
        raise DataError("X is None", f"{GIVE_ROWS}")
    if data is None or isinstance(data, str | os.PathLike) or (name == "X" and are_paths(data)):
        return data
    data = list(data) if isinstance(data, range) else data
    if name == "X" and _is_of_xarray("Dataset", data) and "X" in data:
        data = data["X"]
    _refuse_containers(data, name)
    if isinstance(data, memoryview | np.matrix):
        return np.asarray(data)
    if _is_of_xarray("DataArray", data):
        return _values_of_dataarray(data, name)
    if is_dask_table(data):
        return data if name == "X" else with_lengths(data, name)
    if isinstance(data, np.ma.MaskedArray):
        if np.ma.is_masked(data):
            raise DataError(
                f"{name} is a masked array, whose masked entries would count as values",
                f"fill the masked entries, {name}.filled(value), or leave their rows out",
            )
        return np.asarray(data)
    data = hub_values(data, name)
    if isinstance(data, list | tuple):
        return array_of_list(data, name)
    frame = as_frame(data, name)
    if is_frame(frame):
        return frame
    if frame is not None and name == "X":
        remedy = "give a data frame with this column: X.to_frame()"
        remedy += "; if it is one row, X.to_frame().T" if hasattr(data, "iloc") else ""
        raise DataError(f"X is one column, {frame.name!r}", remedy)
    if frame is not None:
        return column_values(frame, name, keep_missing=keep_missing)
    if isinstance(data, set | frozenset):
        raise DataError(
            f"{name} is a {type(data).__name__}, whose entries have no order",
            "give a list or an array with an entry for each row",
        )
    if is_iterator(data):
        raise DataError(
            f"{name} is a {_kind(data)}, which can be read only once",
            f"give its rows as an array, np.array(list({name})), or as a GeneratorSource if they "
            "do not fit into memory",
        )
    reads = hasattr(data, "__array__") or hasattr(data, "__array_interface__")
    if reads and not hasattr(data, "shape"):
        return np.asarray(data)
    if isinstance(data, np.ndarray) or not hasattr(data, "__dlpack__"):
        return data
    try:
        # The library's own conversion is preferred: DLPack loses that a tensor is a negative view.
        return np.asarray(data) if hasattr(data, "__array__") else np.from_dlpack(data)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise DataError(
            f"{name} is a {_kind(data)} that cannot be read as an array here ({reason})",
            "give a dense array on the CPU, without gradient, and with a dtype of NumPy",
        ) from None


def received_targets(y: Any, name: str = "y", *, keep_missing: bool = False) -> Any:
    """Return targets or weights, see `convert_received`; a data frame becomes an array.

    One column of words becomes (n,), columns of numbers become (n, c).
    keep_missing : whether missing values of a column are kept, in place of an error
    """
    values = convert_received(y, name, keep_missing=keep_missing)
    if is_sparse(values):
        return values.toarray()
    if name == "y" and _is_scalar(values):
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
        f"{some([str(k) for k in values.columns])}",
        "give one column of labels, or numbers",
    )


def received_for_store(
    X: Any, x: Any, y: Any, sample_weight: Any, form: FileForm = NO_OPTIONS
) -> tuple[Any, Any, Any, Any, FileForm]:
    """Return rows, the names of their arrays, targets, weights and form, for making a store.

    Paths, names of columns and of arrays, and an iterable of blocks are returned unchanged.
    form : form of files, with array names of earlier data; an xarray.Dataset replaces these names
    """
    if is_dataset(X, y):
        recorded_arrays = RecordedArrays.from_form(form.recorded)
        request = recorded_arrays.filled(ReadRequest(x, y, sample_weight), X.__contains__)
        form = form._replace(recorded=RecordedArrays.from_request(request).added(form.recorded))
        rows, y, sample_weight = _dataset_arrays(X, request)
        return rows, None, y, sample_weight, form
    _check_arrays(X, y, sample_weight)
    # name_types : types of y and sample_weight that are names or files, not values
    if are_paths(X):
        name_types: tuple[type, ...] = (str, int, os.PathLike, list, tuple)
        y, sample_weight = (int(k) if isinstance(k, np.integer) else k for k in (y, sample_weight))
    elif is_iterator(X) or (isinstance(X, list | tuple) and y is None):
        return X, x, y, sample_weight, form  # blocks
    else:
        X, name_types = X if is_hub_dataset(X) else convert_received(X, "X"), (str, int)
    tables = is_frame(X) or is_hub_dataset(X)
    if not (y is None or isinstance(y, name_types) or (tables and are_names(y, X))):
        y = received_targets(y, "y", keep_missing=True)
    is_number = isinstance(sample_weight, int) and isinstance(X, np.ndarray)
    if not (sample_weight is None or (isinstance(sample_weight, name_types) and not is_number)):
        sample_weight = _weights(sample_weight, X)
    return X, x, y, sample_weight, form


def _check_arrays(X: Any, y: Any, sample_weight: Any) -> None:
    """Raise DataError for a DataArray whose targets or weights run along its columns."""
    if _is_of_xarray("DataArray", X):
        others = (("y", y), ("sample_weight", sample_weight))
        check_dimensions(X, *(k for k in others if _is_of_xarray("DataArray", k[1])))


class Received(NamedTuple):
    """Rows, targets and weights as `convert_received` returns them, and the names of the targets.

    names : names of the target columns; None if they have none
    of_columns : whether the targets are columns of the table that contains the rows
    weight_column : name of the column of this table that contains the weights; None if none does
    """

    X: Any
    y: Any
    sample_weight: Any
    names: tuple[Any, ...] | None = None
    of_columns: bool = False
    weight_column: str | None = None


def received_data(
    X: Any, y: Any = None, sample_weight: Any = None, arrays: RecordedArrays = DEFAULT_ARRAYS
) -> Received:
    """Return data to train on or to compare with.

    y and sample_weight may be names of columns of a table X. If X is paths of files, names are
    returned unchanged. arrays : array names of earlier data
    """
    if is_dataset(X, y):
        request = arrays.filled(ReadRequest(None, y, sample_weight), X.__contains__)
        _, name, column = RecordedArrays.from_request(request)
        names = None if name is None else (name,)
        return Received(*_dataset_arrays(X, request), names, name is not None, column)
    _check_arrays(X, y, sample_weight)
    if are_paths(X):
        return Received(X, y, sample_weight)
    if is_hub_dataset(X) and (data := _of_hub(X, y, sample_weight)) is not None:
        return data
    X = convert_received(X, "X")
    if isinstance(sample_weight, int | np.integer) and (is_frame(X) or is_dask_table(X)):
        raise DataError(
            f"{mention('sample_weight', sample_weight)} is a whole number, which may mean one "
            "weight or a column of the table",
            "give the name of the column, or leave sample_weight out if all weights are equal",
        )
    if is_frame(X) or (is_dask_table(X) and X.ndim == 2):
        of_columns = are_names(y, X) if is_frame(X) else _are_dask_names(y, X)
        if of_columns or isinstance(sample_weight, str):
            return _of_frame(X, y, sample_weight, of_columns=of_columns)
    for name, argument in (("y", y), ("sample_weight", sample_weight)):
        if isinstance(argument, str):
            raise DataError(
                f"{mention(name, argument)} is the name of a column, but X is a {_kind(X)}, which "
                "has no named columns",
                "give the values, or a data frame as X",
            )
    return Received(X, received_targets(y), _weights(sample_weight, X), names_of_targets(y))


def _of_hub(X: Any, y: Any, sample_weight: Any) -> Received | None:
    """Return the data of a data set of Hugging Face whose cells are rows; None if it is a table."""
    of_columns = are_names(y, X)
    column = sample_weight if isinstance(sample_weight, str) else None
    request = ReadRequest(y=y if of_columns else (), w=column)
    split = split_columns(hub_names(X), request, "X")
    rows = hub_rows(X, (*split.targets, *split.weights))
    if rows is None:
        return None
    names: Any = split.targets if of_columns else names_of_targets(y)
    if of_columns:
        y = hub_table(X, split.targets)
        y = y.column(0) if len(split.targets) == 1 else y
    if split.weights:
        sample_weight = hub_table(X, split.weights).column(0)
    w = _weights(sample_weight, rows)
    return Received(rows, received_targets(y), w, names, of_columns, column)


def _of_frame(X: Any, y: Any, sample_weight: Any, *, of_columns: bool) -> Received:
    """Return the data of a frame, perhaps of Dask; y names columns if `of_columns` is true."""
    column = sample_weight if isinstance(sample_weight, str) else None
    request = ReadRequest(y=y if of_columns else (), w=column)
    split = split_columns([str(name) for name in X.columns], request, "X")
    if split.weights:
        column, sample_weight = split.weights[0], X[split.weights[0]]
    if of_columns:
        y = X[split.targets[0]] if len(split.targets) == 1 else X[list(split.targets)]
    rows, w = X[list(split.features)], _weights(sample_weight, X)
    return Received(rows, received_targets(y), w, names_of_targets(y), of_columns, column)


def _are_dask_names(y: Any, X: Any) -> bool:
    """Return whether y are names of columns of a Dask data frame, whose length is not known."""
    several = isinstance(y, list | tuple) and len(y) > 0
    return isinstance(y, str) or (several and all(isinstance(k, str) and k in X.columns for k in y))


def _weights(sample_weight: Any, X: Any) -> Any:
    """Return weights as an array (n,), also from one column, or one number for all rows of X.

    Raises DataError for durations and dates, because their unit would determine the weights.
    """
    w = received_targets(sample_weight, "sample_weight")
    if _is_scalar(w) and not isinstance(w, bool | np.bool_):
        n_rows = len(X) if is_frame(X) or not hasattr(X, "shape") else X.shape[0]
        w = np.full(n_rows, w) if isinstance(n_rows, int | np.integer) else w
    if getattr(getattr(w, "dtype", None), "kind", "") in ("m", "M"):
        raise DataError(
            "sample_weight holds dates or durations, but weights must not depend on a unit of time",
            "give numbers, such as the days: sample_weight / np.timedelta64(1, 'D')",
        )
    return w[:, 0] if getattr(w, "ndim", 1) == 2 and w.shape[1] == 1 else w


def is_iterator(value: Any) -> bool:
    """Return whether `value` is a generator or other iterator, except of Arrow batches."""
    return isinstance(value, Iterator) and not hasattr(value, "__arrow_c_stream__")


def are_paths(X: Any) -> bool:
    """Return whether X is a path or a URL, or several."""
    values = X if isinstance(X, list | tuple) else [X]
    return len(values) > 0 and all(isinstance(k, str | os.PathLike) for k in values)


def is_dataset(X: Any, y: Any) -> bool:
    """Return whether X is an xarray.Dataset that also holds the targets."""
    return _is_of_xarray("Dataset", X) and (y is None or isinstance(y, str))


def _dataset_arrays(data: Any, request: ReadRequest) -> tuple[Any, Any, Any]:
    """Return X, y and w: the arrays of an xarray.Dataset with the names of a request."""
    (x, y), sample_weight = request._replace(targets=True, w=None).arrays, request.w
    if not all(isinstance(name, str) and name in data for name in (x, y)):
        _refuse_containers(data, "X")
    if isinstance(sample_weight, str) and sample_weight in data:
        sample_weight = convert_received(data[sample_weight], "sample_weight")
    check_dimensions(data[x], (y, data[y]))
    X, targets = convert_received(data[x], x), convert_received(data[y], y)
    if sample_weight is None and "w" in data and "w" not in (x, y):
        warn_of_unused(data["w"], X.shape[0], "the xarray.Dataset")
    return X, targets, sample_weight


def _is_scalar(value: Any) -> bool:
    """Return whether a value is one number."""
    is_array = isinstance(value, np.ndarray) and value.ndim == 0
    return is_array or isinstance(value, int | float | np.generic)


def names_of_targets(y: Any) -> tuple[Any, ...] | None:
    """Return the names of the columns of y, a data frame or one of its columns; otherwise None."""
    if is_frame(y) or (hasattr(y, "columns") and hasattr(y, "dtypes")):
        return tuple(y.columns)
    name = getattr(y, "name", None) if hasattr(y, "to_frame") else None
    return None if name is None or name == "" else (name,)


def _refuse_containers(value: Any, name: str) -> None:
    """Raise DataError for a container of arrays or frames."""
    refuse_splits(value, name)
    if _is_of_xarray("Dataset", value):
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
            f"{name} is a {_kind(value)}, whose shape Dask does not know",
            "give a Dask array or data frame, for example from dask.array.from_delayed or "
            "to_dataframe of a bag",
        )


def _kind(value: Any) -> str:
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"


def _is_of_xarray(name: str, value: Any) -> bool:
    """Return whether a value is of this class of xarray, imported or not."""
    kind = getattr(sys.modules.get("xarray"), name, None)
    return kind is not None and isinstance(value, kind)


def _values_of_dataarray(array: Any, name: str) -> Any:
    """Return the data of a DataArray; for a file that is not loaded, a chunked Dask array.

    Raises DataError for a DataArray whose attributes declare packed numbers.
    """
    packing = detect_packing(array, name)
    if packing is not None and (packing.changes or packing.gaps):
        reasons = ", ".join([*packing.attributes, *(text for text, _ in packing.gaps)])
        raise DataError(
            f"{name} is a DataArray that is not decoded ({reasons})",
            f'decode it, xarray.decode_cf({name}.to_dataset(name="X"))["X"]',
        )
    # `data` of an unread array would read the whole file, so its own attribute is checked first.
    if array.chunks is None and not array.variable._in_memory:
        rows = max(1, _DASK_BLOCK_BYTES * len(array) // max(1, array.nbytes))
        stored = array.encoding.get("preferred_chunks", {}).get(array.dims[0], 1)
        pieces = dict.fromkeys(array.dims, -1) | {array.dims[0]: stored * max(1, rows // stored)}
        array = array.chunk(pieces)
    return array.data
