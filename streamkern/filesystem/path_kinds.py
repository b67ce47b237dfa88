"""Recognise what a path holds, and say what to do about the wrong content."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from streamkern.basics.errors import ConfigError
from streamkern.basics.text import redact
from streamkern.filesystem.durable import check_writable
from streamkern.filesystem.urls import local_path, path_text

Kind = Literal["nothing", "file", "archive", "store", "run", "runs", "folder", "remote"]
ARCHIVES: Final = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".7z", ".rar")
"""Endings of the names of archives."""
_STORE_FILES: Final = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
_NOT_STORES: Final[Mapping[Kind, tuple[str, str]]] = {
    "archive": (
        "an archive",
        "unpack it, and give the store in it, or make a store from its files with streamkern "
        "ingest",
    ),
    "file": ("a file", "make a store from it with streamkern ingest"),
    "run": ("a run directory", "give the path of a store"),
    "runs": ("a folder of runs", "give the path of a store"),
}
"""Noun for the content of a path that is no store, and a remedy, for messages."""
_RUN_FORMAT = re.compile(rb'"format":\s*"streamkern-')


def content_kind(url: str | os.PathLike[str]) -> Kind:
    """Return the kind of `url`: "runs" is a folder with run directories directly in it."""
    path = local_path(url)
    if path is None:
        return "remote"
    if not path.exists():
        return "nothing"
    if path.is_file():
        return "archive" if path.name.lower().endswith(ARCHIVES) else "file"
    if _is_run(path):
        return "run"
    if any((path / name).exists() for name in _STORE_FILES):
        return "store"
    return "runs" if runs_below(path) else "folder"


def runs_below(path: Path) -> list[str]:
    """Return the run directories directly in a folder, in the order of their names."""
    try:
        with os.scandir(path) as entries:
            return sorted(e.path for e in entries if e.is_dir() and _is_run(Path(e.path)))
    except OSError:
        return []


def enclosing_store_or_run(url: str | os.PathLike[str]) -> tuple[Path, Kind] | None:
    """Return the store or the run directory that `url` would lie within, or None."""
    path = local_path(url)
    parents = () if path is None else Path(os.path.abspath(path)).parents
    for parent in reversed(parents):  # the outermost first: an array of a store is not a store
        if parent.is_dir() and (kind := content_kind(parent)) in ("store", "run"):
            return parent, kind
    return None


def no_store_text(url: str | os.PathLike[str]) -> str:
    """Return the error message for a path that holds no zarr store, with a remedy."""
    location, kind = redact(url), content_kind(url)
    if kind in _NOT_STORES:
        content, remedy = _NOT_STORES[kind]
        return f"{location} is {content}, not a zarr store; {remedy}"
    if kind == "folder":
        return (
            f"there is no zarr store at {location}, which is a folder of other files; make a store "
            "from these files with streamkern ingest"
        )
    return (
        f"there is no zarr store at {location}; make one with streamkern ingest, or correct the "
        "path"
    )


def no_run_text(url: str | os.PathLike[str], location: str) -> str:
    """Return the error message for a path that holds no run. location : the path in the message"""
    kind, path = content_kind(url), local_path(url)
    if kind == "runs" and path is not None:
        return f"{location} is a folder of runs; give one of them, such as {runs_below(path)[0]}"
    if kind == "run":
        return (
            f"{location} has no checkpoint yet; train the run to its first checkpoint, with the "
            "same run_dir"
        )
    description = {
        "store": ", which is a zarr store", "file": ", which is a file",
        "archive": ", which is an archive",
    }.get(kind, "")  # fmt: skip
    return f"there is no run in {location}{description}; give the run directory of a training"


def check_output(url: str | os.PathLike[str], noun: str) -> None:
    """Raise ConfigError if `url` is "-", lies within a store or run directory, or is not writable.

    noun : the output in the message, a plural such as "predictions"
    """
    if path_text(url) == "-":
        raise ConfigError(
            f"{noun} cannot be written to the standard output (-)", "give the path of a place"
        )
    outer = enclosing_store_or_run(url)
    if outer is not None:
        parent, kind = outer
        container = "store" if kind == "store" else "run directory"
        raise ConfigError(
            f"{redact(url)} lies within the {container} {parent}, where {noun} must not be written",
            "give a path outside of it",
        )
    path = local_path(url)
    if path is not None:
        check_writable(path, redact(url))


def local_file(path: str | os.PathLike[str], writer: str) -> Path:
    """Return the local path of a file that is written; raise ConfigError for a URL.

    writer : subject of the message, such as "the export"
    """
    file_path = local_path(path)
    if file_path is None:
        raise ConfigError(
            f"{redact(os.fspath(path))!r} is a URL, but {writer} writes a local file",
            "give the path of a local file",
        )
    return file_path


def _is_run(path: Path) -> bool:
    """Return whether a folder is a run directory, by its run.json."""
    try:
        return _RUN_FORMAT.search((path / "run.json").read_bytes()) is not None
    except OSError:
        return False
