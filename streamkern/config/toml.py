"""The text of a run file: parsing, and writing of settings."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

_BYTES = ("cache_size", "memory", "device_memory")


def run_file_text(config: BaseModel) -> str:
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


_TOML_CHARACTERS = 1 << 24  # a matrix of a metric has some millions
TOML_BYTES: Final = 4 * _TOML_CHARACTERS
_KEY_PARTS = 32
# The lookbehind and the possessive + keep the search linear in the text.
_PART = r"""(?:(?<![\w-])[A-Za-z0-9_-]++|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*"""
_LONG_KEY = re.compile(f"(?:{_PART}){{{_KEY_PARTS}}}")


def corrected_line(text: str, message: str) -> str:
    """Return a hint at the line of a TOML text that the parser's message names; "" for none.

    The usual mistakes are text without quotes, and a truth value written as in Python.
    """
    number = re.search(r"at line (\d+)", message)
    line = text.split("\n")[int(number[1]) - 1] if number else ""
    match = re.fullmatch(r"\s*([\w.-]+)\s*[=:]\s*([^\s#\[{].*?)\s*", line.partition(" #")[0])
    if match is None:
        return ""
    key, value = match[1], match[2].strip("\"'")
    if value in ("True", "False"):
        return f", as {key} = {value.lower()}"
    written = match[2] if re.fullmatch(r"[+-]?[\d.]+|true|false", value) else json.dumps(value)
    return f", as {key} = {written}" + (", with text in quotes" if written != match[2] else "")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text; ValueError also for a text too expensive to parse.

    Time and memory of a dotted key grow with the square of its parts, and nesting is recursion.
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
