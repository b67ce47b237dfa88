"""Read arrays and groups of Zarr, h5py, xarray and NetCDF, whose conventions differ.

They differ in their slices, attributes, names of dimensions, and members of groups.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError

XARRAY_DIMENSIONS = "_ARRAY_DIMENSIONS"
CSR_MEMBERS = ("data", "indices", "indptr")
"""Members of a group that stores a sparse matrix (CSR)."""


def rows_of_slice(
    rows: slice, n_rows: int, read_rows: Callable[[int, int], NDArray[Any]]
) -> NDArray[Any]:
    """Return the rows that a slice of any step selects in an array of `n_rows` rows.

    read_rows : returns rows start … stop - 1; called once, for the smallest range with the rows
    """
    selected = range(n_rows)[rows]
    if not selected:
        return read_rows(0, 0)
    first, last = sorted((selected[0], selected[-1]))
    block = read_rows(first, last + 1)
    return block if selected.step == 1 else block[:: selected.step].copy()


def decode_text(value: Any) -> Any:
    """Return bytes as text, decoded as UTF-8 with "\ufffd" for invalid bytes; else the value."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def attribute_number(value: Any) -> Any:
    """Return the number that an attribute holds; None if it holds none.

    Numbers may be stored as text, in decimal or as xarray writes floats, see `_float_from_base64`.
    """
    value = decode_text(value)
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, str):
        return None
    for parse in _NUMBER_PARSERS:
        try:
            return parse(value.strip())
        except ValueError:
            continue
    return None


def _float_from_base64(text: str) -> float:
    """Return the float64 that xarray wrote to a Zarr v3 attribute as base64 text."""
    try:
        (number,) = struct.unpack("<d", base64.b64decode(text, validate=True))
    except struct.error as error:
        raise ValueError(text) from error
    return float(number)


_NUMBER_PARSERS: tuple[Callable[[str], Any], ...] = (int, float, _float_from_base64)


def number_in_dtype(number: Any, dtype: np.dtype[Any], *, wraps: bool) -> Any:
    """Convert a number to a dtype; return None if an integer or boolean dtype cannot hold it.

    A float dtype rounds the number, and makes it infinite beyond its range, as in an array that was
    cast to this dtype.

    wraps : whether integers outside the range of the dtype wrap around, as in an array that stores
        signed numbers as unsigned ones
    """
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return dtype.type(number)
    if not math.isfinite(number) or number != int(number):
        return None
    integer = int(number)
    if dtype.kind == "b":
        return bool(integer) if integer in (0, 1) else None
    info = np.iinfo(dtype)
    if wraps and not info.min <= integer <= info.max:
        integer = (integer - info.min) % 2 ** (8 * dtype.itemsize) + info.min
    return dtype.type(integer) if info.min <= integer <= info.max else None


def named_dimensions(array: Any) -> tuple[str, ...] | None:
    """Return the names of an array's dimensions; None unless all of them have one.

    array : an array of xarray, Zarr, h5py or SciPy's NetCDF reader
    """
    attributes = getattr(array, "attrs", None)
    dimensions: Any = getattr(getattr(array, "metadata", None), "dimension_names", None)
    if dimensions is None and isinstance(attributes, Mapping) and XARRAY_DIMENSIONS in attributes:
        dimensions = attributes[XARRAY_DIMENSIONS]
    if dimensions is None:
        dimensions = getattr(array, "dimensions", None) or getattr(array, "dims", None)
    if dimensions is None or isinstance(dimensions, str):
        return None
    names = tuple(_dimension_name(name) for name in dimensions)
    return names if names and all(names) else None


def _dimension_name(dimension: Any) -> str:
    """Return the name of a dimension, or "" if it has none.

    dimension : its name, or a dimension of h5py
    """
    if isinstance(dimension, str):
        return dimension
    label = getattr(dimension, "label", "")
    if label:
        return str(label)
    has_scales = hasattr(dimension, "values") and hasattr(dimension, "attach_scale")
    scales = list(dimension.values()) if has_scales else []
    return str(scales[0].name or "").rpartition("/")[2] if scales else ""


def check_dimensions(X: Any, *named_arrays: tuple[str, Any]) -> None:
    """Raise DataError if targets or weights run along a dimension of X other than its first.

    named_arrays : pairs of a name for the message, and its array, or None if there is none
    """
    names = named_dimensions(X) or ()
    for name, array in named_arrays:
        dimensions = None if array is None else named_dimensions(array)
        rows = dimensions[0] if dimensions else ""
        if rows in names[1:] and rows != names[0]:
            raise DataError(
                f"{name} has its rows along the dimension {rows!r}, but X has them along "
                f"{names[0]!r} (X has {', '.join(names)})",
                f"write X with {rows!r} as the first dimension, in xarray X.transpose({rows!r}, "
                "...)",
            )


_COMPOUND_MEMBERS = (CSR_MEMBERS, ("codes", "categories"), ("values", "mask"))
"""Members of groups that stand for one array: sparse, categorical, or with missing values."""
_MAX_MESSAGE_NAMES = 12
"""Largest number of names in a message."""
_MAX_MEMBERS, _MAX_DEPTH = 200, 4
"""Largest number of members that are read for a message, because each may be a request to object
storage; and the largest depth of their groups."""


def missing_member_text(name: str, group: Any, location: str) -> str:
    """Return the error message for a missing array of a group.

    It lists the first arrays that exist, unless the group cannot be listed.
    """
    paths = []
    try:
        member = group.get(name)
        paths = [f"{name}/{path}" for path in _paths(member)] if is_group(member) else []
        if not paths:
            paths = list(_paths(group))
    except Exception:  # plain HTTP cannot list, and a file may be damaged
        return f"{location} has no array {name!r}: name the arrays with x= and y="
    more = ", ..." if len(paths) > _MAX_MESSAGE_NAMES else ""
    names = (
        f"it has {', '.join(paths[:_MAX_MESSAGE_NAMES]) or 'none'}{more}: name them with x= and y="
    )
    if is_group(member):
        return f"{name!r} of {location} is a group and not an array; {names}"
    return f"{location} has no array {name!r}; {names}"


def _paths(group: Any) -> Iterator[str]:
    """Yield the paths of the arrays in a group, and of the groups that stand for one array.

    They are read level by level, and no deeper than `_MAX_DEPTH` groups. If there are more than
    `_MAX_MEMBERS` members, the last text is an ellipsis in place of the others.
    """
    queue, n_read = [("", group, 0)], 0
    while queue:
        path, parent, depth = queue.pop(0)
        for name in sorted(parent.keys()):
            if n_read == _MAX_MEMBERS:
                yield "..."
                return
            member, n_read = parent.get(name), n_read + 1
            member_path = f"{path}/{name}".lstrip("/")
            if hasattr(member, "shape") or stands_for_array(member):
                yield member_path
            elif is_group(member) and depth < _MAX_DEPTH:
                queue.append((member_path, member, depth + 1))


def stands_for_array(member: Any) -> bool:
    """Return whether a group holds a sparse matrix, codes and categories, or values and a mask."""
    if not is_group(member):
        return False
    return any(all(part in member for part in parts) for parts in _COMPOUND_MEMBERS)


def is_group(member: Any) -> bool:
    """Return whether `member` has keys and attributes, as groups and xarray's Datasets have."""
    return hasattr(member, "keys") and hasattr(member, "attrs")
