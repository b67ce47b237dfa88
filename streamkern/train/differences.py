"""Describe the differences of two records of a run as text, without digests of contents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamkern.kernels.notation import kernel_text

SHOWN_ENTRIES = 6
"""Largest number of entries of a list that are shown."""
_SOURCE_ENTRIES = ("n_rows", "row_shape", "dtype", "n_outputs", "classes", "copies")


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences of two nested records, as "solver.level: was 100, now 200"."""
    before, after = dict(_entries(old)), dict(_entries(new))
    changed: list[str] = []
    for key in dict.fromkeys([*before, *after]):
        a, b = before.get(key), after.get(key)
        if a is not None and b is not None and _is_source(a) and _is_source(b):
            changed += _source_changes(key, a, b)
        elif key not in before or key not in after or a != b:
            changed.append(_change(key, before, after))
    if any(change.startswith("settings.data.scale:") for change in changed):  # the same difference
        changed = [change for change in changed if not change.startswith("data.transforms:")]
    return changed


def _entries(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and the values of the entries of nested tables.

    A kernel, an array and the description of a source are single values. An array that was given in
    place of a setting has the name of this setting.
    """
    for key, value in tables.items():
        name = f"{prefix}{key}"
        if not prefix and _is_array(value) and "settings" in tables:
            name = f"settings.model.{key}"
        whole = _is_array(value) or _is_source(value) or key in ("kernel", "continues")
        if isinstance(value, Mapping) and not whole:
            yield from _entries(value, f"{name}.")
        else:
            yield name, value


def _change(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    shown = _kernel_text if key.rpartition(".")[2] == "kernel" else _text
    old, new = (shown(values[key]) if key in values else "not set" for values in (before, after))
    return f"{key}: other contents" if old == new else f"{key}: was {old}, now {new}"


def _source_changes(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences of the data of two runs, from the descriptions of their sources."""
    changes = []
    for key in _SOURCE_ENTRIES:
        values = old.get(key), new.get(key)
        if values[0] != values[1] and (key != "copies" or set(values) != {1, None}):
            entry = f"{name}.{key}"
            both = ({entry: each[key]} if key in each else {} for each in (old, new))
            changes.append(_change(entry, *both))
    other_rows = set(_checksums(old)) != set(_checksums(new))
    if other_rows:
        changes.append(f"{name}: other rows or targets")
    steps = [list(_transforms(source)) for source in (old, new)]
    kinds = [[step.get("kind", "?") for step in each] for each in steps]
    if kinds[0] != kinds[1]:
        changes.append(f"{name}.transforms: was {_text(kinds[0])}, now {_text(kinds[1])}")
    elif steps[0] != steps[1] and not other_rows:
        others = [a["kind"] for a, b in zip(*steps, strict=True) if a != b and "kind" in a]
        changes.append(f"{name}.transforms: other numbers in {_text(others)}")
    if not changes and old != new:
        changes.append(f"{name}: the same rows are brought in another way")
    return changes


def _transforms(source: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the transforms of a source in the order of their application, base sources first."""
    if isinstance(source, Mapping):
        for key, value in source.items():
            if key != "transforms":
                yield from _transforms(value)
        yield from source.get("transforms", ())
    elif isinstance(source, Sequence) and not isinstance(source, str):
        for each in source:
            yield from _transforms(each)


def _checksums(value: Any) -> Iterator[str]:
    """Yield the digests of contents in a description, but not in its transforms."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if "fingerprint" in key:
                yield json.dumps(entry)
            elif key != "transforms":
                yield from _checksums(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _checksums(entry)
    elif _is_checksum(value):
        yield value


def _is_checksum(value: object) -> bool:
    pattern = r"(\w+:)?[0-9a-f]{16,}"
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_array(value: object) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"shape", "sha256"}


def _is_source(value: object) -> bool:
    return isinstance(value, Mapping) and {"kind", "n_rows"} <= value.keys()


def _kernel_text(value: Any) -> str:
    if not isinstance(value, Mapping):
        return _text(value)
    plain = {key: entry for key, entry in value.items() if key != "metric"}
    return kernel_text(plain) + (" in a metric" if "metric" in value else "")


def _text(value: Any) -> str:
    """Return a value as text for people."""
    if isinstance(value, Mapping):
        if _is_array(value):
            return f"an array of shape {value['shape']}"
        return str(value.get("run", value.get("kind", "a table")))
    if isinstance(value, list | tuple):
        shown = [_text(entry) for entry in value[:SHOWN_ENTRIES]]
        return f"[{', '.join(shown + ['...'] * (len(value) > SHOWN_ENTRIES))}]"
    return "other contents" if _is_checksum(value) else repr(value)
