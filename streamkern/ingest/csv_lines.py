"""Split a text file into pieces of whole rows that can be parsed independently.

The lines of a row whose quoted fields hold line breaks are joined, so that each row is one line: a
line break inside a quoted field becomes a carriage return, which never occurs in the text that
`line_pieces` yields. When the line is parsed, it becomes a line feed again.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from streamkern.basics.errors import DataError, MissingDependencyError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.basics.text import size_text
from streamkern.ingest.tables.arrow import arrow, compute
from streamkern.ingest.tables.numbers import is_number

Piece = tuple[int, bytes]
"""Number of the first line, and whole lines, each ended by a line feed."""
NumberedLines = Sequence[tuple[int, str]]
"""Lines of a file, each with its line number."""

LINE_BREAK_MARK = "\r"
"""Replaces a line break inside a quoted field."""
UNCLOSED = "has a quote that is not closed; close it or remove it, or shorten the field to one line"

_MAX_FIRST_LINE_BYTES = 4 << 20
"""Length of the longest line that is read before `memory=` is known."""
_FIRST_READ_BYTES = 64 << 10
"""Bytes that are read to find the layout of a file; few, as a folder may have many files."""
_MAX_OPEN_QUOTE_BYTES = 1 << 20
"""Length of the longest row with an open quote; in a longer one, the quote is stray."""
_SLAB_BYTES = 1 << 18
"""Bytes that are examined at once; their temporary arrays stay in the processor's cache."""
_ANY_DELIMITER = ",;\t|"
"""Delimiters of a file whose delimiter is unknown."""
_BOM = b"\xef\xbb\xbf"
_LF = ord("\n")
_QUOTED_OR_BLANKS = re.compile(rb'("(?:[^"\n]|"")*")|[ \t]+')
_BLANK_LINES = re.compile(rb"\n *(?=\n)")

# ------------------------------------------------------------------------------ pieces of a file


