"""Write the chunks of a store, several at a time, record them in its journal, and read them back.

When a killed call is repeated, it keeps the chunks whose digests are correct, and makes the others
again.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.machine import available_cpus, ordered_map
from streamkern.basics.message import mention
from streamkern.basics.progress import Progress
from streamkern.basics.text import redact, size_text
from streamkern.basics.values import is_finite_number
from streamkern.filesystem.durable import disk_full_hint
from streamkern.filesystem.ownership import ATTRIBUTE, STORE
from streamkern.filesystem.urls import local_path
from streamkern.store import layout
from streamkern.store.fast_chunks import ChunkWriter
from streamkern.store.layout import DIGEST_CHUNK_ROWS, StoreSpec
from streamkern.store.row_block import RowBlock, checked_chunk
from streamkern.store.statistics import RunningStatistics, Statistics

if TYPE_CHECKING:
    import zarr
    from numpy.typing import NDArray


class Journal:
    """The digests of the chunks: one row for each chunk, which is zeros until the chunk is written.

    Chunks may be added on several threads.

    Parameters
    ----------
    array : zarr array (chunks, bytes) uint8 that stores the digests

    Attributes
    ----------
    digests : (chunks, bytes) uint8, a copy of `array` in memory
    """

    digests: NDArray[np.uint8]

    def __init__(self, array: Any) -> None:
        self._chunks = ChunkWriter(array)
        # Guards `digests` and the order of writes: an older slab must not overwrite a newer one.
        self._lock = threading.Lock()
        try:
            self.digests = np.array(array[:], dtype=np.uint8)
        except (ValueError, RuntimeError):  # with a damaged journal no chunk is known to be done
            self.digests = np.zeros(array.shape, np.uint8)

    def record_first(self, digests: NDArray[np.uint8]) -> None:
        """Record the first chunks as written, with these digests from another journal."""
        self.digests[: len(digests)] = digests
        for slab in range(-(-len(digests) // DIGEST_CHUNK_ROWS)):
            self._write_slab(slab)

    def _write_slab(self, slab: int) -> None:
        """Store the digests of one slab, a chunk of the array."""
        self._chunks.write(
            slab, self.digests[slab * DIGEST_CHUNK_ROWS : (slab + 1) * DIGEST_CHUNK_ROWS]
        )

    @property
    def is_written(self) -> NDArray[np.bool_]:
        """(chunks,) bool, True for chunks that are written."""
        return np.asarray(self.digests.any(axis=1))

    def digest(self, i: int) -> NDArray[np.uint8] | None:
        """Return the digest of chunk `i`; None if it is not written."""
        return self.digests[i] if i < len(self.digests) and self.digests[i].any() else None

    def add(self, i: int, digest: NDArray[np.uint8]) -> None:
        """Record chunk `i` as completely written."""
        with self._lock:
            self.digests[i] = digest
            self._write_slab(i // DIGEST_CHUNK_ROWS)


class ChunkOutput(ABC):
    """The chunks of a store that a `StoreWriter` or a `StoreAppender` writes.

    url : URL of the store
    spec : spec of the store being written
    arrays : open arrays of the rows, in the order of `layout.row_arrays`
    journal : journal of the store
    replaced_chunk : number of a chunk that readers use and that is replaced, or None
    """

    def __init__(
        self, url: str, spec: StoreSpec, arrays: Iterable[Any], journal: Journal,
        replaced_chunk: int | None = None,
    ) -> None:  # fmt: skip
        self.url, self.spec, self.journal = url, spec, journal
        self._chunks = [ChunkWriter(array) for array in arrays]
        self._replaced_chunk = replaced_chunk
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

        Every chunk but the last one has `chunk_rows` rows. Chunks may come in any order, and on
        several threads.

        row_ids : row numbers; None: the positions of the rows in the store

        Raises DataError or NonFiniteError if `checked_chunk` refuses the rows, and an OSError if
        they cannot be written.
        """
        if row_ids is None:
            row_ids = i * self.spec.chunk_rows + np.arange(len(X), dtype=layout.ROW_NUMBER_DTYPE)
        arrays = checked_chunk(self.spec, i, RowBlock(X, y, w, row_ids)).arrays
        with disk_full_hint(self.url):
            chunks = zip(self._chunks, arrays, strict=True)
            self._crcs[i] = [
                chunk.write(i, array, replaces=i == self._replaced_chunk) for chunk, array in chunks
            ]
            # Last: a chunk is in the journal only when all of it is in the store.
            self.journal.add(i, layout.chunk_digest(*arrays))

    def read_back(self, i: int) -> RowBlock | None:
        """Return chunk `i` if its digest agrees with the journal; else None."""
        digest = self.journal.digest(i)
        if digest is None:
            return None
        n_rows = min(self.spec.chunk_rows, self.spec.n_rows - i * self.spec.chunk_rows)
        try:
            rows_and_crcs = [chunk.read(i, n_rows) for chunk in self._chunks]
        except (ValueError, RuntimeError, FileNotFoundError):  # bytes that do not decode
            return None
        arrays = [
            rows.astype(rows.dtype.newbyteorder("="), copy=False) for rows, _ in rows_and_crcs
        ]
        if not np.array_equal(layout.chunk_digest(*arrays), digest):
            return None
        self._crcs[i] = [crc for _, crc in rows_and_crcs]
        return RowBlock.from_arrays(arrays)

    @abstractmethod
    def statistics(self) -> RunningStatistics:
        """Return the statistics of the rows before those to be written."""

    @abstractmethod
    def finish(self, stats: Statistics) -> StoreSpec:
        """Publish the store in one step, and return its spec."""

    def _first_damaged_chunk(self, start: int = 0) -> int | None:
        """Return the first chunk from `start` on that the store does not hold intact, or None.

        Chunks that this process wrote or read back are not read again.
        """
        chunks = range(start, self.spec.n_chunks)
        return next((i for i in chunks if i not in self._crcs and self.read_back(i) is None), None)

    def _write_crcs(self, group: zarr.Group, name: str, first_crcs: NDArray[np.uint32]) -> str:
        """Store the checksums of all chunks, which must be undamaged; return their digest.

        name : name of the array that holds the checksums
        first_crcs : (k, arrays) checksums of the first k chunks, which were written before
        """
        k, n_arrays = first_crcs.shape
        new_crcs = [self._crcs[i] for i in range(k, self.spec.n_chunks)]
        table = np.concatenate([first_crcs, np.array(new_crcs, np.uint32).reshape(-1, n_arrays)])
        rows, names = min(layout.CRC_CHUNK_ROWS, len(table)), ("chunk", "array")
        create_array(group, name, table.shape, rows, table.dtype, names, "none")[:] = table
        return layout.array_digest(table).tobytes().hex()


