"""Describe a store in plain numbers, with warnings about slow or wrong training.

Of a large remote store, only the metadata, y of 8 chunks and the sizes of 8 chunks of X are read;
and one chunk, if X holds integers without compression. All objects are listed if that takes few
requests, or if the caller asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import zarr
from numcodecs.zstd import Zstd
from zarr.codecs import Crc32cCodec

from streamkern.basics.errors import DataError, StreamkernError
from streamkern.basics.text import redact, size_text
from streamkern.filesystem.urls import local_path, zarr_store
from streamkern.store.facts import store_facts, target_row_bytes
from streamkern.store.sample_weights import class_notes
from streamkern.store.zarr_json import store_mark

if TYPE_CHECKING:
    import os

    from streamkern.store.store import Store

_T = TypeVar("_T")

_SMALL_CHUNK_BYTES, _LARGE_CHUNK_BYTES = 1 << 20, 32 << 20
_N_SAMPLED_CHUNKS = 8
# Chi-square per degree of freedom above which rows are sorted: shuffled rows give about 1.
_SORTED_CHI2_PER_DOF = 10.0
_MAX_LISTED_CHUNKS = 1000  # one page of a listing of S3
_MIN_COMPRESSION_RATIO = 1.25


def describe_store(store: Store, *, exact: bool = False) -> dict[str, Any]:
    """Return layout, bytes, compression, class balance, fingerprint and warnings; JSON-able.

    `stored_bytes` is None if the storage does not report sizes. URLs are shown without credentials.

    exact : list all objects even of a large remote store, with one request for every thousand.
        Otherwise its `stored_bytes` are estimated from 8 chunks, and `stored_bytes_estimated` is
        True.
    """
    facts = store_facts(store.stored_chunks)
    is_small = local_path(store.url) is not None or store.n_chunks <= _MAX_LISTED_CHUNKS
    may_list = exact or is_small
    listed_bytes = _listed_bytes(store) if may_list else None
    estimated_bytes = _estimated_bytes(store) if listed_bytes is None else None
    stored_bytes = estimated_bytes if listed_bytes is None else listed_bytes
    return {
        **facts,
        "stored_bytes": stored_bytes,
        "stored_bytes_estimated": estimated_bytes is not None,
        "compression_ratio": None if not stored_bytes else facts["decoded_bytes"] / stored_bytes,
        "warnings": [
            *_layout_warnings(store),
            *(_foreign_warnings(store, may_list) if facts["foreign"] else ()),
            *_target_warnings(store),
        ],
    }


def describe_unfinished(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the progress of a store that is being written at `url`; None if there is none."""
    store = zarr_store(url, storage_options=storage_options)
    try:
        mark = store_mark(store, "", str(url))
    except (OSError, StreamkernError):
        return None
    plan = None if mark is None or mark.get("status") == "complete" else mark.get("plan")
    if not isinstance(plan, Mapping):
        return None
    try:
        n_written = int(np.asarray(zarr.open_group(store, mode="r")["digests"]).any(axis=1).sum())
    except Exception:  # not written yet, or damaged: no chunk is known to be written
        n_written = 0
    # The plan may be altered: other values than whole numbers count as unknown.
    values = (plan.get("chunk_rows"), plan.get("n_rows"))
    chunk_rows, n_rows = (value if isinstance(value, int) else None for value in values)
    return {
        "url": redact(url),
        "unfinished": True,
        "chunks_written": n_written,
        "n_chunks": None if not (chunk_rows and n_rows) else math.ceil(n_rows / chunk_rows),
        "chunk_rows": chunk_rows,
        "n_rows": n_rows,
    }


def is_sorted_by_class(store: Store) -> bool:
    """Return whether class shares differ between chunks by far more than chance.

    The statistic is Pearson's chi-square of the table of chunks by classes, divided by its degrees
    of freedom, on up to 8 chunks spread over the store. It is about 1 if rows are mixed, and about
    the rows per chunk divided by the number of classes if they are sorted.
    """
    if store.spec.classes is None or store.n_chunks < 2:
        return False
    targets = _sample_chunks(store, store.read_targets)
    counts = np.stack([np.bincount(y, minlength=store.spec.n_outputs) for y in targets])
    table = counts[:, counts.sum(axis=0) > 0].astype(np.float64)
    if table.shape[1] < 2:
        return False  # one class in all the chunks read: nothing to compare
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    return bool(statistic / ((len(table) - 1) * (table.shape[1] - 1)) > _SORTED_CHI2_PER_DOF)


# -------------------------------------------------------------------------------------- reads


def _sample_chunks(store: Store, read_chunk: Callable[[int], _T]) -> list[_T]:
    """Return the results of `read_chunk` for up to 8 chunks spread over the store."""
    chunks = np.unique(np.linspace(0, store.n_chunks - 1, _N_SAMPLED_CHUNKS).astype(int)).tolist()
    with ThreadPoolExecutor(_N_SAMPLED_CHUNKS, "streamkern-describe") as pool:
        return list(pool.map(read_chunk, chunks))


