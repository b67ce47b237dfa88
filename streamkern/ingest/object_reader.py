"""Read objects: data frames, data sets of Hugging Face, and iterables of blocks of arrays."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.ingest.array_reader import content_checksum, ends_digest
from streamkern.ingest.arrow_tables import ArrowReader
from streamkern.ingest.columns import ReadRequest, as_list
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.convert_input import convert_input, convert_targets
from streamkern.ingest.frames import are_names, arrow_table, is_frame
from streamkern.ingest.hub_datasets import HubColumns
from streamkern.ingest.numeric import frame_numbers, numeric
from streamkern.ingest.reader import Reader, rows_with_targets
from streamkern.ingest.tables.arrow import arrow, arrow_ipc
from streamkern.ingest.tables.cells import RowsInFile

_DIGEST_BATCH_ROWS = 1000
"""Rows of a data set that are read at once for its digest."""


class _ObjectReader(ArrowReader):
    """Reader of a table that is given as an object, perhaps with targets and weights beside it.

    kind : name of the type of the table
    digest : digest of the rows, which identifies them together with `kind` and `schema`
    separate_arrays : arrays by "y" and "w", if these are not columns of the table
    """

    def __init__(
        self, kind: str, schema: Any, n_rows: int | None, digest: str, request: ReadRequest,
        separate_arrays: dict[str, NDArray[Any]],
    ) -> None:  # fmt: skip
        self._separate_arrays = separate_arrays
        identity = {
            "kind": kind, "schema": str(schema), "rows": n_rows, "digest": digest,
            "asked": request.json(),
            **{name: content_checksum(values) for name, values in separate_arrays.items()},
        }  # fmt: skip
        super().__init__("X", schema, n_rows, request, identity)

    def _block(self, batch: Any, start: int) -> RawBlock:
        block = super()._block(batch, start)
        part = slice(start, start + len(batch))
        rows: dict[str, Any] = {
            name: values[part] for name, values in self._separate_arrays.items()
        }
        return block._replace(**rows)


class FrameReader(_ObjectReader):
    """Reader of a data frame from `as_frame`."""

    def __init__(self, frame: Any, request: ReadRequest) -> None:
        self._table = table = arrow_table(frame, "X")

        def is_separate(y: Any) -> bool:
            return not (y is None or are_names(y, frame) or isinstance(y, int))

        request, separate_arrays = _separate_targets(request, len(table), is_separate)
        digest = _digest([table.replace_schema_metadata()])
        super().__init__(
            "data frame", table.schema, table.num_rows, digest, request, separate_arrays
        )

    def _read(self, block_bytes: int, columns: list[str] | None) -> Iterator[Any]:
        rows = max(1, block_bytes // (8 * len(self._columns_read)))
        table = self._table if columns is None else self._table.select(columns)
        return iter(table.to_batches(max_chunksize=rows))


class HubReader(_ObjectReader):
    """Reader of a `datasets.Dataset`, perhaps with arrays beside it, or of an `IterableDataset`.

    The digest is of all rows of a `Dataset`, but only of the first rows of an `IterableDataset`,
    which may come over a network.
    """

    def __init__(self, data: Any, request: ReadRequest) -> None:
        self._hub = hub = HubColumns(data)
        request, separate_arrays = _separate_targets(
            request, hub.n_rows, lambda y: isinstance(y, np.ndarray)
        )
        self._wide_column = None
        if not request.as_table:
            names = hub.schema.names
            x = None if request.x is None else _column_names(request.x, names)
            target_names = _column_names(request.y_name, names) + _column_names(request.w, names)
            wide = hub.wide_column(
                x, target_names, request.dropped_columns, must_be_alone=request.targets
            )
            if wide is not None:
                request = request._replace(x=wide)
                self._wide_column = hub.wide_column_reader(wide)
        tables = (
            table.replace_schema_metadata() for table in hub.stored_tables(_DIGEST_BATCH_ROWS)
        )
        digest = _digest(tables if hub.n_rows is not None else islice(tables, 1))
        kind = type(data).__name__
        super().__init__(kind, hub.schema, hub.n_rows, digest, request, separate_arrays)

    def _read(self, block_bytes: int, columns: list[str] | None) -> Iterator[Any]:
        row_bytes = 8 * len(self._columns_read)
        if self._wide_column is not None:
            row_bytes += 8 * math.prod(self._wide_column.shape)
        for table in self._hub.tables(max(1, block_bytes // row_bytes), columns):
            yield arrow.RecordBatch.from_arrays(
                [column.combine_chunks() for column in table.columns], schema=table.schema
            )

    def _rows_of_lists(self, lists: Any, rows: RowsInFile) -> NDArray[Any]:
        assert self._wide_column is not None
        return self._wide_column.rows(lists, rows).reshape(len(lists), -1)

    def _block(self, batch: Any, start: int) -> RawBlock:
        block = super()._block(batch, start)
        if self._wide_column is None or self._as_table:
            return block
        return block._replace(X=block.X.reshape(-1, *self._wide_column.shape))


def _column_names(role: Any, names: list[str]) -> list[Any]:
    """Return columns by name, also those that are given by position."""
    return [
        names[column] if isinstance(column, int) and -len(names) <= column < len(names) else column
        for column in as_list(role)
    ]


def _separate_targets(
    request: ReadRequest, n_rows: int | None, is_separate: Callable[[Any], bool]
) -> tuple[ReadRequest, dict[str, NDArray[Any]]]:
    """Return the request without targets and weights given beside the table, and these as arrays.

    n_rows : number of rows of the table; None if it is unknown
    is_separate : returns whether targets or weights are values, and no columns of the table

    Raises DataError unless each row has a target, and a weight if there are weights.
    """
    separate_arrays: dict[str, NDArray[Any]] = {}
    for name, noun, argument in (("y", "target", request.y), ("w", "weight", request.w)):
        if not is_separate(argument):
            continue
        if n_rows is None:
            raise DataError(
                "X is an IterableDataset, so targets and weights must be columns of it",
                f"add a column, and give its name as {mention('y=')}",
            )
        separate_arrays[name] = values = np.asarray(argument)
        if values.ndim < 1 or len(values) != n_rows:
            raise DataError(
                f"X has {n_rows} rows, but the {noun}s have the shape {values.shape}",
                f"give one {noun} for each row",
            )
    empty: dict[str, Any] = {name: [] for name in separate_arrays}
    return request._replace(**empty), separate_arrays


class _Digest(io.RawIOBase):
    """A file that keeps only the SHA-256 of the data written."""

    def __init__(self) -> None:
        self.sha = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha.update(data)
        return memoryview(data).nbytes


def _digest(tables: Iterable[Any]) -> str:
    """Return the SHA-256 of tables of one schema, written as an Arrow stream."""
    tables = iter(tables)
    first_table = next(tables, None)
    if first_table is None:
        raise DataError("X has no rows", "give at least one row")
    file = _Digest()
    with arrow_ipc.new_stream(file, first_table.schema) as stream:
        for table in chain([first_table], tables):
            stream.write_table(table)
    return file.sha.hexdigest()


class BlockReader(Reader):
    """Reader of an iterable of (X, y) pairs of arrays, or of (X, y, w) with sample weights.

    The iterable is read once: a second pass over `blocks` yields only what the first one left.
    """

    def __init__(self, pairs: Iterable[Any], request: ReadRequest) -> None:
        self._numbered_pairs = enumerate(pairs)
        self._first_blocks = self._blocks_to_first_rows(request)
        if not self._first_blocks:
            raise DataError(
                "the iterator gave no rows",
                "give a new iterator: a generator gives its blocks only once",
            )
        # An iterator can be identified only by its first rows.
        self.identity = {"kind": "iterator", "begins": ends_digest(*self._first_blocks[0])}

    def _blocks_to_first_rows(self, request: ReadRequest) -> list[tuple[NDArray[Any], ...]]:
        """Return the blocks up to the first one with rows to keep, without empty blocks.

        The reader holds these blocks, because their rows are needed before the first pass, and an
        iterator yields them only once.
        """
        first_blocks = []
        for X, y, *w in map(self._pair, self._numbered_pairs):
            if len(X):
                first_blocks.append((X, y, *w))
                block = RawBlock(X, y, "the iterator", 0)
                if not request.drop_missing or len(rows_with_targets(block, request.markers).X):
                    break
        return first_blocks

    @staticmethod
    def _pair(numbered_pair: tuple[int, Any]) -> tuple[NDArray[Any], ...]:
        """Return the arrays of a block, given with its number; raise DataError if they differ."""
        index, pair = numbered_pair
        if not isinstance(pair, tuple | list) or len(pair) not in (2, 3):
            raise DataError(
                f"block {index} of the iterator is not a tuple of two or three arrays; give "
                "pairs (X, y), or (X, y, w) with sample weights"
            )
        names = ("X", "y", "sample_weight")
        X, y, *w = (
            _block_array(array, name, index) for array, name in zip(pair, names, strict=False)
        )
        if X.ndim < 2 or y.ndim < 1 or len(X) != len(y):
            raise DataError(
                f"block {index} of the iterator has X of shape {X.shape} and y of shape {y.shape}",
                "give X as (n, d) and a target for each row",
            )
        return X, y, *w

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        row = 0
        for X, y, *w in chain(self._first_blocks, map(self._pair, self._numbered_pairs)):
            block = RawBlock(X, y, "the iterator", row, w=w[0] if w else None)
            step = max(1, block_bytes // max(1, X[:1].nbytes))
            for offset in range(max(start - row, 0), len(X), step):
                yield block.part(offset, offset + step)
            row += len(X)


def _block_array(values: Any, name: str, index: int) -> NDArray[Any]:
    """Return X, y or the sample weights, by `name`, of block `index` as an array."""
    if name != "X":
        return np.asarray(convert_targets(values, name))
    X = convert_input(values, "X")
    if is_frame(X):
        X = frame_numbers(X, "X")
        if X is None:
            raise DataError(
                f"block {index} of the iterator is a data frame with columns that are not "
                "numbers, or with missing numbers",
                "give the whole table as one data frame, or give files",
            )
    return np.asarray(numeric(X))
