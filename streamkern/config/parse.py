"""Parse the text of a run file."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any, Final

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
    found = re.fullmatch(r"\s*([\w.-]+)\s*[=:]\s*([^\s#\[{].*?)\s*", line.partition(" #")[0])
    if found is None:
        return ""
    key, value = found[1], found[2].strip("\"'")
    if value in ("True", "False"):
        return f", as {key} = {value.lower()}"
    written = found[2] if re.fullmatch(r"[+-]?[\d.]+|true|false", value) else json.dumps(value)
    return f", as {key} = {written}" + (", with text in quotes" if written != found[2] else "")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text; ValueError also for a text too expensive to parse.

    Time and memory of a dotted key grow with the square of its parts, and nesting is recursion.
    """
    if len(text) > _TOML_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, {_TOML_CHARACTERS} are allowed")
    found = _LONG_KEY.search(text)
    if found is not None:
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"line {line} has a key of more than {_KEY_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
