"""The description of a store by `streamkern info`, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamkern.basics.text import printable, singular, size_text
from streamkern.cli.glossary import STORE_MEANINGS, with_meaning
from streamkern.ingest.tables.encoder import Encoder
from streamkern.store.facts import chunks_text, row_shape_text


def store_text(store: Mapping[str, Any], *, explain: bool = False) -> str:
    """Return a described store as text, with warnings at the end.

    explain : with the meaning of each line
    """
    facts = _unfinished(store) if store.get("unfinished") else _facts(store)
    lines = [(name, f"  {printable(singular(text))}") for name, text in facts]
    shown = [with_meaning(name, text, STORE_MEANINGS) if explain else text for name, text in lines]
    return "\n".join([printable(str(store["url"])), *shown])


def _facts(store: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines, by their names in the glossary."""
    shape = row_shape_text(store["row_shape"], store.get("sparse_features"))
    targets = store["targets"] if store["targets"] != "classes" else "classes: " + _few(store)
    facts = [
        ("rows", f"{store['n_rows']:,} rows of {shape} {store['dtype']}, "
         f"{store['n_outputs']} {targets}"),
        *_left_out(store),
        *_balance(store),
        *([("weights", "with sample weights")] if store["sample_weights"] else []),
        *encoder_facts(store.get("encoder"), str(store["url"])),
        ("chunks", chunks_text(store)),
        ("size", f"{size_text(store['decoded_bytes'])} decoded{_stored(store)}"),
        ("fingerprint", f"fingerprint {store['fingerprint']}"),
    ]  # fmt: skip
    if store.get("verified"):
        facts.append(("verified", "every chunk matches its digest"))
    return facts + [("note", f"note: {warning}") for warning in store["warnings"]]


def encoder_facts(encoder: Mapping[str, Any] | None, where: str) -> list[tuple[str, str]]:
    """Return the encoding of each column of a table, by its name in the glossary."""
    if encoder is None:
        return []
    found = Encoder.from_json(encoder, where)
    lines = found.lines()
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [f"{name:<{wide[0]}}  {kind:<{wide[1]}}  {what}".rstrip() for name, kind, what in lines]
    head = f"made of {len(found.columns)} columns of a table, {len(found.features)} features:"
    return [("encoder", head), *(("encoder", f"  {line}") for line in shown)]


def _unfinished(store: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows, chunks, done = store["n_rows"], store["n_chunks"], store["chunks_written"]
    of_chunks = "" if chunks is None else f" of {chunks:,}"
    share = "" if not chunks else f", {done / chunks:.0%}"
    of_rows = "" if rows is None else f"; {rows:,} rows in all"
    return [
        ("unfinished", f"unfinished: {done:,}{of_chunks} chunks are written{share}{of_rows}"),
        ("note", "note: run the command that writes it again to finish it"),
    ]


def _balance(store: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the smallest and the largest class."""
    counts, names = store["class_counts"], store["classes"]
    if not counts or names is None or not sum(counts):
        return []
    low, high = min(range(len(counts)), key=counts.__getitem__), counts.index(max(counts))
    shown = (f"{names[k]} {counts[k]:,} ({counts[k] / sum(counts):.1%})" for k in (low, high))
    return [("balance", f"rows per class: {' to '.join(shown)}")]


def _stored(store: Mapping[str, Any]) -> str:
    if not store["stored_bytes"]:
        return ""
    about = "about " if store["stored_bytes_estimated"] else ""
    return f", {about}{size_text(store['stored_bytes'])} stored ({store['compression_ratio']:.3g}x)"


def _left_out(store: Mapping[str, Any]) -> list[tuple[str, str]]:
    n = store.get("n_left_out", 0)
    return [("left_out", f"{n:,} rows without a target were left out")] if n else []


def _few(store: Mapping[str, Any]) -> str:
    names = store["classes"]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
