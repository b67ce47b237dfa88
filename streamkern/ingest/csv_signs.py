"""Detect common faults of a CSV table: an index column, unit lines, digits in groups.

Each is looked for in the first lines of a CSV with a header, and reported with its remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from streamkern.basics.errors import DataError
from streamkern.basics.text import some
from streamkern.basics.warning import warn
from streamkern.ingest.formats import FileForm
from streamkern.ingest.tables.cells import MISSING
from streamkern.ingest.tables.number_style import NumberStyle
from streamkern.ingest.tables.numbers import is_integer, is_number
from streamkern.ingest.tables.writing import other_writing

UNKNOWN_CELLS = {*MISSING, "?", "-", "."}
"""Cells that give no information about the content of a column."""
_INDEX_NAME = re.compile(r"(Unnamed: [0-9]+(\.[0-9]+)*)?")  # as pandas writes and rereads it
_GROUPED = re.compile(r"[+-]?[1-9][0-9]{0,2}(\.[0-9]{3})+")
_BELOW_A_THOUSAND = re.compile(r"[+-]?[0-9]{1,3}")
_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+")
_MAX_UNIT_LINES, _MAX_NAMES = 3, 30
_LOOKED_AT = 100  # rows
CsvRows = Sequence[Sequence[str]]


def columns_of(rows: CsvRows, n_columns: int) -> list[list[str]]:
    """Return the informative cells of each column, from the rows that have all columns."""
    whole = [row for row in rows if len(row) == n_columns]
    return [
        [c for row in whole if (c := row[k].strip()) not in UNKNOWN_CELLS] for k in range(n_columns)
    ]


def index_columns(names: Sequence[str], is_whole: Callable[[str], bool]) -> list[str]:
    """Return the first columns that are a pandas index: integers without a name.

    is_whole : returns whether a column holds integers. At least one column is never an index.
    """
    found: list[str] = []
    for name in names[:-1]:
        if not (_INDEX_NAME.fullmatch(str(name)) and is_whole(name)):
            break
        found.append(name)
    return found


def index_in(names: Sequence[str], rows: CsvRows, header: int, where: str) -> list[str]:
    """Return the first columns that number or name the rows: a pandas index, or row names of R.

    header : number of the line of names

    Raises DataError if the first column has no name and holds something else.
    """
    cells = dict(zip(names, columns_of(rows, len(names)), strict=True))
    found = index_columns(names, lambda name: all(map(is_integer, cells[name])))
    if found or names[0] or len(names) < 2:
        return found
    words = [c for c in cells[""] if not (is_number(c) or other_writing(c))]
    if len({*words}) == len([row for row in rows if len(row) == len(names)]):
        return [""]
    raise DataError(
        f"the first column of {where} has no name, and holds {some(cells[''][:2])}: give it one, "
        f"with skip_lines={header} and names={_listed(names)}"
    )


def has_row_names(lines: Sequence[tuple[int, str]], rows: CsvRows, style: NumberStyle) -> bool:
    """Return whether rows begin with a name that the header does not cover, as R writes them.

    The names are all different, words or integers, and quoted if there is only one row; a column of
    numbers shows that the first line is the header and not a title above it.
    lines, rows : the header and the lines after it, as text and as fields
    """
    header, *below = rows
    if len(below) == 1 and not lines[1][1].startswith('"'):
        return False
    whole = all(len(row) == len(header) + 1 for row in below)
    if not below or not whole or any(is_number(style.with_point(name)) for name in header):
        return False
    first, *columns = ([row[k].strip() for row in below] for k in range(len(header) + 1))
    names = all(is_integer(cell) or not (is_number(cell) or other_writing(cell)) for cell in first)
    if not names or len({*first, ""}) <= len(below) or not any(columns[-1]):
        return False
    numeric = [
        [is_number(style.with_point(cell)) for cell in cells if cell not in UNKNOWN_CELLS]
        for cells in columns
    ]
    titled = any(len(found) > 1 and not found[0] and all(found[1:]) for found in numeric)
    return not titled and any(found and all(found) for found in numeric)


def warn_of_index(name: str, where: str) -> None:
    """Warn that a column is left out because it numbers or names the rows."""
    if name:
        what = f"column {name!r} of {where} holds whole numbers, as an index written by pandas does"
    else:
        what = (
            f"the first column of {where} has no name and numbers or names the rows, as an index "
            "of pandas and row names of R do"
        )
    warn(f"{what}; it is left out: give it a name of its own if it is a feature")


def refuse_units(
    lines: Sequence[tuple[int, str]], rows: CsvRows, style: NumberStyle, where: str
) -> None:
    """Raise DataError if lines below the header are words, and all lines below these numbers.

    lines, rows : the header and the lines after it, as text and as fields
    """
    names, width = [field.strip() for field in rows[0]], len(rows[0])
    if len(rows) < 4 or any(is_number(style.with_point(cell)) for cell in rows[1]):
        return
    for n_lines in range(1, min(_MAX_UNIT_LINES, len(rows) - 3) + 1):
        units = [row for row in rows[1 : 1 + n_lines] if len(row) == width]
        below = columns_of(rows[1 + n_lines : _LOOKED_AT], width)
        numeric = [
            k for k, cells in enumerate(below)
            if len(cells) > 1 and all(is_number(style.with_point(cell)) for cell in cells)
        ]  # fmt: skip
        if len(numeric) < min(2, width) or len(units) < n_lines:
            continue
        cells = [[row[k].strip() for k in numeric] for row in units]
        if any(is_number(style.with_point(cell)) for row in cells for cell in row):
            continue
        if all(any(cell not in UNKNOWN_CELLS for cell in row) for row in cells):
            last, line = lines[n_lines]
            raise DataError(
                f"line {last} of {where} ({line.strip()[:40]!r}) has words in columns that hold "
                f"numbers below it, units as it seems; skip_lines={last} with "
                f"names={_listed(names)} reads the rows below it"
            )


def _listed(names: Sequence[str]) -> str:
    """Return names as an argument, with a name for a first column that has none."""
    if not names[0]:
        names = ["row" + "_" * list(names).count("row"), *names[1:]]
    plain = all(re.fullmatch(r"[^\"'\[\]\\]+", name) for name in names)
    return f"[{', '.join(map(repr, names))}]" if plain and len(names) <= _MAX_NAMES else "..."


def _is_grouped(cells: Sequence[str]) -> bool:
    """Return whether points may group the digits of all these numbers."""
    return any(map(_GROUPED.fullmatch, cells)) and all(
        _GROUPED.fullmatch(cell) or _BELOW_A_THOUSAND.fullmatch(cell) for cell in cells
    )


def check_thousands(
    names: Sequence[str], rows: CsvRows, form: FileForm, delimiter: str, where: str
) -> None:
    """Raise DataError if points may group digits while another column has decimal commas.

    If the only evidence is a semicolon between the fields, warn.
    """
    if form.decimal is not None or form.thousands is not None:
        return
    rows = rows[:_LOOKED_AT]
    if delimiter != ";" and not any("," in cell for row in rows for cell in row):
        return
    columns = columns_of(rows, len(names))
    grouped, commas, by_commas, decimals = [], [], False, False
    for name, cells in zip(names, columns, strict=True):
        if _is_grouped(cells):
            grouped.append((name.strip(), next(filter(_GROUPED.fullmatch, cells))))
        elif any(map(_COMMA.fullmatch, cells)):
            commas.append((name.strip(), next(filter(_COMMA.fullmatch, cells))))
            by_commas = by_commas or _is_grouped([cell.replace(",", ".") for cell in cells])
        else:
            decimals = decimals or any("." in cell and is_number(cell) for cell in cells)
    if not grouped or not (commas or (delimiter == ";" and not decimals)):
        return
    (name, number), *_ = grouped
    holds = f"column {name!r} of {where} holds numbers like {number!r}"
    if commas:
        other, text = commas[0]
        swapped = 'thousands="," if it is the other way round, and ' if by_commas else ""
        raise DataError(
            f'{holds}, and {other!r} numbers like {text!r}: say thousands="." if points group '
            f"digits and commas stand before fractions, {swapped}else write all numbers alike"
        )
    warn(
        f"{holds}, all with three digits behind the point, and semicolons between the fields: they "
        'are read as fractions; thousands="." says that points group digits, and decimal="." that '
        "they do not"
    )
