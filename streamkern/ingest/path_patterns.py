"""Find the files of a folder or a pattern, on a disk or below a URL.

The files are listed once, before anything is read, in the natural order of their paths (part-2
before part-10), which is the order of their rows. A Zarr group counts as one file although it is a
folder, and an existing file whose name looks like a pattern is that file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from streamkern.basics.errors import ConfigError, DataError, StorageAccessError, StoreNotFoundError
from streamkern.basics.text import redact, some
from streamkern.filesystem.icechunk_repository import is_icechunk, snapshot_url
from streamkern.filesystem.remote_file import is_object
from streamkern.filesystem.urls import local_path, open_objects
from streamkern.ingest.input_files import Url, are_paths, format_by_ending, is_path

_ZARR_FILES = {"zarr.json", ".zgroup", ".zarray", ".zmetadata"}
_TABLE_FORMAT_FILES = {"_delta_log/": "Delta", ".hoodie/": "Hudi"}
_WILDCARD = re.compile(r"[*?[]")
_PARTITION = re.compile(r"[^=]+=[^=]*")
# Scratch folder of an output in the same folder.
_SCRATCH_FOLDER = re.compile(r".+-[0-9a-f]{12}\.(ingest|append|predict)/")


def expand_paths(
    inputs: Any, options: Mapping[str, Any] | None = None, out_url: Url | None = None
) -> Any:
    """Return `inputs` with folders and patterns replaced by a list of their files.

    A single file is returned itself instead of a list, and inputs other than paths are returned
    unchanged. A pattern has ``*``, ``?`` and ``[...]`` within a name, and ``**`` for folders at any
    depth, except for folders that begin with ``_`` and links to folders. In folders, names that
    begin with ``_`` or ``.`` are ignored, as Spark and Dask write them, and scratch folders of
    streamkern. Among the matches of a pattern, names that begin with ``_`` are ignored if they have
    no ending of a format.

    options : storage options
    out_url : location of the output, see `refuse_among`

    Raises
    ------
    ConfigError
        The output lies among the inputs.
    StoreNotFoundError
        A folder has no files, or a pattern matches none.
    DataError
        A folder has files of several formats, or folders, or is a Delta or Hudi table, whose folder
        keeps deleted rows; a pattern matches files of several formats or partitions.
    """
    if not are_paths(inputs):
        return inputs
    paths = input_paths(inputs)
    if out_url is not None:
        refuse_among(paths, out_url)
    files = [file for url in paths for file in _files_at(url, dict(options or {}))]
    return files[0] if len(files) == 1 else files


def refuse_among(inputs: Sequence[Url], out_url: Url) -> None:
    """Raise ConfigError if the output would be among the files of a folder or pattern on a disk.

    A later call would read it as rows.
    """
    out = local_path(out_url)
    if out is None:
        return
    out_path = Path(os.path.abspath(out))
    for url in inputs:
        path = local_path(url)
        if path is None:
            continue
        input_path = Path(os.path.abspath(path))
        is_among = out_path.parent == input_path and path.is_dir()
        if not path.exists() and _WILDCARD.search(str(path)):
            parts, pattern = out_path.parts, input_path.parts
            is_among = len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))
            if "**" in pattern:
                is_among = is_among or fnmatchcase(str(out_path), str(input_path))
        if is_among and out_path.name[0] not in "._":
            raise ConfigError(
                f"{redact(out_url)} lies among the files of {redact(url)}, so the next call "
                "would read it as rows",
                "give another output",
            )


def input_paths(inputs: Any) -> list[Url]:
    """Return the paths in `inputs`, which may be anything that `ingest` takes."""
    paths = inputs if isinstance(inputs, list | tuple) else [inputs]
    return [path for path in paths if is_path(path)]


def _files_at(url: Url, options: dict[str, Any]) -> list[Url]:
    """Return the files that a path, URL, folder or pattern stands for."""
    path = local_path(url)
    if path is not None:
        if path.exists():
            return _files_in_folder(_LocalTree(path), url) if path.is_dir() else [url]
        if not _WILDCARD.search(str(path)):
            return [url]
        parts = path.parts
        n_root = next(i for i, part in enumerate(parts) if _WILDCARD.search(part))
        return _matching(_LocalTree(Path(*parts[:n_root])), parts[n_root:], str(path))
    text = str(url)
    if is_icechunk(url):
        return [snapshot_url(text, options)]
    if not is_object(url):  # nothing is listed there
        return [url]
    return _remote_files(text, options)


def _remote_files(url: str, options: dict[str, Any]) -> list[Url]:
    """Return the files of a URL, which may name an object and a folder at once."""
    if url.rstrip("/").endswith(".zarr") and not _WILDCARD.search(url):
        return [url]
    scheme, _, path = url.partition("://")
    parts = path.rstrip("/").split("/")
    # The root ends before the first wildcard, or else before the name; the first part is a bucket.
    wildcards = (i for i, part in enumerate(parts) if _WILDCARD.search(part))
    n_root = max(1, next(wildcards, len(parts) - 1))
    tree = _RemoteTree(f"{scheme}://{'/'.join(parts[:n_root])}", options)
    name = "/".join(parts[n_root:])
    is_pattern = _WILDCARD.search(name) is not None
    is_file_name = is_pattern or format_by_ending(url) is not None or "-ubyte" in name
    try:
        if is_file_name and not url.endswith("/") and tree.has(name):
            return [url]
        if not is_pattern:
            folder = name and f"{name}/"
            return _files_in_folder(tree, url, folder) if tree.entries(folder) else [url]
    except StorageAccessError:  # without permission to list objects, reading them may be allowed
        if is_pattern:
            raise
        return [url]
    return _matching(tree, parts[n_root:], url)


# ------------------------------------------------------------------------- listing of names


class _Tree:
    """Tree of files and folders below a root. Names are paths relative to the root."""

    def entries(self, folder: str) -> list[str]:
        """Return the names directly in a folder, "" for the root; folders end with a slash."""
        raise NotImplementedError

    def descends(self, folder: str) -> bool:
        """Return whether ``**`` descends into a folder."""
        return True

    def url(self, name: str) -> Url:
        """Return the URL of a file or folder."""
        raise NotImplementedError


class _LocalTree(_Tree):
    def __init__(self, root: Path) -> None:
        self._root = root

    def entries(self, folder: str) -> list[str]:
        try:
            with os.scandir(self._root / folder) as entries:
                return [entry.name + "/" * entry.is_dir() for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def descends(self, folder: str) -> bool:
        return not (self._root / folder).is_symlink()  # a link may lead back

    def url(self, name: str) -> Url:
        return str(self._root / name)


class _RemoteTree(_Tree):
    def __init__(self, root: str, options: dict[str, Any]) -> None:
        self._root, self._objects = root, open_objects(root, storage_options=options)

    def has(self, name: str) -> bool:
        """Return whether an object of this name exists."""
        try:
            self._objects.stat(name)
        except FileNotFoundError:
            return False
        return True

    def entries(self, folder: str) -> list[str]:
        return self._objects.entries(folder.rstrip("/"))

    def url(self, name: str) -> Url:
        return f"{self._root}/{name}"


# ------------------------------------------------------------------------- folders and patterns


def _checked_entries(tree: _Tree, folder: str) -> list[str]:
    """Return the entries of a folder; raise DataError for formats that keep deleted rows."""
    names = tree.entries(folder)
    for entry, table_format in _TABLE_FORMAT_FILES.items():
        if entry in names:
            raise DataError(
                f"{redact(tree.url(folder)).rstrip('/')} is a {table_format} table, whose folder "
                "also contains files that the table has replaced or deleted",
                "export the table to Parquet files",
            )
    return names


def _files_in_folder(tree: _Tree, url: Url, folder: str = "") -> list[Url]:
    """Return the files of a folder, or the folder itself if it is a Zarr group."""
    location = redact(str(url)).rstrip("/")
    names = _checked_entries(tree, folder)
    if location.endswith(".zarr") or not _ZARR_FILES.isdisjoint(names):
        return [url]
    data_names = [n for n in names if n[0] not in "._" and not _SCRATCH_FOLDER.fullmatch(n)]
    data_names.sort(key=_natural_key)
    if not data_names:
        raise StoreNotFoundError(
            f"there is no zarr group at {location}, and the folder has no files",
            "give the path of a store, or of a folder with files",
        )
    folders = [n[:-1] for n in data_names if n.endswith("/") and not n.endswith(".zarr/")]
    if any(_PARTITION.fullmatch(name) for name in folders):
        raise _partitions_error(
            location, f"is partitioned into folders ({some(folders)})", location
        )
    if folders:
        raise DataError(
            f"{location} contains other folders ({some(folders)})",
            f"name the files with a pattern, such as {location}/**/*.parquet",
        )
    _check_one_format(data_names, location)
    return [tree.url(f"{folder}{name}".rstrip("/")) for name in data_names]


def _matching(tree: _Tree, parts: Sequence[str], url: str) -> list[Url]:
    """Return the files that match a pattern, and the files of the folders that match it.

    parts : parts of the pattern below the root of the tree
    """
    location = redact(url)
    names = sorted({*_matches(tree, "", tuple(parts))}, key=_natural_key)
    # Markers such as _SUCCESS and _metadata hold no data.
    names = [n for n in names if not _base_name(n).startswith("_") or format_by_ending(n)]
    if not names:
        raise StoreNotFoundError(f"no file matches {location}", "check the pattern")
    partitions = {tuple(p for p in n.split("/")[:-1] if _PARTITION.fullmatch(p)) for n in names}
    if len(partitions) > 1:
        partition_names = some(["/".join(p) for p in sorted(partitions)])
        root = _WILDCARD.split(location)[0].rpartition("/")[0] or "."
        raise _partitions_error(
            location, f"matches files of several partitions ({partition_names})", root
        )
    files: list[Url] = []
    for name in names:
        url_of_name = tree.url(name.rstrip("/"))
        files += _files_in_folder(tree, url_of_name, name) if name.endswith("/") else [url_of_name]
    _check_one_format([str(file) for file in files], location)
    return files


def _partitions_error(location: str, reason: str, folder: str) -> DataError:
    """Return the error for files of several partitions."""
    return DataError(
        f"{location} {reason}, whose names hold a column that the files lack",
        "write the table to one file, for example with "
        f"pandas.read_parquet({folder!r}).to_parquet('whole.parquet')",
    )


def _matches(tree: _Tree, folder: str, parts: tuple[str, ...]) -> Iterator[str]:
    """Yield names below `folder` that match the parts of a pattern; folders end with a slash."""
    part, *next_parts = parts
    if not part:  # two slashes, or one at the end
        if next_parts:
            yield from _matches(tree, folder, tuple(next_parts))
        elif folder:
            yield folder
        return
    if part == "**" and next_parts:  # also matches no folder at all
        yield from _matches(tree, folder, tuple(next_parts))
    for name in _checked_entries(tree, folder):
        bare_name, is_folder = name.rstrip("/"), name.endswith("/")
        if bare_name.startswith(".") and not part.startswith("."):
            continue
        if part == "**" and is_folder:
            if not bare_name.startswith("_") and tree.descends(folder + bare_name):
                yield from _matches(tree, folder + name, parts)
        elif fnmatchcase(bare_name, part):
            if not next_parts:
                yield folder + name
            elif is_folder:
                yield from _matches(tree, folder + name, tuple(next_parts))


def _base_name(name: str) -> str:
    """Return the name of a file or folder without its parent folders and without a final slash."""
    return name.rstrip("/").rpartition("/")[2]


def _check_one_format(names: Sequence[str], location: str) -> None:
    """Raise DataError for files whose endings belong to several formats."""
    by_format: dict[str | None, str] = {}
    for name in names:
        by_format.setdefault(format_by_ending(name), _base_name(name))
    if len(by_format) > 1:
        raise DataError(
            f"{location} has files of several formats ({some(list(by_format.values()))})",
            "name the files of one format, for example *.csv",
        )


def _natural_key(name: str) -> Any:
    """Return the key of the natural order: by folder, then by numbers (part-2 before part-10)."""
    # Splitting by a group leaves the numbers at the odd places.
    split_parts = [re.split(r"([0-9]+)", part) for part in name.rstrip("/").split("/")]
    keys = [[int(text) if i % 2 else text for i, text in enumerate(part)] for part in split_parts]
    return keys, name
