"""Read numbers and text from the attributes of arrays, in the spellings of all formats."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np


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


def _of_base64(text: str) -> float:
    """Return a float as xarray writes it to Zarr v3."""
    try:
        (number,) = struct.unpack("<d", base64.b64decode(text, validate=True))
    except struct.error as error:
        raise ValueError(text) from error
    return float(number)


_READ: tuple[Callable[[str], Any], ...] = (int, float, _of_base64)


def as_stored(number: Any, dtype: np.dtype[Any], *, wraps: bool) -> Any:
    """Return a number in a dtype; None if the dtype cannot hold it."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return dtype.type(number)
    if not math.isfinite(number) or number != int(number):
        return None
    whole = int(number)
    if dtype.kind == "b":
        return bool(whole) if whole in (0, 1) else None
    info = np.iinfo(dtype)
    if wraps and not info.min <= whole <= info.max:
        whole = (whole - info.min) % 2 ** (8 * dtype.itemsize) + info.min
    return dtype.type(whole) if info.min <= whole <= info.max else None
