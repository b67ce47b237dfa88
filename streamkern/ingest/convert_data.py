"""Convert the rows, targets and weights that a caller passes together, also as parts of a table.

Estimators use `convert_data`; ingests use `convert_for_store`. Both use `convert_input`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.ingest.column_roles import ColumnRoles, assign_columns
from streamkern.ingest.columns import DEFAULT_ARRAYS, ReadRequest, RecordedArrays
from streamkern.ingest.convert_input import (
    class_name,
    convert_input,
    convert_targets,
    is_dataset,
    is_iterator,
    is_of_xarray,
    is_scalar,
    names_of_targets,
    refuse_containers,
)
from streamkern.ingest.formats import DEFAULT_FORM, FileForm
from streamkern.ingest.frames import are_names, is_dask_table, is_frame, warn_of_other_order
from streamkern.ingest.hub_datasets import hub_names, hub_rows, hub_table, is_hub_dataset
from streamkern.ingest.input_files import are_paths
from streamkern.store.conventions import check_dimensions
from streamkern.store.sample_weights import warn_of_unused


def convert_for_store(
    X: Any, x: Any, y: Any, sample_weight: Any, form: FileForm = DEFAULT_FORM
) -> tuple[Any, Any, Any, Any, FileForm]:
    """Return the arguments, converted to what `open_reader` takes to make a store of them.

    Paths, names of columns and of arrays, and an iterable of blocks are returned unchanged. The
    names of the arrays of an xarray.Dataset replace those in `form`.
    """
    if is_dataset(X, y):
        earlier_names = RecordedArrays.from_form(form.earlier_record)
        request = earlier_names.apply_to(ReadRequest(x, y, sample_weight), X.__contains__)
        record = RecordedArrays.from_request(request).add_to_record(form.earlier_record)
        rows, y, sample_weight = _dataset_arrays(X, request)
        return rows, None, y, sample_weight, form._replace(earlier_record=record)
    _check_matching_rows(X, y, sample_weight)
    name_types: tuple[type, ...] = (str, int)  # of y and sample_weight if they are no values
    if are_paths(X):
        name_types = (str, int, os.PathLike, list, tuple)
        y, sample_weight = (
            int(role) if isinstance(role, np.integer) else role for role in (y, sample_weight)
        )
    elif is_iterator(X) or (isinstance(X, list | tuple) and y is None):
        return X, x, y, sample_weight, form  # blocks
    elif not is_hub_dataset(X):
        X = convert_input(X, "X")
    is_table = is_frame(X) or is_hub_dataset(X) or (is_dask_table(X) and X.ndim == 2)
    y_is_name = y is None or isinstance(y, name_types) or (is_table and _are_column_names(y, X))
    if not y_is_name:
        y = convert_targets(y, "y", keep_missing=True)
    # Beside an array, an integer is the weight of all rows, as an array has no columns by name.
    is_weight = isinstance(sample_weight, int) and isinstance(X, np.ndarray)
    if sample_weight is not None and (is_weight or not isinstance(sample_weight, name_types)):
        sample_weight = _weights(sample_weight, X)
    return X, x, y, sample_weight, form


def _check_matching_rows(X: Any, y: Any, sample_weight: Any) -> None:
    """Raise DataError if targets or weights share the dimension of X's columns, not of its rows.

    Only DataArrays of xarray have names of dimensions, by which they are compared. Warn if targets
    or weights have the index of X, a data frame of pandas, in another order.
    """
    roles = (("y", y), ("sample_weight", sample_weight))
    if is_of_xarray("DataArray", X):
        check_dimensions(X, *(role for role in roles if is_of_xarray("DataArray", role[1])))
    for name, values in roles:
        warn_of_other_order(X, values, name)


class ConvertedData(NamedTuple):
    """Rows, targets and weights from `convert_input`, and the names of targets and weights.

    X : rows
    y : targets; None if there are none
    sample_weight : weights (n,); None if there are none
    names : names of the target columns; None if they have none
    targets_are_columns : whether the targets are columns of the table that contains the rows
    weight_column : name of the column of this table that contains the weights; None if none does
    """

    X: Any
    y: Any
    sample_weight: Any
    names: tuple[Any, ...] | None = None
    targets_are_columns: bool = False
    weight_column: str | None = None

    def with_target_order(self, expected: Sequence[Any]) -> ConvertedData:
        """Return the data with their targets in the order of these names.

        expected : names of the targets of earlier data; empty if they had none

        Raises DataError if the targets have some of the expected names and others. Targets without
        names, or with other names only, are taken by their position, and so are whole numbers as
        names, which count the columns, unless they are those expected.
        """
        names = tuple(self.names or ())
        if len(names) < 2 or names == tuple(expected) or not {*names} & {*expected}:
            return self
        if len(names) != len(expected) or {*names} != {*expected}:
            if all(isinstance(name, int | np.integer) for name in (*names, *expected)):
                return self
            raise DataError(
                f"the targets are called {some(names)}, but were called {some(expected)} in the "
                "training data",
                "give the same targets, or arrays, whose columns are taken by their position",
            )
        order = [names.index(name) for name in expected]
        return self._replace(y=self.y[:, order], names=tuple(expected))


def convert_data(
    X: Any, y: Any = None, sample_weight: Any = None, arrays: RecordedArrays = DEFAULT_ARRAYS
) -> ConvertedData:
    """Convert rows, targets and weights to train on or to compare with.

    y and sample_weight may be names of columns of a table X. If X is paths of files, names are
    returned unchanged.

    arrays : array names of earlier data

    Raises DataError as `convert_input` does, for names of columns that do not exist, and for inputs
    whose parts contradict each other.
    """
    # Inputs that hold the targets as arrays, or are read later.
    if is_dataset(X, y):
        request = arrays.apply_to(ReadRequest(None, y, sample_weight), X.__contains__)
        _, name, column = RecordedArrays.from_request(request)
        names = None if name is None else (name,)
        return ConvertedData(*_dataset_arrays(X, request), names, name is not None, column)
    _check_matching_rows(X, y, sample_weight)
    if are_paths(X):
        return ConvertedData(X, y, sample_weight)
    # Tables, of which y and sample_weight may be names of columns.
    if is_hub_dataset(X) and (data := _from_hub_dataset(X, y, sample_weight)) is not None:
        return data
    X = convert_input(X, "X")
    if isinstance(sample_weight, int | np.integer) and (is_frame(X) or is_dask_table(X)):
        raise DataError(
            f"{mention('sample_weight', sample_weight)} is a whole number, which may mean one "
            "weight or a column of the table",
            "give the name of the column, or leave sample_weight out if all weights are equal",
        )
    is_table = is_frame(X) or (is_dask_table(X) and X.ndim == 2)
    if is_table and (_are_column_names(y, X) or isinstance(sample_weight, str)):
        return _from_frame(X, y, sample_weight)
    # Otherwise all are values.
    for name, argument in (("y", y), ("sample_weight", sample_weight)):
        if isinstance(argument, str):
            raise DataError(
                f"{mention(name, argument)} is the name of a column, but X is a {class_name(X)}, "
                "which has no named columns",
                "give the values, or a data frame as X",
            )
    return ConvertedData(X, convert_targets(y), _weights(sample_weight, X), names_of_targets(y))


def _named_roles(names: Sequence[str], X: Any, y: Any, sample_weight: Any) -> ColumnRoles:
    """Return the columns of a table X by role; y and sample_weight may be names of columns."""
    w = sample_weight if isinstance(sample_weight, str) else None
    return assign_columns(names, ReadRequest(y=y if _are_column_names(y, X) else (), w=w), "X")


def _are_column_names(y: Any, X: Any) -> bool:
    """Return whether y are names of columns of a table; the length of one of Dask is unknown."""
    if not is_dask_table(X):
        return are_names(y, X)
    if isinstance(y, str):
        return True
    columns = X.columns
    is_list = isinstance(y, list | tuple) and len(y) > 0
    return is_list and all(isinstance(name, str) and name in columns for name in y)


def _from_hub_dataset(X: Any, y: Any, sample_weight: Any) -> ConvertedData | None:
    """Return the data of a data set of Hugging Face whose cells are rows; None if it is a table."""
    roles = _named_roles(hub_names(X), X, y, sample_weight)
    rows = hub_rows(X, (*roles.targets, *roles.weights))
    if rows is None:
        return None
    names = roles.targets or names_of_targets(y)
    if roles.targets:
        y = hub_table(X, roles.targets)
        y = y.column(0) if len(roles.targets) == 1 else y
    if roles.weights:
        sample_weight = hub_table(X, roles.weights).column(0)
    w = _weights(sample_weight, rows)
    return ConvertedData(
        rows, convert_targets(y), w, names, bool(roles.targets), roles.weight_column
    )


def _from_frame(X: Any, y: Any, sample_weight: Any) -> ConvertedData:
    """Return the data of a frame, also of Dask, in which targets or weights are named columns."""
    roles = _named_roles([str(name) for name in X.columns], X, y, sample_weight)
    if roles.weights:
        sample_weight = X[roles.weights[0]]
    if roles.targets:
        y = X[roles.targets[0]] if len(roles.targets) == 1 else X[list(roles.targets)]
    rows = X[list(roles.features)]
    w = _weights(sample_weight, X)
    names = names_of_targets(y)
    return ConvertedData(
        rows, convert_targets(y), w, names, bool(roles.targets), roles.weight_column
    )


def _weights(sample_weight: Any, X: Any) -> Any:
    """Return weights as an array (n,), also from one column, or one number for all rows of X.

    Raises DataError for durations and dates, because their unit would determine the weights.
    """
    w = convert_targets(sample_weight, "sample_weight")
    if is_scalar(w) and not isinstance(w, bool | np.bool_):
        n_rows = len(X) if is_frame(X) or not hasattr(X, "shape") else X.shape[0]
        w = np.full(n_rows, w) if isinstance(n_rows, int | np.integer) else w
    if getattr(getattr(w, "dtype", None), "kind", "") in ("m", "M"):
        raise DataError(
            "sample_weight holds dates or durations, but weights must not depend on a unit of time",
            "give numbers, such as the days: sample_weight / np.timedelta64(1, 'D')",
        )
    return w[:, 0] if getattr(w, "ndim", 1) == 2 and w.shape[1] == 1 else w


def _dataset_arrays(data: Any, request: ReadRequest) -> tuple[Any, Any, Any]:
    """Return X, y and w: the arrays of an xarray.Dataset with the names of a request."""
    x, y, sample_weight = request.x_name, request.y_name, request.w
    if not all(isinstance(name, str) and name in data for name in (x, y)):
        refuse_containers(data, "X")
    if isinstance(sample_weight, str) and sample_weight in data:
        sample_weight = convert_input(data[sample_weight], "sample_weight")
    check_dimensions(data[x], (y, data[y]))
    X, targets = convert_input(data[x], x), convert_input(data[y], y)
    if sample_weight is None and "w" in data and "w" not in (x, y):
        warn_of_unused(data["w"], X.shape[0], "the xarray.Dataset")
    return X, targets, sample_weight
