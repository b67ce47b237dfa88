"""Classify a local path, for errors about a path that is not what it should be."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, Literal

from streamkern.basics.errors import ConfigError
from streamkern.basics.text import redact
from streamkern.filesystem.urls import local_path

Kind = Literal["nothing", "file", "archive", "store", "run", "runs", "folder", "remote"]
ARCHIVES: Final = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".7z", ".rar")
_STORE_FILES: Final = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
_RUN_FILE = re.compile(rb'"format":\s*"streamkern-')


def place_kind(url: str | os.PathLike[str]) -> Kind:
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


def enclosing(url: str | os.PathLike[str]) -> tuple[Path, Kind] | None:
    """Return the store or the run directory that `url` would lie within, or None."""
    path = local_path(url)
    if path is None:
        return None
    found = None  # the outermost: an array of a store is no store
    for parent in Path(os.path.abspath(path)).parents:
        if parent.is_dir() and (kind := place_kind(parent)) in ("store", "run"):
            found = parent, kind
    return found


def no_store(url: str | os.PathLike[str]) -> str:
    """Return the sentence for a path that holds no zarr store, with a remedy."""
    place, kind = redact(url), place_kind(url)
    if kind == "archive":
        return (
            f"{place} is an archive and no zarr store; unpack it, and give the store in it, or "
            "make a store of the files in it with streamkern ingest"
        )
    if kind == "file":
        return f"{place} is a file and no zarr store; make one of it with streamkern ingest"
    if kind == "run":
        return f"{place} is a run directory and no zarr store; give the path of a store"
    if kind == "runs":
        return f"{place} is a folder of runs and no zarr store; give the path of a store"
    if kind == "folder":
        return (
            f"there is no zarr store at {place}, which is a folder of other files; make a store "
            "of files with streamkern ingest"
        )
    return (
        f"there is no zarr store at {place}; make one with streamkern ingest, or correct the path"
    )


def no_run(url: str | os.PathLike[str], place: str) -> str:
    """Return the sentence for a path that holds no run. place : `url` for messages."""
    kind, path = place_kind(url), local_path(url)
    if kind == "runs" and path is not None:
        return f"{place} is a folder of runs; give one of them, such as {runs_below(path)[0]}"
    if kind == "run":
        return (
            f"{place} has no checkpoint yet; train the run to its first checkpoint, by the same "
            "run_dir"
        )
    what = {
        "store": ", which is a zarr store", "file": ", which is a file",
        "archive": ", which is an archive",
    }.get(kind, "")  # fmt: skip
    return f"there is no run in {place}{what}; give the run directory of a training"


def refuse_within(url: str | os.PathLike[str], what: str) -> None:
    """Raise ConfigError if output would be written into a store or a run directory, or to "-".

    what : a plural noun for the message, such as "predictions"
    """
    if os.fspath(url) == "-":
        raise ConfigError(f"{what} do not go to the standard output (-); give the path of a place")
    found = enclosing(url)
    if found is not None:
        parent, kind = found
        held = "store" if kind == "store" else "run directory"
        raise ConfigError(
            f"{redact(url)} lies within the {held} {parent}, where {what} do not belong; give a "
            "place outside of it"
        )


def _is_run(path: Path) -> bool:
    try:
        return _RUN_FILE.search((path / "run.json").read_bytes()) is not None
    except OSError:
        return False
