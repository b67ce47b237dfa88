"""The small files of a run: JSON objects that carry a checksum of themselves.

    {"format": "streamkern-run", "version": 2, ..., "sha256": "9f86d0..."}

The checksum is that of all other entries as sorted JSON without white space, so any JSON tool can
read and re-indent a document, and no change of its content goes unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from streamkern.basics.digest import json_digest, parsed_json
from streamkern.filesystem.objects import Bytes

DOCUMENT_VERSION = 2
_OWN = frozenset({"format", "version", "sha256"})


def seal(kind: str, body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a document of this kind. body : JSON values with finite numbers."""
    assert not _OWN & body.keys()
    document = {"format": f"streamkern-{kind}", "version": DOCUMENT_VERSION, **body}
    sealed = document | {"sha256": json_digest(document)}
    return json.dumps(sealed, indent=1, allow_nan=False).encode() + b"\n"


def unseal(kind: str, data: Bytes) -> dict[str, Any]:
    """Return the body of a document of this kind; raise ValueError if it is not intact."""
    document = parsed_json(data, finite=True)
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    recorded = document.pop("sha256", None)
    if recorded is None:
        raise ValueError("it carries no checksum, so it was edited or is of another version")
    found = document.get("format"), document.get("version")
    if found != (f"streamkern-{kind}", DOCUMENT_VERSION):
        raise ValueError(f"{found[0]!r} version {found[1]!r} is not known here")
    if json_digest(document) != recorded:
        raise ValueError("its checksum does not match")
    return {name: value for name, value in document.items() if name not in _OWN}


def is_sealed(data: Bytes) -> bool:
    """Return whether the bytes are an intact document, of any kind."""
    try:
        document = parsed_json(data, finite=True)
        return isinstance(document, dict) and document.pop("sha256", None) == json_digest(document)
    except ValueError:
        return False
