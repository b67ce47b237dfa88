"""JSON: parsing of arbitrary bytes, and digests of values for any order of their keys."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NoReturn


def parsed_json(data: bytes | bytearray | memoryview, *, finite: bool = False) -> Any:
    """Parse JSON. Raises ValueError with the reason if the bytes are not JSON.

    finite : refuse NaN and infinity, which are not JSON, although some programs write them
    """
    try:
        return json.loads(bytes(data), parse_constant=_refuse if finite else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no JSON")


def json_digest(value: object, *tail: bytes) -> str:
    """Return the SHA-256 of JSON values, as sorted text without white space, and of other bytes."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"\n".join([text.encode(), *tail])).hexdigest()
