"""Mark files as written by streamkern, for formats that have no room for metadata.

The mark is an extended attribute of the file, with its size and time: a file that was changed or
copied since has no valid mark, and file systems without such attributes have none at all.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from streamkern.basics.digest import parsed_json

_ATTRIBUTE = "user.streamkern"


def mark_file(path: Path, kind: str) -> None:
    """Mark a file as written by streamkern. kind : the kind of its content"""
    if hasattr(os, "setxattr"):
        with contextlib.suppress(OSError):
            os.setxattr(path, _ATTRIBUTE, json.dumps(_mark(path, kind)).encode())


def is_marked(path: Path, kind: str) -> bool:
    """Return whether streamkern wrote a file of this kind, and it has not been changed since."""
    if not hasattr(os, "getxattr"):
        return False
    try:
        return bool(parsed_json(os.getxattr(path, _ATTRIBUTE)) == _mark(path, kind))
    except (OSError, ValueError):
        return False


def _mark(path: Path, kind: str) -> dict[str, str | int]:
    found = path.stat()
    return {"kind": kind, "size": found.st_size, "mtime_ns": found.st_mtime_ns}
