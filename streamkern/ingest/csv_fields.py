"""Split the lines of a CSV into fields by the csv module, with errors that name the line."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from streamkern.basics.errors import DataError
from streamkern.ingest.csv_lines import LINE_BREAK_SUBSTITUTE, NumberedLines, with_line_breaks

_UNCLOSED_QUOTE = (
    "has a quote that is not closed; close it or remove it, or shorten the field to one line"
)


def parse_fields(
    lines: NumberedLines, delimiter: str, location: str, start: int | None = None,
    width: int | None = None,
) -> Iterator[list[str]]:  # fmt: skip
    """Yield the fields of each line; raise DataError for a line that is not valid.

    delimiter : the character between two fields
    location : name of the file, for messages
    start : row number of the first line; None if the lines may not be rows
    width : number of fields that a line must have; None for any
    """
    reader = csv.reader((line for _, line in lines), delimiter=delimiter, strict=True)
    for k, (number, line) in enumerate(lines):
        name = line_location(location, number, None if start is None else start + k)
        try:
            fields = next(reader)
        except csv.Error as error:
            raise DataError(f"{name} {_error_text(error)}") from error
        if reader.line_num != k + 1:
            raise DataError(f"{name} {_UNCLOSED_QUOTE}")
        if width is not None and len(fields) != width:
            raise DataError(
                f"{name} has {len(fields)} fields, but the first line has {width}",
                f"write {width} fields, and put quotes around a field that contains {delimiter!r}",
            )
        if LINE_BREAK_SUBSTITUTE in line:
            fields = [*map(with_line_breaks, fields)]
        yield fields


def line_location(location: str, number: int, row: int | None) -> str:
    """Return the name of line `number` for messages. row : its row number; None if unknown."""
    if row is None:
        return f"line {number} of {location}"
    return f"{location}, row {row} (line {number})"


def _error_text(error: csv.Error) -> str:
    """Return an explanation of a line that the csv module refuses."""
    if "unexpected end" in str(error):
        return _UNCLOSED_QUOTE
    if "field larger" in str(error):
        return f"has a field of more than {csv.field_size_limit()} characters; shorten or drop it"
    return f"is not in the form of a CSV: {error}; double the quotes inside a quoted field"
