"""Infer the layout of a CSV file from its first lines: the delimiter, the header, an index.

Where a file may be read in two ways, a function raises DataError, and the message names the option
(such as skip_lines=) that decides.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.basics.warning import warn
from streamkern.ingest.csv_header import UNKNOWN_CELLS, CsvRows, informative_cells, is_header
from streamkern.ingest.csv_lines import NumberedLines, split_fields
from streamkern.ingest.formats import FileForm
from streamkern.ingest.tables.key_columns import index_columns
from streamkern.ingest.tables.numbers import NumberStyle, is_integer, is_number, other_notation

_DELIMITERS = ",;\t|"
"""Delimiters that are recognised."""
_OTHER_DELIMITERS = {
    " ": "blanks", ":": "colons", "\x01": "the character ^A", "~": "tildes", "^": "carets",
}  # fmt: skip
"""Delimiters that the user has to confirm, and their names."""
_EXAMINED_LINES = 20
"""Lines that must agree on their number of fields."""
_CHECKED_ROWS = 100
"""Rows that are searched for units and for separators of thousands."""
_MAX_UNIT_LINES, _MAX_LISTED_NAMES = 3, 30
_EXCEL_SEP_LINE = re.compile(r'"?sep=(.)"?[,;\t|]*')
"""A first line that tells Excel the delimiter."""
_COMMENT = re.compile(r"\s*(#(\s|#|!)|//|--)")
_POINT_GROUPED = re.compile(r"[+-]?[1-9][0-9]{0,2}(\.[0-9]{3})+")
_BELOW_A_THOUSAND = re.compile(r"[+-]?[0-9]{1,3}")
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+")


class CsvLayout(NamedTuple):
    """Layout of the lines of a CSV file.

    skip_lines : number of lines above the header or the first row, including blank ones
    delimiter : the character between two fields
    header : whether the line after the skipped lines names the columns
    fields : fields of that line as written, or the given names of a file without a header
    named : whether the columns have names, from a header or as an argument
    index_columns : names of the leading columns that only number or name the rows, as the index of
        pandas does
    """

    skip_lines: int
    delimiter: str
    header: bool
    fields: tuple[str, ...]
    named: bool
    index_columns: tuple[str, ...] = ()


class FirstLines(NamedTuple):
    """The first lines of a file that are not blank; the first of them is the header or a row.

    lines : the lines
    rows : the fields of each line
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


def csv_layout(
    lines: NumberedLines, form: FileForm, location: str, above: NumberedLines = (),
    required: Collection[str] = (), optional: Collection[str] = (),
) -> CsvLayout:  # fmt: skip
    """Return the layout of a CSV file.

    lines : its first lines that are not blank, after `skip_lines`
    form : the options of the user, and the record of earlier files
    location : name of the file, for messages
    above : the skipped lines
    required : names that its columns must have
    optional : names of columns that it may have besides these

    Raises DataError if the layout is ambiguous, and names the option that resolves it.
    """
    skip, delimiter, recorded = form.skip_lines or 0, form.delimiter, form.recorded or {}
    sep = _EXCEL_SEP_LINE.fullmatch(lines[0][1].strip()) if len(lines) > 1 else None
    if sep is not None and delimiter in (None, sep[1]):
        skip, delimiter, lines = lines[0][0], sep[1], lines[1:]
    separator = delimiter or _delimiter(lines, form.style.decimal)
    rows = [split_fields(line, separator) for _, line in lines]
    head = FirstLines(lines, rows, separator, form.style, location)
    if form.names is None and form.header is not False:
        rows[0] = _without_comment_sign(head)
        if not _COMMENT.match(lines[0][1]) and has_row_names(head):
            rows[0].insert(0, "")
    _check_first_line(head)
    if delimiter is None and len(rows[0]) == 1:
        _check_separated(head)
    if skip and recorded.get("skip_lines") == skip:
        _check_skipped(above, head)
    first, header = head.names, form.header
    if form.names is not None:
        if recorded.get("names") != list(form.names) or {*first}.isdisjoint(form.names):
            _check_thousands(form.names, rows, form, head)
            return CsvLayout(skip, separator, False, _checked_names(head, form.names), True)
        header = True  # this file has a header, although the first file had none
    below = [row for row in rows[1:] if len(row) == len(first)]
    if header is None:
        quoted = lines[0][1].count('"') == 2 * len(first) and len(lines) > 1
        quoted = quoted and not any('"' in line for _, line in lines[1:])
        unnamed = recorded.get("positions") is not None
        header = is_header(first, below, form.style, location, required, quoted, optional, unnamed)
    index: list[str] = []
    if header:
        refuse_unit_lines(head)
        index = _leading_index_columns(head, below)
    names = rows[0] if header else list(map(str, range(len(first))))
    _check_thousands(names, below if header else rows, form, head)
    return CsvLayout(skip, separator, header, tuple(rows[0]), header, tuple(index))


