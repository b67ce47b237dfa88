"""The lines of a text file, in pieces of whole ones that are parsed by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO

from streamkern.basics.errors import DataError
from streamkern.basics.text import size_text

_BLANK = re.compile(rb"\n *(?=\n)")
_BOM = b"\xef\xbb\xbf"


def line_pieces(
    file: IO[bytes], size: int, where: str, step: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """(number of its first line, whole lines in at most `size` bytes, each ended by one LF).

    Pieces are of `step` where lines are shorter, a quarter: parsing multiplies their size.
    """
    rest, number, ended, step = b"", 1, False, step or max(size // 4, 1)
    while not ended:
        cut = 0
        while not ended and cut == 0:
            if len(rest) >= size:
                raise DataError(
                    f"line {number} of {where} is longer than {size_text(size)}, the most that the "
                    "memory given allows; raise memory=, or make it lines"
                )
            rest, ended = _more(file, rest, min(len(rest) + step, size))
            cut = len(rest) if ended else _end_of_lines(rest)
        piece, rest = rest[:cut], rest[cut:]
        if number == 1:
            piece = piece.removeprefix(_BOM)
        piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if piece and not piece.endswith(b"\n"):
            piece += b"\n"
        if piece:
            yield number, piece
        number += piece.count(b"\n")


def _more(file: IO[bytes], rest: bytes, size: int) -> tuple[bytes, bool]:
    """`rest` and what follows it up to `size` bytes, and whether the file ends there."""
    parts, have = [rest], len(rest)
    while have < size:
        data = file.read(size - have)
        if not data:
            return b"".join(parts), True
        parts.append(data)
        have += len(data)
    return b"".join(parts), False


def _end_of_lines(data: bytes) -> int:
    """Where the last whole line ends; a CR at the very end may be half of a CR LF."""
    return (data.rfind(b"\n") + 1) or (data.rfind(b"\r", 0, -1) + 1)


def without_blank(text: bytes) -> bytes:
    """The text without lines that are empty or blanks."""
    if b"\n\n" in text or b"\n " in text or text[:1] in (b"\n", b" "):
        return _BLANK.sub(b"", b"\n" + text)[1:]
    return text


def after_lines(content: bytes, n_lines: int) -> bytes:
    """What follows the first lines."""
    at = 0
    for _ in range(n_lines):
        at = content.index(b"\n", at) + 1
    return content[at:]
