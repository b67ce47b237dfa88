"""Settings as the text of a run file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from streamkern.config.run_config import RunConfig

_BYTES = ("cache_size", "memory", "device_memory")


def run_file_text(config: RunConfig) -> str:
    """Return a run file with every setting that differs from its default.

    Without data.storage_options, which may hold credentials.
    """
    tables: dict[str, dict[str, Any]] = {}
    for name, section in config:
        values = section.model_dump(mode="json")
        usual = type(section).model_construct().model_dump(mode="json", warnings=False)
        changed = {
            k: _bytes_text(v) if k in _BYTES else v
            for k, v in values.items()
            if v is not None and v != usual.get(k)
        }
        tables |= {name: changed} if changed else {}
    return toml(tables)


def _bytes_text(size: int) -> int | str:
    """Return a size in the largest unit of which it is a multiple, as a user would write it."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size % 1024**power == 0:
            return f"{size // 1024**power} {unit}"
    return size


def toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables, of JSON values without None, as TOML with a section for each."""
    sections = (
        "\n".join([f"[{name}]", *(f"{_key(k)} = {_value(v)}" for k, v in table.items())])
        for name, table in tables.items()
    )
    return "\n\n".join(sections) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        # A JSON string is a TOML string, except for a character that TOML requires to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def _key(name: str) -> str:
    plain = name.isascii() and name.replace("_", "a").replace("-", "a").isalnum()
    return name if plain else _value(name)
