"""Parse text as numbers, as in CSV files: ASCII only, without underscores."""

from __future__ import annotations

import re
from collections.abc import Iterable

_INTEGER = re.compile(r"[+-]?[0-9]+\Z")
_PADDED = re.compile(r"\s*0[0-9]")


def numbers(cells: Iterable[str]) -> list[float]:
    """Parse numbers as pyarrow does; float() alone would take 1_000 and digits of other scripts.

    Raises ValueError if a cell is not a number.
    """
    cells = list(cells)
    text = "".join(cells)
    if "_" in text or not text.isascii():
        raise ValueError(next(k for k in cells if "_" in k or not k.isascii()))
    return list(map(float, cells))


def is_number(text: str) -> bool:
    """Return whether text is a number; "nan" and "inf" are."""
    try:
        numbers([text])
    except ValueError:
        return False
    return True


def is_integer(text: str) -> bool:
    """Return whether text is an integer."""
    return _INTEGER.match(text) is not None


def is_padded(text: str) -> bool:
    """Return whether a number has unnecessary leading zeros, as codes do."""
    return "0" in text and _PADDED.match(text) is not None
