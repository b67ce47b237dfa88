"""Read data frames and data sets, perhaps with arrays of targets and weights given beside them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.basics.optional import import_optional
from streamkern.ingest.array_reader import content_checksum
from streamkern.ingest.arrow_tables import ArrowReader
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.frames import are_names, arrow_table


class BesideReader(ArrowReader):
    """Reader of a table that is given as an object, perhaps with targets and weights beside it.

    beside : arrays of `beside_rows` by "y" and "w", if they are not columns of the table
    """

    def __init__(
        self, schema: Any, n_rows: int | None, request: ReadRequest, identity: Any, beside: Any
    ) -> None:
        self._beside = beside
        identity |= {name: content_checksum(values) for name, values in beside.items()}
        super().__init__("X", schema, n_rows, request, identity)

    def _block(self, batch: Any, start: int) -> RawBlock:
        block = super()._block(batch, start)
        part = slice(start, start + len(batch))
        rows: dict[str, Any] = {name: values[part] for name, values in self._beside.items()}
        return block._replace(**rows)


class FrameReader(BesideReader):
    """Reader of a data frame from `as_frame`."""

    def __init__(self, frame: Any, request: ReadRequest) -> None:
        self._table = table = arrow_table(frame, "X")
        beside: dict[str, Any] = {}
        for name, values in (("y", request.y), ("w", request.w)):
            if not (values is None or are_names(values, frame) or isinstance(values, int)):
                beside[name] = beside_rows(values, len(table), name)
        empty: dict[str, Any] = {key: [] for key in beside}
        request = request._replace(**empty)
        data_table = table.replace_schema_metadata()
        identity = {
            "kind": "data frame",
            "schema": str(table.schema),
            "rows": table.num_rows,
            "digest": digest_of(data_table.schema, [data_table]),
            "asked": request.json(),
        }
        super().__init__(table.schema, table.num_rows, request, identity, beside)

    def _read(self, block_bytes: int, columns: list[str] | None) -> Iterator[Any]:
        rows = max(1, block_bytes // (8 * len(self._columns_read)))
        table = self._table if columns is None else self._table.select(columns)
        return iter(table.to_batches(max_chunksize=rows))


def beside_rows(data: Any, n_rows: int, name: str) -> NDArray[Any]:
    """Return targets or weights beside a table; raise DataError unless each row has one."""
    values = np.asarray(data)
    if values.ndim < 1 or len(values) != n_rows:
        noun = {"y": "target", "w": "weight"}[name]
        raise DataError(
            f"X has {n_rows} rows, but the {noun}s beside it have the shape {values.shape}",
            f"give one {noun} for each row",
        )
    return values


class _Digest(io.RawIOBase):
    """A file that keeps only the SHA-256 of the data written."""

    def __init__(self) -> None:
        self.sha = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha.update(data)
        return memoryview(data).nbytes


def digest_of(schema: Any, tables: Iterable[Any]) -> str:
    """Return the SHA-256 of tables of one schema, written as an Arrow stream."""
    file = _Digest()
    with import_optional("pyarrow.ipc").new_stream(file, schema) as stream:
        for table in tables:
            stream.write_table(table)
    return file.sha.hexdigest()
