"""Infer the layout of a CSV file from its first lines: the delimiter, the header, an index.

Where a file may be read in two ways, a function raises DataError, and the message names the option
(such as skip_lines=) that decides.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.ingest.csv_checks import (
    COMMENT_SIGN,
    FirstLines,
    check_delimiter,
    check_first_line,
    check_skipped_lines,
    check_thousands,
    list_text,
    refuse_unit_lines,
)
from streamkern.ingest.csv_header import UNKNOWN_CELLS, CsvRows, informative_cells, is_header
from streamkern.ingest.csv_lines import NumberedLines, split_fields
from streamkern.ingest.formats import FileForm
from streamkern.ingest.tables.key_columns import index_columns
from streamkern.ingest.tables.numbers import is_integer, is_number, other_notation

_DELIMITERS = ",;\t|"
"""Delimiters that are recognised."""
_EXCEL_SEP_LINE = re.compile(r'"?sep=(.)"?[,;\t|]*')
"""A first line that tells Excel the delimiter."""


class CsvLayout(NamedTuple):
    """Layout of the lines of a CSV file.

    skip_lines : number of lines above the header or the first row, including blank ones
    delimiter : the character between two fields
    has_header : whether the line after the skipped lines names the columns
    fields : the fields of this line as written, but without a comment sign, and with "" for row
        names that R left unnamed; or the `names=` of a file without a header
    has_names : whether the columns have names, from a header or from `names=`
    index_columns : names of the leading columns that only number or name the rows, as the index of
        pandas does
    """

    skip_lines: int
    delimiter: str
    has_header: bool
    fields: tuple[str, ...]
    has_names: bool
    index_columns: tuple[str, ...] = ()


def csv_layout(
    lines: NumberedLines, form: FileForm, location: str, skipped_lines: NumberedLines = (),
    required: Collection[str] = (), optional: Collection[str] = (),
) -> CsvLayout:  # fmt: skip
    """Return the layout of a CSV file.

    lines : the first lines that are not blank, after the skipped ones
    form : the options of the user, and the record of earlier files
    location : name of the file, for messages
    skipped_lines : the lines that `skip_lines=` skips
    required : names that columns must have
    optional : names that columns may have besides the required ones

    Raises DataError if the layout is ambiguous, and names the option that resolves it, or if
    `names=` do not fit the file.
    """
    n_skipped = form.skip_lines or 0
    delimiter = form.delimiter
    earlier = form.earlier_record or {}
    sep_line = _EXCEL_SEP_LINE.fullmatch(lines[0][1].strip()) if len(lines) > 1 else None
    if sep_line is not None and delimiter in (None, sep_line[1]):
        n_skipped = lines[0][0]
        delimiter = sep_line[1]
        lines = lines[1:]
    separator = delimiter or _delimiter(lines, form.style.decimal)
    rows = [split_fields(line, separator) for _, line in lines]
    head = FirstLines(lines, rows, separator, form.style, location)
    # Headers of numpy.savetxt begin with #, and headers of R lack a field for the row names.
    if form.names is None and form.header is not False:
        rows[0] = _without_comment_sign(head)
        if not COMMENT_SIGN.match(lines[0][1]) and has_row_names(head):
            rows[0].insert(0, "")
    # Lines that are no rows, and delimiters that must be named, are refused before the header.
    check_first_line(head)
    if delimiter is None and len(rows[0]) == 1:
        check_delimiter(head)
    if n_skipped and earlier.get("skip_lines") == n_skipped:
        check_skipped_lines(skipped_lines, head)
    first_names, has_header = head.names, form.header
    if form.names is not None:
        # If the names are those of earlier files, a first line with one of them is a header.
        names_are_recorded = earlier.get("names") == list(form.names)
        if not names_are_recorded or {*first_names}.isdisjoint(form.names):
            check_thousands(form.names, rows, form, head)
            return CsvLayout(n_skipped, separator, False, _matching_names(head, form.names), True)
        has_header = True  # this file has a header, although the first file had none
    rows_below = [row for row in rows[1:] if len(row) == len(first_names)]
    if has_header is None:
        has_header = is_header(
            first_names, rows_below, form.style, location, required, optional,
            only_header_quoted=_quotes_only_first_line(head),
            earlier_without_header=earlier.get("positions") is not None,
        )  # fmt: skip
    index: list[str] = []
    if has_header:
        refuse_unit_lines(head)
        index = _leading_index_columns(head, rows_below)
    names = rows[0] if has_header else list(map(str, range(len(first_names))))
    check_thousands(names, rows_below if has_header else rows, form, head)
    return CsvLayout(n_skipped, separator, has_header, tuple(rows[0]), has_header, tuple(index))


def _quotes_only_first_line(head: FirstLines) -> bool:
    """Return whether all fields of the first line are quoted, and no field of the next lines."""
    (_, first_line), *next_lines = head.lines
    all_quoted = first_line.count('"') == 2 * len(head.names) and len(next_lines) > 0
    return all_quoted and not any('"' in line for _, line in next_lines)


# ------------------------------------------------------------------------------ the first line


def _delimiter(lines: NumberedLines, decimal: str) -> str:
    """Return the delimiter that splits the first line into the most fields.

    If the decimal sign is a comma, the comma is a candidate only if no other delimiter splits the
    line, and if decimal numbers are quoted or the first line contains words.
    """
    first_line = lines[0][1]
    candidates = [k for k in _DELIMITERS if k != decimal]
    best = max(candidates, key=lambda delimiter: len(split_fields(first_line, delimiter)))
    if decimal == "," and len(split_fields(first_line, best)) == 1:
        by_commas = split_fields(first_line, ",")
        quoted_decimals = any(re.search(r'"[^"]*[0-9],[0-9][^"]*"', line) for _, line in lines)
        if len(by_commas) > 1 and (quoted_decimals or not all(map(is_number, by_commas))):
            return ","
    return best


def _without_comment_sign(head: FirstLines) -> list[str]:
    """Return the fields of the first line without a leading #.

    numpy.savetxt writes this sign before the names of columns. Other lines are returned unchanged:
    those that contain numbers, are the only line, or are above a line that has other cells than
    numbers or another number of fields.
    """
    line, rows = head.lines[0][1], head.rows
    sign = re.match(r"\s*#\s*", line)
    if sign is None or len(rows) < 2 or not all(map(head.style.is_number, rows[1])):
        return rows[0]
    names = split_fields(line[sign.end() :], head.delimiter)
    are_words = not any(map(head.style.is_number, names))
    same_width = len(names) == len(rows[1]) and (len(names) > 1 or " " not in names[0])
    return names if are_words and same_width else rows[0]


def has_row_names(head: FirstLines) -> bool:
    """Return whether each row begins with a row name, for which the header has no field.

    R writes such files. The row names must be different words or integers, and must be quoted if
    there is only one row. At least one other column must consist of numbers, as evidence that the
    first line is the header, and not a title above it.
    """
    header, *rows = head.rows
    all_complete = all(len(row) == len(header) + 1 for row in rows)
    if not rows or not all_complete or any(map(head.style.is_number, header)):
        return False
    if len(rows) == 1 and not head.lines[1][1].startswith('"'):
        return False
    row_names, *columns = ([row[k].strip() for row in rows] for k in range(len(header) + 1))
    are_names = all(is_integer(name) or _is_word(name) for name in row_names)
    if not are_names or len({*row_names, ""}) <= len(rows) or not any(columns[-1]):
        return False
    # For each column, whether each of its informative cells is a number.
    numeric = [
        [head.style.is_number(cell) for cell in cells if cell not in UNKNOWN_CELLS]
        for cells in columns
    ]
    # A word above nothing but numbers is the name of a column: then the first line is a title.
    has_title = any(len(column) > 1 and not column[0] and all(column[1:]) for column in numeric)
    return not has_title and any(column and all(column) for column in numeric)


def _is_word(cell: str) -> bool:
    """Return whether a cell is neither a number nor a date, in any notation."""
    return not (is_number(cell) or other_notation(cell))


def _matching_names(head: FirstLines, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the given names; raise DataError unless they fit a file without a header."""
    if len(names) != len(head.names):
        raise DataError(
            f"{len(names)} {mention('names=')} were given ({some(names)}), but {head.location} has "
            f"{len(head.names)} columns",
            "give a name for each",
        )
    if head.names == list(names):
        raise DataError(
            f"the first line of {head.location} is a header with the {mention('names=')} given",
            f"leave {mention('names=')} out",
        )
    return names


# --------------------------------------------------------------------------- columns and cells


def _leading_index_columns(head: FirstLines, rows: CsvRows) -> list[str]:
    """Return the leading columns that only number or name the rows, as pandas and R write them.

    rows : the fields of the rows below the header

    Raises DataError if the first column has no name, but does not number or name the rows.
    """
    names = head.names
    cells = dict(zip(names, informative_cells(rows, len(names)), strict=True))
    index = index_columns(names, lambda name: all(map(is_integer, cells[name])))
    if index or names[0] or len(names) < 2:
        return index
    if len({*filter(_is_word, cells[""])}) == len(rows):
        return [""]
    raise DataError(
        f"the first column of {head.location} has no name, and holds {some(cells[''][:2])}: give "
        f"it one, with {mention('skip_lines', head.lines[0][0])} and "
        f"{mention(f'names={list_text(names)}')}"
    )
