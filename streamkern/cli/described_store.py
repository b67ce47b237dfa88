"""Describe a store as text, for `streamkern info`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamkern.basics.text import escape_unprintable, first_names_text, size_text, use_singular
from streamkern.cli.glossary import STORE_MEANINGS, with_meaning
from streamkern.ingest.tables.encoder import Encoder
from streamkern.store.facts import chunks_text, row_shape_text


def store_text(store: Mapping[str, Any], *, explain: bool = False) -> str:
    """Return a described store as text, with warnings at the end.

    explain : add the meaning of each line
    """
    facts = _unfinished_facts(store) if store.get("unfinished") else _facts(store)
    lines = [(name, f"  {escape_unprintable(use_singular(text))}") for name, text in facts]
    explained = [
        with_meaning(name, text, STORE_MEANINGS) if explain else text for name, text in lines
    ]
    return "\n".join([escape_unprintable(str(store["url"])), *explained])


def _facts(store: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name in the glossary, text) of each line."""
    shape = row_shape_text(store["row_shape"], store.get("sparse_features"))
    targets = store["targets"]
    if targets == "classes":
        targets = f"classes: {first_names_text(store['classes'])}"
    facts = [
        ("rows", f"{store['n_rows']:,} rows of {shape} {store['dtype']}, "
         f"{store['n_outputs']} {targets}"),
        *_left_out_facts(store),
        *_balance_facts(store),
        *([("weights", "with sample weights")] if store["sample_weights"] else []),
        *encoder_facts(store.get("encoder"), str(store["url"])),
        ("chunks", chunks_text(store)),
        ("size", f"{size_text(store['decoded_bytes'])} decoded{_stored_size_text(store)}"),
        ("fingerprint", f"fingerprint {store['fingerprint']}"),
    ]  # fmt: skip
    if store.get("verified"):
        facts.append(("verified", "every chunk matches its digest"))
    return facts + [("note", f"note: {warning}") for warning in store["warnings"]]


def encoder_facts(encoder: Mapping[str, Any] | None, location: str) -> list[tuple[str, str]]:
    """Return ("encoder", text) lines on the encoding of each column of a table."""
    if encoder is None:
        return []
    fitted_encoder = Encoder.from_json(encoder, location)
    lines = fitted_encoder.lines()  # (name, kind, detail) of each column
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {detail}".rstrip()
        for name, kind, detail in lines
    ]
    n_columns, n_features = len(fitted_encoder.columns), len(fitted_encoder.features)
    heading = f"made of {n_columns} columns of a table, {n_features} features:"
    return [("encoder", heading), *(("encoder", f"  {line}") for line in rows)]


def _unfinished_facts(store: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name in the glossary, text) of each line on an unfinished store."""
    rows, chunks, n_written = store["n_rows"], store["n_chunks"], store["chunks_written"]
    of_chunks = "" if chunks is None else f" of {chunks:,}"
    share = f", {n_written / chunks:.0%}" if chunks else ""
    of_rows = "" if rows is None else f"; {rows:,} rows in all"
    return [
        ("unfinished", f"unfinished: {n_written:,}{of_chunks} chunks are written{share}{of_rows}"),
        ("note", "note: run the command that writes it again to finish it"),
    ]


def _balance_facts(store: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the line on the smallest and the largest class."""
    counts, names = store["class_counts"], store["classes"]
    if not counts or names is None or not sum(counts):
        return []
    if len(set(counts)) == 1:
        return [("balance", f"rows per class: {counts[0]:,} ({1 / len(counts):.1%})")]
    smallest, largest = min(range(len(counts)), key=counts.__getitem__), counts.index(max(counts))
    texts = (
        f"{names[k]} {counts[k]:,} ({counts[k] / sum(counts):.1%})" for k in (smallest, largest)
    )
    return [("balance", f"rows per class: {' to '.join(texts)}")]


def _stored_size_text(store: Mapping[str, Any]) -> str:
    """Return the size of the stored files as text; "" if it is unknown."""
    if not store["stored_bytes"]:
        return ""
    about = "about " if store["stored_bytes_estimated"] else ""
    return f", {about}{size_text(store['stored_bytes'])} stored ({store['compression_ratio']:.3g}x)"


def _left_out_facts(store: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the line on rows that were left out, if there are any."""
    n = store.get("n_left_out", 0)
    return [("left_out", f"{n:,} rows without a target were left out")] if n else []
