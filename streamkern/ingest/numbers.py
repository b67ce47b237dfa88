"""Text that is a number, as every CSV has it: of ASCII, without underscores."""

from __future__ import annotations

import re
from collections.abc import Sequence

_INTEGER = re.compile(r"[+-]?[0-9]+\Z")


def numbers(cells: Sequence[str]) -> list[float]:
    """As pyarrow reads them: float() also takes 1_000, and the digits of other scripts.

    Raises ValueError for what is none.
    """
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
