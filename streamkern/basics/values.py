"""Convert, check and parse values of settings, and parse and digest JSON."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from operator import index
from typing import Any, Final, NoReturn, TypeGuard

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


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite real number of Python or NumPy, but not a boolean."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond float64
        return False


def is_whole_number(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or NumPy, but not a boolean."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def checked_int(name: str, value: Any, minimum: int = 1) -> int:
    """Return `value` as an int; raise ConfigError unless it is a whole number >= `minimum`.

    Accepts the integers of Python and NumPy, but no booleans, which Python counts as 0 and 1.
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or number < minimum:
        # `repr` shows that 2.0 is a float.
        setting = mention(f"{name}={value!r}") if isinstance(value, float) else mention(name, value)
        raise ConfigError(
            f"{setting} must be a whole number, at least {minimum}",
            "correct it, or leave it out for the default",
        )
    return number


def checked_number(name: str, value: Any) -> float:
    """Return a number of at least 0, infinity included, as a float; ConfigError for others."""
    value = to_builtin(value)
    if not (is_finite_number(value) or value == math.inf) or value < 0:
        raise ConfigError(
            f"{mention(name, value)} must be a number, 0 or above",
            "correct it, or leave it out for the default",
        )
    return float(value)


def checked_list(name: str, value: Any) -> tuple[Any, ...]:
    """Return a list as a tuple. Raises ConfigError for a string, a mapping or a single object."""
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        raise ConfigError(f"{mention(name, value)} must be a list", "put it into brackets: [...]")
    return tuple(value)


def parse_json(data: bytes | bytearray | memoryview, *, finite: bool = False) -> Any:
    """Parse JSON. Raises ValueError with the reason if the bytes are not JSON.

    finite : whether to refuse NaN and infinity, which some programs write although JSON has neither
    """
    try:
        return json.loads(bytes(data), parse_constant=_refuse_constant if finite else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}, which is not JSON")


def json_digest(value: object, *tail: bytes) -> str:
    """Return the SHA-256 of JSON values, as text with sorted keys and no spaces, then of `tail`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"\n".join([text.encode(), *tail])).hexdigest()


# Bytes per unit, in lower case: powers of 1000 for "k" and "kb", of 1024 for "kib".
BYTE_UNITS: Final = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((letter, 1000), (f"{letter}b", 1000), (f"{letter}ib", 1024))
}
# Seconds per unit, in lower case.
SECOND_UNITS: Final = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)(e\+?\d{1,2})?\s*([a-zA-Z]*)\s*", re.ASCII | re.I)


def _quantity(text: str, units: Mapping[str, float]) -> float | None:
    """Return a number with a unit in the base unit; None if the text is not such a quantity."""
    match = _QUANTITY.fullmatch(text)
    scale = units.get(match[3].lower()) if match else None
    if match is None or scale is None:
        return None
    return float(match[1] + (match[2] or "")) * scale


def parse_bytes(size: Any, name: str = "size") -> int:
    """Return the bytes in "512 MiB", "1.5GB", 1000 or 1e9; KiB is 1024 bytes and kB is 1000.

    name : name of the parameter, for the message

    Raises ConfigError unless the size is a number of bytes from 1 to 2^63 - 1.
    """
    is_number = isinstance(size, Real) and not isinstance(size, bool)
    n_bytes = size if is_number else None
    if isinstance(size, str):
        n_bytes = _quantity(size, BYTE_UNITS)
    if n_bytes is None or not 1 <= n_bytes < 2**63:
        raise ConfigError(
            f"{mention(name, size)} must be at least one byte, in bytes or with a unit",
            'write for example "512 MiB" or "1.5 GB"',
        )
    return int(n_bytes)


def parse_seconds(time: str) -> float:
    """Return the seconds in "30 s", "5 min" or "1.5 h"; ConfigError for other text."""
    seconds = _quantity(time, SECOND_UNITS)
    if not seconds:
        raise ConfigError(
            f"time={time!r} must be a time above 0 with a unit",
            'write for example "30 s" or "5 min"',
        )
    return seconds
