"""Read CSV files in blocks, by pyarrow's parser if it is installed, otherwise by Python's.

A row is a line once the lines of quoted fields are joined (`csv_lines`). Each piece of whole rows
is parsed by itself, and the number of parsed rows is compared with the number of lines, so that a
stray quote cannot hide rows. Python's csv module, in strict mode, defines a valid file: pyarrow
gets only pieces whose quotes, if any, surround whole fields, where the two cannot disagree. A piece
that pyarrow refuses is read again by the csv module, which reports the error and its position.
"""

from __future__ import annotations

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
from streamkern.ingest.column_roles import assign_columns
from streamkern.ingest.columns import ReadRequest, as_list
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.csv_layout import csv_layout
from streamkern.ingest.csv_lines import NumberedLines
from streamkern.ingest.csv_parsers import arrow_columns, line_location, parse_fields
from streamkern.ingest.formats import FileForm
from streamkern.ingest.input_files import FileOpener, Url
from streamkern.ingest.raw_targets import MAX_LABEL
from streamkern.ingest.reader import Reader
from streamkern.ingest.tables.arrow import arrow, compute, match_mask, with_null
from streamkern.ingest.tables.cells import PADDED
from streamkern.ingest.tables.key_columns import RoundingWarnings, warn_of_index
from streamkern.ingest.tables.missing import missing_in
from streamkern.ingest.tables.numbers import is_zero_padded, numbers

ParsedRows = tuple[Any, list[Any], list[Any], Any]
"""Rows of a piece: X, targets, weights, and a mask of the lines whose rows are not dropped."""


