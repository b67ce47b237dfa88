"""Find columns that are keys rather than features.

Integers above 2**53 are usually keys or hashes: float64 rounds them to 16 digits, and may make two
of them equal. A column may also be an index of the rows that was saved with the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.message import mention
from streamkern.basics.warning import warn
from streamkern.ingest.tables.arrow import compute, is_of_kind
from streamkern.ingest.tables.cells import RowsInFile

MAX_EXACT = 2**53
"""Largest integer up to which float64 represents every integer."""
_LONG_INTEGER = re.compile(r"^\s*[+-]?[0-9]{16,}(\.0*)?\s*$")

_INTEGER_TYPES = (int, np.integer, Decimal)


def array_is_rounded(values: NDArray[Any]) -> bool:
    """Return whether an array holds integers that are too large to be exact in float64."""
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8 or not values.size:
        return False
    return max(int(values.max()), -int(values.min())) > MAX_EXACT


def cells_are_rounded(column: Any) -> bool:
    """Return whether an Arrow column of integers, decimals or text holds integers above 2**53.

    Of decimals, fractions that are so large count as well. Columns of other types do not hold any.
    """
    if is_of_kind(column.type, "string", "large_string"):
        long_texts = column.filter(compute.match_substring_regex(column, _LONG_INTEGER.pattern))
        return any(map(text_is_rounded, long_texts.to_pylist()))
    is_long = is_of_kind(column.type, "integer") and column.type.bit_width == 64
    if not is_long and not is_of_kind(column.type, "decimal"):
        return False
    ends = compute.min_max(column).as_py()
    return any(end is not None and abs(end) > MAX_EXACT for end in ends.values())


def text_is_rounded(text: str) -> bool:
    """Return whether text is an integer that is too large to be exact in float64."""
    return (
        len(text) > 15
        and bool(_LONG_INTEGER.match(text))
        and abs(int(text.partition(".")[0])) > MAX_EXACT
    )


def objects_are_rounded(objects: Any, numbers: NDArray[np.float64]) -> bool:
    """Return whether integers in `objects` were rounded when converted to `numbers`.

    objects : a list or an array that may hold Python integers, decimals or text
    """
    with np.errstate(invalid="ignore"):
        large = np.abs(numbers) >= MAX_EXACT
    if not large.any():
        return False
    cells = np.asarray(objects, object)
    return cells.shape == large.shape and any(
        text_is_rounded(cell)
        if isinstance(cell, str)
        else isinstance(cell, _INTEGER_TYPES) and abs(int(cell)) > MAX_EXACT
        for cell in cells[large].tolist()
    )


class RoundingWarnings:
    """Warnings, once for each column of text, of integers that float64 rounds.

    A column with a decimal point or an exponent in a cell holds measurements and is not checked
    again.
    """

    def __init__(self) -> None:
        self._checked_names: set[str] = set()  # names of columns

    def check(
        self, X: NDArray[np.float64], columns: Sequence[tuple[str, str]], texts: Callable[[], Any]
    ) -> None:
        """Check the columns of X that hold large numbers.

        columns : for each column of X, its name in the table that `texts` returns and its
            displayed name
        texts : returns the cells as an Arrow table of text; called only if needed
        """
        if max(X.max(initial=0), -X.min(initial=0)) < MAX_EXACT:
            return
        table = None
        for (key, name), numbers in zip(columns, X.T, strict=True):
            if name in self._checked_names or np.abs(numbers).max() < MAX_EXACT:
                continue
            table = texts() if table is None else table
            column = table.column(key)
            if cells_are_rounded(column):
                self._warn(name)
            elif compute.any(compute.match_substring_regex(column, "[.,eE]")).as_py():
                self._checked_names.add(name)

    def check_cell(self, name: str, cell: str) -> None:
        """Check one cell of a column."""
        if name not in self._checked_names and text_is_rounded(cell):
            self._warn(name)

    def _warn(self, name: str) -> None:
        self._checked_names.add(name)
        warn_of_rounded_integers(f"column {name!r}")


def warn_of_rounded_columns(columns: Iterable[tuple[Any, Any]]) -> None:
    """Warn of each column, given by name and values, of integers that float64 rounds."""
    for name, values in columns:
        if array_is_rounded(np.asarray(values)):
            warn_of_rounded_integers(f"column {name!r}")


def warn_of_rounded_integers(name: str) -> None:
    """Warn of integers that float64 rounds. name : of their column or file, as in "column 'id'"."""
    warn(
        f"{name} holds whole numbers above 2**53, which are rounded to 16 digits; leave it out if "
        "they are keys"
    )


_INDEX_NAME = re.compile(r"(Unnamed: [0-9]+(\.[0-9]+)*)?")  # as pandas writes and rereads it
_MIN_INDEX_ROWS = 10  # a feature seldom equals so many row numbers by chance


class IndexDetector:
    """Detects a first column that equals the row numbers, counted from 0 or from 1.

    The count may restart with each file.

    Attributes
    ----------
    matches_rows : whether the column has matched all rows so far
    """

    def __init__(self) -> None:
        self.matches_rows = True
        self._n_rows, self._offset = 0, 0.0

    def add(self, column: NDArray[Any], rows: RowsInFile) -> None:
        """Add the first column (k,) of the next rows. rows : row numbers within their file."""
        if not (self.matches_rows and len(column)):
            return
        numbers = np.arange(rows, rows + len(column)) if isinstance(rows, int) else rows
        offsets = column - numbers
        # The count goes on as before; in a new file it may also restart, or count over all files.
        allowed = {self._offset} if self._n_rows else set()
        if numbers[0] == 0 or not self._n_rows:
            allowed |= {0, 1, self._n_rows, self._n_rows + 1}
        self.matches_rows = offsets[0] in allowed and bool((offsets == offsets[0]).all())
        self._offset, self._n_rows = offsets[0], self._n_rows + len(column)

    def add_cells(self, column: Any, rows: RowsInFile) -> None:
        """Add a column of an Arrow table, of numbers or text."""
        if not self.matches_rows:
            return
        try:
            self.add(column.cast("int64").to_numpy(), rows)
        except (ValueError, NotImplementedError):  # words, fractions or lists
            self.matches_rows = False

    def warn_if_index(self, name: str, location: str) -> None:
        """Warn if the column has matched all rows. name, location : its name and file."""
        if self.matches_rows and self._n_rows >= _MIN_INDEX_ROWS:
            warn(
                f"column {name!r} of {location} counts the rows, like an index, but is used as a "
                "feature; if it has nothing to do with the targets, leave it out, for files "
                f"with {mention('drop', name)}"
            )


def index_columns(names: Sequence[str], is_whole: Callable[[str], bool]) -> list[str]:
    """Return the first columns that are a pandas index: integers without a name.

    At least one column is never an index.

    is_whole : returns whether a column holds integers
    """
    index: list[str] = []
    for name in names[:-1]:
        if not (_INDEX_NAME.fullmatch(str(name)) and is_whole(name)):
            break
        index.append(name)
    return index


def warn_of_index(name: str, location: str) -> None:
    """Warn that a column is left out because it numbers or names the rows."""
    if name:
        reason = (
            f"column {name!r} of {location} holds whole numbers, as an index written by pandas does"
        )
    else:
        reason = (
            f"the first column of {location} has no name and numbers or names the rows, as an "
            "index of pandas and row names of R do"
        )
    warn(f"{reason}; it is left out: give it a name of its own if it is a feature")
