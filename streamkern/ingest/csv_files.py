"""Read CSV files in blocks, by pyarrow's parser if it is installed, otherwise by Python's.

A row is a line once the lines of quoted fields are joined (`csv_lines`). Each piece of whole rows
is parsed by itself, and the number of parsed rows is compared with the number of lines, so that a
stray quote cannot hide rows. Python's csv module, in strict mode, defines a valid file: pyarrow
gets only pieces whose quotes, if any, surround whole fields, where the two cannot disagree. A piece
that pyarrow refuses is read again by the csv module, which reports the error and its position.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, NotNumbersError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.basics.text import redact
from streamkern.ingest import csv_lines
from streamkern.ingest.columns import ReadRequest, as_list, split_columns
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.csv_layout import csv_layout
from streamkern.ingest.csv_lines import NumberedLines
from streamkern.ingest.formats import FileForm
from streamkern.ingest.input_files import FileOpener, Url
from streamkern.ingest.raw_targets import MAX_LABEL
from streamkern.ingest.reader import Reader
from streamkern.ingest.tables.arrow import arrow, compute, matches, with_null
from streamkern.ingest.tables.cells import PADDED
from streamkern.ingest.tables.key_columns import RoundingWarnings, warn_of_index
from streamkern.ingest.tables.missing import missing_in
from streamkern.ingest.tables.numbers import is_padded, numbers

Part = tuple[Any, list[Any], list[Any], Any]
"""Rows of a piece: X, targets, weights, and a mask of the lines that are rows and not dropped."""


class CsvReader(Reader):
    """Rows of a CSV with target columns, after an optional header line.

    The first line is a header or a row, as `csv_header` decides; without a header the columns have
    no names. Features are float64, or, if `request.cells` is given, Arrow tables of text, with null
    for missing cells. Targets are returned as text, so that labels keep their spelling. Blank lines
    are skipped; lines end with LF, CR LF or CR.
    """

    natural_dtype = np.dtype(np.float64)
    as_text = targets_as_text = True

    def __init__(
        self, location: str, open_file: Callable[[], IO[bytes]], request: ReadRequest, identity:
        Any, form: FileForm,
    ) -> None:  # fmt: skip
        self.identity, self._location, self._open = identity, location, open_file
        self._style, self._marks = form.style, request.marks
        self._cells, self._drop_missing = request.cells, request.drop_missing
        self._rounding_warnings = RoundingWarnings()
        if request.cells is not None:
            import_optional("pyarrow", "reading words, dates and missing values")
        with closing(self._open()) as file:
            above, lines = csv_lines.first_lines(
                file, form.skip_lines or 0, form.delimiter, location
            )
        layout = self._layout = csv_layout(
            lines, form, location, above, request.known_names, request.names_beside
        )
        self._delimiter, self.has_cells = layout.delimiter, layout.named
        if self._delimiter != " ":  # a first line with wrong quotes is refused
            next(self._rows([line for line in lines if line[0] > layout.skip_lines][:1]))
        self.header = layout.fields  # as written, if they are names
        first = [field.strip() for field in self.header]
        self._names = first if layout.named else [str(i) for i in range(len(first))]
        if not layout.named:
            request = request.as_recorded(form.recorded, len(first))
        split = split_columns(
            self._names, self._without_index(request), location, named=layout.named
        )
        position = {name: i for i, name in enumerate(self._names)}
        self._features, self._targets, self._weights = (
            [position[name] for name in names]
            for names in (split.features, split.targets, split.weights)
        )
        if layout.named:
            self.columns, self.target_columns = split.features, split.targets
            self.weight_column = next(iter(split.weights), None)
            self.unused = tuple(k for k in split.unused if k not in layout.index_columns)
        elif request.cells is not None:
            raise DataError(
                f"{location} has no header line, and columns that are not numbers need names",
                f"add one, or give their names with {mention('names=')}",
            )

    @property
    def positions(self) -> dict[str, Any] | None:
        if self.has_cells or not self._targets:
            return None
        width, used = len(self._names), {*self._targets, *self._weights}
        is_default = self._features == [i for i in range(width) if i not in used]
        chosen = {} if is_default else {"x": self._features}
        return {**chosen, "y": self._targets, "sample_weight": self._weights, "width": width}

    def _without_index(self, request: ReadRequest) -> ReadRequest:
        """Return the request with index columns dropped that it does not name; warn of each."""
        roles = [request.x, request.y, request.w, request.columns]
        requested = {str(k) for role in roles for k in as_list(role)}
        index = () if request.reads_all_columns else self._layout.index_columns
        for position, name in enumerate(index):
            if not requested & {name, str(position), str(position - len(self._names))}:
                warn_of_index(name, self._location)
                request = request._replace(dropped=(*request.dropped, name))
        return request

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        """Yield blocks of rows; a line longer than `block_bytes` is refused."""
        for part, first in self._parts(start, block_bytes, self._by_arrow, self._by_python):
            yield self._block(part, first)

    def original_blocks(self, block_bytes: int) -> Iterator[list[list[str]]]:
        """Yield the texts of all columns, for the same rows in the same order as `blocks`.

        The reader must have been opened with all columns as features.
        """

        def by_arrow(content: bytes) -> list[list[str]] | None:
            table = self._arrow_table(content, "string")
            return None if table is None else [column.to_pylist() for column in table.columns]

        def by_python(lines: NumberedLines, start: int) -> list[list[str]]:
            rows = self._rows(lines, start, len(self._names))
            return [list(column) for column in zip(*rows, strict=True)]

        for columns, _ in self._parts(0, block_bytes, by_arrow, by_python):
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
            pieces = csv_lines.pieces_below(
                csv_lines.line_pieces(file, block_bytes, self._location), above
            )
            for number, text, well_quoted in csv_lines.whole_rows(
                pieces, self._delimiter, len(self._names)
            ):
                if self._delimiter == " ":
                    text = csv_lines.single_blanks(text)
                    well_quoted = b'"' not in text or csv_lines.is_well_quoted(text, " ")
                content = csv_lines.without_blank(text)
                n_rows = csv_lines.n_lines(content)
                if n_rows > skip:
                    rows = by_arrow(csv_lines.after_lines(content, skip)) if well_quoted else None
                    if rows is None:
                        lines = csv_lines.numbered_lines(text, number, self._location)
                        rows = by_python(lines[skip:], start)
                    yield rows, start
                    start += n_rows - skip
                skip = max(skip - n_rows, 0)
        self._n_rows = start

    # ------------------------------------------------------------------------- one piece of lines

    def _block(self, part: Part, start: int) -> RawBlock:
        """Return the parsed rows as a block. start : row number of the first line."""
        X, targets, weights, has_target = part
        y = np.stack(targets, axis=1) if targets else np.empty((len(X), 0))
        n_dropped = int((~has_target).sum())
        block = RawBlock(
            X,
            y[:, 0] if len(targets) == 1 else y,
            self._location,
            start,
            [self._names[k] for k in self._features],
            weights[0] if weights else None,
            start + np.flatnonzero(has_target) if n_dropped else None,
            n_dropped,
        )
        if self._drop_missing or not targets or self._marks is None:
            return block  # rows that lack a target are already dropped
        # A marked target becomes empty, and is refused where y is converted.
        marked = self._marks.mask_of_array(block.y)
        return block._replace(y=np.where(marked, "", block.y)) if marked.any() else block

    def _by_arrow(self, content: bytes) -> Part | None:
        """Parse lines; return None if the csv module must read them."""
        as_numbers = self._cells is None and not self._style.thousands
        table = self._arrow_table(content, "double" if as_numbers else "string")
        if table is None:
            return None
        columns = [table.column(str(k)) for k in self._features]
        X: Any = self._matrix(columns, content) if self._cells is None else self._table_of(columns)
        texts = None if X is None else self._targets_and_weights(table)
        if texts is None:
            return None
        targets, weights = texts
        has_target = np.ones(len(table), bool)
        if self._drop_missing and targets:
            has_target = ~np.any([self._missing(y) for y in targets], axis=0)
        if not has_target.all():
            X = X[has_target] if self._cells is None else X.filter(arrow.array(has_target))
            targets, weights = ([k[has_target] for k in part] for part in texts)
        return X, targets, weights, has_target

    def _matrix(self, columns: Sequence[Any], content: bytes) -> NDArray[np.float64] | None:
        """Return columns of an Arrow table as numbers (k, d); None if a cell is not a number."""
        X = np.empty((len(columns[0]), len(columns)))
        for j, column in enumerate(columns):
            if self._style.thousands and (column := self._style.parse_column(column)) is None:
                return None
            X[:, j] = column.to_numpy()
        if not np.isfinite(X).all():
            return None
        texts = partial(self._arrow_table, content, "string")
        self._rounding_warnings.check(X, [(str(k), self._names[k]) for k in self._features], texts)
        if csv_lines.has_padded(content, self._delimiter):  # by leading zeros, as codes are
            table = texts()
            if any(matches(table.column(str(k)), PADDED).any() for k in self._features):
                return None
        return X

    def _table_of(self, columns: Sequence[Any]) -> Any:
        """Return an Arrow table of these columns of text, with text stripped and null if missing.

        Numbers are in Python's notation.
        """
        missing = arrow.array(list(self._cells or ()), arrow.string())
        cells = {}
        for k, column in zip(self._features, columns, strict=True):
            text, name = compute.utf8_trim_whitespace(column), self._names[k]
            if not self._style.is_python_notation:
                wrong = self._style.wrong_decimal_mask(text)
                if wrong.any():
                    cell = str(text[int(np.argmax(wrong))])
                    raise self._style.wrong_decimal_error(
                        cell, f"column {name!r} of {self._location}"
                    )
                text = self._style.column_to_python_notation(text)
            cells[name] = with_null(text, compute.is_in(text, missing))
        return arrow.table(cells)

    def _missing(self, y: NDArray[np.str_]) -> NDArray[np.bool_]:
        missing = missing_in(y)
        return missing if self._marks is None else missing | self._marks.mask_of_array(y)

    def _targets_and_weights(self, table: Any) -> tuple[list[Any], list[Any]] | None:
        """Return the texts of targets and weights of a table; None if one is too long for a label.

        table : as returned by `_arrow_table`
        """
        columns = {k: table.column(str(k)) for k in (*self._targets, *self._weights)}
        lengths = [compute.max(compute.utf8_length(column)).as_py() for column in columns.values()]
        if max(lengths, default=0) > MAX_LABEL:
            return None
        return self._stripped({k: column.to_pylist() for k, column in columns.items()})

    def _stripped(self, texts: dict[int, Sequence[str]]) -> tuple[list[Any], list[Any]]:
        """Return the stripped texts (k,) of targets and weights, with points as decimal signs."""
        columns = {}
        for k, cells in texts.items():
            if not self._style.is_python_notation:
                for cell in filter(self._style.has_wrong_decimal, cells):
                    raise self._style.wrong_decimal_error(
                        cell, f"a target or weight of {self._location}"
                    )
                cells = [self._style.to_python_notation(cell) for cell in cells]
            columns[k] = np.char.strip(np.array(cells, dtype=np.str_))
        return [columns[k] for k in self._targets], [columns[k] for k in self._weights]

    def _arrow_table(self, content: bytes, features: str) -> Any:
        """Parse columns by position, targets and weights as text; None if Arrow cannot parse them.

        features : Arrow type of the features
        """
        text_columns = [str(k) for k in (*self._targets, *self._weights)]
        types = {str(k): features for k in self._features} | dict.fromkeys(text_columns, "string")
        decimal = self._style.decimal
        return csv_lines.arrow_columns(content, len(self._names), types, self._delimiter, decimal)

    def _by_python(self, lines: NumberedLines, start: int) -> Part:
        """Parse lines by the csv module; raise DataError for the first wrong line."""
        other_texts: dict[int, list[str]] = {k: [] for k in (*self._targets, *self._weights)}
        texts: list[list[str]] = []
        X = np.empty((len(lines), len(self._features)))
        has_target = np.ones(len(lines), bool)
        for row, fields in enumerate(self._rows(lines, start, len(self._names))):
            if self._drop_missing and any(
                self._missing(np.array([fields[k].strip()]))[0] for k in self._targets
            ):
                has_target[row] = False
                continue
            location = self._line_location(lines[row][0], start + row)
            if self._cells is None:
                X[row] = self._numbers(fields, location)
            else:
                texts.append([fields[k] for k in self._features])
            for k, cells in other_texts.items():
                cells.append(fields[k])
                if len(fields[k]) > MAX_LABEL:
                    raise DataError(
                        f"{location}, column {self._names[k]!r} has {len(fields[k])} characters, "
                        f"but at most {MAX_LABEL} are allowed",
                        "shorten it",
                    )
        targets, weights = self._stripped(dict(other_texts))
        if self._cells is None:
            return X if has_target.all() else X[has_target], targets, weights, has_target
        columns = zip(*texts, strict=True) if texts else [()] * len(self._features)
        arrays = [arrow.array(column, arrow.string()) for column in columns]
        return self._table_of(arrays), targets, weights, has_target

    def _rows(
        self, lines: NumberedLines, start: int | None = None, width: int | None = None
    ) -> Iterator[list[str]]:
        """Yield the fields of each line; raise DataError if their number is not `width`."""
        reader = csv.reader((line for _, line in lines), delimiter=self._delimiter, strict=True)
        for row, (number, line) in enumerate(lines):
            location = self._line_location(number, None if start is None else start + row)
            try:
                fields = next(reader)
            except csv.Error as error:
                raise DataError(f"{location} {csv_lines.csv_error_text(error)}") from error
            if reader.line_num != row + 1:
                raise DataError(f"{location} {csv_lines.UNCLOSED}")
            if width is not None and len(fields) != width:
                raise DataError(
                    f"{location} has {len(fields)} fields, but the first line has {width}",
                    f"write {width} fields, and put quotes around a field that contains "
                    f"{self._delimiter!r}",
                )
            if csv_lines.LINE_BREAK_MARK in line:
                fields = [*map(csv_lines.with_line_breaks, fields)]
            yield fields

    def _line_location(self, number: int, row: int | None) -> str:
        if row is None:
            return f"line {number} of {self._location}"
        return f"{self._location}, row {row} (line {number})"

    def _numbers(self, fields: Sequence[str], location: str) -> list[float]:
        """Return the features of a row; raise NotNumbersError if a cell is not a number."""
        cells = [fields[k] for k in self._features]
        if not self._style.is_python_notation:
            for cell in filter(self._style.has_wrong_decimal, cells):
                raise self._style.wrong_decimal_error(cell, location)
        try:
            if any(map(is_padded, cells)):
                raise ValueError
            if not self._style.is_python_notation:
                cells = list(map(self._style.to_python_notation, cells))
            values = numbers(cells)
        except ValueError:
            self._raise_not_a_number(fields, location)
        for k, cell in zip(self._features, cells, strict=True):
            self._rounding_warnings.check_cell(self._names[k], cell)
        return values

    def _raise_not_a_number(self, fields: Sequence[str], location: str) -> NoReturn:
        """Raise for the first field that should be a number and is not."""
        remedy = mention("encode", "auto") if self.has_cells else f"a header or {mention('names=')}"
        for k in self._features:
            if is_padded(fields[k]):
                rule = ", a number with zeros before it, as codes have; write it without them"
                remedy += f" and {mention('categorical=')} or {mention('numeric=')}"
            elif not self._style.is_number(fields[k]):
                rule = "; features are numbers here: fill in or drop such rows"
            else:
                continue
            cell_text = repr(fields[k][:80]) if fields[k].strip() else "empty"
            raise NotNumbersError(
                f"{location}, column {self._names[k]!r} is {cell_text}{rule}, or let ingest encode "
                f"the column, with {remedy}"
            )
        raise AssertionError("all fields are numbers")


def open_csv(url: Url, request: ReadRequest, opener: FileOpener) -> CsvReader:
    """Return a reader of a CSV file, which is opened again for every pass."""
    form, location = opener.form.for_kind("csv"), redact(url)

    def open_file() -> Any:
        file = opener.open_once(url)
        if form.encoding is None or form.encoding == "utf-8":
            return file
        return csv_lines.RecodedFile(file, form.encoding, location)

    options = form.json()
    identity = [opener.identity(url), request.json(), *([options] if options else [])]
    return CsvReader(location, open_file, request, identity, form)
