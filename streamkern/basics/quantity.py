"""Parse sizes in bytes and times, as settings, options and arguments give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from streamkern.basics.errors import ConfigError

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
    number = isinstance(size, int | float | np.integer | np.floating) and not isinstance(size, bool)
    n_bytes = _quantity(size, BYTE_UNITS) if isinstance(size, str) else size if number else 0
    if not 1 <= n_bytes < 2**63:
        raise ConfigError(
            f"{name}={size!r} must be at least one byte, in bytes or with a unit; "
            'write for example "512 MiB" or "1.5 GB"'
        )
    return int(n_bytes)


def parse_seconds(time: str) -> float:
    """Return the seconds in "30 s", "5 min" or "1.5 h"."""
    seconds = _quantity(time, SECOND_UNITS)
    if not seconds:
        raise ConfigError(
            f'time={time!r} must be a time above 0 with a unit; write for example "30 s" or "5 min"'
        )
    return seconds
