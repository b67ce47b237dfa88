"""Notices what spoils a table though every line is a row: an index, units, digits in groups.

Each is looked for in the first lines of a CSV that has a header, and is said with its remedy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from streamkern.basics.errors import DataError
from streamkern.basics.text import some
from streamkern.basics.warning import warn
from streamkern.ingest.formats import FileForm
from streamkern.ingest.tables.cells import MISSING
from streamkern.ingest.tables.number_style import NumberStyle
from streamkern.ingest.tables.numbers import is_integer, is_number

UNKNOWN = {*MISSING, "?", "-", "."}
"""Cells that say nothing of what a column holds."""
INDEX_NAMES = ("", "Unnamed: 0")
"""Names of the first column where it is the index that pandas wrote, and wrote again."""
_GROUPED = re.compile(r"[+-]?[1-9][0-9]{0,2}(\.[0-9]{3})+")
_BELOW_A_THOUSAND = re.compile(r"[+-]?[0-9]{1,3}")
_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+")
_MOST_UNIT_LINES, _MOST_NAMES = 3, 30
_LOOKED_AT = 100  # rows
Rows = Sequence[Sequence[str]]


def columns_of(rows: Rows, n_columns: int) -> list[list[str]]:
    """Return the cells of each column that say something, of the rows that have all columns."""
    whole = [row for row in rows if len(row) == n_columns]
    return [[c for row in whole if (c := row[k].strip()) not in UNKNOWN] for k in range(n_columns)]


def has_index(names: Sequence[str], rows: Rows, header: int, where: str) -> bool:
    """Return whether the first column is an index of the rows: whole numbers without a name.

    header : number of the line of names. Raises DataError where it has no name and holds something
    else.
    """
    name = names[0].strip()
    if len(names) < 2 or name not in INDEX_NAMES:
        return False
    cells = columns_of(rows, len(names))[0]
    if all(map(is_integer, cells)):
        return True
    if name:
        return False
    raise DataError(
        f"the first column of {where} has no name, and holds {some(cells[:2])}: give it one, with "
        f"skip_lines={header} and names={_listed(names)}"
    )


def warn_of_index(name: str, where: str) -> None:
    """Warn that a column is left out, as it numbers the rows."""
    what = "has no name" if not name else f"is {name!r}"
    warn(
        f"the first column of {where} {what} and holds whole numbers, as an index written by "
        "pandas does; it is left out: give it a name of its own if it is a feature"
    )


def refuse_units(
    lines: Sequence[tuple[int, str]], rows: Rows, style: NumberStyle, where: str
) -> None:
    """Raise DataError where lines below the header are words, and all below them numbers.

    lines, rows : the header and what follows it, as text and as fields
    """
    names, width = [field.strip() for field in rows[0]], len(rows[0])
    if len(rows) < 4 or any(is_number(style.with_point(cell)) for cell in rows[1]):
        return
    for n_lines in range(1, min(_MOST_UNIT_LINES, len(rows) - 3) + 1):
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
        if all(any(cell not in UNKNOWN for cell in row) for row in cells):
            last, line = lines[n_lines]
            raise DataError(
                f"line {last} of {where} ({line.strip()[:40]!r}) has words in columns that hold "
                f"numbers below it, units as it seems; skip_lines={last} with "
                f"names={_listed(names)} reads the rows below it"
            )


def _listed(names: Sequence[str]) -> str:
    """Return names as an argument, with one for a first column that has none."""
    if not names[0]:
        names = ["row" + "_" * list(names).count("row"), *names[1:]]
    plain = all(re.fullmatch(r"[^\"'\[\]\\]+", name) for name in names)
    return f"[{', '.join(map(repr, names))}]" if plain and len(names) <= _MOST_NAMES else "..."


def _is_grouped(cells: Sequence[str]) -> bool:
    """Return whether points may group the digits of all these numbers."""
    return any(map(_GROUPED.fullmatch, cells)) and all(
        _GROUPED.fullmatch(cell) or _BELOW_A_THOUSAND.fullmatch(cell) for cell in cells
    )


def check_thousands(
    names: Sequence[str], rows: Rows, form: FileForm, delimiter: str, where: str
) -> None:
    """Refuse points that group digits where another column has decimal commas.

    Where only a semicolon between the fields speaks for it, warn.
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
