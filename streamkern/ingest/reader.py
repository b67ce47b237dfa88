"""Define the interface of readers, and the readers that wrap others.

A wrapper reads one file or several, leaves out rows without a target, or encodes a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.text import redact, some
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.input_files import Url, explained_damage
from streamkern.ingest.tables.cells import MISSING
from streamkern.ingest.tables.encoder import Encoder, FittedEncoder, UnknownWords
from streamkern.ingest.tables.missing import MissingMarkers, missing_in

FileRowCounts = tuple[tuple[str, int | None], ...]
"""For each file, its name without secrets and its number of rows, or None if it is unknown."""


class Reader:
    """An input for `ingest` and prediction, which yields blocks of consecutive rows.

    Attributes
    ----------
    sparse_shape : number of features, and length when packed, of sparse rows; None for dense rows
    width : length of the rows if they are packed sparse rows, see `pack`
    natural_dtype : dtype of all of X; None if it is unknown before X is read
    as_text : whether numbers are read from text, and may be stored in a narrower dtype
    targets_as_text : whether all targets are text, as in a CSV
    can_be_table : whether the input can also be opened with `as_table`; its columns have names then
    has_types : whether columns have types, so that text is never a number
    identity : JSON that must be equal for an interrupted ingest to be resumed, see `readers`
    encoder : JSON of the encoder of an encoded table, whose features have the names in `columns`
    columns : names of the columns of X as returned; None if they have none
    target_columns : names of the columns of y; None if they have none
    weight_column : name of the column of w; None if it has none
    unused : names of the columns that were read for no array, without an index of the rows
    file_form : form of the files as in `StoreSpec`; None if the format is self-describing
    """

    sparse_shape: tuple[int, int] | None = None
    width: int | None = None
    natural_dtype: np.dtype[Any] | None = None
    as_text = targets_as_text = can_be_table = has_types = False
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
        """Number of rows; None if it is known only after the last row was read."""
        return self._n_rows

    @property
    def n_dropped(self) -> int:
        """Number of rows without a target that were left out so far."""
        return 0

    @property
    def files(self) -> FileRowCounts:
        """Name of each file, without secrets, and its number of rows; empty for data in memory."""
        return ()

    @property
    def positions(self) -> dict[str, Any] | None:
        """Positions of targets, weights and chosen features in a file without names, and its width.

        As JSON.
        """
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
    """A reader of the rows of another reader, whose description it copies."""

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
    "natural_dtype", "as_text", "targets_as_text", "has_types", "identity", "encoder",
    "can_be_table", "file_form", "sparse_shape", "width", "columns", "target_columns",
    "weight_column", "unused",
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
    """Several files with the same columns, one after another, described as the first of them.

    `unused` are the names of the unused columns of all files.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        super().__init__(readers[0])
        self._readers = readers
        dtypes = [reader.natural_dtype for reader in readers]
        numeric = [dtype for dtype in dtypes if dtype is not None and dtype.kind in "biuf"]
        self.natural_dtype = np.result_type(*numeric) if len(numeric) == len(dtypes) else None
        for name in ("as_text", "targets_as_text", "can_be_table", "has_types"):
            setattr(self, name, all(getattr(reader, name) for reader in readers))
        self.unused = tuple(dict.fromkeys(name for reader in readers for name in reader.unused))
        self.identity = [reader.identity for reader in readers]
        shapes = [reader.sparse_shape or (0, 0) for reader in readers]
        if self.sparse_shape is not None:
            same_width = len({d for d, _ in shapes}) == 1
            self.sparse_shape = max(shapes, key=lambda shape: shape[1]) if same_width else None
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
                n_read_before = max(start - row, 0)
                row += len(block.X)
                if n_read_before < len(block.X) or block.n_dropped:
                    yield block.part(n_read_before)

    def pack(self, width: int) -> None:
        super().pack(width)
        for reader in self._readers:
            reader.pack(width)
        self.natural_dtype = np.result_type(*(reader.natural_dtype for reader in self._readers))
        self.as_text = self.reader.as_text


def rows_with_targets(block: RawBlock, markers: MissingMarkers | None) -> RawBlock:
    """Return the block without the rows that lack a target."""
    missing = missing_in(block.y)
    if markers is not None:
        missing |= markers.mask_of_array(block.y).reshape(len(missing), -1).any(axis=1)
    return block.without(missing)


class TargetedRows(WrappingReader):
    """The rows of a reader that have a target; row numbers count these rows only.

    markers : markers of missing targets
    """

    n_rows, n_dropped = None, 0

    def __init__(self, reader: Reader, markers: MissingMarkers | None) -> None:
        super().__init__(reader)
        self._markers = markers

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        """Yield blocks from row `start` on, of those with a target; earlier rows are read again."""
        self.n_dropped = 0
        row, is_first = 0, False
        for block in self.reader.blocks(0, block_bytes):
            is_first = is_first or block.start == 0
            block = rows_with_targets(block, self._markers)
            self.n_dropped += block.n_dropped
            n_read_before = max(start - row, 0)
            row += len(block.X)
            if n_read_before < len(block.X):
                starts_file = is_first and not n_read_before
                yield _as_first_block(block) if starts_file else block.part(n_read_before)
                is_first = False


def _as_first_block(block: RawBlock) -> RawBlock:
    """Return the block as the first of its file if all rows before it were left out."""
    if block.start == 0 or block.rows is not None:
        return block._replace(start=0)
    rows = range(block.start, block.start + len(block.X))
    return block._replace(start=0, rows=np.array(rows, np.int64))


class EncodedReader(WrappingReader):
    """Rows of a reader whose blocks have Arrow tables as X, encoded by an encoder.

    fitted_encoder : given if these are the rows that the encoder was fitted on
    """

    def __init__(
        self, reader: Reader, encoder: Encoder, fitted_encoder: FittedEncoder | None = None
    ) -> None:
        super().__init__(reader)
        self._encoder, self._fitted_encoder = encoder, fitted_encoder
        self.as_text = self.can_be_table = False
        self.natural_dtype = np.dtype(np.float32)
        self.encoder, self.columns = encoder.json(), encoder.features

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        row, unknown = start, UnknownWords(self._encoder)
        # Blocks are split, because features may take far more bytes than the cells of the table:
        # each takes 8 bytes as float64 and then 4 as float32.
        step = max(1, block_bytes // (12 * len(self._encoder.features)))
        for block in self.reader.blocks(start, block_bytes):
            for offset in range(0, len(block.X), step):
                part = block.part(offset, offset + step)
                if self._fitted_encoder is None:
                    X = self._encoder.encode(part.X, part.location, part.row_numbers)
                    unknown.add(part.X)
                else:
                    X = self._fitted_encoder.encode(part.X, part.location, part.row_numbers, row)
                row += len(X)
                yield part._replace(X=X, columns=self.columns)
        unknown.warn_if_many(some([name for name, _ in self.files]) if self.files else "the input")


def encoded_reader(
    open_table: Callable[[ReadRequest], Reader], request: ReadRequest, encoder: Encoder
) -> EncodedReader:
    """Return a reader of a table by an existing encoder.

    open_table : opens the table
    request : its `dropped_columns` are left out besides those that the encoder drops
    """
    request = request._replace(
        columns=encoder.columns,
        dropped_columns=(*encoder.dropped, *request.dropped_columns),
        as_table=True,
        missing_texts=encoder.missing,
        markers=MissingMarkers(text for text in encoder.missing if text not in MISSING),
    )
    return EncodedReader(open_table(request), encoder)
