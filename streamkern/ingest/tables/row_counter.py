"""Detect a first column that counts the rows of a table: an index that was saved as a column."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.warning import warn
from streamkern.ingest.tables.cells import RowsInFile

_FEWEST = 10  # rows; a feature hardly counts so many by chance


class RowCounter:
    """Comparison of the first column with the row numbers, counted from 0 or from 1.

    The count may restart with each file.
    """

    def __init__(self) -> None:
        self.counts = True
        self._n_rows, self._shift = 0, 0.0

    def add(self, column: NDArray[Any], rows: RowsInFile) -> None:
        """Add the first column (k,) of the next rows. rows : their numbers in their file."""
        if not (self.counts and len(column)):
            return
        numbers = np.arange(rows, rows + len(column)) if isinstance(rows, int) else rows
        shifts = column - numbers
        allowed = {self._shift} if self._n_rows else set()
        if numbers[0] == 0 or not self._n_rows:
            allowed |= {0, 1, self._n_rows, self._n_rows + 1}
        self.counts = shifts[0] in allowed and bool((shifts == shifts[0]).all())
        self._shift, self._n_rows = shifts[0], self._n_rows + len(column)

    def add_cells(self, column: Any, rows: RowsInFile) -> None:
        """Add a column of an Arrow table, of numbers or text."""
        if not self.counts:
            return
        try:
            self.add(column.cast("int64").to_numpy(), rows)
        except (ValueError, NotImplementedError):  # words, fractions or lists
            self.counts = False

    def tell(self, name: str, where: str) -> None:
        """Warn if the column `name` has counted all rows so far."""
        if self.counts and self._n_rows >= _FEWEST:
            warn(
                f"column {name!r} of {where} counts the rows, as an index does, and is a feature: "
                f"leave it out if it says nothing about the targets, of files with drop={name!r}"
            )
