"""Conversion of NumPy's numbers to Python's own, as JSON and settings require."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

from streamkern.basics.errors import ConfigError


def to_builtin(value: Any) -> Any:
    """Convert NumPy scalars and arrays to Python numbers and lists.

    Values in lists, tuples and mappings are converted as well; anything else is returned unchanged.
    """
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {to_builtin(key): to_builtin(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_builtin, value))
    return value


def checked_int(name: str, value: Any, least: int = 1) -> int:
    """Return `value` as an int. Raises ConfigError unless it is a whole number of at least `least`.

    Accepts the integers of Python and NumPy.
    """
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(f"{name}={value} must be a whole number, at least {least}")
    return number
