"""Fill a store with the chunks that a caller makes: several at a time, resumable, then published.

Chunks left by a killed call are verified by their digests and kept, and the same call makes the
rest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

from streamkern.basics.errors import ConfigError
from streamkern.basics.machine import available_cpus
from streamkern.basics.parallel import ordered_map
from streamkern.basics.progress import Progress
from streamkern.basics.text import redact, size_text
from streamkern.filesystem.urls import local_path
from streamkern.store.appender import StoreAppender
from streamkern.store.layout import StoreSpec
from streamkern.store.row_block import RowBlock
from streamkern.store.statistics import RunningStatistics
from streamkern.store.writer import StoreWriter

DEFAULT_MEMORY = 1 << 30
_REMOTE_WRITERS = 16
# Copies of a chunk being made and written: the rows as read, the cast, the results of two
# transforms, and five for digesting, compressing and writing it, less those freed by then.
COPIES_OF_A_CHUNK = 8


def check_seed(seed: int) -> None:
    """Raise ConfigError for a negative seed."""
    if seed < 0:
        raise ConfigError(f"seed={seed} must be 0 or more")


def checked_chunk_bytes(chunk_mb: float, memory: int, n_chunks: int) -> int:
    """Return the bytes of a chunk of `chunk_mb` MiB; ConfigError if `n_chunks` exceed `memory`."""
    size = chunk_mb * 2**20
    if not 1 <= size < math.inf:
        raise ConfigError(f"chunk_mb={chunk_mb} must be a number of MiB above 0")
    chunk_bytes = int(size)
    if memory < n_chunks * chunk_bytes:
        raise ConfigError(
            f"memory={size_text(memory)} is less than {n_chunks} chunks of chunk_mb={chunk_mb}; "
            f"raise memory= to {-(-n_chunks * chunk_bytes >> 20)} MiB or lower chunk_mb="
        )
    return chunk_bytes


def refuse_same_place(
    inputs: Iterable[str | os.PathLike[str]], out_url: str | os.PathLike[str]
) -> None:
    """Raise ConfigError if one of the inputs is at the place of the output."""
    there = local_path(out_url)
    for path in inputs:
        here = local_path(path)
        same = str(path).rstrip("/") == str(out_url).rstrip("/")
        if same or (here is not None and there is not None and here.resolve() == there.resolve()):
            raise ConfigError(f"{redact(out_url)} is both input and output; write elsewhere")


def n_writers(url: str | os.PathLike[str], memory: int, chunk_bytes: int) -> int:
    """Return the number of chunks to make and write at a time; more for writes to a network."""
    # On a disk, two more than there are cores: these wait for writes.
    wanted = available_cpus() + 2 if local_path(url) is not None else _REMOTE_WRITERS
    return max(1, min(wanted, memory // (COPIES_OF_A_CHUNK * chunk_bytes)))


def fill(
    writer: StoreWriter | StoreAppender,
    chunks_from: Callable[[int], Iterable[Callable[[], RowBlock]]],
    n_ahead: int,
    progress: Progress | None = None,
) -> StoreSpec:
    """Keep the chunks that verify, make the others, and publish; return the spec of the store.

    The chunks are those with rows that `writer.statistics()` does not include.

    Parameters
    ----------
    chunks_from : returns for i, in order, the calls that make chunk i and the chunks after it. Each
        call runs on some thread, up to `n_ahead` ahead of the one waited for.
    progress : called with ("write", rows done, rows in all) after each chunk
    """
    spec, stats = writer.spec, writer.statistics()
    with ThreadPoolExecutor(n_ahead, thread_name_prefix="streamkern-write") as pool:
        # Statistics are taken on the threads and merged in chunk order, which is part of the bits.
        for counted in _written(writer, chunks_from, stats, pool, n_ahead):
            stats.merge(counted)
            if progress is not None:
                progress("write", stats.n_rows, spec.n_rows)
    return writer.finish(stats.result())


def _written(
    writer: StoreWriter | StoreAppender,
    chunks_from: Callable[[int], Iterable[Callable[[], RowBlock]]],
    before: RunningStatistics,
    pool: ThreadPoolExecutor,
    n_ahead: int,
) -> Iterator[RunningStatistics]:
    """Yield the statistics of each chunk in order, once the chunk is in the store.

    before : the statistics of the old rows
    """
    n_old, chunk_rows = before.n_rows, writer.spec.chunk_rows

    def counted(i: int, chunk: RowBlock) -> RunningStatistics:
        stats = before.empty()
        stats.add(*chunk.take(slice(max(n_old - i * chunk_rows, 0), None)).contents)
        return stats

    def keep(i: int) -> RunningStatistics | None:
        chunk = writer.stored(i)
        return None if chunk is None else counted(i, chunk)

    def write(i: int, make: Callable[[], RowBlock]) -> RunningStatistics:
        chunk = writer.stored(i)
        if chunk is None:
            chunk = make()
            writer.write_chunk(i, *chunk)
        return counted(i, chunk)

    first = n_old // chunk_rows
    stored = (partial(keep, i) for i in range(first, writer.spec.n_chunks))
    with closing(ordered_map(pool, stored, n_ahead)) as kept:
        for stats in kept:
            if stats is None:
                break
            yield stats
            first += 1
    # Threads finish out of order, so some of these chunks may be stored as well.
    missing = (partial(write, i, make) for i, make in enumerate(chunks_from(first), first))
    yield from ordered_map(pool, missing, n_ahead)
