"""Read data sets of Hugging Face's library `datasets` into stores, a batch at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.ingest.columns import ReadRequest, as_list
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.frame_reader import BesideReader, beside_rows, digest_of
from streamkern.ingest.hub_datasets import HubColumns
from streamkern.ingest.tables.cells import RowsInFile

_DIGEST_BATCH_ROWS = 1000  # in a batch that is read for the digest


class HubReader(BesideReader):
    """Reader of a `datasets.Dataset`, perhaps with arrays beside it, or of an `IterableDataset`.

    The identity of the data is a digest: of all rows of a `Dataset`, but only of the first rows of
    an `IterableDataset`, which may come over a network.
    """

    def __init__(self, data: Any, request: ReadRequest) -> None:
        self._hub = HubColumns(data)
        schema, n_rows = self._hub.schema, self._hub.n_rows
        beside: dict[str, Any] = {}
        for name, values in (("y", request.y), ("w", request.w)):
            if isinstance(values, np.ndarray):
                if n_rows is None:
                    raise DataError(
                        "X is an IterableDataset, beside which targets or weights cannot be given",
                        f"make them a column, and give its name as {mention('y=')}",
                    )
                beside[name] = beside_rows(values, n_rows, name)
        empty: dict[str, Any] = {name: [] for name in beside}
        request = request._replace(**empty)
        self._wide_column = None
        if request.cells is None:
            x = None if request.x is None else _column_names(request.x, schema.names)
            other_columns = _column_names("y" if request.y is None else request.y, schema.names)
            other_columns += _column_names(request.w, schema.names)
            wide = self._hub.wide_column(x, other_columns, request.dropped, alone=request.targets)
            if wide is not None:
                request = request._replace(x=wide)
                self._wide_column = self._hub.wide(wide)
        identity = {
            "kind": type(data).__name__,
            "schema": str(schema),
            "rows": n_rows,
            "digest": self._digest(all_rows=n_rows is not None),
            "asked": request.json(),
        }
        super().__init__(schema, n_rows, request, identity, beside)

    def _digest(self, *, all_rows: bool) -> str:
        tables = (t.replace_schema_metadata() for t in self._hub.raw(_DIGEST_BATCH_ROWS))
        first = next(tables, None)
        if first is None:
            raise DataError("X has no rows", "give some")
        return digest_of(first.schema, chain([first], islice(tables, None if all_rows else 0)))

    def _read(self, block_bytes: int, columns: list[str] | None) -> Iterator[Any]:
        row_bytes = 8 * len(self._columns_read)
        if self._wide_column is not None:
            row_bytes += 8 * math.prod(self._wide_column.shape)
        rows = max(1, block_bytes // row_bytes)
        for table in self._hub.tables(rows, columns):
            yield import_optional("pyarrow").RecordBatch.from_arrays(
                [k.combine_chunks() for k in table.columns], schema=table.schema
            )

    def _rows_of_lists(self, lists: Any, rows: RowsInFile) -> NDArray[Any]:
        assert self._wide_column is not None
        return self._wide_column.rows(lists, rows).reshape(len(lists), -1)

    def _block(self, batch: Any, start: int) -> RawBlock:
        block = super()._block(batch, start)
        if self._wide_column is None or self._cells:
            return block
        return block._replace(X=block.X.reshape(-1, *self._wide_column.shape))


def _column_names(role: Any, names: list[str]) -> list[Any]:
    """Return columns by name, also those that are given by position."""
    return [
        names[k] if isinstance(k, int) and -len(names) <= k < len(names) else k
        for k in as_list(role)
    ]
