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
from typing import IO, NamedTuple

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.text import size_text
from streamkern.ingest.tables.numbers import is_number

Piece = tuple[int, bytes]
"""Number of the first line, and whole lines, each ended by a line feed."""
NumberedLines = Sequence[tuple[int, str]]
"""Lines of a file, each with its line number."""

LINE_BREAK_SUBSTITUTE = "\r"
"""Stands for a line break inside a quoted field, so that each row is one line."""

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
_QUOTED_OR_SPACES = re.compile(rb'("(?:[^"\n]|"")*")|[ \t]+')
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
    limit_text, remedy = "most that the memory given allows; ", f"raise {mention('memory=')}, or "
    if step:
        limit_text, remedy = "most that is read as one line; ", ""
    incomplete_line = b""
    number = 1
    ended = False
    step = step or max(size // 4, 1)
    while not ended:
        cut = 0
        while not ended and cut == 0:
            if len(incomplete_line) >= size:
                raise DataError(
                    f"line {number} of {location} is longer than {size_text(size)}, the "
                    f"{limit_text}{remedy}write shorter lines"
                )
            n_bytes = min(len(incomplete_line) + step, size)
            incomplete_line, ended = _read_until(file, incomplete_line, n_bytes)
            line_end = incomplete_line.rfind(b"\n")
            if line_end < 0:  # a CR at the very end may be half of a CR LF
                line_end = incomplete_line.rfind(b"\r", 0, -1)
            cut = len(incomplete_line) if ended else line_end + 1
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


def _read_until(file: IO[bytes], start: bytes, size: int) -> tuple[bytes, bool]:
    """Return `start` extended from the file to `size` bytes, and whether the file ended."""
    parts, n_bytes = [start], len(start)
    while n_bytes < size:
        data = file.read(size - n_bytes)
        if not data:
            return b"".join(parts), True
        parts.append(data)
        n_bytes += len(data)
    return b"".join(parts), False


def pieces_after(pieces: Iterable[Piece], n_skipped: int) -> Iterator[Piece]:
    """Yield pieces of lines without the first `n_skipped` lines of the file."""
    for number, text in pieces:
        if number <= n_skipped:
            n_dropped = min(n_skipped + 1 - number, n_lines(text))
            number, text = number + n_dropped, after_lines(text, n_dropped)
        if text:
            yield number, text


def first_lines(
    file: IO[bytes], n_skipped: int, delimiter: str | None, location: str
) -> tuple[NumberedLines, NumberedLines]:
    """Return the lines that are skipped, and the first lines after them, both without blank lines.

    n_skipped : number of lines to skip
    delimiter : the character between two fields; None if it is unknown

    Raises DataError if there are no lines after the skipped ones.
    """
    skipped_lines: list[tuple[int, str]] = []

    def recorded_pieces() -> Iterator[Piece]:
        for number, text in line_pieces(file, _MAX_FIRST_LINE_BYTES, location, _FIRST_READ_BYTES):
            if number <= n_skipped:
                lines = numbered_lines(text, number, location)
                skipped_lines.extend(line for line in lines if line[0] <= n_skipped)
            yield number, text

    pieces = pieces_after(recorded_pieces(), n_skipped)
    for number, text, _ in whole_rows(pieces, delimiter or _ANY_DELIMITER):
        if lines := numbered_lines(text, number, location):
            return skipped_lines, lines
    if skipped_lines:
        raise DataError(
            f"{location} has no lines below the {n_skipped} that {mention('skip_lines=')} skips",
            "give a smaller number",
        )
    raise DataError(f"{location} is empty", "give a file with rows")


# --------------------------------------------------------------------------------------- whole rows


class WholeRows(NamedTuple):
    """Consecutive rows of a CSV, each on one line.

    number : line number of the first row
    text : the lines
    well_quoted : whether all quotes surround whole fields, see `is_well_quoted`
    """

    number: int
    text: bytes
    well_quoted: bool


def whole_rows(
    pieces: Iterable[Piece], delimiter: str, width: int | None = None
) -> Iterator[WholeRows]:
    """Yield the rows of pieces of lines, with each row on one line.

    A quote that is not closed within `_MAX_OPEN_QUOTE_BYTES` is stray: its line is a row.

    delimiter : one or more characters that may separate fields
    width : number of fields of a row; None if it is unknown
    """
    incomplete_row, first_number = b"", 1
    for number, text in pieces:
        if incomplete_row:
            number, text, incomplete_row = first_number, incomplete_row + text, b""
        well_quoted = b'"' not in text or is_well_quoted(text, delimiter)
        if not well_quoted:
            text, incomplete_row = _on_one_line_each(text, delimiter, width)
            first_number = number + n_lines(text) + text.count(LINE_BREAK_SUBSTITUTE.encode())
            if len(incomplete_row) > _MAX_OPEN_QUOTE_BYTES:
                text, incomplete_row = text + incomplete_row, b""
            well_quoted = is_well_quoted(text, delimiter)
        if text:
            yield WholeRows(number, text, well_quoted)
    if incomplete_row:
        yield WholeRows(first_number, incomplete_row, False)


def _on_one_line_each(text: bytes, delimiter: str, width: int | None) -> tuple[bytes, bytes]:
    """Return the whole rows, each on one line, and the start of a row whose quote stays open."""
    delimiters = re.escape((delimiter + ("\t" if delimiter == " " else "")).encode())
    # A quote after a delimiter or at the start of a line; text with doubled quotes; the closing
    # quote before a delimiter or at the end of a line, or else the end of the text.
    quoted_field = re.compile(
        rb'(?<![^%b\n])"(?:[^"]++|"")*+(?:"(?=[%b\n])|\Z)' % (delimiters, delimiters)
    )  # fmt: skip
    joined = bytearray(text)
    for match in quoted_field.finditer(text):
        if b"\n" not in match[0]:
            continue
        begin, end = joined.rfind(b"\n", 0, match.start()) + 1, match.end()
        if end == len(text):
            return bytes(joined[:begin]), text[begin:]
        if not _are_rows(text[begin : text.index(b"\n", end)], delimiter, width):
            joined[match.start() : end] = match[0].replace(b"\n", LINE_BREAK_SUBSTITUTE.encode())
    return bytes(joined), b""


def _are_rows(text: bytes, delimiter: str, width: int | None) -> bool:
    """Return whether the lines inside one pair of quotes are rows, so that the quotes are stray.

    True if every line has `width` fields, and the same fields of each are numbers. Without numbers
    nothing can be concluded: False.
    """
    cells = [line.split(delimiter) for line in text.decode(errors="replace").split("\n")]
    if width is None or width < 2 or any(len(row) != width for row in cells):
        return False
    patterns = {tuple(is_number(cell.strip(' "')) for cell in row) for row in cells}
    return len(patterns) == 1 and any(patterns.pop())


def is_well_quoted(content: bytes, delimiter: str) -> bool:
    """Return whether all quotes surround whole fields of one line, or are doubled in such fields.

    Quotes open and close in turn; a doubled one does both. False if the delimiter is not ASCII,
    because pyarrow does not read such a delimiter.

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
    # Between line feeds, so that padded[k] is the byte before text[k], and padded[k + 2] after it.
    line_feed = np.array([_LF], np.uint8)
    padded = np.concatenate([line_feed, text, line_feed])
    line_ends = np.flatnonzero(text == _LF)
    return bool(
        np.isin(padded[opens], ends).all()
        and np.isin(padded[closes + 2], ends).all()
        and (np.searchsorted(line_ends, opens) == np.searchsorted(line_ends, closes)).all()
    )


# --------------------------------------------------------------------------------- lines and fields


def numbered_lines(text: bytes, number: int, location: str) -> list[tuple[int, str]]:
    """Return (line number, line) of the lines that are not blank. number : of the first line.

    Raises DataError for bytes that are not text.
    """
    try:
        lines = text.decode().split("\n")
    except UnicodeDecodeError as error:
        line_number = number + sum(text.count(end, 0, error.start) for end in (b"\n", b"\r"))
        raise DataError(
            f"line {line_number} of {location} holds the byte {text[error.start]:#04x}, which is "
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
    by_spaces = delimiter == " "
    line = re.sub(r"[ \t]+", " ", line).strip() if by_spaces and '"' not in line else line
    try:
        reader = csv.reader([line], delimiter=delimiter, strict=True, skipinitialspace=by_spaces)
        return [with_line_breaks(field) for field in next(reader, [""])]
    except csv.Error:
        return [line]


def with_line_breaks(field: str) -> str:
    """Return a field with its line breaks restored."""
    return field.replace(LINE_BREAK_SUBSTITUTE, "\n")


# --------------------------------------------------------------------------------------------- text


def n_lines(text: bytes) -> int:
    """Return the number of line feeds; much faster than bytes.count."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == _LF))


def without_blank_lines(text: bytes) -> bytes:
    """Return the text without lines that are empty or consist of spaces."""
    codes = np.frombuffer(text, np.uint8)
    line_starts = codes[np.flatnonzero(codes[:-1] == _LF) + 1]
    if text[:1] in (b"\n", b" ") or ((line_starts == _LF) | (line_starts == ord(" "))).any():
        return _BLANK_LINES.sub(b"", b"\n" + text)[1:]
    return text


def after_lines(content: bytes, n_skipped: int) -> bytes:
    """Return the content after its first `n_skipped` lines."""
    position = 0
    for _ in range(n_skipped):
        position = content.index(b"\n", position) + 1
    return content[position:]


def collapse_spaces(text: bytes) -> bytes:
    """Return the lines with one space in place of any spaces and tabs between fields.

    Quoted text is unchanged.
    """
    if b'"' in text:
        text = _QUOTED_OR_SPACES.sub(lambda match: match[1] or b" ", text)
    else:
        text = re.sub(rb"[ \t]+", b" ", text)
    return re.sub(rb"(?m)^ | $", b"", text)


def has_zero_padded_field(content: bytes, delimiter: str) -> bool:
    """Return whether a field may begin with a zero and another digit, as codes do.

    False is certain; True may also be due to the text after a quote or a space in a field.
    """
    if content[:1] == b"0" and content[1:2].isdigit():
        return True
    text = np.frombuffer(content, np.uint8)
    # Characters before a number: an end of a line or field; a quote or a space if there are any.
    ends = [_LF, ord(delimiter), *(c for c in b'" ' if c in content)]
    for start in range(0, len(text) - 2, _SLAB_BYTES):
        slab = text[start : start + _SLAB_BYTES + 2]
        before, at, after = slab[:-2], slab[1:-1], slab[2:]
        is_padding = at == ord("0")
        is_padding &= (after ^ ord("0")) < 10  # the codes of digits are 0x30 to 0x39
        begins_number = before == ends[0]
        for end in ends[1:]:
            begins_number |= before == end
        if (is_padding & begins_number).any():
            return True
    return False


class RecodedFile:
    """A text file in another encoding, read as UTF-8."""

    def __init__(self, file: IO[bytes], encoding: str, location: str) -> None:
        self._file, self._location = io.TextIOWrapper(file, encoding, newline=""), location

    def read(self, size: int) -> bytes:
        """Return `size` characters as UTF-8; DataError for bytes that are not in the encoding."""
        try:
            return self._file.read(size).encode()
        except UnicodeError as error:
            raise DataError(
                f"{self._location} is not text in {mention('encoding', self._file.encoding)} "
                f"({error})",
                "give the encoding in which the file was written",
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()
