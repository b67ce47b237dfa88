"""Decide whether the first line of a CSV names the columns or is the first row.

A line of words is a header unless its words occur again below it. A line of numbers is a row unless
a row like it is very improbable, given the rows below it: pandas writes 0,1,2,... above columns
without names, and pivoted tables have years. An ambiguous line is refused, and the error names the
options that decide.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import compress, pairwise

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.basics.warning import warn
from streamkern.ingest.tables.cells import MISSING
from streamkern.ingest.tables.numbers import NumberStyle, is_integer, is_number, other_notation

UNKNOWN_CELLS = {*MISSING, "?", "-", "."}
"""Cells that give no information about the content of a column."""
CsvRows = Sequence[Sequence[str]]
_EXAMINED_ROWS = 200
_LOG10_CERTAIN, _LOG10_LIKELY = math.log10(1e-4), math.log10(0.05)
"""Bounds of log10 P, the probability that a row is like the first line. Below the first bound the
line is a header; between the two it is refused as ambiguous."""
_MAX_LOG10_PER_COLUMN = 6.0  # largest |log10 P| of one column
_YEARS = range(1000, 3000)
_MIN_FEWER_DIGITS = 4  # of a name than of the numbers below it, to count as another notation
_MIN_INTEGER_CELLS = 4  # a column with fractions seldom begins with so many integers
_MIN_SERIES_COLUMNS = 4
"""Number of columns over which integers seldom increase by chance, and numbers with fractions, or
years, seldom have a constant step."""
_MIN_LONG_SERIES_COLUMNS = 8
"""Number of columns over which numbers with fractions seldom increase by chance, and integers
seldom have a constant step."""


def informative_cells(rows: CsvRows, n_columns: int) -> list[list[str]]:
    """Return the informative cells of each column, from the rows that have all columns."""
    complete = [row for row in rows if len(row) == n_columns]
    return [
        [c for row in complete if (c := row[k].strip()) not in UNKNOWN_CELLS]
        for k in range(n_columns)
    ]


def is_header(
    fields: Sequence[str], rows: CsvRows, style: NumberStyle, location: str,
    required: Collection[str] = (), optional: Collection[str] = (), *,
    only_header_quoted: bool = False, earlier_without_header: bool = False,
) -> bool:  # fmt: skip
    """Return whether the first line names the columns; raise DataError if it is ambiguous.

    fields : stripped fields of the first line
    rows : fields of the rows below it that have as many fields
    style : notation of the numbers
    location : name of the file, for messages
    required : names that columns must have, such as those that a model was trained on
    optional : names that columns may have besides the required ones
    only_header_quoted : whether all fields of the first line are quoted, and no field below it is
    earlier_without_header : whether earlier files of the same data have no header
    """
    numeric = [*map(style.is_number, fields)]
    has_required = {*required} <= {*fields}
    if required and has_required and not _occur_in_rows(required, fields, rows):
        return True
    if all(numeric):
        has_no_other = {*fields} <= {*required, *optional}
        if required and has_required and has_no_other and len({*fields}) == len(fields):
            return True
        if earlier_without_header:
            _warn_of_names(fields, rows, style, location, only_header_quoted)
            return False
        return _is_header_of_numbers(fields, rows, style, location, only_header_quoted)
    if any(numeric):
        return _is_mixed_header(fields, rows, numeric, style, location)
    return _is_header_of_words(fields, rows, style, location)


def _occur_in_rows(required: Collection[str], names: Sequence[str], rows: CsvRows) -> bool:
    """Return whether each required name is also a cell of its column, so that the line is a row."""
    return bool(rows) and all(
        any(row[k].strip() == name for row in rows) for k, name in enumerate(names)
        if name in required
    )  # fmt: skip


def _is_mixed_header(
    fields: Sequence[str], rows: CsvRows, numeric: Sequence[bool], style: NumberStyle, location: str
) -> bool:
    """Return True if the names mix numbers with words, and the words are above numeric columns.

    Raises DataError otherwise.
    """
    rows = rows[:_EXAMINED_ROWS]
    columns = informative_cells(rows, len(fields))
    above_numbers = all(
        (name not in UNKNOWN_CELLS or (k == 0 and not name)) and _all_numbers(columns[k], style)
        for k, name in enumerate(fields)
        if not numeric[k]
    )
    number_names = list(compress(fields, numeric))
    number_rows = [list(compress(row, numeric)) for row in rows]
    if above_numbers and _log10_chance(number_names, number_rows, style) < _LOG10_LIKELY:
        return True
    raise DataError(
        f"the first line of {location} has words and numbers, so it may be a header or a row",
        f"if the file has no header, give the names of its columns with {mention('names=')}; if "
        f"it is a header, give {mention('header', True)}; or add a header line with names that "
        "are not numbers",
    )


def _is_header_of_numbers(
    names: Sequence[str], rows: CsvRows, style: NumberStyle, location: str, only_header_quoted: bool
) -> bool:
    """Return whether a line of numbers is a header; raise DataError if it is only likely."""
    rows = rows[:_EXAMINED_ROWS]
    names = [style.to_python_notation(name) for name in names]
    log10_chance = _log10_chance(names, rows, style)
    if len({*names}) < len(names) or not (log10_chance or only_header_quoted):
        return False
    if only_header_quoted:
        return True
    is_series = _is_column_numbering(names) or _is_header_of_years(names, rows)
    # An improbable row is a header if its numbers are also a usual series of names, or rising.
    if log10_chance < _LOG10_CERTAIN:
        reason = "as programs number them" if is_series else ""
        if not is_series and _is_increasing(names) and _differ_in_notation(names, rows, style):
            reason = "as its numbers rise and are written otherwise than those below"
        if reason:
            warn(
                f"the first line of {location} ({some(names)}) is read as the names of its "
                f"columns, {reason}; give {mention('header', True)} if this is right, and "
                f"{mention('header', False)} if it is a row"
            )
            return True
    # Otherwise the line is ambiguous or a row; for a row that is such a series, there is a warning.
    is_series_of_several = is_series and len(names) > 1
    if log10_chance < (_LOG10_LIKELY if is_series_of_several else _LOG10_CERTAIN):
        raise DataError(
            f"the first line of {location} ({some(names)}) may be a header or a row; give "
            f"{mention('header', True)} if it is a header, and {mention('header', False)} if it "
            "is a row"
        )
    if is_series_of_several:
        warn(
            f"the first line of {location} ({some(names)}) is read as a row, like those below it; "
            f"give {mention('header', True)} if it names the columns, and "
            f"{mention('header', False)} if not"
        )
    return False


def _warn_of_names(
    names: Sequence[str], rows: CsvRows, style: NumberStyle, location: str, only_header_quoted: bool
) -> None:
    """Warn if a line that is a row, as in earlier files, would otherwise be read as names."""
    log10_chance = _log10_chance(
        [*map(style.to_python_notation, names)], rows[:_EXAMINED_ROWS], style
    )
    is_improbable = only_header_quoted or log10_chance < _LOG10_CERTAIN
    if len({*names}) == len(names) and is_improbable:
        warn(
            f"the first line of {location} ({some(names)}) may name its columns; it is read as a "
            "row, as the files before it have no header: remove it if it is not a row"
        )


def _log10_chance(names: Sequence[str], rows: CsvRows, style: NumberStyle) -> float:
    """Return log10 of the probability that a row has values like these names, given the rows.

    It is 0.0 if the line does not look like names at all. Columns are assumed to be independent.

    names : the fields of the first line, which are numbers in Python's notation
    """
    if not rows:  # a long first line may be all that was read
        is_long_series = _is_column_numbering(names) and len(names) >= _MIN_LONG_SERIES_COLUMNS
        return _LOG10_CERTAIN if is_long_series else 0.0
    if _continues_below(names, rows):
        return 0.0 if len(rows) > 1 else _LOG10_LIKELY
    columns = [
        [*map(style.to_python_notation, cells)] for cells in informative_cells(rows, len(names))
    ]
    log10_notations = [_log10_notation(*pair) for pair in zip(names, columns, strict=True)]
    # Under each name of a series of integers, another notation or other values are evidence.
    if all(map(is_integer, names)):
        is_series = _is_column_numbering(names) or _is_arithmetic(names, _MIN_LONG_SERIES_COLUMNS)
        if is_series or _is_header_of_years(names, rows):
            return sum(map(min, log10_notations, map(_log10_equal, names, columns)))
        if _is_increasing(names) and all(map(_is_far_from, names, columns)):
            return -_MAX_LOG10_PER_COLUMN
    elif _is_arithmetic(names, _MIN_SERIES_COLUMNS):
        return -_MAX_LOG10_PER_COLUMN
    return sum(log10_notations) if all(log10_notations) else 0.0


def _differ_in_notation(names: Sequence[str], rows: CsvRows, style: NumberStyle) -> bool:
    """Return whether every name is written in another notation than the numbers of its column."""
    columns = (
        [*map(style.to_python_notation, cells)] for cells in informative_cells(rows, len(names))
    )
    return all(_log10_notation(*pair) for pair in zip(names, columns, strict=True))


def _log10_notation(name: str, cells: Sequence[str]) -> float:
    """Return log10 of the probability that a cell is written in the notation of the text `name`.

    It is 0.0 if the cells of the column are in the same notation.
    """
    if not cells:
        return 0.0
    if not is_integer(name):
        if len(cells) >= _MIN_INTEGER_CELLS and all(map(is_integer, cells)):
            return -_MAX_LOG10_PER_COLUMN / 2
        n_fewer = min(map(_n_digits, cells)) - _n_digits(name)
        return -min(_MAX_LOG10_PER_COLUMN, n_fewer) if n_fewer >= _MIN_FEWER_DIGITS else 0.0
    if not all(is_number(cell) and not is_integer(cell) for cell in cells):
        return 0.0
    if any(float(cell).is_integer() for cell in cells):  # other integers are written 1.0
        return -_MAX_LOG10_PER_COLUMN
    decimals = min(len(_mantissa(cell).partition(".")[2]) for cell in cells)
    return -min(_MAX_LOG10_PER_COLUMN, max(1, decimals))


def _log10_equal(name: str, cells: Sequence[str]) -> float:
    """Return log10 of the probability that a cell of this column is equal to `name`."""
    n_equal = sum(float(cell) == float(name) for cell in cells if is_number(cell))
    return math.log10((n_equal + 0.5) / (len(cells) + 1)) if cells else 0.0


def _mantissa(cell: str) -> str:
    """Return a number without its exponent."""
    return cell.lower().partition("e")[0]


def _n_digits(cell: str) -> int:
    """Return the number of digits of a number, without its exponent."""
    return sum(c.isdigit() for c in _mantissa(cell))


def _is_far_from(name: str, cells: Sequence[str]) -> bool:
    """Return whether a number is farther from all cells than these are from each other."""
    values = [float(cell) for cell in cells if is_number(cell)]
    if len(values) < 2 or len(values) < len(cells):
        return False
    low = min(values)
    high = max(values)
    value = float(name)
    return max(low - value, value - high) > max(high - low, 1.0)


def _is_column_numbering(names: Sequence[str]) -> bool:
    """Return whether names are 0, 1, 2, ... or 1, 2, 3, ..., as programs number columns."""
    return names[0] in ("0", "1") and _differences(names) <= {1}


def _is_arithmetic(names: Sequence[str], min_columns: int) -> bool:
    """Return whether at least `min_columns` numbers rise or fall by a constant step."""
    steps = _differences(names)
    return len(names) >= min_columns and len(steps) == 1 and steps != {0}


def _is_increasing(names: Sequence[str]) -> bool:
    """Return whether so many numbers rise that they hardly do so by chance."""
    integers = all(map(is_integer, names))
    min_columns = _MIN_SERIES_COLUMNS if integers else _MIN_LONG_SERIES_COLUMNS
    return len(names) >= min_columns and min(_differences(names), default=0) > 0


def _is_header_of_years(names: Sequence[str], rows: CsvRows) -> bool:
    """Return whether the names are years in order, and the numbers below them mostly are not years.

    For four or more years with a constant step, the numbers below do not matter.
    """
    if len(names) < 2 or not all(is_integer(name) and int(name) in _YEARS for name in names):
        return False
    steps = _differences(names)
    if min(steps) <= 0 <= max(steps):
        return False
    if len(names) >= _MIN_SERIES_COLUMNS and len(steps) == 1:
        return True
    cells = [cell for row in rows for cell in row if is_number(cell)]
    n_years = sum(_YEARS[0] <= float(cell) <= _YEARS[-1] for cell in cells)
    return 4 * n_years < len(cells)


def _differences(names: Sequence[str]) -> set[float]:
    """Return the distinct differences of consecutive numbers, without rounding errors."""
    return {round(b - a, 9) for a, b in pairwise(map(float, names))}


def _continues_below(names: Sequence[str], rows: CsvRows) -> bool:
    """Return whether each line is the one above it plus a constant, as in a range of numbers.

    The lines are the names and the first three rows, without rows that have other cells than
    numbers.
    """
    lines = [[float(c) for c in row] for row in (names, *rows[:3]) if all(map(is_number, row))]
    # All differences of cells that are below each other.
    steps = {
        round(cell - cell_above, 9)
        for line_above, line in pairwise(lines)
        for cell_above, cell in zip(line_above, line, strict=True)
    }
    return len(steps) == 1 and steps != {0.0}


def _is_header_of_words(
    names: Sequence[str], rows: CsvRows, style: NumberStyle, location: str
) -> bool:
    """Return True for a line of words; raise DataError if its words occur again below it.

    Few repeated words above columns of numbers are no evidence against a header.
    """
    columns = [(name, [row[k].strip() for row in rows]) for k, name in enumerate(names)]
    repeated = [name for name, cells in columns if name and name in cells]
    for name, cells in columns:
        if other_notation(name) and any(map(other_notation, cells)):
            repeated.append(name)
    if not repeated:
        return True
    above_numbers = any(
        name not in UNKNOWN_CELLS
        and _all_numbers([c for c in cells if c not in UNKNOWN_CELLS], style)
        for name, cells in columns
    )
    if not above_numbers or 2 * len(repeated) > len(names):
        raise DataError(
            f"the first line of {location} is probably no header, because "
            f"{some(sorted(set(repeated)))}, or something similar, occurs again further down in "
            "the same column",
            f"if the file has no header, give the names of its columns with {mention('names=')}; "
            f"if the line is a header, give {mention('header', True)}",
        )
    return True


def _all_numbers(cells: Sequence[str], style: NumberStyle) -> bool:
    """Return whether there are cells, none of them unknown, and all are numbers."""
    return bool(cells) and all(map(style.is_number, cells))