def create_array(
    group: zarr.Group,
    name: str,
    shape: tuple[int, ...],
    chunk_rows: int,
    dtype: np.dtype[Any],
    dimensions: tuple[str, ...],
    compress: str,
) -> Any:
    """Create an array of a store, in chunks of `chunk_rows` whole rows, and return it.

    dimensions : names of the dimensions
    compress : as for `layout.codecs`
    """
    return group.create_array(
        name,
        shape=shape,
        chunks=(chunk_rows, *shape[1:]),
        dtype=dtype,
        filters=None,
        compressors=layout.codecs(dtype, compress, shape[1:]),
        fill_value=0,
        dimension_names=dimensions,
        config={"write_empty_chunks": True},
        attributes={ATTRIBUTE: STORE},  # identifies the group if its own attribute is lost
    )


DEFAULT_MEMORY = 1 << 30
"""Bytes that a call may take unless it is told another number."""
_REMOTE_WRITERS = 16
"""Number of chunks that are written at a time to a network."""
COPIES_PER_CHUNK = 8
"""Largest number of copies of a chunk that are assumed to exist at once while it is made and
written: the rows as read, the cast, the results of two transforms, and copies for digesting,
compressing and writing it."""


def checked_chunk_bytes(chunk_mb: float, memory: int, n_chunks: int) -> int:
    """Return the bytes of a chunk of `chunk_mb` MiB.

    Raises ConfigError unless `chunk_mb` is a finite number and a chunk has at least one byte, and
    if `n_chunks` chunks exceed `memory`, in bytes.
    """
    size = chunk_mb * 2**20 if is_finite_number(chunk_mb) else 0
    if not 1 <= size < math.inf:
        raise ConfigError(
            f"{mention('chunk_mb', chunk_mb)} must be a number of MiB above 0",
            f"set for example {mention('chunk_mb', 8)}",
        )
    chunk_bytes = int(size)
    if memory < n_chunks * chunk_bytes:
        raise ConfigError(
            f"{mention(f'memory={size_text(memory)}')} is less than {n_chunks} chunks of "
            f"{mention('chunk_mb', chunk_mb)}",
            f"raise {mention('memory=')} to {-(-n_chunks * chunk_bytes >> 20)} MiB or lower "
            f"{mention('chunk_mb=')}",
        )
    return chunk_bytes