def _described(numbered: tuple[int, str], location: str) -> str:
    """Return a line as messages show it."""
    number, line = numbered
    return f"line {number} of {location} ({line.strip()[:40]!r})"


# ------------------------------------------------------------------------------ the first line


def _delimiter(lines: NumberedLines, decimal: str) -> str:
    """Return the delimiter that splits the first line into the most fields.

    If the decimal sign is a comma, the comma is a candidate only if no other delimiter splits the
    line, and if decimal numbers are quoted or the first line contains words.
    """
    first = lines[0][1]
    candidates = [k for k in _DELIMITERS if k != decimal]
    best = max(candidates, key=lambda delimiter: len(split_fields(first, delimiter)))
    if decimal == "," and len(split_fields(first, best)) == 1:
        by_commas = split_fields(first, ",")
        quoted_decimals = any(re.search(r'"[^"]*[0-9],[0-9][^"]*"', line) for _, line in lines)
        if len(by_commas) > 1 and (quoted_decimals or not all(map(is_number, by_commas))):
            return ","
    return best


def _without_comment_sign(head: FirstLines) -> list[str]:
    """Return the fields of the first line without a leading #.

    numpy.savetxt writes this sign before the names of columns. A line that is no header, because it
    contains numbers or another number of fields than the next line, is returned unchanged.
    """
    first, rows = head.lines[0][1], head.rows
    sign = re.match(r"\s*#\s*", first)
    if sign is None or len(rows) < 2 or not all(map(head.style.is_number, rows[1])):
        return rows[0]
    names = split_fields(first[sign.end() :], head.delimiter)
    words = not any(map(head.style.is_number, names))
    fits = len(names) == len(rows[1]) and (len(names) > 1 or " " not in names[0])
    return names if words and fits else rows[0]


def has_row_names(head: FirstLines) -> bool:
    """Return whether each row begins with a row name, for which the header has no field.

    R writes such files. The row names must be different words or integers, and must be quoted if
    there is only one row. At least one other column must consist of numbers, as evidence that the
    first line is the header, and not a title above it.
    """
    header, *below = head.rows
    complete = all(len(row) == len(header) + 1 for row in below)
    if not below or not complete or any(map(head.style.is_number, header)):
        return False
    if len(below) == 1 and not head.lines[1][1].startswith('"'):
        return False
    first, *columns = ([row[k].strip() for row in below] for k in range(len(header) + 1))
    are_names = all(is_integer(cell) or _is_word(cell) for cell in first)
    if not are_names or len({*first, ""}) <= len(below) or not any(columns[-1]):
        return False
    numeric = [
        [head.style.is_number(cell) for cell in cells if cell not in UNKNOWN_CELLS]
        for cells in columns
    ]
    titled = any(len(numbers) > 1 and not numbers[0] and all(numbers[1:]) for numbers in numeric)
    return not titled and any(numbers and all(numbers) for numbers in numeric)


