"""What stands for JSON values: the same for equal ones, in whatever order their keys are."""

from __future__ import annotations

import hashlib
import json


def json_digest(value: object, *tail: bytes) -> str:
    """sha256 of JSON values as sorted text without white space, and of bytes behind it."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"\n".join([text.encode(), *tail])).hexdigest()
