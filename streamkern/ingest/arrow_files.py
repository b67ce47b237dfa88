"""Read tables with typed columns from files of Parquet, Arrow IPC (Feather) and JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from streamkern.basics.errors import DataError, MemoryBudgetError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.basics.text import redact, size_text
from streamkern.basics.warning import warn
from streamkern.filesystem.urls import local_path
from streamkern.ingest.array_reader import check_row_bytes
from streamkern.ingest.arrow_tables import ArrowReader, readable_file
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.csv_lines import line_pieces, without_blank_lines
from streamkern.ingest.input_files import FileOpener, Url, plain_path
from streamkern.ingest.tables.arrow import arrow, arrow_ipc, compute, is_of_kind


def _check_footer(location: str, metadata: Any) -> None:
    """Raise DataError if the footer contradicts itself: columns would be read past each other.

    The column chunks cannot be checked: Arrow ends the process if their metadata is damaged.
    """
    rows = sum(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    if rows != metadata.num_rows:
        raise DataError(
            f"{location} is damaged: its row groups have {rows} rows, but its footer names "
            f"{metadata.num_rows}",
            "write it again",
        )


class ParquetReader(ArrowReader):
    """Reader of a Parquet file; page checksums are verified if the file has them.

    A file that is not compressed is opened only while it is read: of a folder with thousands of
    files, one at a time.
    """

    def __init__(self, url: Url, request: ReadRequest, opener: FileOpener) -> None:
        self._url, self._opener = url, opener
        self._identity, location = opener.identity(url), redact(url)
        with readable_file(location, "Parquet"), self._open() as file:
            _check_footer(location, file.metadata)
            self.schema, n_rows = file.schema_arrow, file.metadata.num_rows
            super().__init__(
                location, self.schema, n_rows, request, [self._identity, request.json()]
            )

    @contextmanager
    def _open(self) -> Iterator[Any]:
        parquet, file = import_optional("pyarrow.parquet"), plain_path(self._url)
        with ExitStack() as files:
            if file is None and local_path(self._url) is not None:
                file = self._opener.seekable(self._opener.open(self._url))
            elif file is None:
                file = files.enter_context(self._opener.open_once(self._url))
            yield files.enter_context(parquet.ParquetFile(file, page_checksum_verification=True))

    def _read(self, block_bytes: int, columns: list[str] | None) -> Iterator[Any]:
        with readable_file(self._location, "Parquet"), self._open() as file:
            if self._opener.identity(self._url) != self._identity:
                raise DataError(
                    f"{self._location} was replaced while it was read",
                    "run the same command again when no program writes to the file",
                )
            row_bytes = self._row_bytes(file)
            check_row_bytes(row_bytes, 1, self._location, block_bytes)
            rows = max(1, block_bytes // row_bytes)
            yield from file.iter_batches(batch_size=rows, columns=columns)

    def _row_bytes(self, file: Any) -> int:
        """Return a lower bound of the bytes of a row in memory; encoded rows may be far smaller."""
        n_values = len(self._columns_read)
        if self._lists and self._n_rows:  # all lists have the length of the first
            first_row = next(file.iter_batches(batch_size=1, columns=[self._features[0]]))
            n_values += len(first_row.column(0).flatten())
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        sizes = [group.total_byte_size // max(group.num_rows, 1) for group in groups]
        return int(max(8 * n_values, *sizes, 0))


_MAX_LINE_BYTES = 32 << 20  # of a line of JSON
_TYPE_PIECE_BYTES = 1 << 20  # of JSON that are parsed at once to find the types of the columns


class ArrowFileReader(ArrowReader):
    """Reader of an Arrow IPC file (Feather version 2) or stream, by record batches."""

    def __init__(self, url: Url, request: ReadRequest, opener: FileOpener) -> None:
        self._url, self._opener = url, opener
        location, identity = redact(url), [opener.identity(url), request.json()]
        with (
            readable_file(location, "Arrow IPC (Feather version 2)"),
            self._open(None) as (schema, _),
        ):
            self.schema = schema
        super().__init__(location, self.schema, None, request, identity)

    @contextmanager
    def _open(self, columns: list[str] | None) -> Iterator[tuple[Any, Iterator[Any]]]:
        """Yield the schema and the record batches, of these columns or of all."""
        fields = [self.schema.get_field_index(name) for name in columns or ()]  # none means all
        options = arrow_ipc.IpcReadOptions(use_threads=False, included_fields=fields)
        with closing(self._opener.open_once(self._url)) as file:
            head = file.read(6)
            file.seek(0)
            source = arrow.PythonFile(file, mode="r")
            if head == b"ARROW1":
                reader = arrow_ipc.open_file(source, options=options)
                yield reader.schema, map(reader.get_batch, range(reader.num_record_batches))
            else:
                reader = arrow_ipc.open_stream(source, options=options)
                yield reader.schema, iter(reader)

    def _read(self, block_bytes: int, columns: list[str] | None) -> Iterator[Any]:
        n_rows = 0
        with readable_file(self._location, "Arrow IPC"), self._open(columns) as (_, batches):
            for batch in batches:
                batch.validate(full=True)  # damaged offsets would end the process
                if batch.nbytes > 8 * block_bytes:
                    raise MemoryBudgetError(
                        f"a record batch of {self._location} takes {size_text(batch.nbytes)}, but "
                        f"{mention('memory=')} allows only {size_text(8 * block_bytes)}",
                        f"raise {mention('memory=')}, or write smaller batches",
                    )
                rows = max(1, block_bytes * len(batch) // max(1, batch.nbytes))
                for start in range(0, len(batch), rows):
                    yield batch.slice(start, rows)
                n_rows += len(batch)
        self._n_rows = n_rows


class JsonLinesReader(ArrowReader):
    """Reader of a file with a JSON object in each line.

    The column types must hold the values of all lines: the file is read once more beforehand.
    """

    def __init__(self, url: Url, request: ReadRequest, opener: FileOpener) -> None:
        self._url, self._opener = url, opener
        self.schema: Any = None
        location, n_rows = redact(url), 0
        schema = import_optional("pyarrow", "reading JSON lines").schema([])
        for table in self._tables(_MAX_LINE_BYTES, location, None, _TYPE_PIECE_BYTES):
            schema, n_rows = _unify_schemas(schema, table.schema, location), n_rows + len(table)
            self._warn_of_rounding(table, location)
        self.schema = schema
        super().__init__(location, schema, n_rows, request, [opener.identity(url), request.json()])

    def _read(self, block_bytes: int, columns: list[str] | None) -> Iterator[Any]:
        size = max(block_bytes, _TYPE_PIECE_BYTES)
        for table in self._tables(size, self._location, self.schema, None):
            yield from table.select(self.schema.names).combine_chunks().to_batches()

    def _warn_of_rounding(self, table: Any, location: str) -> None:
        """Warn of integers of more than 64 bits, which Arrow rounds."""
        for name, column in zip(table.column_names, table.columns, strict=True):
            if is_of_kind(column.type, "floating") and len(column):
                ends = compute.min_max(column).as_py()
                if max(abs(end or 0) for end in ends.values()) >= 2**63:
                    warn(
                        f"column {name!r} of {location} holds numbers above 2**63, which are "
                        "rounded to 16 digits"
                    )

    def _tables(self, size: int, location: str, schema: Any, step: int | None) -> Iterator[Any]:
        """Yield a table for each piece of whole lines.

        size, step : as in `line_pieces`
        schema : types of the columns; None to infer them from each piece
        """
        json = import_optional("pyarrow.json")
        parse_options = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer")
        with closing(self._opener.open_once(self._url)) as file:
            for number, text in line_pieces(file, size, location, step):
                content = without_blank_lines(text)
                if not content:
                    continue
                read_options = json.ReadOptions(use_threads=False, block_size=len(content) + 1)
                try:
                    table = json.read_json(arrow.BufferReader(content), read_options, parse_options)
                except arrow.ArrowException as error:
                    raise DataError(
                        f"{location} is not a file of JSON lines with columns of one type each: "
                        f"{error} (rows from line {number} on)",
                        "correct it",
                    ) from error
                if len(table) != content.count(b"\n"):
                    raise DataError(
                        f"the lines of {location} from {number} on are not one JSON object each",
                        "write one object in each line",
                    )
                yield table


def _unify_schemas(schema_so_far: Any, schema: Any, location: str) -> Any:
    """Return a schema that holds the values of both; raise DataError if there is none."""
    # A column of dates and other text is a column of text.
    text = arrow.string()
    for field in schema:
        k = schema_so_far.get_field_index(field.name)
        types = () if k < 0 else (field.type, schema_so_far.field(k).type)
        if {str(kind)[:9] for kind in types} == {"string", "timestamp"}:
            schema = schema.set(schema.get_field_index(field.name), field.with_type(text))
            schema_so_far = schema_so_far.set(k, field.with_type(text))
    try:
        return arrow.unify_schemas([schema_so_far, schema], promote_options="permissive")
    except arrow.ArrowException as error:
        raise DataError(
            f"{location} has columns whose type changes ({error})",
            "write one type for each column",
        ) from error


TYPED_READERS = {"parquet": ParquetReader, "arrow": ArrowFileReader, "jsonl": JsonLinesReader}
"""The readers of formats with typed columns."""
