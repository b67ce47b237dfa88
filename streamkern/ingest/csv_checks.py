"""Check the first lines of a CSV file: titles, comments, units, delimiters, decimal commas.

Each check raises DataError for lines that may be read in two ways, and the message names the option
that decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.warning import warn
from streamkern.ingest.csv_header import UNKNOWN_CELLS, CsvRows, informative_cells
from streamkern.ingest.csv_lines import NumberedLines, split_fields
from streamkern.ingest.formats import FileForm
from streamkern.ingest.tables.numbers import NumberStyle, is_number

_OTHER_DELIMITERS = {
    " ": "blanks", ":": "colons", "\x01": "the character ^A", "~": "tildes", "^": "carets",
}  # fmt: skip
"""Delimiters that the user has to confirm, and their names."""
_EXAMINED_LINES = 20
"""Lines that must agree on their number of fields."""
_CHECKED_ROWS = 100
"""Rows that are searched for units and for separators of thousands."""
_MAX_UNIT_LINES, _MAX_LISTED_NAMES = 3, 30
_ORANGE_FLAGS = {"", "class", "meta", "ignore", "c", "m", "i"}
"""Cells of the third line of a table of Orange."""
COMMENT_SIGN = re.compile(r"\s*(#(\s|#|!)|//|--)")
"""Beginning of a line that may be a comment."""
_POINT_GROUPED = re.compile(r"[+-]?[1-9][0-9]{0,2}(\.[0-9]{3})+")
_BELOW_A_THOUSAND = re.compile(r"[+-]?[0-9]{1,3}")
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+")


class FirstLines(NamedTuple):
    """The first lines of a file that are not blank; the first of them is the header or a row.

    lines : the lines with their numbers
    rows : the fields of each line
    delimiter : the character between two fields
    style : notation of the numbers
    location : name of the file, for messages
    """

    lines: NumberedLines
    rows: list[list[str]]
    delimiter: str
    style: NumberStyle
    location: str

    @property
    def names(self) -> list[str]:
        """The stripped fields of the first line."""
        return [field.strip() for field in self.rows[0]]


def _line_text(numbered_line: tuple[int, str], location: str) -> str:
    """Return the number and the beginning of a line, for messages."""
    number, line = numbered_line
    return f"line {number} of {location} ({line.strip()[:40]!r})"


def check_first_line(head: FirstLines) -> None:
    """Raise DataError if the first line seems to be a title or comment, not a header or a row.

    The evidence is a sign of comments, or another number of fields than in the lines below. Titles,
    which have one field, may stand above these lines, if at least two lines follow them. Rows that
    end with a delimiter below a header without it are refused with a message of their own.
    """
    fields, *rows = head.rows
    (number, line), *_ = head.lines
    widths = [len(row) for row in rows[:_EXAMINED_LINES]]
    n_titles = next((i for i, width in enumerate(widths) if width > 1), 0)
    row_widths = {*(widths[n_titles:] if len(widths) > n_titles + 1 else widths)}
    comment = COMMENT_SIGN.match(line)
    if fields and not fields[0].startswith(("#", "/", "-", " ", "\t")):
        comment = None  # the sign is inside a quoted field, or was removed from a header
    rows_are_longer = row_widths == {len(fields) + 1} and len(fields) > 1
    if rows_are_longer and not any(row[-1].strip() for row in rows):
        raise DataError(
            f"the rows of {head.location} end with {head.delimiter!r}, but line {number}, which "
            "names the columns, does not",
            "remove it from the ends of the lines",
        )
    line_text = _line_text(head.lines[0], head.location)
    rows_agree = len(rows) > 1 and len(row_widths) == 1 and max(row_widths) > 1
    differs = rows_agree and len(fields) not in row_widths
    if comment and row_widths <= {len(fields)}:
        raise DataError(
            f"{line_text} looks like a comment",
            f"if it is a comment, give {mention('skip_lines', number)}; if it names the columns or "
            f"is a row, write it without {comment[0].strip()!r} at its start",
        )
    if comment or differs:
        next_text = f", and the next ones {max(row_widths)}" if differs else ""
        raise DataError(
            f"{line_text} has {len(fields)} field{'s' * (len(fields) > 1)}{next_text}",
            f"if it stands above the header, give {mention('skip_lines=')}, the number of lines "
            "above the header; otherwise give all lines the same number of fields",
        )


def check_delimiter(head: FirstLines) -> None:
    """Raise DataError if the fields seem to be separated by a delimiter that must be named."""
    texts = [line.strip() for _, line in head.lines[:_EXAMINED_LINES]]
    for delimiter, name in _OTHER_DELIMITERS.items():
        first_width, *widths = (len(split_fields(text, delimiter)) for text in texts)
        if len({*widths}) == 1 and widths[0] > 1 and first_width in (widths[0], widths[0] - 1):
            escaped = delimiter if delimiter.isprintable() else ascii(delimiter)[1:-1]
            raise DataError(
                f"the fields of {head.location} are not separated by commas, semicolons, tabs or "
                f"|, but apparently by {name}",
                f"confirm it with {mention('delimiter', escaped)}",
            )


def check_skipped_lines(skipped_lines: NumberedLines, head: FirstLines) -> None:
    """Raise DataError if a line is skipped as in earlier files, but is a row of this file."""
    for row in (split_fields(line, head.delimiter) for _, line in skipped_lines):
        cells = [cell.strip() for cell in row if cell.strip() not in UNKNOWN_CELLS]
        if len(row) == len(head.rows[0]) and cells and all(map(head.style.is_number, cells)):
            raise DataError(
                f"the first lines of {head.location} would be skipped, as in the files before it, "
                "but they contain a row",
                f"give {mention('skip_lines=')}, the number of lines above its header or first "
                f"row; {mention('skip_lines', 0)} skips none",
            )


def refuse_unit_lines(head: FirstLines) -> None:
    """Raise DataError if the lines below the header seem to contain units.

    These lines contain words in columns that contain only numbers below them. Tables of Orange have
    two such lines: types, and flags such as "class", which may be in a column of words.
    """
    rows = head.rows
    width = len(head.names)
    is_style_number = head.style.is_number
    if len(rows) < 4 or any(map(is_style_number, rows[1])):
        return
    for n_lines in range(min(_MAX_UNIT_LINES, len(rows) - 3), 0, -1):
        unit_rows = [row for row in rows[1 : 1 + n_lines] if len(row) == width]
        columns = informative_cells(rows[1 + n_lines : _CHECKED_ROWS], width)
        numeric = [
            k
            for k, cells in enumerate(columns)
            if len(cells) > 1 and all(map(is_style_number, cells))
        ]
        if len(numeric) < min(2, width) or len(unit_rows) < n_lines:
            continue
        units = [[row[k].strip() for k in numeric] for row in unit_rows]
        if any(is_style_number(cell) for row in units for cell in row):
            continue
        if n_lines > 1 and set(map(str.strip, unit_rows[-1])) <= _ORANGE_FLAGS:
            units.pop()
        if all(any(cell not in UNKNOWN_CELLS for cell in row) for row in units):
            skip_text = mention("skip_lines", head.lines[n_lines][0])
            names_text = mention(f"names={list_text(head.names)}")
            raise DataError(
                f"{_line_text(head.lines[len(units)], head.location)} has words, apparently units "
                "or types, in columns that hold numbers below it",
                f"{skip_text} with {names_text} reads the rows below it",
            )


def list_text(names: Sequence[str]) -> str:
    """Return the names as a list in Python, for messages; the first is "row" if it is empty.

    The result is "..." if there are too many names, or one has quotes, brackets or backslashes.
    """
    if not names[0]:
        names = ["row" + "_" * list(names).count("row"), *names[1:]]
    are_plain = all(re.fullmatch(r"[^\"'\[\]\\]+", name) for name in names)
    if not are_plain or len(names) > _MAX_LISTED_NAMES:
        return "..."
    return f"[{', '.join(map(repr, names))}]"


def _may_have_groups(cells: Sequence[str]) -> bool:
    """Return whether all these numbers may have points between groups of three digits."""
    return any(map(_POINT_GROUPED.fullmatch, cells)) and all(
        _POINT_GROUPED.fullmatch(cell) or _BELOW_A_THOUSAND.fullmatch(cell) for cell in cells
    )


def check_thousands(names: Sequence[str], rows: CsvRows, form: FileForm, head: FirstLines) -> None:
    """Raise DataError if numbers like 1.234 may be thousands, because others have decimal commas.

    If the only evidence is that semicolons separate the fields, warn instead.

    names : names of the columns
    rows : the fields of the first rows
    """
    if form.decimal is not None or form.thousands is not None:
        return
    rows, by_semicolons = rows[:_CHECKED_ROWS], head.delimiter == ";"
    if not by_semicolons and not any("," in cell for row in rows for cell in row):
        return
    # The name and an example of each column of numbers like 1.234, and of numbers like 1,5.
    grouped, commas = [], []
    commas_may_group = has_points = False
    for name, cells in zip(names, informative_cells(rows, len(names)), strict=True):
        if _may_have_groups(cells):
            grouped.append((name.strip(), next(filter(_POINT_GROUPED.fullmatch, cells))))
        elif any(map(_DECIMAL_COMMA.fullmatch, cells)):
            commas.append((name.strip(), next(filter(_DECIMAL_COMMA.fullmatch, cells))))
            with_points = [cell.replace(",", ".") for cell in cells]
            commas_may_group = commas_may_group or _may_have_groups(with_points)
        else:
            has_points = has_points or any("." in cell and is_number(cell) for cell in cells)
    if not grouped or not (commas or (by_semicolons and not has_points)):
        return
    (name, number), *_ = grouped
    column_text = f"column {name!r} of {head.location} holds numbers like {number!r}"
    if not commas:
        warn(
            f"{column_text}, all with three digits behind the point, and semicolons between the "
            f"fields: they are read as fractions; give {mention('thousands', '.')} if points group "
            f"digits, and {mention('decimal', '.')} if not"
        )
        return
    comma_column, text = commas[0]
    swapped = ""
    if commas_may_group:
        swapped = f"{mention('thousands', ',')} if it is the other way round, and "
    raise DataError(
        f"{column_text}, and {comma_column!r} numbers like {text!r}; give "
        f"{mention('thousands', '.')} if points separate groups of digits and commas are decimal "
        f"commas, {swapped}else write all numbers with the same decimal separator"
    )
