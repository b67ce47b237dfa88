"""Find whole numbers above 2**53, of which float64 keeps 16 digits only, and warn of them.

They are keys and hashes, as a rule, and two of them may become one number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.optional import need
from streamkern.basics.warning import warn

LARGEST_EXACT = 2**53
_WHOLE = re.compile(r"^\s*[+-]?[0-9]{16,}(\.0*)?\s*$")

_KINDS = (int, np.integer, Decimal)


def array_is_rounded(values: NDArray[Any]) -> bool:
    """Return whether integers in an array are too large for float64 to hold them all."""
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8 or not values.size:
        return False
    return max(int(values.max()), -int(values.min())) > LARGEST_EXACT


def cells_are_rounded(column: Any) -> bool:
    """Return the same of an Arrow column of integers, decimals, or text that is written as them."""
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    types, kind = arrow.types, column.type
    if types.is_string(kind) or types.is_large_string(kind):
        found = column.filter(compute.match_substring_regex(column, _WHOLE.pattern))
        return any(map(text_is_rounded, found.to_pylist()))
    if not ((types.is_integer(kind) and kind.bit_width == 64) or types.is_decimal(kind)):
        return False
    ends = compute.min_max(column).as_py()
    return any(end is not None and abs(end) > LARGEST_EXACT for end in ends.values())


def text_is_rounded(text: str) -> bool:
    """Return whether text is written as a whole number that is too large for float64."""
    return (
        len(text) > 15
        and bool(_WHOLE.match(text))
        and abs(int(text.partition(".")[0])) > LARGEST_EXACT
    )


def objects_are_rounded(objects: Any, numbers: NDArray[np.float64]) -> bool:
    """Return whether whole numbers became these rounded ones.

    objects : a list or an array of integers of Python, decimals or text, among others.
    """
    with np.errstate(invalid="ignore"):
        large = np.abs(numbers) >= LARGEST_EXACT
    if not large.any():
        return False
    cells = np.asarray(objects, object)
    return cells.shape == large.shape and any(
        text_is_rounded(cell)
        if isinstance(cell, str)
        else isinstance(cell, _KINDS) and abs(int(cell)) > LARGEST_EXACT
        for cell in cells[large].tolist()
    )


class KeyWatch:
    """Warn once of each column of text whose whole numbers float64 rounds.

    A column with a point or an exponent in a cell holds measurements, and is looked at no more.
    """

    def __init__(self) -> None:
        self._settled: set[str] = set()  # names of columns

    def look(
        self, X: NDArray[np.float64], columns: Sequence[tuple[str, str]], texts: Callable[[], Any]
    ) -> None:
        """Look at the columns of X with large numbers.

        columns : for each column of X its name in the table that `texts` makes, and that for users
        texts : returns an Arrow table of the text; called only where it is needed
        """
        if max(X.max(initial=0), -X.min(initial=0)) < LARGEST_EXACT:
            return
        asked = [
            names
            for names, numbers in zip(columns, X.T, strict=True)
            if names[1] not in self._settled and np.abs(numbers).max() >= LARGEST_EXACT
        ]
        if not asked:
            return
        table = texts()
        for own, name in asked:
            column = table.column(own)
            if cells_are_rounded(column):
                self._tell(name)
            elif need("pyarrow.compute").any(_has_fraction(column)).as_py():
                self._settled.add(name)

    def look_at(self, name: str, cell: str) -> None:
        """Look at one cell of a column."""
        if name not in self._settled and text_is_rounded(cell):
            self._tell(name)

    def _tell(self, name: str) -> None:
        self._settled.add(name)
        warn_of_rounded(f"column {name!r}")


def _has_fraction(column: Any) -> Any:
    """Return which cells of an Arrow column of text have a point or an exponent."""
    return need("pyarrow.compute").match_substring_regex(column, "[.,eE]")


def warn_of_rounded(what: str) -> None:
    """Warn of whole numbers that are rounded. what : "column 'id'", for example."""
    warn(
        f"{what} holds whole numbers above 2**53, which are rounded to 16 digits; leave it out if "
        "they are keys"
    )
