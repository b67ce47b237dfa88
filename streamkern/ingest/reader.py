"""Define the interface of readers, and the readers that wrap others.

A wrapper reads one file or several, leaves out rows without a target, or encodes a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.text import redact, some
from streamkern.ingest.columns import FileRowCounts
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.input_files import Url, explained_damage
from streamkern.ingest.tables.cells import MISSING
from streamkern.ingest.tables.encoder import Encoder, UnknownWords
from streamkern.ingest.tables.fit import FittedEncoder
from streamkern.ingest.tables.missing import MissingMarkers, missing_in


class Reader:
    """An input for `ingest` and prediction.

    n_rows : None if it is known only after the last row was read
    n_dropped : number of rows without a target that were left out so far
    sparse_shape : number of features, and length when packed, of sparse rows; None for dense rows
    width : length of the rows if they are packed sparse rows, see `pack`
    natural_dtype : dtype of all of X; None if it is unknown before X is read
    as_text : whether numbers are read from text, and may be stored in a narrower dtype
    targets_as_text : whether all targets are text, as in a CSV
    identity : JSON that identifies the data, so that an interrupted ingest is not resumed with
        other data
    columns, target_columns, weight_column : names of the columns of X, y and w as returned; None
        if they have none
    unused : names of the columns that were read for no array, without an index of the rows
    files : name of each file, without secrets, and its number of rows as `n_rows`; empty for data
        in memory
    file_form : form of the files as in `StoreSpec`; None if the format is self-describing
    positions : positions of targets, weights and, if they were chosen, features in a file without
        names, and its width; JSON
    encoder : JSON, of a table that was encoded; its features have the names in `columns`
    has_cells : whether the input can also be opened with `cells`: a table whose columns have names
    typed : whether columns have types, so that text is never a number
    """

    sparse_shape: tuple[int, int] | None = None
    width: int | None = None
    natural_dtype: np.dtype[Any] | None = None
    as_text = targets_as_text = has_cells = typed = False
    identity: Any = None
    encoder: Any = None
    columns: tuple[str, ...] | None = None
    target_columns: tuple[str, ...] | None = None
    weight_column: str | None = None
    unused: tuple[str, ...] = ()
    file_form: Mapping[str, Any] | None = None
    _n_rows: int | None = None

    @property
    def n_rows(self) -> int | None:
        return self._n_rows

    @property
    def n_dropped(self) -> int:
        return 0

    @property
    def files(self) -> FileRowCounts:
        return ()

    @property
    def positions(self) -> dict[str, Any] | None:
        return None

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        """Yield blocks of rows from row `start` to the end."""
        raise NotImplementedError

    def pack(self, width: int) -> None:
        """Yield packed sparse rows (2, width) from now on; for readers with a `sparse_shape`."""
        assert self.sparse_shape is not None
        self.width = width
        self.file_form = {**(self.file_form or {}), "sparse": self.sparse_shape[0]}


class WrappingReader(Reader):
    """A reader of the rows of another one, which it describes as that one does."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        for name in _DESCRIPTION:
            setattr(self, name, getattr(reader, name))

    @property
    def n_rows(self) -> int | None:
        return self.reader.n_rows

    @property
    def n_dropped(self) -> int:
        return self.reader.n_dropped

    @property
    def files(self) -> FileRowCounts:
        return self.reader.files


_DESCRIPTION: Final = (
    "natural_dtype", "as_text", "targets_as_text", "typed", "identity", "encoder", "has_cells",
    "file_form", "sparse_shape", "width", "columns", "target_columns", "weight_column",
    "unused",
)  # fmt: skip
"""Attributes of a reader that describe its rows."""


class FileReader(WrappingReader):
    """A reader of one file; errors about damage name the file."""

    def __init__(self, reader: Reader, url: Url, form: Mapping[str, Any] | None = None) -> None:
        super().__init__(reader)
        self._url = url
        self.file_form = form if reader.file_form is None else reader.file_form

    @property
    def files(self) -> FileRowCounts:
        return ((redact(self._url), self.n_rows),)

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        with explained_damage(self._url):
            yield from self.reader.blocks(start, block_bytes)

    def pack(self, width: int) -> None:
        super().pack(width)
        self.reader.pack(width)
        self.natural_dtype, self.as_text = self.reader.natural_dtype, self.reader.as_text


