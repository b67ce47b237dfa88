"""Measure how fast a store is read: stored objects, decoded chunks and batches.

    objects    whole objects of X, as stored, by 1, 4, 8, ... threads, one request each
    chunks     `Store.read_chunk` by as many threads; also reads y, verifies checksums and decodes
    batches    the `BatchReader` with its defaults, and a consumer that takes no time

Chunks are read in random order. On a local disk, chunks that were read before come from the page
cache if they fit.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import zarr

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.text import redact, size_text, text_table
from streamkern.filesystem.urls import local_path, open_objects, zarr_store
from streamkern.planning.sizes import ROW_ID_BYTES
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.sources.base import target_bytes
from streamkern.stream.sources.stores import ZarrSource

if TYPE_CHECKING:
    import os

    from streamkern.store.store import Store

CONNECTION_COUNTS = (1, 4, 8, 16, 32, 64)
_MAX_IN_FLIGHT_BYTES = 512 << 20  # decoded
_MAX_BYTES_READ = 8 << 30  # for one row of the table
_NEAR_BEST_SHARE = 0.9  # share of the best speed that counts as reaching it
_BATCH_ROWS = 1000

ReadRow = dict[str, Any]


def read_speed(
    url: str | os.PathLike[str],
    *,
    x: str = "X",
    y: str | None = "y",
    seconds: float = 3.0,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[ReadRow], None] = lambda row: None,
) -> dict[str, Any]:
    """Return rows of measurements and a conclusion, JSON-able. Takes `seconds` for each row.

    A row has these entries, None if not measured: what ("objects", "chunks" or "batches"),
    connections, requests_per_s, bytes_per_s (stored bytes of "objects", else decoded),
    samples_per_s, and the times median_ms and p95_ms (95th percentile) of a read. Rows with more
    than 512 MiB in flight are left out.

    x, y : names of the arrays
    progress : called with each row once it is measured
    """
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"{mention('seconds', seconds)} must be finite and above 0", "give for example 10"
        )
    source = ZarrSource(url, x=x, y=y, storage_options=storage_options)
    store = source.store
    rows = list[ReadRow]()
    chunk_bytes = store.spec.chunk_rows * store.spec.row_bytes
    max_connections = max(1, _MAX_IN_FLIGHT_BYTES // chunk_bytes)
    connection_counts = [n for n in CONNECTION_COUNTS if n <= max_connections]
    readers: dict[str, Callable[[int], int]] = {
        "objects": _object_reader(store, x, storage_options),
        "chunks": lambda i: sum(part.nbytes for part in store.read_chunk(i)),
    }
    for stage, read_chunk in readers.items():
        for n in connection_counts:
            rows.append(_measure(stage, read_chunk, store, n, seconds))
            progress(rows[-1])
    max_bytes_per_s = max(row["bytes_per_s"] for row in rows if row["what"] == "chunks")
    rows.append(_measure_batches(source, seconds, max_bytes_per_s))
    progress(rows[-1])
    return {
        "url": redact(store.url),
        "chunk_bytes": chunk_bytes,
        "chunk_rows": store.spec.chunk_rows,
        "rows": rows,
        "conclusion": conclusion(rows, chunk_bytes),
    }


def speed_text(rows: Sequence[ReadRow]) -> str:
    """Return the rows as a table of text."""
    table = [
        {
            "": row["what"],
            "connections": row["connections"],
            "requests/s": row["requests_per_s"],
            "MB/s": round(row["bytes_per_s"] / 1e6, 1),
            "samples/s": round(row["samples_per_s"]),
            "median ms": row["median_ms"],
            "p95 ms": row["p95_ms"],
        }
        for row in rows
    ]
    return text_table(table, list(table[0]))


def conclusion(rows: Sequence[ReadRow], chunk_bytes: int) -> str:
    """Return two sentences: the bottleneck with the bytes in flight, and the speed of batches.

    rows : from `read_speed`; the last row is the one of the batches
    """
    objects, chunks = ([r for r in rows if r["what"] == stage] for stage in ("objects", "chunks"))
    batches = rows[-1]
    best_read = max(objects, key=_samples_per_s)
    read_rate, decoding_rate, batch_rate = (
        _samples_per_s(row) for row in (best_read, max(chunks, key=_samples_per_s), batches)
    )
    n = _connections_near_best(objects)
    in_flight = f"{n} connection{'s' * (n > 1)}, {size_text(n * chunk_bytes)} in flight"
    mb_per_s, max_connections = best_read["bytes_per_s"] / 1e6, chunks[-1]["connections"]
    if max_connections > 1 and _connections_near_best(chunks) == max_connections:
        bottleneck = (
            f"Latency is the slow side: reads still get faster at {max_connections} connections, "
            f"{size_text(max_connections * chunk_bytes)} in flight; larger chunks, or more memory "
            "for the run, keep more in flight."
        )
    elif decoding_rate < _NEAR_BEST_SHARE * read_rate:
        bottleneck = (
            f"Decoding is the slow side: {decoding_rate:,.0f} samples/s, where the storage gives "
            f"{read_rate:,.0f}; more processors help, and so may chunks without compression."
        )
    else:
        bottleneck = f"Bandwidth is the slow side: {mb_per_s:,.0f} MB/s, reached with {in_flight}."
    return (
        f"{bottleneck} In batches, with {batches['connections']} readers, {batch_rate:,.0f} "
        f"samples/s arrive ({batch_rate / read_rate:.0%} of the best): a run that takes "
        "fewer does not wait for this store."
    )


def _connections_near_best(rows: Sequence[ReadRow]) -> int:
    """Return the fewest connections that reach 0.9 of the best speed. rows : by connections"""
    near_best = _NEAR_BEST_SHARE * max(map(_samples_per_s, rows))
    return int(next(row["connections"] for row in rows if _samples_per_s(row) >= near_best))


def _samples_per_s(row: ReadRow) -> float:
    """Return the samples per second of a measurement."""
    return float(row["samples_per_s"])


# ------------------------------------------------------------------------------------ the reads


def _object_reader(
    store: Store, x: str, storage_options: Mapping[str, Any] | None
) -> Callable[[int], int]:
    """Return a function that reads the objects of X with a chunk's rows and returns their bytes."""
    X: Any = zarr.open_group(zarr_store(store.url, storage_options=storage_options), mode="r")[x]
    unit = X.shards or X.chunks
    pieces = [range(-(-n // k)) for n, k in zip(X.shape[1:], unit[1:], strict=True)]

    def keys(i: int) -> list[str]:
        return [
            f"{X.path}/{X.metadata.encode_chunk_key((i, *piece))}"
            for piece in itertools.product(*pieces)
        ]

    path = local_path(store.url)
    if path is not None:
        return lambda i: sum(len((path / key).read_bytes()) for key in keys(i))
    objects = open_objects(store.url, storage_options=storage_options)
    return lambda i: sum(len(data) for data in objects.get_many(keys(i)))


class _ChunkRead(NamedTuple):
    """A finished read of a chunk."""

    duration_s: float
    n_bytes: int
    n_rows: int


def _measure(
    stage: str, read_chunk: Callable[[int], int], store: Store, n_threads: int, seconds: float
) -> ReadRow:
    """Measure reads of random chunks by `n_threads` threads for `seconds`.

    read_chunk : reads a chunk, given its number, and returns the number of bytes
    """
    n_chunks = store.n_chunks
    lock = threading.Lock()
    finished_reads: list[_ChunkRead] = []
    order = np.random.default_rng(n_threads).permutation(n_chunks)
    start_s = time.perf_counter()
    n_bytes_read = n_started = 0

    def read_until_time_is_up() -> None:
        nonlocal n_bytes_read, n_started
        while True:
            with lock:
                time_is_up = (
                    time.perf_counter() - start_s > seconds or n_bytes_read > _MAX_BYTES_READ
                )
                if time_is_up and finished_reads:  # at least one read is measured
                    return
                i = int(order[n_started % n_chunks])
                n_started += 1
            read_start_s = time.perf_counter()
            n_bytes = read_chunk(i)
            start, stop = store.chunk_bounds(i)
            with lock:
                n_bytes_read += n_bytes
                duration_s = time.perf_counter() - read_start_s
                finished_reads.append(_ChunkRead(duration_s, n_bytes, stop - start))

    with ThreadPoolExecutor(n_threads, "streamkern-readspeed") as pool:
        for future in [pool.submit(read_until_time_is_up) for _ in range(n_threads)]:
            future.result()
    elapsed_s = time.perf_counter() - start_s
    durations_s = [read.duration_s for read in finished_reads]
    return {
        "what": stage,
        "connections": n_threads,
        "requests_per_s": len(finished_reads) / elapsed_s,
        "bytes_per_s": sum(read.n_bytes for read in finished_reads) / elapsed_s,
        "samples_per_s": sum(read.n_rows for read in finished_reads) / elapsed_s,
        "median_ms": 1e3 * float(np.median(durations_s)),
        "p95_ms": 1e3 * float(np.percentile(durations_s, 95)),
    }


def _measure_batches(source: ZarrSource, seconds: float, bytes_per_s: float) -> ReadRow:
    """Measure the `BatchReader` for `seconds`, with blocks that take at most half of that time.

    bytes_per_s : expected decoded bytes per second
    """
    block_bytes = int(min(128 << 20, max(1.0, bytes_per_s * seconds / 2)))
    batch_size = min(_BATCH_ROWS, source.n_rows)
    with BatchReader(source, batch_size=batch_size, seed=0, block_bytes=block_bytes) as reader:
        start_s = time.perf_counter()
        for _ in reader.epochs(0, 1 << 30):
            if time.perf_counter() - start_s > seconds:
                break
        elapsed_s = time.perf_counter() - start_s
        read_bytes_per_s = reader.stats.bytes_read / elapsed_s
        sample_bytes = source.row_bytes + target_bytes(source) + ROW_ID_BYTES
        threads = reader.threads
    return {
        "what": "batches",
        "connections": threads,
        "requests_per_s": None,
        "bytes_per_s": read_bytes_per_s,
        "samples_per_s": read_bytes_per_s / sample_bytes,
        "median_ms": None,
        "p95_ms": None,
    }
