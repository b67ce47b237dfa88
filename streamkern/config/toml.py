"""Parse the text of a run file, and write settings as such a text."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

_SIZE_SETTINGS = ("cache_size", "memory", "device_memory")


def run_file_text(config: BaseModel) -> str:
    """Return the text of a run file with every setting of a `RunConfig` that is not at its default.

    data.storage_options are left out, because they may hold credentials.
    """
    tables: dict[str, dict[str, Any]] = {}
    for name, section in config:
        values = section.model_dump(mode="json")
        defaults = type(section).model_construct().model_dump(mode="json", warnings=False)
        changed = {
            k: _size_value(v) if k in _SIZE_SETTINGS else v
            for k, v in values.items()
            if v is not None and v != defaults.get(k)
        }
        tables |= {name: changed} if changed else {}
    return toml(tables)


def _size_value(size: int) -> int | str:
    """Return a number of bytes in the largest unit that divides it, such as "8 GiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size % 1024**power == 0:
            return f"{size // 1024**power} {unit}"
    return size


def toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables of JSON values, without None, as TOML text with a section for each table."""
    sections = (
        "\n".join([f"[{name}]", *(f"{_key(k)} = {toml_value(v)}" for k, v in table.items())])
        for name, table in tables.items()
    )
    return "\n\n".join(sections) + "\n"


def toml_value(value: Any) -> str:
    """Return a JSON value as TOML text."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, str):
        # A JSON string is a TOML string, but TOML requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def _key(name: str) -> str:
    """Return a key as TOML text, in quotes unless it is a bare key."""
    bare = name.isascii() and name.replace("_", "a").replace("-", "a").isalnum()
    return name if bare else toml_value(name)


_TOML_CHARACTERS = 1 << 24  # allowed number; the matrix of a metric takes some millions
TOML_BYTES: Final = 4 * _TOML_CHARACTERS
"""Largest size of a run file: a character takes at most 4 bytes of UTF-8."""
_KEY_PARTS = 32  # allowed number of parts of a dotted key
# A part is a bare or a quoted key, followed by a dot. The lookbehind and the possessive + keep the
# search linear in the text.
_PART = r"""(?:(?<![\w-])[A-Za-z0-9_-]++|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*"""
_LONG_KEY = re.compile(f"(?:{_PART}){{{_KEY_PARTS}}}")


def suggest_correction(text: str, message: str) -> str:
    """Return the correction of the line that the parser's message names, such as ", as x = true".

    It corrects the usual mistakes: text without quotes, a colon, and a truth value written as in
    Python. For other mistakes it returns "".

    text : the TOML text
    message : error message of `parse_toml`
    """
    number = re.search(r"at line (\d+)", message)
    line = text.split("\n")[int(number[1]) - 1] if number else ""
    match = re.fullmatch(r"\s*([\w.-]+)\s*[=:]\s*([^\s#\[{].*?)\s*", line.partition(" #")[0])
    if match is None:
        return ""
    key, written_value = match[1], match[2]
    value = written_value.strip("\"'")
    if value in ("True", "False"):
        return f", as {key} = {value.lower()}"
    if re.fullmatch(r"[+-]?[\d.]+|true|false", value):  # the mistake is a colon
        return f", as {key} = {written_value}"
    quoted = json.dumps(value)
    return f", as {key} = {quoted}" + (", with text in quotes" if quoted != written_value else "")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises ValueError for text that is not TOML, or would take too long to parse: time and memory of
    a dotted key grow with the square of the number of its parts, and nesting is recursion.
    """
    if len(text) > _TOML_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, {_TOML_CHARACTERS} are allowed")
    match = _LONG_KEY.search(text)
    if match is not None:
        line = text.count("\n", 0, match.start()) + 1
        raise ValueError(f"line {line} has a key of more than {_KEY_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