def line_pieces(
    file: IO[bytes], size: int, location: str, step: int | None = None
) -> Iterator[Piece]:
    """Yield (number of the first line, whole lines in at most `size` bytes, each ended by one LF).

    Pieces have `step` bytes if lines are shorter, by default a quarter of `size`, because parsing
    multiplies their size. If `step` is given, `size` is a fixed limit that more memory does not
    raise.
    """
    limit = "most that is read as one line; " if step else "most that the memory given allows; "
    remedy = "" if step else f"raise {mention('memory=')}, or "
    incomplete_line, number, ended = b"", 1, False
    step = step or max(size // 4, 1)
    while not ended:
        cut = 0
        while not ended and cut == 0:
            if len(incomplete_line) >= size:
                raise DataError(
                    f"line {number} of {location} is longer than {size_text(size)}, the {limit}"
                    f"{remedy}write shorter lines"
                )
            n_bytes = min(len(incomplete_line) + step, size)
            incomplete_line, ended = _extended(file, incomplete_line, n_bytes)
            # A CR at the very end may be half of a CR LF.
            line_feed = incomplete_line.rfind(b"\n")
            last = line_feed if line_feed >= 0 else incomplete_line.rfind(b"\r", 0, -1)
            cut = len(incomplete_line) if ended else last + 1
        piece, incomplete_line = incomplete_line[:cut], incomplete_line[cut:]
        if number == 1:
            piece = piece.removeprefix(_BOM)
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if piece and not piece.endswith(b"\n"):
            piece += b"\n"
        if piece:
            yield number, piece
        number += n_lines(piece)


def _extended(file: IO[bytes], start: bytes, size: int) -> tuple[bytes, bool]:
    """Return `start` extended from the file to `size` bytes, and whether the file ended."""
    parts, n_bytes = [start], len(start)
    while n_bytes < size:
        data = file.read(size - n_bytes)
        if not data:
            return b"".join(parts), True
        parts.append(data)
        n_bytes += len(data)
    return b"".join(parts), False


def pieces_below(pieces: Iterable[Piece], n_above: int) -> Iterator[Piece]:
    """Yield pieces of lines without the first `n_above` lines of the file."""
    for number, text in pieces:
        if number <= n_above:
            skipped = min(n_above + 1 - number, n_lines(text))
            number, text = number + skipped, after_lines(text, skipped)
        if text:
            yield number, text


def first_lines(
    file: IO[bytes], n_above: int, delimiter: str | None, location: str
) -> tuple[NumberedLines, NumberedLines]:
    """Return the first lines: the skipped ones, and rows below them, both without blank lines."""
    above: list[tuple[int, str]] = []

    def recorded_pieces() -> Iterator[Piece]:
        for number, text in line_pieces(file, _MAX_FIRST_LINE_BYTES, location, _FIRST_READ_BYTES):
            if number <= n_above:
                lines = numbered_lines(text, number, location)
                above.extend(line for line in lines if line[0] <= n_above)
            yield number, text

    pieces = pieces_below(recorded_pieces(), n_above)
    for number, text, _ in whole_rows(pieces, delimiter or _ANY_DELIMITER):
        if lines := numbered_lines(text, number, location):
            return above, lines
    if above:
        raise DataError(
            f"{location} has no lines below the {n_above} that {mention('skip_lines=')} skips",
            "give a smaller number",
        )
    raise DataError(f"{location} is empty", "give a file with rows")


# --------------------------------------------------------------------------------------- whole rows


def whole_rows(
    pieces: Iterable[Piece], delimiter: str, width: int | None = None
) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (line number, whole rows, well quoted) of pieces of lines, with each row on one line.

    The last value is whether all quotes surround whole fields, see `is_well_quoted`.

    delimiter : one or more characters that may separate fields
    width : number of fields of a row
    """
    incomplete_row, first = b"", 1
    for number, text in pieces:
        if incomplete_row:
            number, text, incomplete_row = first, incomplete_row + text, b""
        well_quoted = b'"' not in text or is_well_quoted(text, delimiter)
        if not well_quoted:
            text, incomplete_row = _on_one_line_each(text, delimiter, width)
            first = number + n_lines(text) + text.count(LINE_BREAK_MARK.encode())
            if len(incomplete_row) > _MAX_OPEN_QUOTE_BYTES:
                text, incomplete_row = text + incomplete_row, b""
            well_quoted = is_well_quoted(text, delimiter)
        if text:
            yield number, text, well_quoted
    if incomplete_row:
        yield first, incomplete_row, False


def _on_one_line_each(text: bytes, delimiter: str, width: int | None) -> tuple[bytes, bytes]:
    """Return the whole rows, each on one line, and the start of a row whose quote stays open."""
    between = re.escape((delimiter + ("\t" if delimiter == " " else "")).encode())
    field = re.compile(
        rb'(?<![^%b\n])"(?:[^"]++|"")*+(?:"(?=[%b\n])|\Z)' % (between, between)
    )  # fmt: skip
    joined = bytearray(text)
    for match in field.finditer(text):
        if b"\n" not in match[0]:
            continue
        begin, end = joined.rfind(b"\n", 0, match.start()) + 1, match.end()
        if end == len(text):
            return bytes(joined[:begin]), text[begin:]
        if not _are_rows(text[begin : text.index(b"\n", end)], delimiter, width):
            joined[match.start() : end] = match[0].replace(b"\n", LINE_BREAK_MARK.encode())
    return bytes(joined), b""


def _are_rows(text: bytes, delimiter: str, width: int | None) -> bool:
    """Return whether the lines inside one pair of quotes are rows, so that the quotes are stray.

    They are if each has all fields, and numbers in the same places; lines of words prove nothing.
    """
    cells = [line.split(delimiter) for line in text.decode(errors="replace").split("\n")]
    if width is None or width < 2 or any(len(row) != width for row in cells):
        return False
    patterns = {tuple(is_number(cell.strip(' "')) for cell in row) for row in cells}
    return len(patterns) == 1 and any(patterns.pop())


def is_well_quoted(content: bytes, delimiter: str) -> bool:
    """Return whether all quotes surround whole fields of one line, or are doubled in such fields.

    Quotes open and close in turn; a doubled one does both. False if the delimiter is not ASCII,
    which pyarrow does not read.

    delimiter : one or more characters that may separate fields
    """
    if not delimiter.isascii():
        return False
    text = np.frombuffer(content, np.uint8)
    quotes = np.flatnonzero(text == ord('"'))
    if len(quotes) % 2:
        return False
    opens, closes = quotes[::2], quotes[1::2]
    ends = np.array([*map(ord, delimiter), _LF, ord('"')], np.uint8)
    around = np.concatenate([ends[-2:-1], text, ends[-2:-1]])  # a line feed before and after it
    lines = np.flatnonzero(text == _LF)
    return bool(
        np.isin(around[opens], ends).all()
        and np.isin(around[closes + 2], ends).all()
        and (np.searchsorted(lines, opens) == np.searchsorted(lines, closes)).all()
    )


# --------------------------------------------------------------------------------- lines and fields


def numbered_lines(text: bytes, number: int, location: str) -> list[tuple[int, str]]:
    """Return (line number, line) of the lines that are not blank, the first one being `number`.

    Raises DataError for bytes that are not text.
    """
    try:
        lines = text.decode().split("\n")
    except UnicodeDecodeError as error:
        wrong_line = number + sum(text.count(end, 0, error.start) for end in (b"\n", b"\r"))
        raise DataError(
            f"line {wrong_line} of {location} holds the byte {text[error.start]:#04x}, which is "
            "not UTF-8",
            f"give its encoding, as in {mention('encoding', _likely_encoding(text))}",
        ) from error
    numbered = []
    for line in lines:
        if "\0" in line:
            raise DataError(
                f"line {number} of {location} holds a null byte",
                "if the file is not damaged, give its encoding, as in "
                f"{mention('encoding', _likely_encoding(text))}",
            )
        if line.strip(" "):
            numbered.append((number, line))
        number += 1 + line.count("\r")  # for each line break in a quoted field
    return numbered


def _likely_encoding(text: bytes) -> str:
    """Return the likely encoding of text that is not UTF-8."""
    if text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"  # with its byte-order mark
    if b"\0" not in text:
        return "latin-1"
    return "utf-16-be" if text[:1] == b"\0" else "utf-16-le"


def split_fields(line: str, delimiter: str) -> list[str]:
    """Return the fields of a line; one field, the line itself, if its quotes are unbalanced."""
    blanks = delimiter == " "
    line = re.sub(r"[ \t]+", " ", line).strip() if blanks and '"' not in line else line
    try:
        reader = csv.reader([line], delimiter=delimiter, strict=True, skipinitialspace=blanks)
        return [with_line_breaks(field) for field in next(reader, [""])]
    except csv.Error:
        return [line]


def with_line_breaks(field: str) -> str:
    """Return a field with its line breaks restored."""
    return field.replace(LINE_BREAK_MARK, "\n")


def csv_error_text(error: csv.Error) -> str:
    """Return an explanation of a line that the csv module refuses."""
    if "unexpected end" in str(error):
        return UNCLOSED
    if "field larger" in str(error):
        return f"has a field of more than {csv.field_size_limit()} characters; shorten or drop it"
    return f"is not in the form of a CSV: {error}; double the quotes inside a quoted field"


# --------------------------------------------------------------------------------------------- text


def n_lines(text: bytes) -> int:
    """Return the number of line feeds; much faster than bytes.count."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == _LF))


def without_blank(text: bytes) -> bytes:
    """Return the text without lines that are empty or consist of blanks."""
    codes = np.frombuffer(text, np.uint8)
    begins = codes[np.flatnonzero(codes[:-1] == _LF) + 1]
    if text[:1] in (b"\n", b" ") or ((begins == _LF) | (begins == ord(" "))).any():
        return _BLANK_LINES.sub(b"", b"\n" + text)[1:]
    return text


def after_lines(content: bytes, n_skipped: int) -> bytes:
    """Return the content after its first `n_skipped` lines."""
    position = 0
    for _ in range(n_skipped):
        position = content.index(b"\n", position) + 1
    return content[position:]


def single_blanks(text: bytes) -> bytes:
    """Return lines whose fields are separated by one blank in place of any blanks and tabs.

    Quoted text is unchanged.
    """
    if b'"' in text:
        text = _QUOTED_OR_BLANKS.sub(lambda match: match[1] or b" ", text)
    else:
        text = re.sub(rb"[ \t]+", b" ", text)
    return re.sub(rb"(?m)^ | $", b"", text)


def has_padded(content: bytes, delimiter: str) -> bool:
    """Return whether a field may begin with a zero and another digit, as codes do."""
    if content[:1] == b"0" and content[1:2].isdigit():
        return True
    text = np.frombuffer(content, np.uint8)
    ends = [_LF, ord(delimiter), *(c for c in b'" ' if c in content)]
    for start in range(0, len(text) - 2, _SLAB_BYTES):
        part = text[start : start + _SLAB_BYTES + 2]
        padded = part[1:-1] == ord("0")
        padded &= (part[2:] ^ ord("0")) < 10
        begins = part[:-2] == ends[0]
        for end in ends[1:]:
            begins |= part[:-2] == end
        if (padded & begins).any():
            return True
    return False


class RecodedFile:
    """A text file in another encoding, read as UTF-8."""

    def __init__(self, file: IO[bytes], encoding: str, location: str) -> None:
        self._file, self._location = io.TextIOWrapper(file, encoding, newline=""), location

    def read(self, size: int) -> bytes:
        try:
            return self._file.read(size).encode()
        except UnicodeError as error:
            raise DataError(
                f"{self._location} is not text in {mention('encoding', self._file.encoding)} "
                f"({error})",
                "give the encoding in which the file was written",
            ) from error

    def close(self) -> None:
        self._file.close()


def arrow_columns(
    content: bytes, n_columns: int, types: dict[str, str], delimiter: str, decimal: str
) -> Any:
    """Parse lines by pyarrow as a table; None if it is not installed or cannot parse them.

    types : Arrow types of the columns wanted, by position
    """
    try:
        reader = import_optional("pyarrow.csv")
        content.decode()
    except (MissingDependencyError, UnicodeDecodeError):
        return None
    if b"\0" in content or not delimiter.isascii():
        return None
    has_breaks = LINE_BREAK_MARK.encode() in content
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
    for k, column in enumerate(table.columns) if has_breaks else ():
        if column.type == arrow.string():
            restored = compute.replace_substring(column, LINE_BREAK_MARK, "\n")
            table = table.set_column(k, table.column_names[k], restored)
    return table
