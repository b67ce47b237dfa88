"""What a store is, in plain numbers, with warnings about what will make training slow or wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.storage import redact

if TYPE_CHECKING:
    from streamkern.store import Store

_SMALL_CHUNK, _LARGE_CHUNK = 1 << 20, 32 << 20
_SAMPLED_CHUNKS = 8
_SORTED_RATIO = 10.0  # chi-square per degree of freedom; mixed rows give 1, sorted ones thousands
_IMBALANCE = 100


def describe_store(store: Store) -> dict[str, Any]:
    """Layout, bytes, compression, class balance, fingerprint and warnings; JSON-able.

    Reads y of up to 8 chunks and lists the store's objects; sizes are None where the storage
    can not list. URLs are shown without credentials.
    """
    spec = store.spec
    stored = _stored_bytes(store)
    decoded = spec.n_rows * (spec.row_bytes + _target_bytes(store))
    counts = spec.class_counts
    kind = "values" if spec.classes is None else "classes"
    if spec.n_outputs == 0:
        kind = "none"
    return {
        "url": redact(store.url),
        "n_rows": spec.n_rows,
        "row_shape": list(spec.row_shape),
        "dtype": spec.x_dtype.name,
        "targets": kind,
        "target_dtype": None if spec.y_dtype is None else spec.y_dtype.name,
        "n_outputs": spec.n_outputs,
        "classes": None if spec.classes is None else list(spec.classes),
        "class_counts": None if counts is None else list(counts),
        "n_chunks": store.n_chunks,
        "chunk_rows": spec.chunk_rows,
        "chunk_bytes": spec.chunk_rows * spec.row_bytes,
        "codecs": store.codec_names(),
        "decoded_bytes": decoded,
        "stored_bytes": stored,
        "compression_ratio": None if not stored else decoded / stored,
        "global_mean": spec.global_mean,
        "global_scale": spec.global_scale,
        "constant_features": None if spec.scale is None else int((spec.scale == 0).sum()),
        "foreign": spec.foreign,
        "fingerprint": spec.fingerprint,
        "warnings": _warnings(store),
    }


def _warnings(store: Store) -> list[str]:
    spec = store.spec
    found = []
    chunk = spec.chunk_rows * spec.row_bytes
    if chunk < _SMALL_CHUNK and spec.n_rows * spec.row_bytes > _SMALL_CHUNK:
        found.append(
            f"chunks of {chunk / 2**20:.2g} MiB are small: every read costs a request; ingest with "
            "chunk_mb between 4 and 16"
        )
    if chunk > _LARGE_CHUNK:
        found.append(
            f"chunks of {chunk / 2**20:.0f} MiB are large: prefetching holds many; ingest with "
            "chunk_mb between 4 and 16"
        )
    if spec.foreign:
        found.append(
            "streamkern did not write this store: no digests, no statistics, and the fingerprint "
            "covers its metadata only; ingest it to get them"
        )
        absent = store.absent_chunks()
        if absent:
            found.append(
                f"{absent} chunks are absent; reading them is an error unless the store is opened "
                'with missing="fill"'
            )
    if looks_sorted(store):
        found.append(
            "rows are sorted or grouped by label: batches will not be mixed well; ingest the store "
            "with shuffle"
        )
    counts = spec.class_counts
    if counts is not None and counts and max(counts) > _IMBALANCE * max(min(counts), 1):
        found.append(f"classes are unbalanced: {min(counts)} to {max(counts)} rows")
    return found


def looks_sorted(store: Store) -> bool:
    """Whether class shares differ between chunks by far more than chance.

    Pearson's chi-square of the chunks by classes table, over its degrees of freedom, on up to
    8 chunks spread over the store. About 1 when rows are mixed; about the rows per chunk over
    the classes when they are sorted.
    """
    if store.spec.classes is None or store.n_chunks < 2:
        return False
    chunks = np.unique(np.linspace(0, store.n_chunks - 1, _SAMPLED_CHUNKS).astype(int))
    table = np.stack(
        [
            np.bincount(store.read_targets(i), minlength=store.spec.n_outputs)
            for i in chunks.tolist()
        ]
    ).astype(np.float64)
    table = table[:, table.sum(axis=0) > 0]
    if table.shape[1] < 2:
        return False  # one class in all the chunks looked at: nothing to compare
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    return bool(statistic / ((len(table) - 1) * (table.shape[1] - 1)) > _SORTED_RATIO)


def _target_bytes(store: Store) -> int:
    spec = store.spec
    if spec.y_dtype is None:
        return 0
    return spec.y_dtype.itemsize * (1 if spec.classes is not None else spec.n_outputs)


def _stored_bytes(store: Store) -> int | None:
    try:
        return store.stored_bytes()
    except Exception:  # plain HTTP can not list
        return None
