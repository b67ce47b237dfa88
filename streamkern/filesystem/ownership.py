"""Recognise the groups and files that streamkern made, and may replace or delete.

A zarr group that streamkern writes has a mark from its first file on, the attribute `streamkern`
with its `kind` and its `status`, which is "complete" once the whole group is written and durable.
Only groups with the mark and files of known names are deleted: a file that another program put
into such a folder stays, and the folder with it. The root metadata of a group are replaced, never
removed, so that the mark exists at every instant, also while the rest is being deleted.

A file of a format without room for metadata has its mark in an extended attribute, with its size
and time: a file that was changed or copied since has no valid mark, and file systems without such
attributes have none at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import filelock
import zarr

from streamkern.basics.errors import DataError, RunError, StreamkernError
from streamkern.basics.text import redact
from streamkern.basics.values import parse_json
from streamkern.filesystem.durable import (
    LocalFiles,
    is_temporary,
    make_folders,
    sync_folder,
    sync_store,
)
from streamkern.filesystem.zarr_store import ObjectsStore

ATTRIBUTE = "streamkern"
"""Name of the attribute of a group that holds its mark."""
STORE, PREDICTIONS = "store", "predictions"
"""The kinds of groups that have a mark."""
ARRAYS = {
    STORE: re.compile(r"X|y|w|row|(?:digests|crc)(?:-[1-9]\d*)?"),
    PREDICTIONS: re.compile(r"values|labels|row|digests"),
}
"""Names of the arrays that a group of a kind may hold; anything else in it is not ours."""

# A file or a folder of an array; and a file at the root of a group, or a part that a kill left.
_ARRAY_KEY = re.compile(r"([^/]+)/(?:zarr\.json|(?:c(?:/\d+)*/?)?)")
_ROOT_KEY = re.compile(r"zarr\.json|(?:[^/]+/(?:c/(?:\d+/)*)?)?[^/]+\.[0-9a-f]{32}\.partial")

Mark = Mapping[str, Any]


def mark_at(store: Any, url: str) -> dict[str, Any] | None:
    """Return the mark at a place (the attribute `streamkern`), or None if the place is free.

    Raises
    ------
    DataError
        The place holds something else; it is never deleted, not even with overwrite=True.
    """
    refusal = DataError(
        f"{redact(url)} holds files that streamkern did not write", "choose another place"
    )
    try:
        group = zarr.open_group(store, mode="r", use_consolidated=False)
    except (FileNotFoundError, NotADirectoryError):
        if _is_free(store):
            return None
        raise refusal from None
    except (OSError, StreamkernError):
        raise
    except Exception as error:  # an array, or unreadable metadata
        raise refusal from error
    mark = group.attrs.get(ATTRIBUTE)
    if not isinstance(mark, Mapping):
        raise refusal
    return dict(mark)


def begin_group(store: Any, url: str, mark: Mark) -> zarr.Group:
    """Return a group with this mark and without arrays, new or in place of one with a mark.

    mark : JSON values, among them `kind`

    The arrays of an old group are durably deleted on return. Raises DataError as `mark_at` does,
    and for an old group of another kind.
    """
    old_mark, kind = mark_at(store, url), mark["kind"]
    if old_mark is None:
        remove_leftover_files(store, kind)
        if isinstance(store, LocalFiles):
            make_folders(store.root)
        return zarr.create_group(store, attributes={ATTRIBUTE: dict(mark)})
    check_kind(old_mark, kind, url)
    # Without its consolidated metadata, which list the arrays that are deleted below.
    group = zarr.open_group(store, mode="r+", use_consolidated=False)
    # Until the new mark is written, neither the old nor the new group must seem complete.
    group.attrs.put({ATTRIBUTE: {**mark, "status": "clearing"}})
    _delete(store, lambda key: _is_array(key, kind) or _is_leftover_file(key, kind))
    group.attrs.put({ATTRIBUTE: dict(mark)})
    return group


def check_kind(mark: Mark, kind: str, url: str) -> None:
    """Raise DataError unless this is the mark of a group of that kind."""
    if mark.get("kind") != kind:
        raise DataError(
            f"{redact(url)} holds a group of kind {str(mark.get('kind'))!r} that streamkern wrote, "
            f"where {kind!r} would go",
            "choose another place",
        )


def publish_group(group: zarr.Group, mark: Mark, check: Callable[[], None] | None = None) -> None:
    """Give a group its final mark, once all its data is durable.

    check : raises an error unless the group still belongs to the caller; called after the sync,
        which may take long
    """
    sync_store(group.store)
    if check is not None:
        check()
    group.attrs[ATTRIBUTE] = dict(mark)


def remove_leftover_files(store: Any, kind: str) -> None:
    """Delete the temporary files that killed writes left in a group of this kind."""
    if isinstance(store, LocalFiles):  # an object is complete or not there at all
        _delete(store, lambda key: _is_leftover_file(key, kind))


def remove_arrays(store: LocalFiles, kind: str, names: Container[str]) -> None:
    """Delete the arrays of a group of this kind that have one of the `names`."""

    def is_selected(key: str) -> bool:
        return _is_array(key, kind) and key.partition("/")[0] in names

    remove(store.root, is_selected)


def remove(root: Path, is_ours: Callable[[str], bool]) -> None:
    """Delete everything below a local folder for which `is_ours` is true, durably.

    Folders are deleted only if they are empty; of links, the target stays.

    is_ours : takes a path relative to `root`, with "/" between its parts and after a folder
    """
    changed = set()
    for parent, folders, files in os.walk(root, topdown=False):
        for path in (Path(parent, name) for name in files):
            if is_ours(path.relative_to(root).as_posix()):
                path.unlink(missing_ok=True)
                changed.add(path.parent)
        for path in (Path(parent, name) for name in folders):
            if is_ours(f"{path.relative_to(root).as_posix()}/") and not path.is_symlink():
                with contextlib.suppress(OSError):  # something is left in it
                    path.rmdir()
                    changed.add(path.parent)
    for folder in changed:
        if folder.is_dir():
            sync_folder(folder)


def remove_group(root: Path) -> None:
    """Delete a local zarr group of streamkern, with any arrays."""
    if root.is_symlink():
        return
    remove(root, is_of_group)
    with contextlib.suppress(OSError):  # gone already, or something is left in it
        root.rmdir()
        sync_folder(root.parent)


def is_of_group(key: str) -> bool:
    """Return whether this is the key of a file or a folder of a zarr group with any arrays."""
    return _is_array(key) or _ROOT_KEY.fullmatch(key) is not None


def file_lock(path: Path) -> filelock.BaseFileLock:
    """Return a lock that is acquired at once or not at all; RunError if the file is not ours."""
    # Lock files of streamkern stay empty. Some versions of filelock empty the file that they lock.
    if path.is_file() and path.stat().st_size:
        raise RunError(f"{path} is not empty and was not made by streamkern", "give another folder")
    return filelock.FileLock(path, timeout=0, thread_local=False)


def _is_free(store: Any) -> bool:
    """Return whether a place is empty, except for temporary files of a write that was killed."""
    if isinstance(store, ObjectsStore):
        return not store.objects.list(store.prefix)
    root = store.root
    if not root.is_dir():
        return not root.exists()
    return all(is_temporary(name) for name in os.listdir(root))


def _is_array(key: str, kind: str | None = None) -> bool:
    """Return whether this is the key of a file or folder of an array in a group of the kind.

    kind : None allows arrays of any name
    """
    match = _ARRAY_KEY.fullmatch(key)
    return match is not None and (kind is None or bool(ARRAYS[kind].fullmatch(match[1])))


def _is_leftover_file(key: str, kind: str) -> bool:
    """Return whether a killed write left the file at this key of a group of the kind."""
    folder, _, name = key.rpartition("/")
    return is_temporary(name) and (not folder or _is_array(f"{folder}/", kind))


def _delete(store: Any, is_ours: Callable[[str], bool]) -> None:
    """Delete everything in a zarr store whose key `is_ours` accepts."""
    if isinstance(store, LocalFiles):
        remove(store.root, is_ours)
        return
    keys = [key for key, _ in store.objects.list(store.prefix)]
    store.objects.delete([k for k in keys if is_ours(k.removeprefix(f"{store.prefix}/"))])


_EXTENDED_ATTRIBUTE = "user.streamkern"
"""Name of the attribute that holds the mark of a file of a format without room for metadata."""


def mark_file(path: Path, kind: str) -> None:
    """Mark a file as written by streamkern. kind : the kind of its content"""
    if hasattr(os, "setxattr"):
        with contextlib.suppress(OSError):
            os.setxattr(path, _EXTENDED_ATTRIBUTE, json.dumps(_file_mark(path, kind)).encode())


def is_marked(path: Path, kind: str) -> bool:
    """Return whether streamkern wrote a file of this kind, and it has not been changed since."""
    if not hasattr(os, "getxattr"):
        return False
    try:
        return bool(parse_json(os.getxattr(path, _EXTENDED_ATTRIBUTE)) == _file_mark(path, kind))
    except (OSError, ValueError):
        return False


def _file_mark(path: Path, kind: str) -> dict[str, str | int]:
    """Return the mark of a file as it is now."""
    status = path.stat()
    return {"kind": kind, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
