"""The arrays of a store that is being written: created from its spec, written and read by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.filesystem.ownership import ATTRIBUTE, STORE
from streamkern.store import layout
from streamkern.store.fast_chunks import ChunkWriter
from streamkern.store.journal import Journal
from streamkern.store.layout import StoreSpec
from streamkern.store.sample_weights import DTYPE

if TYPE_CHECKING:
    import zarr
    from numpy.typing import NDArray


class NewArrays:
    """The arrays X, y, row, and w if rows are weighted; those of an interrupted write are kept.

    by_name : the open arrays
    journal : the chunks that are written
    """

    def __init__(self, group: zarr.Group, spec: StoreSpec, compress: str) -> None:
        self._group, self._spec, self._compress = group, spec, compress
        n, k = spec.n_rows, spec.chunk_rows
        values = spec.classes is None
        y_shape, y_names = ((n, spec.n_outputs), ("row", "output")) if values else ((n,), ("row",))
        names = layout.dimension_names(spec.row_shape)
        self.by_name = {
            "X": self._array("X", (n, *spec.row_shape), k, spec.x_dtype, names),
            "y": self._array("y", y_shape, k, np.dtype(spec.y_dtype), y_names),
        }
        if spec.weight_totals is not None:
            self.by_name["w"] = self._array("w", (n,), k, DTYPE, ("row",))
        self.by_name["row"] = self._array("row", (n,), k, layout.ROW, ("row",), compress="none")
        self._chunks = [ChunkWriter(array) for array in self.by_name.values()]
        self._crcs: dict[int, list[int | None]] = {}  # of each chunk that this writer wrote or read
        shape = (spec.n_chunks, len(self._chunks) * layout.DIGEST_BYTES)
        byte = np.dtype(np.uint8)
        self.journal = Journal(
            self._array("digests", shape, layout.DIGEST_CHUNK, byte, ("chunk", "byte"))
        )

    def _array(
        self,
        name: str,
        shape: tuple[int, ...],
        chunk_rows: int,
        dtype: np.dtype[Any],
        names: tuple[str, ...],
        compress: str | None = None,
    ) -> Any:
        if name in self._group:
            return self._group[name]
        compress = compress or self._compress
        return create_array(self._group, name, shape, chunk_rows, dtype, names, compress)

    def write(self, i: int, parts: Sequence[NDArray[Any]]) -> None:
        """Write the rows of chunk `i` to each array, then add it to the journal."""
        chunks = zip(self._chunks, parts, strict=True)
        self._crcs[i] = [array.write(i, part) for array, part in chunks]
        # Last: a chunk is in the journal only when all of it is in the store.
        self.journal.add(i, layout.chunk_digest(*parts))

    def read(self, i: int) -> list[NDArray[Any]] | None:
        """Return chunk `i` of each array, if the journal has it and its digest agrees."""
        digest = self.journal.digest(i)
        if digest is None:
            return None
        n_rows = min(self._spec.chunk_rows, self._spec.n_rows - i * self._spec.chunk_rows)
        try:
            read = [array.read(i, n_rows) for array in self._chunks]
        except (ValueError, RuntimeError, FileNotFoundError):  # bytes that do not decode
            return None
        parts = [rows.astype(rows.dtype.newbyteorder("="), copy=False) for rows, _ in read]
        if not np.array_equal(layout.chunk_digest(*parts), digest):
            return None
        self._crcs[i] = [crc for _, crc in read]
        return parts

    def damaged(self) -> int | None:
        """Return the first chunk that is not in the store as written; None if all are."""
        every = range(self._spec.n_chunks)
        return next((i for i in every if i not in self._crcs and self.read(i) is None), None)

    def write_crcs(self) -> str:
        """Write the checksums of all chunks, of which none is `damaged`; return their digest."""
        n_chunks = self._spec.n_chunks
        table = np.array([self._crcs[i] for i in range(n_chunks)], np.uint32)
        if "crc" in self._group:
            del self._group["crc"]
        return write_crcs(self._group, "crc", table)


def create_array(
    group: zarr.Group,
    name: str,
    shape: tuple[int, ...],
    chunk_rows: int,
    dtype: np.dtype[Any],
    names: tuple[str, ...],
    compress: str,
) -> Any:
    """Create an array of a store, in chunks of whole rows.

    names : names of its dimensions
    """
    return group.create_array(
        name,
        shape=shape,
        chunks=(chunk_rows, *shape[1:]),
        dtype=dtype,
        filters=None,
        compressors=layout.codecs(dtype, compress),
        fill_value=0,
        dimension_names=names,
        config={"write_empty_chunks": True},
        attributes={ATTRIBUTE: STORE},  # identifies the group if its own attribute is lost
    )


def write_crcs(group: zarr.Group, name: str, table: NDArray[np.uint32]) -> str:
    """Store the checksums of all chunks, (chunks, arrays), as a new array; return their digest."""
    rows, names = min(layout.CRC_CHUNK, len(table)), ("chunk", "array")
    create_array(group, name, table.shape, rows, table.dtype, names, "none")[:] = table
    return layout.array_digest(table).tobytes().hex()
