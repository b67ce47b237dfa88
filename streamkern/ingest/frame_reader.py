"""Read data frames of any library in blocks."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.basics.optional import import_optional
from streamkern.ingest.array_reader import contents
from streamkern.ingest.arrow_tables import ArrowReader
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.frames import are_names, arrow_table


class FrameReader(ArrowReader):
    """Reader of a data frame from `as_frame`, perhaps with targets and weights beside it."""

    typed = True

    def __init__(self, frame: Any, asked: ReadRequest) -> None:
        self._table = table = arrow_table(frame, "X")
        beside: dict[str, Any] = {}
        for name, given in (("y", asked.y), ("w", asked.w)):
            if not (given is None or are_names(given, frame) or isinstance(given, int)):
                beside[name] = _beside(given, len(table), name)
        self._beside = beside
        empty: dict[str, Any] = {key: [] for key in beside}
        asked = asked._replace(**empty)
        identity = {
            "kind": "data frame",
            "schema": str(table.schema),
            "rows": table.num_rows,
            "digest": _digest(table.replace_schema_metadata()),
            "asked": asked.json(),
            **{name: contents(values) for name, values in beside.items()},
        }
        super().__init__("X", table.schema, table.num_rows, asked, identity)

    def _batches(self, block_bytes: int) -> Iterator[Any]:
        rows = max(1, block_bytes // (8 * len(self._kept)))
        return iter(self._table.select(self._kept).to_batches(max_chunksize=rows))

    def _block(self, batch: Any, start: int) -> RawBlock:
        block = super()._block(batch, start)
        part = slice(start, start + len(batch))
        rows: dict[str, Any] = {name: values[part] for name, values in self._beside.items()}
        return block._replace(**rows)


def _beside(given: Any, n_rows: int, name: str) -> NDArray[Any]:
    """Return targets or weights beside a data frame; raise DataError unless each row has one."""
    values = np.asarray(given)
    if values.ndim < 1 or len(values) != n_rows:
        what = {"y": "target", "w": "weight"}[name]
        raise DataError(
            f"X has {n_rows} rows, and the {what}s beside it have the shape {values.shape}; give "
            f"one {what} for each row"
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


def _digest(table: Any) -> str:
    """Return the SHA-256 of a table, written as an Arrow stream."""
    file = _Digest()
    with import_optional("pyarrow.ipc").new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return file.sha.hexdigest()
