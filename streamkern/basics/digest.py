"""JSON: parsed whatever the bytes are, and what stands for values, in any order of their keys."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NoReturn


def parsed_json(data: bytes | bytearray | memoryview, *, finite: bool = False) -> Any:
    """The value that the bytes say; ValueError, saying why, unless they are JSON.

    finite : NaN and infinity are refused, which are no JSON and which others write all the same
    """
    try:
        return json.loads(bytes(data), parse_constant=_refuse if finite else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no JSON")


def json_digest(value: object, *tail: bytes) -> str:
    """sha256 of JSON values as sorted text without white space, and of bytes behind it."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"\n".join([text.encode(), *tail])).hexdigest()
