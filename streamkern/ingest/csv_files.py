"""Reads CSV files in blocks: by pyarrow's parser where it is installed, else by Python's.

A row is a line: quoted fields may hold the delimiter, but no line break. A stray quote can then
swallow nothing, each piece of whole lines is parsed by itself, and the rows that came out are
compared with the lines that went in. Python's csv module, strict, decides what is right: pyarrow
gets pieces whose quotes, if any, are around whole fields, where there is nothing to disagree about,
and what it refuses is read again by the csv module, which says what is wrong and where.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, MissingDependencyError, NotNumbersError
from streamkern.basics.optional import need
from streamkern.basics.text import redact
from streamkern.ingest.columns import Asked, Files, split_columns
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.csv_lines import after_lines, line_pieces, without_blank
from streamkern.ingest.input_files import Place, Url
from streamkern.ingest.numbers import is_number, numbers
from streamkern.ingest.targets import MAX_LABEL

_DELIMITERS = ",;\t|"
_FIRST_LINE = 4 << 20  # bytes of it at most: it is read before any memory is given
_FIRST_READ = 64 << 10  # to look for it; of a folder's thousands of files little more is read twice


class CsvReader:
    """Rows of numbers with target columns, after an optional header line.

    A first line of numbers is a row, and the columns then have no names; one without numbers is
    the header. Features are parsed in float64. Targets are handed on as text, so that labels keep
    their spelling. Blank lines are skipped; lines end with LF, CR LF or CR.
    """

    files: Files = ()  # named by who opened them
    encoder = None

    @property
    def has_cells(self) -> bool:
        """Whether its columns have names, by which an encoder goes."""
        return self._header

    def __init__(
        self, where: str, open_file: Callable[[], IO[bytes]], asked: Asked, identity: Any
    ) -> None:
        self.n_rows: int | None = None
        self.natural_dtype: np.dtype[Any] | None = np.dtype(np.float64)
        self.as_text = True
        self.identity = identity
        self._where, self._open = where, open_file
        with closing(self._open()) as file:
            pieces = line_pieces(file, _FIRST_LINE, where, _FIRST_READ)
            line = next(filter(None, (self._numbered(*piece)[:1] for piece in pieces)), None)
        if line is None:
            raise DataError(f"{where} is empty")
        self._delimiter = _delimiter(line[0][1])
        self.header = tuple(next(self._rows(line)))  # as it stands there, if it is one
        first = [field.strip() for field in self.header]
        self._header = _is_header(first, where)
        self._names = first if self._header else [str(i) for i in range(len(first))]
        split = split_columns(self._names, asked, where, named=self._header)
        self.columns = split.features if self._header else None
        self.target_columns = split.targets if self._header else None
        position = {name: i for i, name in enumerate(self._names)}
        self._features, self._targets, self._weights = (
            [position[name] for name in names]
            for names in (split.features, split.targets, split.weights)
        )

    @property
    def _text_columns(self) -> tuple[list[int], list[int]]:
        return self._targets, self._weights

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        """Blocks of rows; a line longer than `block_bytes` is refused."""
        for (X, y, w), first in self._parts(start, block_bytes, self._by_arrow, self._by_python):
            yield self._block(X, y, w, first)

    def original_blocks(self, block_bytes: int) -> Iterator[list[list[str]]]:
        """The texts of all columns, for the same rows in the same order as `blocks` has them, of a
        reader for which all columns are features."""
        for columns, _ in self._parts(0, block_bytes, self._texts, self._texts_by_python):
            yield columns

    def _parts(
        self, start: int, block_bytes: int, by_arrow: Callable[..., Any],
        by_python: Callable[..., Any],
    ) -> Iterator[tuple[Any, int]]:  # fmt: skip
        """What one of the two makes of the lines of a piece, and its first row, from `start` on.

        by_arrow : of plain content, None where that can not be left to Arrow
        """
        skip = start + (1 if self._header else 0)
        with closing(self._open()) as file:
            for number, text in line_pieces(file, block_bytes, self._where):
                content = without_blank(text)
                n_lines = content.count(b"\n")
                if n_lines > skip:
                    plain = b'"' not in content or _is_well_quoted(content, self._delimiter)
                    found = by_arrow(after_lines(content, skip)) if plain else None
                    if found is None:
                        found = by_python(self._numbered(number, text)[skip:], start)
                    yield found, start
                    start += n_lines - skip
                skip = max(skip - n_lines, 0)
        self.n_rows = start

    # ------------------------------------------------------------------------- one piece of lines

    def _block(self, X: Any, targets: list[Any], weights: list[Any], start: int) -> RawBlock:
        y = np.stack(targets, axis=1) if targets else np.empty((len(X), 0))
        return RawBlock(
            X,
            y[:, 0] if len(targets) == 1 else y,
            self._where,
            start,
            [self._names[k] for k in self._features],
            weights[0] if weights else None,
        )

    def _by_arrow(self, content: bytes) -> tuple[Any, list[Any], list[Any]] | None:
        """(X, targets, weights) of the lines; None for what the csv module must see."""
        table = self._arrow_table(content, "double")
        if table is None:
            return None
        X = np.empty((table.num_rows, len(self._features)))
        for j, k in enumerate(self._features):
            X[:, j] = table.column(str(k)).to_numpy()
        if not np.isfinite(X).all():
            return None
        beside = self._texts_beside(table)
        return None if beside is None else (X, *beside)

    def _texts(self, content: bytes) -> list[list[str]] | None:
        table = self._arrow_table(content, "string")
        return None if table is None else [column.to_pylist() for column in table.columns]

    def _texts_by_python(self, lines: Sequence[tuple[int, str]], start: int) -> list[list[str]]:
        rows = self._rows(lines, start, len(self._names))
        return [list(column) for column in zip(*rows, strict=True)]

    def _texts_beside(self, table: Any) -> tuple[list[Any], list[Any]] | None:
        """Targets and weights of a table of `_arrow_table`; None where one is too long."""
        texts = {k: table.column(str(k)).to_pylist() for k in (*self._targets, *self._weights)}
        if any(len(cell) > MAX_LABEL for cells in texts.values() for cell in cells):
            return None
        targets, weights = ([_stripped(texts[k]) for k in ks] for ks in self._text_columns)
        return targets, weights

    def _arrow_table(self, content: bytes, features: str) -> Any:
        """Columns by position, targets and weights as text; None for what Arrow does not take.

        features : their type
        """
        try:
            arrow = need("pyarrow.csv")
        except MissingDependencyError:
            return None
        if not _is_text(content):
            return None
        names = [str(k) for k in range(len(self._names))]
        kept = [*self._features, *self._targets, *self._weights]
        types = {str(k): features if k in set(self._features) else "string" for k in kept}
        try:
            table = arrow.read_csv(
                io.BytesIO(content),
                arrow.ReadOptions(column_names=names, block_size=len(content) + 1),
                arrow.ParseOptions(
                    delimiter=self._delimiter, quote_char='"' if b'"' in content else False
                ),
                arrow.ConvertOptions(
                    column_types=types,
                    include_columns=[str(k) for k in kept],
                    null_values=[],
                    strings_can_be_null=False,
                ),
            )
        except ValueError:  # pyarrow.ArrowInvalid
            return None
        return table if table.num_rows == content.count(b"\n") else None

    def _by_python(
        self, lines: Sequence[tuple[int, str]], start: int
    ) -> tuple[Any, list[Any], list[Any]]:
        """(X, targets, weights) of the lines; DataError for the first that is wrong."""
        texts: dict[int, list[str]] = {k: [] for k in (*self._targets, *self._weights)}
        take, features = self._taken(len(lines))
        for row, fields in enumerate(self._rows(lines, start, len(self._names))):
            take(row, fields, partial(self._place, lines[row][0], start + row))
            for k, cells in texts.items():
                cells.append(fields[k])
                if len(fields[k]) > MAX_LABEL:
                    raise DataError(
                        f"{self._place(lines[row][0], start + row)}, column {self._names[k]!r} has "
                        f"{len(fields[k])} characters, {MAX_LABEL} are allowed"
                    )
        targets, weights = ([_stripped(texts[k]) for k in ks] for ks in self._text_columns)
        return features(), targets, weights

    def _taken(self, n_rows: int) -> tuple[Callable[..., None], Callable[[], Any]]:
        """What takes the fields of each row, and its place for messages; and what came of all."""
        X = np.empty((n_rows, len(self._features)))

        def take(row: int, fields: Sequence[str], place: Callable[[], str]) -> None:
            try:
                X[row] = numbers([fields[k] for k in self._features])
            except ValueError:
                self._blame(fields, place())

        return take, lambda: X

    def _rows(
        self, lines: Sequence[tuple[int, str]], start: int | None = None, width: int | None = None
    ) -> Iterator[list[str]]:
        """The fields of each line; DataError for a number other than `width`."""
        reader = csv.reader((line for _, line in lines), delimiter=self._delimiter, strict=True)
        for row, (number, _) in enumerate(lines):
            place = self._place(number, None if start is None else start + row)
            try:
                fields = next(reader)
            except csv.Error as error:
                raise DataError(f"{place} {_explained(error)}") from error
            if reader.line_num != row + 1:
                raise DataError(f"{place} {_UNCLOSED}")
            if width is not None and len(fields) != width:
                raise DataError(f"{place} has {len(fields)} fields, the first line has {width}")
            yield fields

    def _numbered(self, number: int, text: bytes) -> list[tuple[int, str]]:
        """(line number, line) of the lines that are not blank; DataError for what is no text."""
        try:
            lines = text.decode().split("\n")
        except UnicodeDecodeError as error:
            bad = number + text.count(b"\n", 0, error.start)
            raise DataError(
                f"line {bad} of {self._where} holds the byte {text[error.start]:#04x}, which is "
                "not UTF-8; convert the file, as with: iconv -f LATIN1 -t UTF-8"
            ) from error
        for i, line in enumerate(lines):
            if "\0" in line:
                raise DataError(
                    f"line {number + i} of {self._where} holds a null byte; it is damaged, or no "
                    "text in UTF-8: convert the file, as with: iconv -f UTF-16 -t UTF-8"
                )
        return [(n, line) for n, line in enumerate(lines, start=number) if line.strip(" ")]

    def _place(self, number: int, row: int | None) -> str:
        if row is None:
            return f"line {number} of {self._where}"
        return f"{self._where}, row {row} (line {number})"

    def _blame(self, fields: Sequence[str], place: str) -> NoReturn:
        """Raise for the first field that should be a number and is none."""
        for k in self._features:
            if not is_number(fields[k]):
                what = repr(fields[k][:80]) if fields[k].strip() else "empty"
                raise NotNumbersError(
                    f"{place}, column {self._names[k]!r} is {what}; features are numbers here: "
                    "encode, fill in or drop such rows"
                )
        raise AssertionError("all fields are numbers")


# ---------------------------------------------------------------------------------------- helpers

_UNCLOSED = (
    "has a quote that is not closed on its line; remove it, or the line break inside the field"
)


def open_csv(url: Url, asked: Asked, place: Place) -> CsvReader:
    """A CSV file, opened anew for every pass over it."""
    opened = partial(place.open_once, url)
    return CsvReader(redact(url), opened, asked, [place.identity(url), asked.json()])


def _explained(error: csv.Error) -> str:
    if "unexpected end" in str(error):
        return _UNCLOSED
    if "field larger" in str(error):
        return f"has a field of more than {csv.field_size_limit()} characters; shorten or drop it"
    return f"is not in the form of a CSV: {error}; double the quotes inside a quoted field"


def _is_well_quoted(content: bytes, delimiter: str) -> bool:
    """Whether all quotes are around whole fields of one line, or doubled in such fields.

    They open and close in turn, a doubled one both at once.
    """
    text = np.frombuffer(content, np.uint8)
    quotes = np.flatnonzero(text == ord('"'))
    if len(quotes) % 2:
        return False
    opens, closes = quotes[::2], quotes[1::2]
    ends = np.array([ord(delimiter), ord("\n"), ord('"')], np.uint8)
    around = np.concatenate([ends[1:2], text, ends[1:2]])  # a line ends before and behind it
    lines = np.flatnonzero(text == ord("\n"))
    return bool(
        np.isin(around[opens], ends).all()
        and np.isin(around[closes + 2], ends).all()
        and (np.searchsorted(lines, opens) == np.searchsorted(lines, closes)).all()
    )


def _is_text(content: bytes) -> bool:
    if b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _delimiter(first: str) -> str:
    """The one that cuts the first line into the most fields."""

    def n_fields(delimiter: str) -> int:
        try:
            return len(next(csv.reader([first], delimiter=delimiter, strict=True)))
        except csv.Error:
            return 0

    return max(_DELIMITERS, key=n_fields)


def _is_header(first: Sequence[str], where: str) -> bool:
    """Whether the first line names the columns; DataError where that can not be told."""
    found = [is_number(field) for field in first]
    if any(found) and not all(found):
        raise DataError(
            f"the first line of {where} has words and numbers: it may be a header or a row; add a "
            "header line, with names that are not numbers"
        )
    return not all(found)


def _stripped(cells: Sequence[str]) -> NDArray[np.str_]:
    return np.char.strip(np.array(cells, dtype=np.str_))