def _is_word(cell: str) -> bool:
    """Return whether a cell is neither a number nor a date, in any notation."""
    return not (is_number(cell) or other_notation(cell))


def _check_first_line(head: FirstLines) -> None:
    """Raise DataError if the first line seems to be a title or comment, not a header or a row.

    The evidence is a sign of comments, or another number of fields than in the lines below. Titles,
    which have one field, may stand above these lines, if at least two lines follow them.
    """
    first, *below = head.rows
    (number, line), *_ = head.lines
    widths = [len(row) for row in below[:_EXAMINED_LINES]]
    n_titles = next((i for i, width in enumerate(widths) if width > 1), 0)
    after = {*(widths[n_titles:] if len(widths) > n_titles + 1 else widths)}
    comment = _COMMENT.match(line)
    if first and not first[0].startswith(("#", "/", "-", " ", "\t")):
        comment = None
    longer = after == {len(first) + 1} and len(first) > 1
    if longer and not any(row[-1].strip() for row in below):
        raise DataError(
            f"the rows of {head.location} end with {head.delimiter!r}, but line {number}, which "
            "names the columns, does not",
            "remove it from the ends of the lines",
        )
    described = _described(head.lines[0], head.location)
    differs = len(below) > 1 and len(after) == 1 and len(first) not in after and max(after) > 1
    if comment and after <= {len(first)}:
        raise DataError(
            f"{described} looks like a comment",
            f"if it is a comment, give {mention('skip_lines', number)}; if it names the columns or "
            f"is a row, write it without {comment[0].strip()!r} at its start",
        )
    if comment or differs:
        next_text = f", and the next ones {max(after)}" if differs else ""
        raise DataError(
            f"{described} has {len(first)} field{'s' * (len(first) > 1)}{next_text}",
            f"if it stands above the header, give {mention('skip_lines=')}, the number of lines "
            "above the header; otherwise give all lines the same number of fields",
        )


def _check_separated(head: FirstLines) -> None:
    """Raise DataError if the fields seem to be separated by a delimiter that must be named."""
    texts = [line.strip() for _, line in head.lines[:_EXAMINED_LINES]]
    for delimiter, name in _OTHER_DELIMITERS.items():
        first, *widths = (len(split_fields(text, delimiter)) for text in texts)
        if len({*widths}) == 1 and widths[0] > 1 and first in (widths[0], widths[0] - 1):
            written = delimiter if delimiter.isprintable() else ascii(delimiter)[1:-1]
            raise DataError(
                f"the fields of {head.location} are not separated by commas, semicolons, tabs or "
                f"|, but apparently by {name}",
                f"confirm it with {mention('delimiter', written)}",
            )


def _check_skipped(above: NumberedLines, head: FirstLines) -> None:
    """Raise DataError if a line is skipped as in earlier files, but is a row of this file."""
    for row in (split_fields(line, head.delimiter) for _, line in above):
        cells = [cell.strip() for cell in row if cell.strip() not in UNKNOWN_CELLS]
        if len(row) == len(head.rows[0]) and cells and all(map(head.style.is_number, cells)):
            raise DataError(
                f"the first lines of {head.location} would be skipped, as in the files before it, "
                "but they contain a row",
                f"give {mention('skip_lines=')}, the number of lines above its header or first "
                f"row; {mention('skip_lines', 0)} skips none",
            )


def _checked_names(head: FirstLines, names: tuple[str, ...]) -> tuple[str, ...]:
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

    rows : the fields of the first rows

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
        f"{mention(f'names={_listed(names)}')}"
    )


