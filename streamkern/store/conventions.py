"""Conventions of arrays that other programs write: attributes, dimensions, members of groups."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from streamkern.basics.errors import DataError

XARRAY_DIMENSIONS = "_ARRAY_DIMENSIONS"
CSR_MEMBERS = ("data", "indices", "indptr")
"""Members of a group that is a sparse matrix."""


def text_of(value: str | bytes) -> str:
    """Return text, decoded if it is given as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def number_of(value: Any) -> Any:
    """Return the number in an attribute, also from JSON text; None if it is not a number."""
    if isinstance(value, bytes):
        value = text_of(value)
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, str):
        return None
    for read in _READ:
        try:
            return read(value.strip())
        except ValueError:
            continue
    return None


def _float_from_base64(text: str) -> float:
    """Return a float as xarray writes it to Zarr v3."""
    try:
        (number,) = struct.unpack("<d", base64.b64decode(text, validate=True))
    except struct.error as error:
        raise ValueError(text) from error
    return float(number)


_READ: tuple[Callable[[str], Any], ...] = (int, float, _float_from_base64)


def as_stored(number: Any, dtype: np.dtype[Any], *, wraps: bool) -> Any:
    """Return a number in a dtype; None if the dtype cannot hold it."""
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


def dimensions_of(array: Any) -> tuple[str, ...] | None:
    """Return the names of the dimensions of an array of xarray, Zarr, h5py or SciPy's NetCDF.

    None if they have no names.
    """
    attributes = getattr(array, "attrs", None)
    dimensions: Any = getattr(getattr(array, "metadata", None), "dimension_names", None)
    if dimensions is None and isinstance(attributes, Mapping) and XARRAY_DIMENSIONS in attributes:
        dimensions = attributes[XARRAY_DIMENSIONS]
    if dimensions is None:
        dimensions = getattr(array, "dimensions", None) or getattr(array, "dims", None)
    if dimensions is None or isinstance(dimensions, str):
        return None
    names = tuple(_name(name) for name in dimensions)
    return names if names and all(names) else None


def _name(given: Any) -> str:
    """Return the name of a dimension; "" without one."""
    if isinstance(given, str):
        return given
    label = getattr(given, "label", "")  # of h5py
    if label:
        return str(label)
    scales = (
        list(given.values()) if hasattr(given, "values") and hasattr(given, "attach_scale") else []
    )
    return str(scales[0].name or "").rpartition("/")[2] if scales else ""


def check_dimensions(X: Any, *others: tuple[str, Any]) -> None:
    """Raise DataError if targets or weights run along a dimension of X other than its first.

    others : names, for messages, and arrays; None for a missing one
    """
    names = dimensions_of(X) or ()
    for name, array in others:
        first = (dimensions_of(array) or ("",))[0] if array is not None else ""
        if first not in set(names[1:]) - {*names[:1]}:
            continue
        raise DataError(
            f"{name} runs along the dimension {first!r}, and the rows of X along {names[0]!r} "
            f"(X has {', '.join(names)})",
            f"write X with {first!r} first, as X.transpose({first!r}, ...) of xarray does",
        )


_OTHERS = (("codes", "categories"), ("values", "mask"))
_SHOWN = 12  # names in a message
_LISTED, _DEPTH = 200, 4  # members read for a message, and depth of groups


def no_member(name: str, group: Any, where: str) -> str:
    """Return the message that no array has this name, with the arrays of the group."""
    paths = []
    try:
        member = group.get(name)
        paths = [f"{name}/{path}" for path in _paths(member)] if is_group(member) else []
        if not paths:
            paths = list(_paths(group))
    except Exception:  # plain HTTP cannot list, and a file may be damaged
        return f"{where} has no array {name!r}: name the arrays with x= and y="
    more = ", ..." if len(paths) > _SHOWN else ""
    names = f"it has {', '.join(paths[:_SHOWN]) or 'none'}{more}: name them with x= and y="
    if is_group(member):
        return f"{name!r} of {where} is a group and not an array; {names}"
    return f"{where} has no array {name!r}; {names}"


def _paths(group: Any) -> Iterator[str]:
    """Yield the paths of the arrays of a group, and of groups that stand for one."""
    waiting, looked = [("", group, 0)], 0
    while waiting and looked < _LISTED:
        path, parent, depth = waiting.pop(0)
        for name in sorted(parent.keys()):
            member, looked = parent.get(name), looked + 1
            below = f"{path}/{name}".lstrip("/")
            if hasattr(member, "shape") or stands_for_array(member):
                yield below
            elif is_group(member) and depth < _DEPTH:
                waiting.append((below, member, depth + 1))


def stands_for_array(member: Any) -> bool:
    """Return whether a group is a sparse matrix, codes and categories, or values and a mask."""
    if not is_group(member):
        return False
    return any(all(part in member for part in parts) for parts in (CSR_MEMBERS, *_OTHERS))


def is_group(member: Any) -> bool:
    """Return whether `member` is a group of zarr or h5py."""
    return hasattr(member, "keys") and hasattr(member, "attrs")
