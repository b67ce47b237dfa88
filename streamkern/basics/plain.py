"""NumPy's numbers as Python's own, which JSON and settings take."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

from streamkern.basics.errors import ConfigError


def to_builtin(value: Any) -> Any:
    """`value` with NumPy's scalars and arrays as Python's numbers and lists, also inside of lists,
    tuples and tables; anything else as it is."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {to_builtin(key): to_builtin(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_builtin, value))
    return value


def checked_int(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int. Raises ConfigError unless it is a whole number of Python's or NumPy's, at
    least `least`."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(f"{name}={value} must be a whole number, at least {least}")
    return number
