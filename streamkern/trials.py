"""The trainings of a search, each kept in a file of its own as soon as it is done.

    search.json                   settings and data that must not change, and a digest of them
    trial-<digest>-<trial>.json   one training, named by its search and by what was tried
    result.json                   the table, once the search is done

Every file is there whole or not at all. Two processes at one search do the same work twice, and
write the same: no lock is needed. Without a place everything stays in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from streamkern.config import difference
from streamkern.errors import ResumeMismatchError, RunError, StorageError
from streamkern.folder import TEMPORARY, Folder, open_folder, reason
from streamkern.report import utc_now
from streamkern.storage import local_path

SEARCH, RESULT = "search.json", "result.json"
Key = tuple[Any, ...]


class Trials:
    """What was tried already. Raises RunError and StorageError where the place can not be used.

    place : path or URL of a folder, or None. identity : JSON values; a folder with another one is
    refused with a ResumeMismatchError that names every difference.
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
        self._folder: Folder | None = None
        if place is None:
            return
        self._folder = open_folder(place, storage_options)
        with self._using(self._folder):
            names = self._folder.names()
            if SEARCH in names:
                self._check(self._folder, identity)
            else:
                self._begin(place, self._folder, names, identity)
            prefix = f"trial-{self._digest}-"
            for name in sorted(n for n in names if n.startswith(prefix) and n.endswith(".json")):
                with contextlib.suppress(ValueError):  # damaged: it is tried again
                    record = json.loads(self._folder.read(name))
                    self._found[name] = record

    @contextlib.contextmanager
    def _using(self, folder: Folder) -> Iterator[None]:
        try:
            yield
        except (RunError, StorageError):
            raise
        except OSError as error:
            raise RunError(f"{folder.place} can not be used: {reason(error)}") from error

    def _check(self, folder: Folder, identity: Mapping[str, Any]) -> None:
        try:
            recorded = json.loads(folder.read(SEARCH))["identity"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{folder.place}/{SEARCH} can not be read: {error}") from error
        changes = [c.removeprefix("settings.") for c in difference(recorded, identity)]
        if changes:
            raise ResumeMismatchError(
                f"{folder.place} holds a search that differs: {'; '.join(changes)}; restore "
                "these, or give another folder"
            )

    def _begin(
        self,
        place: str | os.PathLike[str],
        folder: Folder,
        names: set[str],
        identity: Mapping[str, Any],
    ) -> None:
        foreign = sorted(name for name in names if not name.endswith(TEMPORARY))
        if foreign:
            raise RunError(
                f"{folder.place} holds {foreign[0]!r} but no search of streamkern; give a new or "
                "empty folder"
            )
        path = local_path(place)
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
        self._write(SEARCH, {"format": "streamkern-search", "identity": identity})

    def records(self) -> list[dict[str, Any]]:
        """All of them, in no order that means anything."""
        return list(self._found.values())

    def get(self, key: Key) -> dict[str, Any] | None:
        """The record of what was tried under `key` (JSON values), or None."""
        return self._found.get(self._name(key))

    def add(self, key: Key, record: Mapping[str, Any]) -> None:
        """Keep a record; on return it survives a power cut."""
        name = self._name(key)
        self._found[name] = dict(record)
        self._write(name, {**record, "saved": utc_now()})

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write result.json."""
        self._write(RESULT, result)

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        if self._folder is not None:
            with self._using(self._folder):
                text = json.dumps(value, indent=1, allow_nan=False)
                self._folder.write(name, text.encode() + b"\n")

    def _name(self, key: Key) -> str:
        return f"trial-{self._digest}-{_digest(key)}.json"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
