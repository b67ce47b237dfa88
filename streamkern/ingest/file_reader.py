"""Define the interface of readers, and the readers of one file and of several files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.text import redact, some
from streamkern.ingest.columns import FileRowCounts
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.input_files import Url, explained_damage


class Reader(Protocol):
    """Interface of an input for `ingest` and prediction.

    n_rows : None if it is known only after the last row was read
    natural_dtype : dtype of all of X; None if it is unknown before X is read
    as_text : whether numbers are text, whose natural dtype is wider than usually needed
    targets_as_text : whether all targets are text, as in a CSV
    identity : JSON
    columns, target_columns : names of the columns of X and y as returned; None if they have none
    files : name of each file, without secrets, and its number of rows as `n_rows`; empty for data
        in memory
    encoder : JSON, of a table that was encoded; its features have the names in `columns`
    has_cells : whether the input can also be opened with `cells`: a table whose columns have names
    """

    @property
    def n_rows(self) -> int | None: ...
    @property
    def natural_dtype(self) -> np.dtype[Any] | None: ...
    @property
    def as_text(self) -> bool: ...
    @property
    def targets_as_text(self) -> bool: ...
    @property
    def identity(self) -> Any: ...
    @property
    def columns(self) -> tuple[str, ...] | None: ...
    @property
    def target_columns(self) -> tuple[str, ...] | None: ...
    @property
    def files(self) -> FileRowCounts: ...
    @property
    def encoder(self) -> Any: ...
    @property
    def has_cells(self) -> bool: ...

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        """Yield blocks of rows from row `start` to the end."""


class FileReader:
    """A reader of one file; errors about damage name the file."""

    def __init__(self, reader: Reader, url: Url, form: Mapping[str, Any] | None = None) -> None:
        self.natural_dtype, self.as_text = reader.natural_dtype, reader.as_text
        self.targets_as_text = reader.targets_as_text
        self.identity, self.encoder = reader.identity, reader.encoder
        self.has_cells, self.typed = reader.has_cells, getattr(reader, "typed", False)
        self.columns, self.target_columns = reader.columns, reader.target_columns
        self.weight_column = getattr(reader, "weight_column", None)
        self.reader, self._url, self._form = reader, url, form

    @property
    def n_rows(self) -> int | None:
        return self.reader.n_rows

    @property
    def files(self) -> FileRowCounts:
        return ((redact(self._url), self.n_rows),)

    @property
    def file_form(self) -> Mapping[str, Any] | None:
        """Form of the file as in `StoreSpec`; None if the format is self-describing."""
        own: Mapping[str, Any] | None = getattr(self.reader, "file_form", None)
        return self._form if own is None else own

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        with explained_damage(self._url):
            yield from self.reader.blocks(start, block_bytes)


class ManyReader:
    """Several files with the same columns, one after another."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers
        dtypes = [reader.natural_dtype for reader in readers]
        known = [dtype for dtype in dtypes if dtype is not None and dtype.kind in "biuf"]
        self.natural_dtype = np.result_type(*known) if len(known) == len(dtypes) else None
        self.as_text = all(reader.as_text for reader in readers)
        self.targets_as_text = all(reader.targets_as_text for reader in readers)
        self.columns, self.target_columns = readers[0].columns, readers[0].target_columns
        self.weight_column = getattr(readers[0], "weight_column", None)
        self.identity = [reader.identity for reader in readers]
        self.has_cells = all(reader.has_cells for reader in readers)
        self.typed = all(getattr(reader, "typed", False) for reader in readers)
        encoders = [reader.encoder for reader in readers]
        self.encoder = encoders[0]
        if any(encoder != self.encoder for encoder in encoders):
            raise DataError(
                f"{some([name for name, _ in self.files])} were encoded in different ways; ingest "
                "the tables that they were made from together"
            )

    @property
    def n_rows(self) -> int | None:
        counts = [n for _, n in self.files if n is not None]
        return sum(counts) if len(counts) == len(self._readers) else None

    @property
    def file_form(self) -> Mapping[str, Any] | None:
        """Form of the files as in `StoreSpec`."""
        return getattr(self._readers[0], "file_form", None)

    @property
    def files(self) -> FileRowCounts:
        return tuple(file for reader in self._readers for file in reader.files)

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        row = 0
        for reader in self._readers:
            if reader.n_rows is not None:
                if row + reader.n_rows > start:
                    yield from reader.blocks(max(start - row, 0), block_bytes)
                row += reader.n_rows
                continue
            for block in reader.blocks(0, block_bytes):  # rows can be counted only by reading them
                skip = max(start - row, 0)
                row += len(block.X)
                if skip < len(block.X) or block.dropped:
                    yield block.part(skip)
