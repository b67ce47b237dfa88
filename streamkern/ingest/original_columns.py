"""Read all columns of tables unchanged, to write them next to predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.basics.text import redact, some
from streamkern.ingest.arrow_files import TYPED_READERS
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.csv_files import open_csv
from streamkern.ingest.formats import TABLES
from streamkern.ingest.input_files import FileOpener, Url, explained_damage
from streamkern.ingest.tables.arrow import arrow, is_of_kind

_ALL_COLUMNS = ReadRequest(y=(), targets=False, reads_all_columns=True)


class OriginalColumns:
    """Columns of tables of one format, one file after another, by the names of the first file.

    Cells of CSV are the texts between the delimiters, without the quotes around them; columns of
    typed files (Parquet, Arrow, JSON lines) are Arrow arrays. Files are opened one at a time, and
    must not change after this object was created.

    Attributes
    ----------
    urls : URLs of the files
    names : names of the columns, as in the first file
    schema : Arrow schema of the first file, with columns that are nullable in any file; None for
        CSV

    Raises
    ------
    ConfigError
        A file has no named columns, or the files have different formats.
    DataError
        A file has other columns than the first, or of another type.
    """

    def __init__(self, urls: Sequence[Url], opener: FileOpener) -> None:
        self.urls, self._opener = tuple(urls), opener
        self._format = self._common_format()
        self._identities = [opener.identity(url) for url in urls]
        self.names: tuple[str, ...] = ()
        self.schema: Any = None
        # For each file, the indices of its columns in the order of the first file.
        self._orders = [self._column_order(url) for url in urls]

    def blocks(self, block_bytes: int) -> Iterator[list[Any]]:
        """Yield the columns (k,) of consecutive rows: lists of texts, or Arrow arrays.

        Raises DataError if a file is damaged, or has changed since this object was created.
        """
        for url, identity, order in zip(self.urls, self._identities, self._orders, strict=True):
            self._check_unchanged(url, identity)
            with explained_damage(url), ExitStack() as files:
                for block in self._open(url, files).original_blocks(block_bytes):
                    yield [block[index] for index in order]
            self._check_unchanged(url, identity)

    def check_texts(self) -> None:
        """Raise ConfigError unless all columns can be written as text."""
        for field in self.schema or ():
            if not _can_be_text(field.type):
                raise ConfigError(
                    f"column {field.name!r} of {redact(self.urls[0])} is {field.type}, which "
                    "CSV cannot hold",
                    "write .parquet",
                )

    def arrow_fields(self) -> list[Any]:
        """Return the Arrow fields of a table with these columns; columns of CSV are strings."""
        import_optional("pyarrow", "writing Parquet")
        if self.schema is not None:
            return list(self.schema)
        return [arrow.field(name, arrow.string()) for name in self.names]

    def _common_format(self) -> str:
        """Return the format of all files; raise ConfigError unless it is one with named columns."""
        formats = [self._opener.format_name(url) for url in self.urls]
        for url, format_name in zip(self.urls, formats, strict=True):
            if format_name not in TABLES:
                raise ConfigError(
                    f"{redact(url)} has no named columns, but {mention('with_input', True)} "
                    "writes the columns of tables (CSV, Parquet, Arrow, JSON lines)",
                    "leave it out",
                )
            if format_name != formats[0]:
                raise ConfigError(
                    f"{redact(self.urls[0])} and {redact(url)} have different formats, so "
                    f"{mention('with_input', True)} cannot write their columns to one file",
                    "give files of one format",
                )
        return formats[0]

    def _open(self, url: Url, files: ExitStack) -> Any:
        """Return a reader of all columns of a file, which `files` closes."""
        open_reader: Any = TYPED_READERS.get(self._format, open_csv)
        return open_reader(
            url, _ALL_COLUMNS, FileOpener(self._opener.options, files, form=self._opener.form)
        )

    def _column_order(self, url: Url) -> list[int]:
        """Return the indices of the columns of a file in the order of the first file."""
        with explained_damage(url), ExitStack() as files:
            reader = self._open(url, files)
            schema = None if self._format == "csv" else reader.schema
            has_names = schema is not None or reader.can_be_table
            columns = reader.header if schema is None else tuple(schema.names)
        if not has_names:
            raise ConfigError(
                f"{redact(url)} has no header line, so its columns have no names in the output",
                f"add a header line, or give {mention('names=')}",
            )
        if not self.names:
            self.names, self.schema = columns, schema
        normalise = str.strip if self._format == "csv" else str
        index_of = {normalise(name): k for k, name in enumerate(columns)}
        expected_names = [normalise(name) for name in self.names]
        first_location = redact(self.urls[0])
        if index_of.keys() != {*expected_names}:
            raise DataError(
                f"{redact(url)} has the columns {some(columns)}, but {first_location} has "
                f"{some(self.names)}",
                "predict each file in a separate call",
            )
        self._check_types(schema, redact(url), first_location)
        return [index_of[name] for name in expected_names]

    def _check_types(self, schema: Any, location: str, first_location: str) -> None:
        """Raise DataError if a type differs from the first file; merge whether it is nullable."""
        for field in schema or ():
            first_field = self.schema.field(field.name)
            if first_field.type != field.type:
                raise DataError(
                    f"column {field.name!r} is {field.type} in {location}, but {first_field.type} "
                    f"in {first_location}",
                    "predict each file in a separate call, or give the column one type",
                )
            if field.nullable and not first_field.nullable:
                k = self.schema.get_field_index(field.name)
                self.schema = self.schema.set(k, first_field.with_nullable(True))

    def _check_unchanged(self, url: Url, identity: Any) -> None:
        """Raise DataError if a file is not the one that was there at first."""
        if self._opener.identity(url) != identity:
            raise DataError(
                f"{redact(url)} was changed while its rows were predicted",
                "run the same command again, which predicts all rows again",
            )


def texts(column: Any, name: str) -> list[str]:
    """Return the cells of a column of `OriginalColumns` as CSV text; nulls are empty.

    Raises DataError for bytes that are not UTF-8.
    """
    if isinstance(column, list):
        return column
    try:
        cells: list[str] = column.cast(arrow.string()).fill_null("").to_pylist()
    except (UnicodeDecodeError, arrow.ArrowException) as error:
        raise DataError(
            f"column {name!r} holds text that is not UTF-8 ({error})",
            "correct it, or write .parquet",
        ) from error
    return cells


def _can_be_text(arrow_type: Any) -> bool:
    """Return whether cells of an Arrow type can be written as text without loss."""
    if is_of_kind(arrow_type, "dictionary"):
        arrow_type = arrow_type.value_type
    if is_of_kind(
        arrow_type, "duration", "binary", "large_binary", "fixed_size_binary", "binary_view"
    ):
        return False
    try:
        arrow.nulls(0, arrow_type).cast(arrow.string())
    except (arrow.ArrowNotImplementedError, arrow.ArrowInvalid):
        return False
    return True
