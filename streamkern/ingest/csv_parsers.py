"""Parse lines of a CSV: by pyarrow, which is fast, or by the csv module, which reads every dialect.

Errors of the csv module name the line.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from streamkern.basics.errors import DataError, MissingDependencyError
from streamkern.basics.optional import import_optional
from streamkern.ingest.csv_lines import (
    LINE_BREAK_SUBSTITUTE,
    NumberedLines,
    n_lines,
    with_line_breaks,
)
from streamkern.ingest.tables.arrow import arrow, compute

_UNCLOSED_QUOTE = (
    "has a quote that is not closed; close it or remove it, or shorten the field to one line"
)


def arrow_columns(
    content: bytes, n_columns: int, types: dict[str, str], delimiter: str, decimal: str
) -> Any:
    """Parse lines by pyarrow as a table; None if it is not installed or cannot parse them.

    content : whole rows, each on one line that ends with a line feed, without blank lines
    n_columns : number of columns of the file; the names of the table are their positions
    types : Arrow type of each column to read, by its position as text
    delimiter : the character between two fields
    decimal : decimal sign of the numbers
    """
    try:
        reader = import_optional("pyarrow.csv")
        content.decode()
    except (MissingDependencyError, UnicodeDecodeError):
        return None
    if b"\0" in content or not delimiter.isascii():
        return None
    has_breaks = LINE_BREAK_SUBSTITUTE.encode() in content
    read_options = reader.ReadOptions(
        column_names=[str(k) for k in range(n_columns)], block_size=len(content) + 1
    )
    parse_options = reader.ParseOptions(
        delimiter=delimiter,
        quote_char='"' if b'"' in content else False,
        newlines_in_values=has_breaks,
    )
    convert_options = reader.ConvertOptions(
        column_types=types, include_columns=list(types), null_values=[],
        strings_can_be_null=False, decimal_point=decimal,
    )  # fmt: skip
    try:
        table = reader.read_csv(io.BytesIO(content), read_options, parse_options, convert_options)
    except ValueError:  # pyarrow.ArrowInvalid
        return None
    if table.num_rows != n_lines(content):
        return None
    # Line breaks in quoted fields were replaced, to have each row on one line.
    for k, column in enumerate(table.columns):
        if has_breaks and column.type == arrow.string():
            restored = compute.replace_substring(column, LINE_BREAK_SUBSTITUTE, "\n")
            table = table.set_column(k, table.column_names[k], restored)
    return table


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
