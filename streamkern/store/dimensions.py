"""Compare the names of dimensions: rows of X, targets and weights must share one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamkern.basics.errors import DataError
from streamkern.store.packing import XARRAY_DIMENSIONS


def dimensions_of(array: Any) -> tuple[str, ...] | None:
    """Return the names of the dimensions of an array of xarray, Zarr, h5py or SciPy's NetCDF.

    None if they have no names.
    """
    attributes = getattr(array, "attrs", None)
    found: Any = getattr(getattr(array, "metadata", None), "dimension_names", None)
    if found is None and isinstance(attributes, Mapping) and XARRAY_DIMENSIONS in attributes:
        found = attributes[XARRAY_DIMENSIONS]
    if found is None:
        found = getattr(array, "dimensions", None) or getattr(array, "dims", None)
    if found is None or isinstance(found, str):
        return None
    names = tuple(_name(name) for name in found)
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
    own = dimensions_of(X)
    for name, array in others:
        theirs = None if array is None else dimensions_of(array)
        if own is None or theirs is None or theirs[0] == own[0] or theirs[0] not in own[1:]:
            continue
        raise DataError(
            f"{name} runs along the dimension {theirs[0]!r}, and the rows of X along {own[0]!r} "
            f"(X has {', '.join(own)}); write X with {theirs[0]!r} first, as "
            f"X.transpose({theirs[0]!r}, ...) of xarray does"
        )
