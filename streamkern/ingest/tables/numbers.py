"""Text that is a number, as every CSV has it: of ASCII, without underscores."""

from __future__ import annotations

import re
from collections.abc import Iterable

_INTEGER = re.compile(r"[+-]?[0-9]+\Z")
_PADDED = re.compile(r"\s*0[0-9]")


def numbers(cells: Iterable[str]) -> list[float]:
    """As pyarrow reads them: float() also takes 1_000, and the digits of other scripts.

    Raises ValueError for what is none.
    """
    cells = list(cells)
    text = "".join(cells)
    if "_" in text or not text.isascii():
        raise ValueError(next(k for k in cells if "_" in k or not k.isascii()))
    return list(map(float, cells))


def is_number(text: str) -> bool:
    """Whether it is one; so are "nan" and "inf"."""
    try:
        numbers([text])
    except ValueError:
        return False
    return True


def is_integer(text: str) -> bool:
    """Whether it is written as one."""
    return _INTEGER.match(text) is not None


def is_padded(text: str) -> bool:
    """Return whether a number has zeros before it that it does not need, as codes do."""
    return "0" in text and _PADDED.match(text) is not None
