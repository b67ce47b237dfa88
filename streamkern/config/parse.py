"""Values from text: the tables of a run file, bytes, and times."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any, Final

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
_TOML_CHARACTERS = 1 << 24  # a matrix of a metric has some millions
_KEY_PARTS = 32
# The look behind and the possessive + keep the search linear in the text.
_PART = r"""(?:(?<![\w-])[A-Za-z0-9_-]++|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*"""
_LONG_KEY = re.compile(f"(?:{_PART}){{{_KEY_PARTS}}}")
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", re.ASCII)


def _quantity(text: str, units: Mapping[str, float]) -> float:
    match = _QUANTITY.fullmatch(text)
    return float(match[1]) * units.get(match[2].lower(), 0.0) if match else 0.0


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; ValueError also for what would take the parser too much.

    Time and memory of a dotted key grow with the square of its parts, and nesting is recursion.
    """
    if len(text) > _TOML_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, {_TOML_CHARACTERS} are allowed")
    found = _LONG_KEY.search(text)
    if found is not None:
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"line {line} has a key of more than {_KEY_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_bytes(size: str | int, name: str = "size") -> int:
    """Return the bytes in "512 MiB", "1.5GB" or 1000; KiB is 1024 bytes and kB is 1000.

    name : of the parameter, for the message
    """
    n_bytes = int(_quantity(size, BYTE_UNITS)) if isinstance(size, str) else size
    if n_bytes < 1:
        raise ConfigError(
            f"{name}={size!r} must be at least one byte, in bytes or with a unit; "
            'write for example "512 MiB" or "1.5 GB"'
        )
    return n_bytes


def parse_seconds(time: str) -> float:
    """Return the seconds in "30 s", "5 min" or "1.5 h"."""
    seconds = _quantity(time, SECOND_UNITS)
    if not seconds:
        raise ConfigError(
            f'time={time!r} must be a time above 0 with a unit; write for example "30 s" or "5 min"'
        )
    return seconds