class CsvReader(Reader):
    """Rows of a CSV with target columns, after an optional header line.

    The first line is a header or a row, as `csv_header` decides; without a header the columns have
    no names. Features are float64, or, if `request.as_table`, Arrow tables of text, with null
    for missing cells. Targets are returned as text, so that labels keep their spelling. Blank lines
    are skipped; lines end with LF, CR LF or CR.

    open_file : returns the file, opened from its start
    identity : JSON that identifies the data, as in `Reader`
    form : the options of the user, and the record of earlier files
    """

    natural_dtype = np.dtype(np.float64)
    as_text = targets_as_text = True

    def __init__(
        self, location: str, open_file: Callable[[], IO[bytes]], request: ReadRequest, identity:
        Any, form: FileForm,
    ) -> None:  # fmt: skip
        self.identity, self._location, self._open = identity, location, open_file
        self._style, self._markers = form.style, request.markers
        self._as_table, self._missing_texts = request.as_table, request.missing_texts
        self._drop_missing = request.drop_missing
        self._rounding_warnings = RoundingWarnings()
        if request.as_table:
            import_optional("pyarrow", "reading words, dates and missing values")
        with closing(self._open()) as file:
            skipped_lines, lines = csv_lines.first_lines(
                file, form.skip_lines or 0, form.delimiter, location
            )
        layout = self._layout = csv_layout(
            lines, form, location, skipped_lines, request.expected_names, request.non_feature_names
        )
        self._delimiter, self.can_be_table = layout.delimiter, layout.has_names
        if self._delimiter != " ":  # a first line with wrong quotes is refused
            next(self._fields([line for line in lines if line[0] > layout.skip_lines][:1]))
        self.header = layout.fields  # as written, if they are names
        if layout.has_names:
            self._names = [field.strip() for field in self.header]
        else:
            self._names = list(map(str, range(len(self.header))))
            request = request.with_recorded_positions(form.earlier_record, len(self._names))
        roles = assign_columns(
            self._names, self._without_index(request), location, has_names=layout.has_names
        )
        position = {name: i for i, name in enumerate(self._names)}
        self._features, self._targets, self._weights = (
            [position[name] for name in names]
            for names in (roles.features, roles.targets, roles.weights)
        )
        if layout.has_names:
            self.columns, self.target_columns = roles.features, roles.targets
            self.weight_column = roles.weight_column
            self.unused = tuple(k for k in roles.unused if k not in layout.index_columns)
        elif request.as_table:
            raise DataError(
                f"{location} has no header line, and columns that are not numbers need names",
                f"add one, or give their names with {mention('names=')}",
            )

    @property
    def positions(self) -> dict[str, Any] | None:
        if self.can_be_table or not self._targets:
            return None
        width, used = len(self._names), {*self._targets, *self._weights}
        is_default = self._features == [i for i in range(width) if i not in used]
        chosen = {} if is_default else {"x": self._features}
        return {**chosen, "y": self._targets, "sample_weight": self._weights, "width": width}

    def _without_index(self, request: ReadRequest) -> ReadRequest:
        """Return the request without index columns, unless it names them; warn of each."""
        roles = [request.x, request.y, request.w, request.columns]
        requested = {str(k) for role in roles for k in as_list(role)}
        index_names = []
        candidates = () if request.reads_all_columns else self._layout.index_columns
        for position, name in enumerate(candidates):
            if not requested & {name, str(position), str(position - len(self._names))}:
                warn_of_index(name, self._location)
                index_names.append(name)
        return request._replace(dropped_columns=(*request.dropped_columns, *index_names))

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        """Yield blocks of rows; a line longer than `block_bytes` is refused."""
        parsers = self._parse_by_arrow, self._parse_by_python
        for rows, first_row in self._parsed_pieces(start, block_bytes, *parsers):
            yield self._block(rows, first_row)

    def original_blocks(self, block_bytes: int) -> Iterator[list[list[str]]]:
        """Yield the texts of all columns, for the same rows in the same order as `blocks`.

        The reader must have been opened with all columns as features.
        """

        def by_arrow(content: bytes) -> list[list[str]] | None:
            table = self._arrow_table(content, "string")
            return None if table is None else [column.to_pylist() for column in table.columns]

        def by_python(lines: NumberedLines, start: int) -> list[list[str]]:
            rows = self._fields(lines, start, len(self._names))
            return [list(column) for column in zip(*rows, strict=True)]

        for columns, _ in self._parsed_pieces(0, block_bytes, by_arrow, by_python):
            yield columns

    def _parsed_pieces(
        self, start: int, block_bytes: int, by_arrow: Callable[..., Any],
        by_python: Callable[..., Any],
    ) -> Iterator[tuple[Any, int]]:  # fmt: skip
        """Yield the parsed rows of each piece, from row `start` on, and the number of the first.

        by_arrow : parses lines, given as bytes; returns None if the csv module must parse them
        by_python : parses numbered lines, given also the row number of the first
        """
        n_unread = start + int(self._layout.has_header)  # lines to skip, not counting blank ones
        with closing(self._open()) as file:
            pieces = csv_lines.pieces_after(
                csv_lines.line_pieces(file, block_bytes, self._location), self._layout.skip_lines
            )
            for number, text, well_quoted in csv_lines.whole_rows(
                pieces, self._delimiter, len(self._names)
            ):
                if self._delimiter == " ":
                    text = csv_lines.collapse_spaces(text)
                    well_quoted = b'"' not in text or csv_lines.is_well_quoted(text, " ")
                content = csv_lines.without_blank_lines(text)
                n_rows = csv_lines.n_lines(content)
                if n_rows > n_unread:
                    unread = csv_lines.after_lines(content, n_unread)
                    rows = by_arrow(unread) if well_quoted else None
                    if rows is None:
                        lines = csv_lines.numbered_lines(text, number, self._location)
                        rows = by_python(lines[n_unread:], start)
                    yield rows, start
                    start += n_rows - n_unread
                n_unread = max(n_unread - n_rows, 0)
        self._n_rows = start

    # ------------------------------------------------------------------------- one piece of lines

    def _block(self, rows: ParsedRows, start: int) -> RawBlock:
        """Return the parsed rows as a block. start : row number of the first line."""
        X, targets, weights, has_target = rows
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
        if self._drop_missing or not targets or self._markers is None:
            return block  # rows that lack a target are already dropped
        # A marked target becomes empty, and is refused where y is converted.
        marked = self._markers.mask_of_array(block.y)
        return block._replace(y=np.where(marked, "", block.y)) if marked.any() else block

    def _parse_by_arrow(self, content: bytes) -> ParsedRows | None:
        """Parse lines by pyarrow; return None if the csv module must parse them."""
        as_numbers = not self._as_table and not self._style.thousands
        table = self._arrow_table(content, "double" if as_numbers else "string")
        if table is None:
            return None
        columns = [table.column(str(k)) for k in self._features]
        X: Any = self._table_of(columns) if self._as_table else self._matrix(columns, content)
        texts = None if X is None else self._targets_and_weights(table)
        if texts is None:
            return None
        targets, weights = texts
        has_target = np.ones(len(table), bool)
        if self._drop_missing and targets:
            has_target = ~np.any([self._missing_mask(y) for y in targets], axis=0)
        if not has_target.all():
            X = X.filter(arrow.array(has_target)) if self._as_table else X[has_target]
            targets = [y[has_target] for y in targets]
            weights = [w[has_target] for w in weights]
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
        # A column with leading zeros holds codes.
        if csv_lines.has_zero_padded_field(content, self._delimiter):
            table = texts()
            if any(match_mask(table.column(str(k)), PADDED).any() for k in self._features):
                return None
        return X

    def _table_of(self, columns: Sequence[Any]) -> Any:
        """Return an Arrow table of these columns of text, with text stripped and null if missing.

        Numbers are in Python's notation.
        """
        missing = arrow.array(list(self._missing_texts), arrow.string())
        cells = {}
        for k, column in zip(self._features, columns, strict=True):
            text, name = compute.utf8_trim_whitespace(column), self._names[k]
            if not self._style.is_python_notation:
                has_wrong_decimal = self._style.wrong_decimal_mask(text)
                if has_wrong_decimal.any():
                    cell = str(text[int(np.argmax(has_wrong_decimal))])
                    raise self._style.wrong_decimal_error(
                        cell, f"column {name!r} of {self._location}"
                    )
                text = self._style.column_to_python_notation(text)
            cells[name] = with_null(text, compute.is_in(text, missing))
        return arrow.table(cells)

    def _missing_mask(self, y: NDArray[np.str_]) -> NDArray[np.bool_]:
        """Return a mask (k,) of the targets that are missing, also by a marker of the user."""
        missing = missing_in(y)
        return missing if self._markers is None else missing | self._markers.mask_of_array(y)

    def _targets_and_weights(self, table: Any) -> tuple[list[Any], list[Any]] | None:
        """Return the texts of targets and weights of a table; None if one is too long for a label.

        table : as returned by `_arrow_table`
        """
        columns = {k: table.column(str(k)) for k in (*self._targets, *self._weights)}
        lengths = [compute.max(compute.utf8_length(column)).as_py() for column in columns.values()]
        if max(lengths, default=0) > MAX_LABEL:
            return None
        return self._strip({k: column.to_pylist() for k, column in columns.items()})

    def _strip(self, texts: dict[int, Sequence[str]]) -> tuple[list[Any], list[Any]]:
        """Return the stripped texts (k,) of targets and weights, with points as decimal signs.

        texts : cells of each target and weight, by the position of the column
        """
        columns = {}
        for k, cells in texts.items():
            cells = self._style.cells_to_python_notation(
                cells, f"a target or weight of {self._location}"
            )
            columns[k] = np.char.strip(np.array(cells, dtype=np.str_))
        return [columns[k] for k in self._targets], [columns[k] for k in self._weights]

    def _arrow_table(self, content: bytes, features: str) -> Any:
        """Return an Arrow table of the columns, by position; None if Arrow cannot parse them.

        Targets and weights are text. features : Arrow type of the features
        """
        text_columns = [str(k) for k in (*self._targets, *self._weights)]
        types = {str(k): features for k in self._features} | dict.fromkeys(text_columns, "string")
        decimal = self._style.decimal
        return arrow_columns(content, len(self._names), types, self._delimiter, decimal)

    def _parse_by_python(self, lines: NumberedLines, start: int) -> ParsedRows:
        """Parse lines by the csv module; raise DataError for the first wrong line."""
        other_texts: dict[int, list[str]] = {k: [] for k in (*self._targets, *self._weights)}
        texts: list[list[str]] = []
        X = np.empty((len(lines), len(self._features)))
        has_target = np.ones(len(lines), bool)
        for row, fields in enumerate(self._fields(lines, start, len(self._names))):
            if self._drop_missing and any(
                self._missing_mask(np.array([fields[k].strip()]))[0] for k in self._targets
            ):
                has_target[row] = False
                continue
            location = line_location(self._location, lines[row][0], start + row)
            if self._as_table:
                texts.append([fields[k] for k in self._features])
            else:
                X[row] = self._numbers(fields, location)
            for k, cells in other_texts.items():
                cells.append(fields[k])
                if len(fields[k]) > MAX_LABEL:
                    raise DataError(
                        f"{location}, column {self._names[k]!r} has {len(fields[k])} characters, "
                        f"but at most {MAX_LABEL} are allowed",
                        "shorten it",
                    )
        targets, weights = self._strip(dict(other_texts))
        if not self._as_table:
            return X if has_target.all() else X[has_target], targets, weights, has_target
        columns = zip(*texts, strict=True) if texts else [()] * len(self._features)
        arrays = [arrow.array(column, arrow.string()) for column in columns]
        return self._table_of(arrays), targets, weights, has_target

    def _fields(
        self, lines: NumberedLines, start: int | None = None, width: int | None = None
    ) -> Iterator[list[str]]:
        """Yield the fields of each line, see `parse_fields`."""
        return parse_fields(lines, self._delimiter, self._location, start, width)

    def _numbers(self, fields: Sequence[str], location: str) -> list[float]:
        """Return the features of a row; raise NotNumbersError if a cell is not a number."""
        texts = [fields[k] for k in self._features]
        cells = self._style.cells_to_python_notation(texts, location)
        try:
            if any(map(is_zero_padded, cells)):
                raise ValueError
            values = numbers(cells)
        except ValueError:
            self._raise_not_a_number(fields, location)
        for k, cell in zip(self._features, cells, strict=True):
            self._rounding_warnings.check_cell(self._names[k], cell)
        return values

    def _raise_not_a_number(self, fields: Sequence[str], location: str) -> NoReturn:
        """Raise NotNumbersError for the first feature of a row that is not a number."""
        remedy = (
            mention("encode", "auto") if self.can_be_table else f"a header or {mention('names=')}"
        )
        for k in self._features:
            if is_zero_padded(fields[k]):
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
    form, location = opener.form.for_format("csv"), redact(url)

    def open_file() -> Any:
        file = opener.open_once(url)
        if form.encoding is None or form.encoding == "utf-8":
            return file
        return csv_lines.RecodedFile(file, form.encoding, location)

    options = form.json()
    identity = [opener.identity(url), request.json(), *([options] if options else [])]
    return CsvReader(location, open_file, request, identity, form)
