"""Records of the trainings of a search, each written to its own file as soon as it is done.

    search.json                   settings and data that must not change, and a digest of them
    trial-<digest>-<trial>.json   one training, named by the digests of its search and its settings
    result.json                   the table, once the search is done

Every file carries a checksum of itself, and is complete or not there at all. On a disk search.lock
excludes a second process; on an object store two processes would do the same work twice, and write
the same. Without a place everything stays in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import filelock

from streamkern.basics.errors import ResumeMismatchError, RunError, RunLockedError, StorageError
from streamkern.basics.text import utc_now
from streamkern.basics.values import json_digest
from streamkern.basics.warning import warn
from streamkern.filesystem.durable import is_temporary, make_folders
from streamkern.filesystem.ownership import file_lock
from streamkern.filesystem.urls import local_path
from streamkern.rundir.checksums import seal, unseal
from streamkern.rundir.run_storage import RunStorage, open_folder, reason
from streamkern.train.differences import difference

SEARCH, RESULT, SEARCH_LOCK = "search.json", "result.json", "search.lock"
Key = tuple[Any, ...]


class Trials:
    """The recorded trainings. Raises RunError and StorageError if the place cannot be used.

    place : path or URL of a folder, or None
    identity : JSON values; a folder with another one is refused with a ResumeMismatchError that
        names every difference
    """

    def __init__(
        self,
        place: str | os.PathLike[str] | None,
        identity: Mapping[str, Any],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        identity = json.loads(json.dumps(identity))  # as it is read back: tuples are lists
        self._digest = _digest(identity)
        self._found: dict[str, dict[str, Any]] = {}
        self._folder: RunStorage | None = None
        self._lock: filelock.BaseFileLock | None = None
        if place is None:
            return
        self._folder = open_folder(place, storage_options)
        try:
            with self._using(self._folder):
                _check_ours(self._folder)
                self._check(self._folder, identity)
                self._take(self._folder, local_path(place))
                self._open(self._folder, identity)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process resume the search."""
        if self._lock is not None:
            self._lock.release()

    def _take(self, folder: RunStorage, path: Path | None) -> None:
        if path is None:
            return
        make_folders(path)
        lock = file_lock(path / SEARCH_LOCK)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise RunLockedError(
                f"another process is at the search in {folder.place}; wait for it, or give "
                "another folder"
            ) from None
        self._lock = lock

    def _open(self, folder: RunStorage, identity: Mapping[str, Any]) -> None:
        if not self._check(folder, identity):
            self._write("search", SEARCH, {"identity": identity})
        names = folder.names()
        if self._lock is not None:  # so that no other process is writing them
            folder.delete(name for name in names if is_temporary(name))
        prefix = f"trial-{self._digest}-"
        for name in sorted(n for n in names if n.startswith(prefix) and n.endswith(".json")):
            try:
                self._found[name] = unseal("trial", folder.read(name))
            except ValueError as error:
                text = f"{folder.place}/{name} is damaged ({error}); its training is done again"
                warn(text)

    @contextlib.contextmanager
    def _using(self, folder: RunStorage) -> Iterator[None]:
        try:
            yield
        except (RunError, StorageError):
            raise
        except OSError as error:
            raise RunError(f"{folder.place} cannot be used: {reason(error)}") from error

    def _check(self, folder: RunStorage, identity: Mapping[str, Any]) -> bool:
        """Return whether the folder holds this search; raise if it holds another, or is damaged."""
        try:
            recorded = unseal("search", folder.read(SEARCH))["identity"]
        except FileNotFoundError:
            return False
        except (ValueError, KeyError) as error:
            raise RunError(
                f"{folder.place}/{SEARCH} is damaged ({error}); restore it from a copy, or give "
                "another folder"
            ) from error
        changes = [c.removeprefix("settings.") for c in difference(recorded, identity)]
        if changes:
            raise ResumeMismatchError(
                f"{folder.place} holds a search that differs: {'; '.join(changes)}; restore "
                "these, or give another folder"
            )
        return True

    def records(self) -> list[dict[str, Any]]:
        """Return all records, in arbitrary order."""
        return list(self._found.values())

    def get(self, key: Key) -> dict[str, Any] | None:
        """Return the record of the training under `key` (JSON values), or None."""
        return self._found.get(self._name(key))

    def add(self, key: Key, record: Mapping[str, Any]) -> None:
        """Keep a record, which survives a power cut once this returns."""
        name = self._name(key)
        self._found[name] = dict(record)
        self._write("trial", name, {**record, "saved": utc_now()})

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write result.json."""
        self._write("result", RESULT, result)

    def _write(self, kind: str, name: str, value: Mapping[str, Any]) -> None:
        if self._folder is not None:
            with self._using(self._folder):
                self._folder.write(name, seal(kind, value))

    def _name(self, key: Key) -> str:
        return f"trial-{self._digest}-{_digest(key)}.json"


def _check_ours(folder: RunStorage) -> None:
    """Raise RunError unless the folder holds a search, or nothing."""
    names = folder.names()
    foreign = sorted(name for name in names if name != SEARCH_LOCK and not is_temporary(name))
    if foreign and SEARCH not in names:
        raise RunError(
            f"{folder.place} holds {foreign[0]!r} but no search of streamkern; give a new or "
            "empty folder"
        )


def _digest(value: Any) -> str:
    return json_digest(value)[:16]
