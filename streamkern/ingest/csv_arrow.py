"""Parse lines of a CSV by pyarrow, which is faster than the csv module but reads fewer dialects."""

from __future__ import annotations

import io
from typing import Any

from streamkern.basics.errors import MissingDependencyError
from streamkern.basics.optional import import_optional
from streamkern.ingest.csv_lines import LINE_BREAK_SUBSTITUTE, n_lines
from streamkern.ingest.tables.arrow import arrow, compute


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
    for k, column in enumerate(table.columns) if has_breaks else ():
        if column.type == arrow.string():
            restored = compute.replace_substring(column, LINE_BREAK_SUBSTITUTE, "\n")
            table = table.set_column(k, table.column_names[k], restored)
    return table
