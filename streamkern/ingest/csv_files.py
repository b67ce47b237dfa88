"""Read CSV files in blocks, by pyarrow's parser if it is installed, otherwise by Python's.

A row is a line once the lines of quoted fields are joined (`csv_records`). Each piece of whole rows
is parsed by itself, and the number of parsed rows is compared with the number of lines, so that a
stray quote swallows nothing. Python's csv module, in strict mode, decides what is valid: pyarrow
gets only pieces whose quotes, if any, surround whole fields, where the two cannot disagree. A piece
that pyarrow refuses is read again by the csv module, which reports the error and its position.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import count
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, MissingDependencyError, NotNumbersError
from streamkern.basics.optional import import_optional
from streamkern.ingest.columns import FileRowCounts, ReadRequest, as_list, split_columns
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.csv_layout import csv_layout
from streamkern.ingest.csv_lines import (
    UNCLOSED,
    after_lines,
    csv_error_text,
    has_padded,
    is_text_cell,
    is_well_quoted,
    line_pieces,
    n_lines,
    numbered_lines,
    single_blanks,
    without_blank,
)
from streamkern.ingest.csv_records import BREAK, below, first_lines, whole_rows, with_breaks
from streamkern.ingest.csv_signs import warn_of_index
from streamkern.ingest.formats import FileForm
from streamkern.ingest.kept_rows import marked_missing
from streamkern.ingest.raw_targets import MAX_LABEL
from streamkern.ingest.tables.cells import PADDED, matches
from streamkern.ingest.tables.long_numbers import KeyWatch
from streamkern.ingest.tables.missing import missing_in
from streamkern.ingest.tables.numbers import is_padded, numbers


class CsvReader:
    """Rows of numbers with target columns, after an optional header line.

    The first line is a header or a row, as `csv_header` decides; without a header the columns have
    no names. Features are parsed as float64. Targets are returned as text, so that labels keep
    their spelling. Blank lines are skipped; lines end with LF, CR LF or CR.
    """

    files: FileRowCounts = ()  # named by the caller that opened them
    encoder = None

    @property
    def has_cells(self) -> bool:
        """True if the columns have names, which an encoder needs."""
        return self._header

    def __init__(
        self,
        where: str,
        open_file: Callable[[], IO[bytes]],
        asked: ReadRequest,
        identity: Any,
        form: FileForm | None = None,
    ) -> None:
        self.n_rows: int | None = None
        self.natural_dtype: np.dtype[Any] | None = np.dtype(np.float64)
        self.as_text = self.targets_as_text = True
        self.identity = identity
        self._where, self._open = where, open_file
        form = FileForm() if form is None else form
        self._style, self._marks = form.style, asked.marks
        self._drop_missing = asked.drop_missing
        self._keys = KeyWatch()
        with closing(self._open()) as file:
            above, lines = first_lines(file, form.skip_lines or 0, form.delimiter, where)
        layout = self._layout = csv_layout(
            lines, form, where, above, asked.known_names, asked.names_beside
        )
        self._delimiter, self._header = layout.delimiter, layout.named
        if self._delimiter != " ":  # a first line with wrong quotes is refused
            next(self._rows([line for line in lines if line[0] > layout.skip_lines][:1]))
        self.header = layout.fields  # as written, if they are names
        first = [field.strip() for field in self.header]
        self._names = first if layout.named else [str(i) for i in range(len(first))]
        if not layout.named:
            asked = asked.as_recorded(form.recorded, len(first))
        split = split_columns(self._names, self._without_index(asked), where, named=layout.named)
        self.columns = split.features if layout.named else None
        self.target_columns = split.targets if layout.named else None
        self.weight_column = next(iter(split.weights), None) if layout.named else None
        position = {name: i for i, name in enumerate(self._names)}
        self._features, self._targets, self._weights = (
            [position[name] for name in names]
            for names in (split.features, split.targets, split.weights)
        )

    @property
    def positions(self) -> dict[str, Any] | None:
        """Positions of targets and weights in a file without names, and its width; JSON."""
        if self._header or not self._targets:
            return None
        return {"y": self._targets, "sample_weight": self._weights, "width": len(self._names)}

    def _without_index(self, asked: ReadRequest) -> ReadRequest:
        """Return `asked` without an index of the rows that is not asked for by name or position."""
        wishes = [asked.x, asked.y, asked.w, asked.columns]
        named = {str(k) for wish in wishes for k in as_list(wish)}
        left = []
        for position, name in enumerate(() if asked.whole else self._layout.unnamed):
            if not named & {name, str(position), str(position - len(self._names))}:
                warn_of_index(name, self._where)
                left.append(name)
        return asked._replace(dropped=(*asked.dropped, *left))

    @property
    def _text_columns(self) -> tuple[list[int], list[int]]:
        return self._targets, self._weights

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        """Yield blocks of rows; a line longer than `block_bytes` is refused."""
        for part, first in self._parts(start, block_bytes, self._by_arrow, self._by_python):
            yield self._block(part, first)

    def original_blocks(self, block_bytes: int) -> Iterator[list[list[str]]]:
        """Yield the texts of all columns, for the same rows in the same order as `blocks`.

        The reader must have been opened with all columns as features.
        """
        for columns, _ in self._parts(0, block_bytes, self._texts, self._texts_by_python):
            yield columns

    def _parts(
        self, start: int, block_bytes: int, by_arrow: Callable[..., Any],
        by_python: Callable[..., Any],
    ) -> Iterator[tuple[Any, int]]:  # fmt: skip
        """Yield the parsed rows of each piece, from row `start` on, and the number of the first.

        by_arrow : parses content with simple quotes; returns None if Arrow cannot parse it reliably
        by_python : parses everything else
        """
        skip, above = start + (1 if self._layout.header else 0), self._layout.skip_lines
        with closing(self._open()) as file:
            pieces = below(line_pieces(file, block_bytes, self._where), above)
            for number, text, plain in whole_rows(pieces, self._delimiter, len(self._names)):
                if self._delimiter == " ":
                    text = single_blanks(text)
                    plain = b'"' not in text or is_well_quoted(text, " ")
                content = without_blank(text)
                n_here = n_lines(content)
                if n_here > skip:
                    found = by_arrow(after_lines(content, skip)) if plain else None
                    if found is None:
                        found = by_python(numbered_lines(text, number, self._where)[skip:], start)
                    yield found, start
                    start += n_here - skip
                skip = max(skip - n_here, 0)
        self.n_rows = start

    # ------------------------------------------------------------------------- one piece of lines

    def _block(self, part: tuple[Any, list[Any], list[Any], Any], start: int) -> RawBlock:
        """Return the rows of a piece. part : X, targets, weights, and which are kept or None."""
        X, targets, weights, kept = part
        y = np.stack(targets, axis=1) if targets else np.empty((len(X), 0))
        n_dropped = 0 if kept is None else int((~kept).sum())
        block = RawBlock(
            X,
            y[:, 0] if len(targets) == 1 else y,
            self._where,
            start,
            [self._names[k] for k in self._features],
            weights[0] if weights else None,
            start + np.flatnonzero(kept) if n_dropped else None,
            n_dropped,
        )
        # Rows that lack a target are already dropped; otherwise the user's missing markers are
        # refused.
        return block if self._drop_missing or not targets else marked_missing(block, self._marks)

    def _by_arrow(self, content: bytes) -> tuple[Any, list[Any], list[Any], Any] | None:
        """Parse lines as (X, targets, weights, kept); None if the csv module must read them."""
        table = self._arrow_table(content, "string" if self._style.thousands else "double")
        if table is None:
            return None
        X = np.empty((table.num_rows, len(self._features)))
        for j, k in enumerate(self._features):
            column = table.column(str(k))
            if self._style.thousands and (column := self._style.parsed(column)) is None:
                return None
            X[:, j] = column.to_numpy()
        if not np.isfinite(X).all():
            return None
        asked = partial(self._arrow_table, content, "string")
        self._keys.look(X, [(str(k), self._names[k]) for k in self._features], asked)
        if has_padded(content, self._delimiter) and self._is_padded(content):
            return None
        beside = self._texts_beside(table)
        return None if beside is None else self._kept_of(X, *beside)

    def _kept_of(
        self, X: Any, targets: list[Any], weights: list[Any]
    ) -> tuple[Any, list[Any], list[Any], Any]:
        """Return the rows without those that lack a target, if such rows are to be dropped."""
        if not (self._drop_missing and targets):
            return X, targets, weights, None
        kept = ~np.any([self._missing(y) for y in targets], axis=0)
        if kept.all():
            return X, targets, weights, None
        rows = (
            X.filter(import_optional("pyarrow").array(kept))
            if hasattr(X, "column_names")
            else X[kept]
        )
        return rows, [y[kept] for y in targets], [w[kept] for w in weights], kept

    def _missing(self, y: NDArray[np.str_]) -> NDArray[np.bool_]:
        found = missing_in(y)
        return found if self._marks is None else found | self._marks.found_in(y)

    def _is_padded(self, content: bytes) -> bool:
        """Return whether a feature is a number with leading zeros, as codes have."""
        table = self._arrow_table(content, "string")
        return any(matches(table.column(str(k)), PADDED).any() for k in self._features)

    def _texts(self, content: bytes) -> list[list[str]] | None:
        table = self._arrow_table(content, "string")
        return None if table is None else [column.to_pylist() for column in table.columns]

    def _texts_by_python(self, lines: Sequence[tuple[int, str]], start: int) -> list[list[str]]:
        rows = self._rows(lines, start, len(self._names))
        return [list(column) for column in zip(*rows, strict=True)]

    def _texts_beside(self, table: Any) -> tuple[list[Any], list[Any]] | None:
        """Return targets and weights of a table of `_arrow_table`; None if one is too long."""
        compute = import_optional("pyarrow.compute")
        columns = {k: table.column(str(k)) for k in (*self._targets, *self._weights)}
        lengths = [compute.max(compute.utf8_length(column)).as_py() for column in columns.values()]
        if max(lengths, default=0) > MAX_LABEL:
            return None
        texts = {k: column.to_pylist() for k, column in columns.items()}
        targets, weights = ([self._stripped(texts[k]) for k in ks] for ks in self._text_columns)
        return targets, weights

    def _stripped(self, cells: Sequence[str]) -> NDArray[np.str_]:
        if not self._style.plain:
            for cell in filter(self._style.contradicts, cells):
                raise self._style.contradiction(cell, f"a target or weight of {self._where}")
            cells = [self._style.with_point(cell) for cell in cells]
        return np.char.strip(np.array(cells, dtype=np.str_))

    def _arrow_table(self, content: bytes, features: str) -> Any:
        """Parse columns by position, targets and weights as text; None if Arrow cannot parse them.

        features : Arrow type of the features
        """
        try:
            arrow = import_optional("pyarrow.csv")
        except MissingDependencyError:
            return None
        if not is_text_cell(content):
            return None
        has_breaks = BREAK.encode() in content
        names = [str(k) for k in range(len(self._names))]
        kept = [*self._features, *self._targets, *self._weights]
        types = {str(k): features if k in set(self._features) else "string" for k in kept}
        try:
            table = arrow.read_csv(
                io.BytesIO(content),
                arrow.ReadOptions(column_names=names, block_size=len(content) + 1),
                arrow.ParseOptions(
                    delimiter=self._delimiter,
                    quote_char='"' if b'"' in content else False,
                    newlines_in_values=has_breaks,
                ),
                arrow.ConvertOptions(
                    column_types=types,
                    include_columns=[str(k) for k in kept],
                    null_values=[],
                    strings_can_be_null=False,
                    decimal_point=self._style.decimal,
                ),
            )
        except ValueError:  # pyarrow.ArrowInvalid
            return None
        if table.num_rows != n_lines(content):
            return None
        return with_breaks(table) if has_breaks else table

    def _by_python(
        self, lines: Sequence[tuple[int, str]], start: int
    ) -> tuple[Any, list[Any], list[Any], Any]:
        """Parse lines as (X, targets, weights, kept); raise DataError for the first wrong line."""
        texts: dict[int, list[str]] = {k: [] for k in (*self._targets, *self._weights)}
        take, features = self._taken(len(lines))
        kept = np.ones(len(lines), bool)
        for row, fields in enumerate(self._rows(lines, start, len(self._names))):
            if self._drop_missing and any(
                self._missing(np.array([fields[k].strip()]))[0] for k in self._targets
            ):
                kept[row] = False
                continue
            take(fields, partial(self._place, lines[row][0], start + row))
            for k, cells in texts.items():
                cells.append(fields[k])
                if len(fields[k]) > MAX_LABEL:
                    raise DataError(
                        f"{self._place(lines[row][0], start + row)}, column {self._names[k]!r} has "
                        f"{len(fields[k])} characters, {MAX_LABEL} are allowed; shorten it"
                    )
        targets, weights = ([self._stripped(texts[k]) for k in ks] for ks in self._text_columns)
        return features(), targets, weights, kept

    def _taken(self, n_rows: int) -> tuple[Callable[..., None], Callable[[], Any]]:
        """Return a function that takes the fields and position of a row, and one that returns X."""
        X, row = np.empty((n_rows, len(self._features))), count()

        def take(fields: Sequence[str], place: Callable[[], str]) -> None:
            cells = [fields[k] for k in self._features]
            for cell in () if self._style.plain else filter(self._style.contradicts, cells):
                raise self._style.contradiction(cell, place())
            try:
                if any(is_padded(cell) for cell in cells):
                    raise ValueError
                cells = cells if self._style.plain else list(map(self._style.with_point, cells))
                X[next(row)] = numbers(cells)
            except ValueError:
                self._blame(fields, place())
            for k, cell in zip(self._features, cells, strict=True):
                self._keys.look_at(self._names[k], cell)

        return take, lambda: X[: next(row)]

    def _rows(
        self, lines: Sequence[tuple[int, str]], start: int | None = None, width: int | None = None
    ) -> Iterator[list[str]]:
        """Yield the fields of each line; raise DataError if their number is not `width`."""
        reader = csv.reader((line for _, line in lines), delimiter=self._delimiter, strict=True)
        for row, (number, line) in enumerate(lines):
            place = self._place(number, None if start is None else start + row)
            try:
                fields = next(reader)
            except csv.Error as error:
                raise DataError(f"{place} {csv_error_text(error)}") from error
            if reader.line_num != row + 1:
                raise DataError(f"{place} {UNCLOSED}")
            if width is not None and len(fields) != width:
                raise DataError(
                    f"{place} has {len(fields)} fields, the first line has {width}; write as many, "
                    f"with quotes around a field that holds {self._delimiter!r}"
                )
            yield [field.replace(BREAK, "\n") for field in fields] if BREAK in line else fields

    def _place(self, number: int, row: int | None) -> str:
        if row is None:
            return f"line {number} of {self._where}"
        return f"{self._where}, row {row} (line {number})"

    def _blame(self, fields: Sequence[str], place: str) -> NoReturn:
        """Raise for the first field that should be a number and is not."""
        way = 'encode="auto"' if self._header else "a header or names="
        for k in self._features:
            if is_padded(fields[k]):
                rule = ", a number with zeros before it, as codes have; write it without them"
                way += " and categorical= or numeric="
            elif not self._is_number(fields[k]):
                rule = "; features are numbers here: fill in or drop such rows"
            else:
                continue
            what = repr(fields[k][:80]) if fields[k].strip() else "empty"
            raise NotNumbersError(
                f"{place}, column {self._names[k]!r} is {what}{rule}, or let ingest encode the "
                f"column, with {way}"
            )
        raise AssertionError("all fields are numbers")

    def _is_number(self, text: str) -> bool:
        try:
            numbers([self._style.with_point(text)])
        except ValueError:
            return False
        return True