def _listed_bytes(store: Store) -> int | None:
    """Return the bytes of all chunks in the storage; None if it cannot be listed."""
    objects, arrays = store.stored_chunks.objects, store.stored_chunks.arrays
    try:
        if objects is None:
            return store.stored_bytes()
        return sum(size for array in arrays for _, size in objects.list(array.path))
    except Exception:  # plain HTTP cannot list
        return None


def _estimated_bytes(store: Store) -> int | None:
    """Return the estimated bytes of all chunks in remote storage; None if it reports no sizes."""
    objects = store.stored_chunks.objects
    if objects is None:
        return None

    def size(i: int) -> int:
        return objects.stat(store.stored_chunks.key(store.stored_chunks.x, i))[0]

    try:
        sizes = _sample_chunks(store, size)
    except OSError:
        return None
    X_bytes = float(np.mean(sizes)) * _objects_per_read(store) * store.n_chunks
    return int(X_bytes) + store.spec.n_rows * target_row_bytes(store.spec)


def _objects_per_read(store: Store) -> int:
    """Return the number of objects of X that hold the rows of a chunk."""
    X = store.stored_chunks.x
    unit = X.shards or X.chunks
    return math.prod(-(-n // k) for n, k in zip(X.shape[1:], unit[1:], strict=True))


# ----------------------------------------------------------------------------------- warnings


def _layout_warnings(store: Store) -> list[str]:
    """Return warnings about chunk sizes, shards and compression."""
    spec, warnings = store.spec, []
    # Chunks that cost too many requests, or too much memory.
    advice = "ingest with chunk_mb between 4 and 16"
    chunk_bytes = spec.chunk_rows * spec.row_bytes
    if chunk_bytes < _SMALL_CHUNK_BYTES and spec.n_rows * spec.row_bytes > _SMALL_CHUNK_BYTES:
        warnings.append(
            f"chunks of {size_text(chunk_bytes)} are small: every read costs a request; {advice}"
        )
    if chunk_bytes > _LARGE_CHUNK_BYTES:
        warnings.append(
            f"chunks of {size_text(chunk_bytes)} are large: prefetching holds many; {advice}"
        )
    # Layouts of other programs, in which a read of rows costs more than one read of a chunk.
    X, y = store.stored_chunks.x, store.stored_chunks.y
    if X.shards is not None:
        n_inner_chunks = math.prod(X.shards) // math.prod(X.chunks)
        warnings.append(
            f"X is sharded: rows are read a shard at a time, {size_text(chunk_bytes)} in "
            f"{n_inner_chunks} pieces, and decoded by zarr, which is slower than plain chunks; "
            "ingest the store"
        )
    n_pieces = _objects_per_read(store)
    if n_pieces > 1:
        warnings.append(
            f"X is cut into {n_pieces} pieces along its features: a read of some rows costs "
            f"{n_pieces} requests; ingest the store"
        )
    y_rows = spec.chunk_rows if y is None else min((y.shards or y.chunks)[0], spec.n_rows)
    if y_rows != spec.chunk_rows:
        warnings.append(
            f"X has chunks of {spec.chunk_rows:,} rows and y of {y_rows:,}: parts of y are read "
            "more than once; ingest the store"
        )
    # Integers, of which images consist, may compress well; the noise in floats does not.
    is_compressed = any(not isinstance(codec, Crc32cCodec) for codec in X.compressors)
    if spec.x_dtype.kind == "u" and not is_compressed:
        ratio = _zstd_ratio(store)
        if ratio > _MIN_COMPRESSION_RATIO:
            warnings.append(
                f"{spec.x_dtype.name} rows are stored as they are; zstd would make them "
                f"{ratio:.2g} times smaller: ingest with compress zstd"
            )
    return warnings


def _zstd_ratio(store: Store) -> float:
    """Return the compression ratio of zstd on the first MiB of rows."""
    try:
        rows = store.read_chunk(0)[0]
    except DataError:  # perhaps absent
        return 1.0
    sample = rows[: max(1, _SMALL_CHUNK_BYTES // store.spec.row_bytes)].tobytes()
    return len(sample) / len(Zstd(level=3).encode(sample))


def _foreign_warnings(store: Store, may_list: bool) -> list[str]:
    """Return warnings about a foreign store; absent chunks are counted if they may be listed."""
    missing_facts = "no digests, no statistics, and the fingerprint covers its metadata only"
    if store.spec.fingerprint.startswith("icechunk:"):
        missing_facts = "no statistics"
    warnings = [f"streamkern did not write this store: {missing_facts}; ingest it to get them"]
    n_absent = store.stored_chunks.absent_chunks() if may_list else 0
    if n_absent:
        warnings.append(
            f"{n_absent} chunks are absent; reading them is an error unless the store is opened "
            'with missing="fill"'
        )
    return warnings


def _target_warnings(store: Store) -> list[str]:
    """Return warnings about the order of the rows and the balance of the classes."""
    warnings, spec = [], store.spec
    if is_sorted_by_class(store):
        warnings.append(
            "rows are sorted or grouped by label: batches will not be mixed well; ingest the store "
            "with shuffle"
        )
    if spec.classes is not None and spec.class_counts is not None:
        warnings += class_notes(spec.classes, np.array(spec.class_counts, np.float64), "rows")
    return warnings
