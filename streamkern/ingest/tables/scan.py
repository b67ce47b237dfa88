"""Infer the kind of a column of a table from its cells, in bounded memory.

Parquet files and data frames declare the types of their columns. The columns of a CSV are text, and
all of their cells decide: numbers if all are numbers, dates if all are dates (ISO 8601), otherwise
words. An ambiguous column is refused, with the option that resolves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamkern.ingest.tables import cells
from streamkern.ingest.tables.arrow import (
    column_kind,
    is_list_type,
    is_text_type,
    match_mask,
    plain_cells,
    value_mask,
)
from streamkern.ingest.tables.cells import PADDED, RowsInFile, WrongCellError, row_number
from streamkern.ingest.tables.key_columns import (
    MAX_EXACT,
    cells_are_rounded,
    warn_of_rounded_integers,
)
from streamkern.ingest.tables.numbers import are_codes, is_number
from streamkern.ingest.tables.words import DistinctCounter, Words
from streamkern.store.statistics import ColumnMoments

_SUMMED_ROWS = 1 << 13  # numbers summed at once
_MIN_SHARE_OF_CODES = 0.1  # of the cells and texts of a column of integers and codes
_MAX_EXAMPLE_WORDS = 1000  # words of a column that are checked for numbers in another notation
COLUMN_KINDS = ("number", "category", "date")
FirstCell = tuple[int, str] | None
"""Row number and text of the first cell of a sort; None before there is one."""


class ColumnDeclarations(NamedTuple):
    """Declarations of the user about columns, by name.

    categorical : names of columns that are words
    numeric : names of columns that are numbers
    dates : name -> strptime format, or None for ISO 8601
    dropped_columns : names of columns that are not features
    """

    categorical: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()
    dates: Mapping[str, str | None] = MappingProxyType({})
    dropped_columns: tuple[str, ...] = ()

    def kind(self, name: str) -> str | None:
        """Return the declared kind of a column; None if it has none."""
        if name in self.categorical:
            return "category"
        return "number" if name in self.numeric else "date" if name in self.dates else None


class Column:
    """Statistics and counts of the cells of one column seen so far, and the kind that they imply.

    Parameters
    ----------
    name : name of the column
    arrow_type : type of the column, text for a CSV
    declared : the user's declarations
    n_targets : number of targets of which `words` has sums
    has_types : whether the table declares types, so that text is never a number
    is_mixed : whether an earlier pass found numbers and words in the column, so that `words` counts
        the numbers, too

    Attributes
    ----------
    kind : "number", "category" or "date"; None if the cells decide
    has_scalars : whether a cell is a single value, not a list or another nested value
    zoned : whether dates have a time zone; None if unknown
    min_value : smallest number, or day
    max_value : largest number, or day
    has_fractions : whether a value is not an integer (a date with a time)
    n_rows : number of cells
    n_missing : number of cells without a value
    words : the words of the column; None if it cannot be a category
    """

    def __init__(
        self,
        name: str,
        arrow_type: Any,
        declared: ColumnDeclarations,
        n_targets: int,
        has_types: bool = False,
        is_mixed: bool = False,
    ) -> None:
        self.name, self.date_format = name, declared.dates.get(name)
        self.is_mixed = is_mixed
        self.declared_kind = declared.kind(name)
        kind = column_kind(arrow_type)
        self.type_kind = kind if kind in COLUMN_KINDS else None
        self.has_scalars, self.arrow_type = kind is not None, str(arrow_type)
        self.has_number_lists = (
            is_list_type(arrow_type) and column_kind(arrow_type.value_type) == "number"
        )
        self.is_declared_text = has_types and is_text_type(arrow_type)
        self.kind = self.declared_kind or self.type_kind  # None: the cells decide
        self._moments, self._values_to_sum = ColumnMoments(1), np.empty(0)
        self.zoned: bool | None = None
        self.first_wrong_date: tuple[int, str, str] | None = None
        self._n_ones = self._n_zeros = 0
        self.min_value = np.inf
        self.max_value = -np.inf
        self.has_fractions = False
        self.n_rows = self.n_missing = 0
        self.words = Words(n_targets) if self.kind in (None, "category") else None
        # In a column of text: the number of cells that are numbers or dates, and the first of each.
        self.n_numbers = self.n_dates = 0
        self.first_number: FirstCell = None
        self.first_word: FirstCell = None
        self.first_date: FirstCell = None
        self.first_not_a_date: FirstCell = None
        self.first_padded_number: FirstCell = None
        self._warned_of_rounding = False
        # In a column of numbers and words:
        self._different_numbers, self._different_words = DistinctCounter(), DistinctCounter()
        self._has_integers_only = True
        self.example_words: dict[str, None] = {}  # the first few, even if not all words are kept

    def add(
        self, column: Any, start: RowsInFile, folds: NDArray[np.int64], T: NDArray[np.float64]
    ) -> None:
        """Add cells; raise WrongCellError for a cell that does not fit the kind of the column.

        column : Arrow column of k cells
        start : row numbers of the cells within the file, see `row_number`
        folds : (k,) fold of each row
        T : (k, t) targets of each row
        """
        column = plain_cells(column)
        valid, kind = value_mask(column), column_kind(column.type)
        if self.kind is None and kind in COLUMN_KINDS and self.n_values == 0:
            self.kind = kind  # after files in which all cells were missing
        self.n_rows += len(valid)
        self.n_missing += int((~valid).sum())
        if kind is None and valid.any():
            row = int(np.argmax(valid))
            raise WrongCellError(row, str(column[row]), f"is {column.type}, and no cell of a table")
        if self.kind == "number":
            self._measure_numbers(column)
        elif self.kind == "date":
            self._measure_days(column)
        else:
            if self.kind is None and valid.any():
                self._classify_text(column, valid, start)
            assert self.words is not None
            # Numbers are counted as words in the second pass only: most columns of numbers have no
            # words, and counting their values would be slow.
            if self.first_number is None or self.is_mixed:
                texts, codes = cells.as_words(column)
                if self.kind is None:
                    self._add_examples(texts)
                self.words.add(texts, codes, folds, T)

    def _add_examples(self, texts: list[str]) -> None:
        """Keep some of the words, and count the numbers and the words of a mixed column."""
        words = texts
        if self.is_mixed:
            numbers = [text for text in texts if is_number(text)]
            words = [text for text in texts if not is_number(text)]
            self._different_numbers.add(numbers)
            self._different_words.add(words)
            self._has_integers_only &= all(map(str.isdigit, numbers))
        if len(self.example_words) < _MAX_EXAMPLE_WORDS:
            examples = self.example_words | dict.fromkeys(words)
            self.example_words = dict.fromkeys(islice(examples, _MAX_EXAMPLE_WORDS))

    def _measure_numbers(self, column: Any) -> None:
        """Measure cells that are numbers, and warn once of integers that float64 rounds."""
        self._measure(cells.as_numbers(column))
        is_large = max(self.max_value, -self.min_value) >= MAX_EXACT
        if is_large and not self._warned_of_rounding and cells_are_rounded(column):
            self._warned_of_rounding = True
            warn_of_rounded_integers(f"column {self.name!r}")

    def _classify_text(self, column: Any, valid: NDArray[np.bool_], start: RowsInFile) -> None:
        """Count the cells of text that are numbers, and dates if there are no numbers."""
        text = is_text_type(column.type)  # false: a typed file after one of text
        is_number = column_kind(column.type) == "number"
        numbers = match_mask(column, cells.NUMBER) if text else valid & is_number
        words = valid & ~numbers
        self.n_numbers += int(numbers.sum())
        self.first_number = self.first_number or _first_cell(column, numbers, start)
        self.first_word = self.first_word or _first_cell(column, words, start)
        if text and self.first_padded_number is None:
            self.first_padded_number = _first_cell(column, match_mask(column, PADDED), start)
        if self.first_word is None:
            self._measure_numbers(column)
        elif self.n_numbers == 0 and words.any():
            self._classify_dates(column, words, start)

    def _classify_dates(self, column: Any, words: NDArray[np.bool_], start: RowsInFile) -> None:
        """Count the cells that are dates, and measure them while all cells are dates."""
        dates = cells.are_dates(column) if is_text_type(column.type) else words
        self.n_dates += int(dates.sum())
        self.first_date = self.first_date or _first_cell(column, dates, start)
        self.first_not_a_date = self.first_not_a_date or _first_cell(column, words & ~dates, start)
        if self.first_not_a_date is not None or self.first_wrong_date is not None:
            return
        try:
            self._measure_days(column)
        except WrongCellError as error:
            row = row_number(start, error.row)
            self.first_wrong_date = row, error.text, error.reason or "is none"

    def _measure_days(self, column: Any) -> None:
        """Measure cells that are dates; raise WrongCellError for any other cell."""
        days = cells.as_days(column, self.date_format)
        cells.check_zone(column, self.date_format, self.zoned)
        is_zoned = cells.is_zoned(column, self.date_format)
        self.zoned = self.zoned if is_zoned is None else is_zoned
        self._measure(days)

    def _measure(self, values: NDArray[np.float64]) -> None:
        """Add numbers or days (k,), NaN if missing; raise WrongCellError for infinity."""
        if np.isinf(values).any():
            row = int(np.argmax(np.isinf(values)))
            raise WrongCellError(row, str(values[row]))
        values = values[~np.isnan(values)]
        if len(values):
            self.min_value = min(self.min_value, float(values.min()))
            self.max_value = max(self.max_value, float(values.max()))
            self.has_fractions = self.has_fractions or bool((values % 1 != 0).any())
            self._n_ones += int((values == 1).sum())
            self._n_zeros += int((values == 0).sum())
        # Summed in pieces of fixed length, so that the result does not depend on the block size.
        self._values_to_sum = np.concatenate([self._values_to_sum, values])
        complete = len(self._values_to_sum) - len(self._values_to_sum) % _SUMMED_ROWS
        for start in range(0, complete, _SUMMED_ROWS):
            self._moments.add(self._values_to_sum[start : start + _SUMMED_ROWS, None])
        self._values_to_sum = self._values_to_sum[complete:]

    def moments(self) -> tuple[float, float]:
        """Return mean and standard deviation of the numbers or days, after the last cell."""
        if self.is_boolean:
            assert self.words is not None
            ones = sum(
                self.words.sums()[index, :, 0].sum()
                for text, index in self.words.index_of.items()
                if cells.BOOLEAN_WORDS[text.lower()]
            )
            return _bernoulli_moments(float(ones / self.n_values))
        if self._n_ones + self._n_zeros == self.n_values:  # the same bits as for words
            return _bernoulli_moments(self._n_ones / self.n_values)
        self._moments.add(self._values_to_sum[:, None])
        self._values_to_sum = self._values_to_sum[:0]
        return float(self._moments.mean[0]), float(np.sqrt(self._moments.variance()[0]))

    # ------------------------------------------------------------------ after the last cell

    @property
    def n_values(self) -> int:
        """Number of cells with a value."""
        return self.n_rows - self.n_missing

    @property
    def is_boolean(self) -> bool:
        """True if all cells are the words "true" and "false", in any case."""
        words = self.words
        return (
            self.kind is None and words is not None and bool(words.index_of)
            and self.n_numbers == 0
            and {text.lower() for text in words.index_of} <= set(cells.BOOLEAN_WORDS)
        )  # fmt: skip

    def infer_kind(self) -> str:
        """Return the kind: "number", "category", "date", or "empty" without any value."""
        if self.n_values == 0:
            return "empty"
        if self.kind is not None:
            return self.kind
        if self.n_numbers == self.n_values or self.is_boolean:
            return "number"
        dates = self.n_dates == self.n_values and self.first_wrong_date is None
        return "date" if dates else "category"

    @property
    def has_numbers_and_words(self) -> bool:
        """True if an undeclared column of text has numbers and words that are not true or false."""
        return self.kind is None and self.first_number is not None and self.first_word is not None

    def consists_of_codes(self) -> bool:
        """Return whether the numbers of a mixed column are codes, as its words are.

        They are if there are more different words than different numbers ("4", "f" and "r"), or if
        the numbers are integers, and a tenth of the cells and of their different texts are words
        that are codes, too ("PC 17599" and "113803"). Otherwise the words may stand for missing
        values ("unknown", "error 3"), or be misspelt numbers.
        """
        n_words, n_numbers = self._different_words.count(), self._different_numbers.count()
        if n_words > n_numbers:
            return True
        are_frequent = (
            n_words >= _MIN_SHARE_OF_CODES * (n_words + n_numbers)
            and self.n_values - self.n_numbers >= _MIN_SHARE_OF_CODES * self.n_values
        )
        return are_frequent and self._has_integers_only and are_codes(list(self.example_words))

    def says_little(self, most_one_hot: int) -> bool:
        """Return whether hardly any word of an undeclared column of text repeats.

        most_one_hot : number of different words that is accepted however few the rows are
        """
        if self.kind is not None or self.words is None:
            return False
        return self.words.n_words > max(most_one_hot, self.words.n_seen / 2)


def _first_cell(column: Any, mask: NDArray[np.bool_], start: RowsInFile) -> FirstCell:
    """Return the first cell of a mask (k,); None if the mask is empty."""
    if not mask.any():
        return None
    row = int(np.argmax(mask))
    return row_number(start, row), str(column[row])


def _bernoulli_moments(share: float) -> tuple[float, float]:
    """Return mean and standard deviation of zeros and ones. share : the share of ones."""
    return share, float(np.sqrt(share * (1 - share)))
