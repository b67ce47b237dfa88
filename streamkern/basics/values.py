"""Values of settings and JSON: Python's own numbers, sizes, times, parsing and digests."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from numbers import Real
from operator import index
from typing import Any, Final, NoReturn

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention


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
        shown = mention(f"{name}={value!r}") if isinstance(value, float) else mention(name, value)
        raise ConfigError(f"{shown} must be a whole number, at least {least}")
    return number


def checked_list(name: str, value: Any) -> tuple[Any, ...]:
    """Return a list of objects as a tuple. Raises ConfigError for an object that is not a list."""
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        raise ConfigError(f"{mention(name, value)} must be a list", "give [it]")
    return tuple(value)


def parsed_json(data: bytes | bytearray | memoryview, *, finite: bool = False) -> Any:
    """Parse JSON. Raises ValueError with the reason if the bytes are not JSON.

    finite : refuse NaN and infinity, which are not JSON, although some programs write them
    """
    try:
        return json.loads(bytes(data), parse_constant=_refuse if finite else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is not JSON")


def json_digest(value: object, *tail: bytes) -> str:
    """Return the SHA-256 of JSON values, as sorted text without white space, and of other bytes."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"\n".join([text.encode(), *tail])).hexdigest()


BYTE_UNITS: Final = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((letter, 1000), (f"{letter}b", 1000), (f"{letter}ib", 1024))
}
SECOND_UNITS: Final = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)(e\+?\d{1,2})?\s*([a-zA-Z]*)\s*", re.ASCII | re.I)


def _quantity(text: str, units: Mapping[str, float]) -> float:
    match = _QUANTITY.fullmatch(text)
    return float(match[1] + (match[2] or "")) * units.get(match[3].lower(), 0.0) if match else 0.0


def parse_bytes(size: Any, name: str = "size") -> int:
    """Return the bytes in "512 MiB", "1.5GB", 1000 or 1e9; KiB is 1024 bytes and kB is 1000.

    name : name of the parameter, for the message
    """
    number = isinstance(size, Real) and not isinstance(size, bool)
    n_bytes = _quantity(size, BYTE_UNITS) if isinstance(size, str) else size if number else 0
    if not 1 <= n_bytes < 2**63:
        raise ConfigError(
            f"{mention(name, size)} must be at least one byte, in bytes or with a unit",
            'write for example "512 MiB" or "1.5 GB"',
        )
    return int(n_bytes)


def parse_seconds(time: str) -> float:
    """Return the seconds in "30 s", "5 min" or "1.5 h"."""
    seconds = _quantity(time, SECOND_UNITS)
    if not seconds:
        raise ConfigError(
            f"time={time!r} must be a time above 0 with a unit",
            'write for example "30 s" or "5 min"',
        )
    return seconds