def refuse_same_location(
    inputs: Iterable[str | os.PathLike[str]], out_url: str | os.PathLike[str]
) -> None:
    """Raise ConfigError if one of the inputs has the location of the output."""
    out = local_path(out_url)
    for path in inputs:
        source = local_path(path)
        is_same_url = str(path).rstrip("/") == str(out_url).rstrip("/")
        is_same_path = source is not None and out is not None and source.resolve() == out.resolve()
        if is_same_url or is_same_path:
            raise ConfigError(
                f"{redact(out_url)} is input and output at the same time", "give another output"
            )


def n_writers(url: str | os.PathLike[str], memory: int, chunk_bytes: int) -> int:
    """Return the number of chunks to make and write at a time.

    It is 16 for a network and two more than there are cores for a disk, or as many as fit in memory
    if these are fewer, but at least 1.

    memory, chunk_bytes : bytes of the whole call, and of a chunk
    """
    # More threads than cores, because some of them wait for writes.
    desired = available_cpus() + 2 if local_path(url) is not None else _REMOTE_WRITERS
    return max(1, min(desired, memory // (COPIES_PER_CHUNK * chunk_bytes)))


def fill_store(
    writer: ChunkOutput,
    chunks_from: Callable[[int], Iterable[Callable[[], RowBlock]]],
    n_ahead: int,
    progress: Progress | None = None,
) -> StoreSpec:
    """Write all chunks of a store and publish it; return its spec.

    Chunks that hold only rows of `writer.statistics()` are not touched. Of the other chunks, those
    that the store has already are kept if their digests are correct.

    Parameters
    ----------
    chunks_from : takes i and returns, in order, the calls that make chunk i and the chunks after
        it; each call runs on one of the threads
    n_ahead : number of threads, and of calls that run ahead of the one waited for
    progress : called with ("write", rows done, rows in all) after each chunk
    """
    spec, stats = writer.spec, writer.statistics()
    with ThreadPoolExecutor(n_ahead, thread_name_prefix="streamkern-write") as pool:
        # Merged in the order of the chunks, because rounding depends on the order.
        for chunk_stats in _chunk_statistics(writer, chunks_from, stats, pool, n_ahead):
            stats.merge(chunk_stats)
            if progress is not None:
                progress("write", stats.n_rows, spec.n_rows)
    return writer.finish(stats.result())


def _chunk_statistics(
    writer: ChunkOutput,
    chunks_from: Callable[[int], Iterable[Callable[[], RowBlock]]],
    old_rows: RunningStatistics,
    pool: ThreadPoolExecutor,
    n_ahead: int,
) -> Iterator[RunningStatistics]:
    """Write the chunks; yield the statistics of each in order, once it is in the store.

    old_rows : statistics of the rows that the store had before an append; empty for a new store
    """
    n_old, chunk_rows = old_rows.n_rows, writer.spec.chunk_rows

    def new_row_statistics(i: int, chunk: RowBlock) -> RunningStatistics:
        stats = old_rows.empty()
        n_old_in_chunk = max(n_old - i * chunk_rows, 0)
        stats.add(*chunk.take(slice(n_old_in_chunk, None)).contents)
        return stats

    def verify(i: int) -> RunningStatistics | None:
        chunk = writer.read_back(i)
        return None if chunk is None else new_row_statistics(i, chunk)

    def write(i: int, make: Callable[[], RowBlock]) -> RunningStatistics:
        chunk = writer.read_back(i)
        if chunk is None:
            chunk = make()
            writer.write_chunk(i, *chunk)
        return new_row_statistics(i, chunk)

    next_chunk = n_old // chunk_rows
    # First the chunks that the store has already, up to the first one that it lacks.
    checks = (partial(verify, i) for i in range(next_chunk, writer.spec.n_chunks))
    with closing(ordered_map(pool, checks, n_ahead)) as results:
        for stats in results:
            if stats is None:
                break
            yield stats
            next_chunk += 1
    # Threads finish out of order, so some of the remaining chunks may be stored as well.
    writes = (partial(write, i, make) for i, make in enumerate(chunks_from(next_chunk), next_chunk))
    yield from ordered_map(pool, writes, n_ahead)
