"""Join the lines of a CSV row whose quoted fields hold line breaks, so that each row is one line.

A line break inside a quoted field becomes a carriage return, which never occurs in the text that
`line_pieces` yields. The parser of the line turns it back into a line feed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from streamkern.basics.errors import DataError
from streamkern.basics.optional import import_optional
from streamkern.ingest.csv_lines import (
    after_lines,
    is_well_quoted,
    line_pieces,
    n_lines,
    numbered_lines,
)
from streamkern.ingest.tables.numbers import is_number

BREAK = "\r"
"""Replaces a line break inside a quoted field."""
_MOST = 1 << 20  # bytes of a row with an open quote; a longer one is stray
_FIRST_LINE = 4 << 20  # most bytes of the first line, which is read before memory= is known
_FIRST_READ = 64 << 10  # bytes of the first read; a folder may have thousands of files
_ANY = ",;\t|"  # delimiters of a file whose delimiter is unknown
Piece = tuple[int, bytes]


def whole_rows(
    pieces: Iterable[Piece], delimiter: str, width: int | None = None
) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (line number, whole rows, well quoted) of pieces of lines, with each row on one line.

    The last value is whether all quotes surround whole fields, see `is_well_quoted`.

    delimiter : one or more characters that may separate fields
    width : number of fields of a row
    """
    rest, first = b"", 1
    for number, text in pieces:
        if rest:
            number, text, rest = first, rest + text, b""
        well = b'"' not in text or is_well_quoted(text, delimiter)
        if not well:
            text, rest = _joined(text, delimiter, width)
            first = number + n_lines(text) + text.count(BREAK.encode())
            if len(rest) > _MOST:
                text, rest = text + rest, b""
            well = is_well_quoted(text, delimiter)
        if text:
            yield number, text, well
    if rest:
        yield first, rest, False


def _joined(text: bytes, delimiter: str, width: int | None) -> tuple[bytes, bytes]:
    """Return the whole rows, each on one line, and the start of a row whose quote stays open."""
    between = re.escape((delimiter + ("\t" if delimiter == " " else "")).encode())
    field = re.compile(
        rb'(?<![^%b\n])"(?:[^"]++|"")*+(?:"(?=[%b\n])|\Z)' % (between, between)
    )  # fmt: skip
    found = bytearray(text)
    for match in field.finditer(text):
        if b"\n" not in match[0]:
            continue
        begin, end = found.rfind(b"\n", 0, match.start()) + 1, match.end()
        if end == len(text):
            return bytes(found[:begin]), text[begin:]
        if not _are_rows(text[begin : text.index(b"\n", end)], delimiter, width):
            found[match.start() : end] = match[0].replace(b"\n", BREAK.encode())
    return bytes(found), b""


def _are_rows(text: bytes, delimiter: str, width: int | None) -> bool:
    """Return whether the lines inside one pair of quotes are rows, so that the quotes are stray.

    They are if each has all fields, and numbers in the same places; lines of words prove nothing.
    """
    cells = [line.split(delimiter) for line in text.decode(errors="replace").split("\n")]
    if width is None or width < 2 or any(len(row) != width for row in cells):
        return False
    found = {tuple(is_number(cell.strip(' "')) for cell in row) for row in cells}
    return len(found) == 1 and any(found.pop())


def with_breaks(table: Any) -> Any:
    """Return an Arrow table with the line breaks restored in its text."""
    arrow, compute = import_optional("pyarrow"), import_optional("pyarrow.compute")
    columns = [
        compute.replace_substring(column, BREAK, "\n") if column.type == arrow.string() else column
        for column in table.columns
    ]
    return arrow.table(dict(zip(table.column_names, columns, strict=True)))


def below(pieces: Iterable[Piece], n_above: int) -> Iterator[Piece]:
    """Yield pieces of lines without the first `n_above` lines of the file."""
    for number, text in pieces:
        if number <= n_above:
            skipped = min(n_above + 1 - number, n_lines(text))
            number, text = number + skipped, after_lines(text, skipped)
        if text:
            yield number, text


def first_lines(
    file: IO[bytes], n_above: int, delimiter: str | None, where: str
) -> tuple[Sequence[tuple[int, str]], Sequence[tuple[int, str]]]:
    """Return the first lines: the skipped ones, and rows below them, both without blank lines."""
    above: list[tuple[int, str]] = []

    def noted() -> Iterator[Piece]:
        for number, text in line_pieces(file, _FIRST_LINE, where, _FIRST_READ):
            if number <= n_above:
                lines = numbered_lines(text, number, where)
                above.extend(line for line in lines if line[0] <= n_above)
            yield number, text

    for number, text, _ in whole_rows(below(noted(), n_above), delimiter or _ANY):
        if lines := numbered_lines(text, number, where):
            return above, lines
    if above:
        raise DataError(
            f"{where} has no lines below the {n_above} that skip_lines= leaves out; give fewer"
        )
    raise DataError(f"{where} is empty; give a file with rows")
