"""Describe an open store in plain numbers and as HTML, without reading from the storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.text import facts_html_table, redact, size_text
from streamkern.store.sparse_rows import is_packed, sparse_features

if TYPE_CHECKING:
    from streamkern.store.layout import StoreSpec
    from streamkern.store.stored_chunks import StoredChunks

_MAX_NAMES_SHOWN = 12  # of classes or columns, in a cell of the table


def store_facts(chunks: StoredChunks) -> dict[str, Any]:
    """Return the layout, class balance and fingerprint of a store, as JSON values.

    Nothing is read from the storage. The URL is shown without credentials. Statistics that the
    store does not have are None, and so is the number of constant features of packed sparse rows.
    """
    spec = chunks.spec
    target_kind = "values" if spec.classes is None else "classes"
    if spec.n_outputs == 0:
        target_kind = "none"
    counts = spec.class_counts
    # The entries of packed rows are no features, so their scales do not mark constant features.
    n_constant = None
    if spec.scale is not None and not is_packed(spec.row_shape):
        n_constant = int((spec.scale == 0).sum())
    codecs = chunks.x.metadata.to_dict().get("codecs") or ()
    return {
        "url": redact(chunks.url),
        "n_rows": spec.n_rows,
        "row_shape": list(spec.row_shape),
        "dtype": spec.x_dtype.name,
        "targets": target_kind,
        "target_dtype": None if spec.y_dtype is None else spec.y_dtype.name,
        "n_outputs": spec.n_outputs,
        "classes": None if spec.classes is None else list(spec.classes),
        "class_counts": None if counts is None else list(counts),
        "sample_weights": spec.weight_totals is not None,
        "n_chunks": spec.n_chunks,
        "chunk_rows": spec.chunk_rows,
        "chunk_bytes": spec.chunk_rows * spec.row_bytes,
        "codecs": [codec["name"] for codec in codecs],
        "decoded_bytes": spec.n_rows * (spec.row_bytes + target_row_bytes(spec)),
        "global_mean": spec.global_mean,
        "global_scale": spec.global_scale,
        "constant_features": n_constant,
        "foreign": spec.foreign,
        "encoder": spec.encoder,
        "sparse_features": sparse_features(spec.file_form),
        "n_left_out": spec.n_left_out,
        "fingerprint": spec.fingerprint,
    }


def target_row_bytes(spec: StoreSpec) -> int:
    """Return the bytes of the target and of the weight of one row."""
    if spec.y_dtype is None:
        return 0
    weight = 0 if spec.weight_totals is None else np.dtype(np.float32).itemsize
    return weight + spec.y_dtype.itemsize * (1 if spec.classes is not None else spec.n_outputs)


def row_shape_text(row_shape: Sequence[int], n_features: int | None) -> str:
    """Return the shape of a row in words. n_features : number of features if rows are sparse"""
    if is_packed(row_shape):
        return f"{n_features:,} features, at most {row_shape[1]:,} of them not 0, sparse"
    return " x ".join(map(str, row_shape))


def chunks_text(facts: Mapping[str, Any]) -> str:
    """Return the chunks of a store in words. facts : from `store_facts`"""
    return (
        f"{facts['n_chunks']:,} chunks of {facts['chunk_rows']:,} rows, "
        f"{size_text(facts['chunk_bytes'])}, codecs {', '.join(facts['codecs'])}"
    )


def store_html(chunks: StoredChunks) -> str:
    """Return a table of the facts as HTML, for a notebook."""
    facts, spec = store_facts(chunks), chunks.spec
    left_out = f"; {spec.n_left_out:,} without a target were left out" if spec.n_left_out else ""
    shape = row_shape_text(spec.row_shape, facts["sparse_features"])
    table_rows = [
        ("store", facts["url"]),
        ("rows", f"{spec.n_rows:,}{left_out}"),
        ("features", f"{shape} {facts['dtype']}{names_after_colon(spec.columns or ())}"),
        (facts["targets"] if facts["targets"] == "classes" else "targets", _targets(spec)),
        ("weights", "sample weights" if facts["sample_weights"] else "none"),
        ("chunks", chunks_text(facts)),
        ("size", f"{size_text(facts['decoded_bytes'])} decoded"),
    ]
    return facts_html_table(table_rows)


def _targets(spec: StoreSpec) -> str:
    """Return the classes with their numbers of rows, or the columns of values."""
    if spec.classes is None:
        if not spec.n_outputs:
            return "none"
        dtype = "" if spec.y_dtype is None else f" {spec.y_dtype.name}"
        return f"{spec.n_outputs:,} values{dtype}{names_after_colon(spec.target_columns or ())}"
    counts = spec.class_counts
    if counts is None:
        return f"{spec.n_outputs:,}{names_after_colon(spec.classes)}"
    total = sum(counts) or 1
    pairs = zip(spec.classes[: _MAX_NAMES_SHOWN + 1], counts, strict=False)
    counted = [f"{name} {n:,} ({n / total:.1%})" for name, n in pairs]
    return f"{spec.n_outputs:,}{names_after_colon(counted)}"


def names_after_colon(names: Sequence[str]) -> str:
    """Return ": a, b, c" for the first of the names; "" without names."""
    more = ", ..." if len(names) > _MAX_NAMES_SHOWN else ""
    return f": {', '.join(names[:_MAX_NAMES_SHOWN])}{more}" if names else ""