def refuse_unit_lines(head: FirstLines) -> None:
    """Raise DataError if the lines below the header seem to contain units.

    These lines contain words in columns that contain only numbers below them.
    """
    rows, width, is_style_number = head.rows, len(head.names), head.style.is_number
    if len(rows) < 4 or any(map(is_style_number, rows[1])):
        return
    for n_lines in range(1, min(_MAX_UNIT_LINES, len(rows) - 3) + 1):
        units = [row for row in rows[1 : 1 + n_lines] if len(row) == width]
        below = informative_cells(rows[1 + n_lines : _CHECKED_ROWS], width)
        numeric = [
            k
            for k, cells in enumerate(below)
            if len(cells) > 1 and all(map(is_style_number, cells))
        ]
        if len(numeric) < min(2, width) or len(units) < n_lines:
            continue
        cells = [[row[k].strip() for k in numeric] for row in units]
        if any(is_style_number(cell) for row in cells for cell in row):
            continue
        if all(any(cell not in UNKNOWN_CELLS for cell in row) for row in cells):
            last = head.lines[n_lines]
            raise DataError(
                f"{_described(last, head.location)} has words, apparently units, in columns that "
                "hold numbers below it",
                f"{mention('skip_lines', last[0])} with {mention(f'names={_listed(head.names)}')} "
                "reads the rows below it",
            )


def _listed(names: Sequence[str]) -> str:
    """Return the names as a list in Python, for messages; the first is "row" if it is empty."""
    if not names[0]:
        names = ["row" + "_" * list(names).count("row"), *names[1:]]
    fits = all(re.fullmatch(r"[^\"'\[\]\\]+", name) for name in names)
    return f"[{', '.join(map(repr, names))}]" if fits and len(names) <= _MAX_LISTED_NAMES else "..."


def _may_be_grouped(cells: Sequence[str]) -> bool:
    """Return whether all these numbers may have points between groups of three digits."""
    return any(map(_POINT_GROUPED.fullmatch, cells)) and all(
        _POINT_GROUPED.fullmatch(cell) or _BELOW_A_THOUSAND.fullmatch(cell) for cell in cells
    )


def _check_thousands(names: Sequence[str], rows: CsvRows, form: FileForm, head: FirstLines) -> None:
    """Raise DataError if numbers like 1.234 may be thousands, because others have decimal commas.

    If the only evidence is that semicolons separate the fields, warn instead.

    names : names of the columns
    rows : their fields in the first rows
    """
    if form.decimal is not None or form.thousands is not None:
        return
    rows, by_semicolons = rows[:_CHECKED_ROWS], head.delimiter == ";"
    if not by_semicolons and not any("," in cell for row in rows for cell in row):
        return
    grouped, commas, commas_may_group, has_points = [], [], False, False
    for name, cells in zip(names, informative_cells(rows, len(names)), strict=True):
        if _may_be_grouped(cells):
            grouped.append((name.strip(), next(filter(_POINT_GROUPED.fullmatch, cells))))
        elif any(map(_DECIMAL_COMMA.fullmatch, cells)):
            commas.append((name.strip(), next(filter(_DECIMAL_COMMA.fullmatch, cells))))
            with_points = [cell.replace(",", ".") for cell in cells]
            commas_may_group = commas_may_group or _may_be_grouped(with_points)
        else:
            has_points = has_points or any("." in cell and is_number(cell) for cell in cells)
    if not grouped or not (commas or (by_semicolons and not has_points)):
        return
    (name, number), *_ = grouped
    holds = f"column {name!r} of {head.location} holds numbers like {number!r}"
    if not commas:
        warn(
            f"{holds}, all with three digits behind the point, and semicolons between the fields: "
            f"they are read as fractions; give {mention('thousands', '.')} if points group digits, "
            f"and {mention('decimal', '.')} if not"
        )
        return
    comma_column, text = commas[0]
    swapped = ""
    if commas_may_group:
        swapped = f"{mention('thousands', ',')} if it is the other way round, and "
    raise DataError(
        f"{holds}, and {comma_column!r} numbers like {text!r}; give {mention('thousands', '.')} "
        f"if points separate groups of digits and commas are decimal commas, {swapped}else write "
        "all numbers with the same decimal separator"
    )
