"""Damage for local stores, as by disks, object stores and operators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def flip_bit(root: Path, key: str, byte: int = -10) -> None:
    """Flip one bit of the object `key`."""
    path = root / key
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x10
    path.write_bytes(data)


def truncate(root: Path, key: str, keep: float = 0.5) -> None:
    """Cut the object `key` to a fraction of its bytes."""
    path = root / key
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def remove(root: Path, key: str) -> None:
    """Lose the object `key`."""
    (root / key).unlink()


def content(root: Path) -> dict[str, Any]:
    """Return the `tree` of a store without the description of its input: names of files and
    columns, and the format of the files."""
    files: dict[str, Any] = dict(tree(root))
    group = json.loads(files["zarr.json"])
    for name in ("files", "columns", "target_columns", "made_from", "metadata_digest"):
        del group["attributes"]["streamkern"][name]
    for name in ("file_form", "weight_column"):
        group["attributes"]["streamkern"].pop(name, None)
    return {**files, "zarr.json": group}


def tree(root: Path) -> dict[str, bytes]:
    """Return every file below `root` with its content, to compare two stores bit by bit."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