class ManyReader(WrappingReader):
    """Several files with the same columns, one after another, described as the first of them."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        super().__init__(readers[0])
        self._readers = readers
        dtypes = [reader.natural_dtype for reader in readers]
        numeric = [dtype for dtype in dtypes if dtype is not None and dtype.kind in "biuf"]
        self.natural_dtype = np.result_type(*numeric) if len(numeric) == len(dtypes) else None
        for name in ("as_text", "targets_as_text", "has_cells", "typed"):
            setattr(self, name, all(getattr(reader, name) for reader in readers))
        self.identity = [reader.identity for reader in readers]
        shapes = [reader.sparse_shape or (0, 0) for reader in readers]
        if self.sparse_shape is not None:
            alike = len({d for d, _ in shapes}) == 1
            self.sparse_shape = max(shapes, key=lambda shape: shape[1]) if alike else None
        if any(reader.encoder != self.encoder for reader in readers):
            raise DataError(
                f"{some([name for name, _ in self.files])} were encoded in different ways",
                "ingest the original tables together",
            )

    @property
    def n_rows(self) -> int | None:
        counts = [n for _, n in self.files if n is not None]
        return sum(counts) if len(counts) == len(self._readers) else None

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

    def pack(self, width: int) -> None:
        super().pack(width)
        for reader in self._readers:
            reader.pack(width)
        self.natural_dtype = np.result_type(*(reader.natural_dtype for reader in self._readers))
        self.as_text = self.reader.as_text


def rows_with_targets(block: RawBlock, marks: MissingMarkers | None) -> RawBlock:
    """Return the block without the rows that lack a target."""
    missing = missing_in(block.y)
    if marks is not None:
        missing |= marks.mask_of_array(block.y).reshape(len(missing), -1).any(axis=1)
    return block.without(missing)


class TargetedRows(WrappingReader):
    """The rows of a reader that have a target; row numbers count these rows only.

    marks : markers of missing targets
    """

    n_rows, n_dropped = None, 0

    def __init__(self, reader: Reader, marks: MissingMarkers | None) -> None:
        super().__init__(reader)
        self._marks = marks

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        """Yield blocks from kept row `start` on; the rows before it are read again."""
        self.n_dropped = 0
        row, is_first = 0, False
        for block in self.reader.blocks(0, block_bytes):
            is_first = is_first or block.start == 0
            block = rows_with_targets(block, self._marks)
            self.n_dropped += block.dropped
            skip = max(start - row, 0)
            row += len(block.X)
            if skip < len(block.X):
                yield _as_first_block(block) if is_first and not skip else block.part(skip)
                is_first = False


def _as_first_block(block: RawBlock) -> RawBlock:
    """Return the block as the first of its file if all rows before it were left out."""
    if block.start == 0 or block.rows is not None:
        return block._replace(start=0)
    rows = range(block.start, block.start + len(block.X))
    return block._replace(start=0, rows=np.array(rows, np.int64))


class EncodedReader(WrappingReader):
    """Rows of a reader whose blocks have Arrow tables as X, encoded by an encoder.

    fitted : given if these are the rows that the encoder was fitted on
    """

    def __init__(
        self, reader: Reader, encoder: Encoder, fitted: FittedEncoder | None = None
    ) -> None:
        super().__init__(reader)
        self._encoder, self._fitted = encoder, fitted
        self.as_text = self.has_cells = False
        self.natural_dtype = np.dtype(np.float32)
        self.encoder, self.columns = encoder.json(), encoder.features

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        row, step = start, max(1, block_bytes // (12 * len(self._encoder.features)))
        blocks, unknown = self.reader.blocks(start, block_bytes), UnknownWords(self._encoder)
        # Features may take far more bytes than the cells they are made of.
        parts = (k.part(first, first + step) for k in blocks for first in range(0, len(k.X), step))
        for block in parts:
            if self._fitted is None:
                X = self._encoder.encode(block.X, block.location, block.row_numbers)
                unknown.add(block.X)
            else:
                X = self._fitted.encode(block.X, block.location, block.row_numbers, row)
            row += len(X)
            yield block._replace(X=X, columns=self.columns)
        unknown.warn_if_many(some([name for name, _ in self.files]) if self.files else "the input")


def encoded_reader(
    open_cells: Callable[..., Reader], encoder: Encoder, dropped: Sequence[str] = ()
) -> EncodedReader:
    """Return a reader of a table by an existing encoder.

    dropped : columns that are left out, if they exist, besides those that the encoder drops
    open_cells : opens the table, given `columns`, `dropped`, `cells` and `marks` of `ReadRequest`
    """
    reader = open_cells(
        columns=encoder.columns,
        dropped=(*encoder.dropped, *dropped),
        cells=encoder.missing,
        marks=MissingMarkers(text for text in encoder.missing if text not in MISSING),
    )
    return EncodedReader(reader, encoder)
