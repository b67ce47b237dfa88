"""Write the chunks of a store's arrays, record them in its journal, and read them back."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.filesystem.durable import disk_full_hint
from streamkern.filesystem.ownership import ATTRIBUTE, STORE
from streamkern.store import layout
from streamkern.store.fast_chunks import ChunkWriter
from streamkern.store.layout import DIGEST_CHUNK, StoreSpec
from streamkern.store.row_block import RowBlock, checked_chunk

if TYPE_CHECKING:
    import zarr
    from numpy.typing import NDArray


class Journal:
    """Digests of the chunks that are written: a row for each, 0 for a missing one.

    Chunks may be added on several threads. `digests` (chunks, bytes) is the array in memory.
    """

    digests: NDArray[np.uint8]

    def __init__(self, array: Any) -> None:
        self._chunks = ChunkWriter(array)
        self._lock = threading.Lock()  # an older slab must not overwrite a newer one
        try:
            self.digests = np.array(array[:], dtype=np.uint8)
        except (ValueError, RuntimeError):  # with a damaged journal no chunk is known to be done
            self.digests = np.zeros(array.shape, np.uint8)

    def keep(self, digests: NDArray[np.uint8]) -> None:
        """Record the first chunks as written, with these digests from another journal."""
        self.digests[: len(digests)] = digests
        for slab in range(-(-len(digests) // DIGEST_CHUNK)):
            self._write(slab)

    def _write(self, slab: int) -> None:
        self._chunks.write(slab, self.digests[slab * DIGEST_CHUNK : (slab + 1) * DIGEST_CHUNK])

    @property
    def done(self) -> NDArray[np.bool_]:
        """(chunks,) bool, True for chunks that are written."""
        return np.asarray(self.digests.any(axis=1))

    def digest(self, i: int) -> NDArray[np.uint8] | None:
        """Return the digest of chunk `i`; None if it is not written."""
        return self.digests[i] if i < len(self.digests) and self.digests[i].any() else None

    def add(self, i: int, digest: NDArray[np.uint8]) -> None:
        """Record chunk `i` as completely written."""
        with self._lock:
            self.digests[i] = digest
            self._write(i // DIGEST_CHUNK)


class ChunkOutput:
    """The chunks of a store that a `StoreWriter` or a `StoreAppender` writes.

    spec : spec of the store being written
    arrays : open arrays of the rows, in the order of `layout.row_arrays`
    replaced : the chunk in use by readers that is written anew, or None
    """

    def __init__(
        self, url: str, spec: StoreSpec, arrays: Iterable[Any], journal: Journal,
        replaced: int | None = None,
    ) -> None:  # fmt: skip
        self.url, self.spec, self.journal = url, spec, journal
        self._chunks, self._replaced = [ChunkWriter(array) for array in arrays], replaced
        self._crcs: dict[int, list[int | None]] = {}  # of each chunk written or read here

    def write_chunk(
        self,
        i: int,
        X: NDArray[Any],
        y: NDArray[Any],
        w: NDArray[Any] | None = None,
        row_ids: NDArray[Any] | None = None,
    ) -> None:
        """Write chunk `i`, given as the fields of a `RowBlock`.

        Every chunk has `chunk_rows` rows, the last one the remaining rows. Chunks may come in any
        order, and on several threads. Non-finite values and ids outside the classes are refused.

        row_ids : row numbers in the source; None: their positions in the store
        """
        if row_ids is None:
            row_ids = i * self.spec.chunk_rows + np.arange(len(X), dtype=layout.ROW)
        arrays = checked_chunk(self.spec, i, RowBlock(X, y, w, row_ids)).arrays
        with disk_full_hint(self.url):
            chunks = zip(self._chunks, arrays, strict=True)
            self._crcs[i] = [
                chunk.write(i, array, replaces=i == self._replaced) for chunk, array in chunks
            ]
            # Last: a chunk is in the journal only when all of it is in the store.
            self.journal.add(i, layout.chunk_digest(*arrays))

    def stored(self, i: int) -> RowBlock | None:
        """Return chunk `i`, if the journal has it and its digest agrees; else None."""
        digest = self.journal.digest(i)
        if digest is None:
            return None
        n_rows = min(self.spec.chunk_rows, self.spec.n_rows - i * self.spec.chunk_rows)
        try:
            read = [chunk.read(i, n_rows) for chunk in self._chunks]
        except (ValueError, RuntimeError, FileNotFoundError):  # bytes that do not decode
            return None
        arrays = [rows.astype(rows.dtype.newbyteorder("="), copy=False) for rows, _ in read]
        if not np.array_equal(layout.chunk_digest(*arrays), digest):
            return None
        self._crcs[i] = [crc for _, crc in read]
        return RowBlock.from_arrays(arrays)

    def _first_damaged(self, first: int = 0) -> int | None:
        """Return the first chunk from `first` on that is not in the store as written, or None."""
        chunks = range(first, self.spec.n_chunks)
        return next((i for i in chunks if i not in self._crcs and self.stored(i) is None), None)

    def _write_crcs(self, group: zarr.Group, name: str, old: NDArray[np.uint32]) -> str:
        """Store the checksums of all chunks, none of which is damaged; return their digest.

        old : (k, arrays), of the first chunks
        """
        new = [self._crcs[i] for i in range(len(old), self.spec.n_chunks)]
        table = np.concatenate([old, np.array(new, np.uint32).reshape(-1, old.shape[1])])
        rows, names = min(layout.CRC_CHUNK, len(table)), ("chunk", "array")
        create_array(group, name, table.shape, rows, table.dtype, names, "none")[:] = table
        return layout.array_digest(table).tobytes().hex()


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
