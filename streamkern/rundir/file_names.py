"""Find, name and delete the files of a run directory; read and write run.json."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamkern.basics.errors import RunError, StorageError
from streamkern.basics.warning import warn
from streamkern.filesystem.durable import is_temporary
from streamkern.filesystem.objects import Bytes
from streamkern.rundir.checkpoint_format import GROUP_NAME, named_group, read_manifest
from streamkern.rundir.checksums import UnverifiedError, seal, unseal
from streamkern.rundir.run_log import read_lines
from streamkern.rundir.run_storage import RunStorage, WriterLock, os_error_text

CHECKPOINTS, CONFIG = "checkpoints/", "run.json"
_SETUP_NAME = re.compile(r"(?:\d{12}-)?setup(?:-\d{1,3})?(?:\.json)?")
_FORMAT_ENTRY = re.compile(rb'"format":\s*"streamkern-')
_MANIFEST_NAME = re.compile(r"(?:(\d{12})-)?(\d{12}|setup)\.json")

CheckpointId = tuple[int, int]
"""Number of the writer, and step. A later checkpoint has a higher id."""


def name_stem(writer: int, step: int | str) -> str:
    """Return the name of a setup or checkpoint without ``.json``: ``000000000003-000000000042``.

    writer : number of the writer; 0 on a disk, where names do not contain it
    step : step of a checkpoint, or "setup"
    """
    text = step if isinstance(step, str) else f"{step:012d}"
    return f"{writer:012d}-{text}" if writer else text


def writer_number(name: str) -> int:
    """Return the writer's number in the name of a setup or a checkpoint; 0 on a disk."""
    match = re.match(r"(\d{12})-(\d{12}|setup)", name)
    return int(match[1]) if match else 0


def checkpoint_ids(names: set[str]) -> list[CheckpointId]:
    """Return (writer, step) for each manifest among `names`, oldest first; a setup has step 0."""
    matches = [match for name in names if (match := _MANIFEST_NAME.fullmatch(name))]
    return sorted((int(m[1] or 0), 0 if m[2] == "setup" else int(m[2])) for m in matches)


def foreign_files(folder: RunStorage) -> str | None:
    """Return a file of another program whose name a run would use; None if there is none.

    A folder belongs to streamkern if one of its documents, perhaps a damaged one, has a format of
    streamkern. The name of a file is not enough.
    """
    names = {
        name for name in folder.names() if name in folder.used_names or _SETUP_NAME.fullmatch(name)
    }
    if not names or any(_FORMAT_ENTRY.search(data) for data in _run_documents(folder)):
        return None
    return min(names)


def _run_documents(folder: RunStorage) -> Iterator[Bytes]:
    """Yield the content of documents that a run writes, as far as they exist."""
    # List again: a writer that is just starting writes writer.json before all other files.
    names = folder.names()
    setups = (name for name in names if name.endswith(".json") and _SETUP_NAME.match(name))
    yield from _read_existing(folder, [*sorted(names & {CONFIG, "writer.json"}), *sorted(setups)])
    for folder_name in ("lease/", CHECKPOINTS):
        newest = sorted(name for name in folder.names(folder_name) if name.endswith(".json"))[-3:]
        yield from _read_existing(folder, [folder_name + name for name in newest])


def _read_existing(folder: RunStorage, names: Sequence[str]) -> Iterator[Bytes]:
    for name in names:
        # The file may have been deleted since the listing, or may be a folder.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            yield folder.read(name)


def n_logged_lines(folder: RunStorage) -> int:
    """Return the number of log lines that the newest intact checkpoint, or the setup, records."""
    setups, checkpoints = published_manifests(folder)
    manifest = newest_intact(folder, setups + checkpoints)
    return 0 if manifest is None else int(manifest["log"])


def stored_records(folder: RunStorage) -> tuple[list[dict[str, Any]], str | None]:
    """Return the records of the run log in order, and a warning if any are damaged or lost."""
    location = f"the run log in {folder.location}"
    try:
        n_stored = n_logged_lines(folder)  # read before the log, which only grows
        return read_lines(folder.read_log(), location, n_stored)
    except StorageError:
        raise
    except OSError as error:
        raise RunError(f"{location} cannot be read: {os_error_text(error)}") from error


def published_manifests(folder: RunStorage) -> tuple[list[str], list[str]]:
    """Return the names of the manifests of setups, and of checkpoints, each oldest first."""
    setups = [name_stem(writer, "setup") for writer, _ in checkpoint_ids(folder.names())]
    checkpoints = [
        CHECKPOINTS + name_stem(*checkpoint)
        for checkpoint in checkpoint_ids(folder.names(CHECKPOINTS))
    ]
    return [f"{name}.json" for name in setups], [f"{name}.json" for name in checkpoints]


def newest_intact(
    folder: RunStorage, names: Sequence[str], damage: list[str] | None = None
) -> dict[str, Any] | None:
    """Return the last of the manifests `names` that is intact, or None.

    damage : receives a sentence for each newer manifest that is damaged
    """
    for name in reversed(names):
        try:
            return read_manifest(folder, name)
        except UnverifiedError as error:
            if damage is None:  # reported when it is loaded
                continue
            if any(name in kind for kind in published_manifests(folder)):  # no writer deleted it
                damage.append(f"{folder.location}: {error}")
    return None


def write_config(folder: RunStorage, config: Mapping[str, Any]) -> None:
    """Store the configuration as run.json, atomically."""
    folder.write(CONFIG, seal("run", config))


def read_config(folder: RunStorage) -> dict[str, Any] | None:
    """Return the content of run.json, or None if there is none.

    Raises RunError if it is damaged or was edited.
    """
    try:
        return unseal("run", folder.read(CONFIG))
    except FileNotFoundError:
        return None
    except StorageError:
        raise
    except (OSError, ValueError) as error:
        raise RunError(
            f"{folder.location}/run.json is damaged ({error})",
            "restore it from a copy, or run the same command again, which writes this file "
            "again if there is a setup or a checkpoint",
        ) from error


def repair_run_json(folder: RunStorage, run: Mapping[str, Any]) -> None:
    """Write run.json again if it differs from the configuration in the manifests."""
    try:
        config = read_config(folder)
        state = "is missing" if config is None else "is of another run"
    except RunError:
        config = None
        state = "was damaged or edited"
    if config != run:
        write_config(folder, run)
        warn(f"{folder.location}/run.json {state}; it is written again from its setup")


_log = logging.getLogger("streamkern")


class CheckpointRetention:
    """Delete old files of a run directory, in the process that holds its lock.

    keep : number of checkpoints to keep, the newest ones
    unverified : names, without ``.json``, of damaged checkpoints, which are deleted with the next
        old ones
    """

    def __init__(self, folder: RunStorage, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._groups: dict[str, str] = {}  # the group of each manifest, as far as known
        self.unverified: set[str] = set()

    def record_group(self, manifest: str, group: str) -> None:
        """Record the group that a manifest, which was just written, refers to."""
        self._groups[manifest] = group

    def delete_unfinished(self, lock: WriterLock) -> None:
        """Delete files that earlier writers left unfinished."""
        for folder_name in ("", CHECKPOINTS):
            try:
                self._sweep(lock, folder_name, self._folder.names(folder_name))
            except StorageError:
                raise
            except OSError as error:  # a writer that lost the run may use the same files
                self._log_failure(error)

    def delete_old(self, lock: WriterLock, folder_name: str, names: set[str]) -> None:
        """Delete the checkpoints among `names` that are too old, and groups without a manifest.

        A failure is only logged, because the new checkpoint is durable already.

        folder_name : folder, "" or `CHECKPOINTS`
        names : names in it; deleted manifests are removed

        Raises RunLockedError if another writer has taken over the run. That writer may have resumed
        from a checkpoint that is too old here, and may have deleted the group that was just saved,
        before its manifest was written.
        """
        try:
            lock.check()
            if folder_name == CHECKPOINTS:
                stems = [name_stem(*checkpoint) for checkpoint in checkpoint_ids(names)]
                intact = [stem for stem in stems if stem not in self.unverified]
                expired = {f"{stem}.json" for stem in (*intact[: -self._keep], *self.unverified)}
                self._folder.delete([folder_name + name for name in sorted(expired)])
                names -= expired
                self.unverified.clear()
            self._sweep(lock, folder_name, names)
        except OSError as error:
            self._log_failure(error)

    def _sweep(self, lock: WriterLock, folder_name: str, names: set[str]) -> None:
        """Delete temporary files, and groups of this or earlier writers without a manifest."""
        for name in names:
            match = GROUP_NAME.fullmatch(name)
            if is_temporary(name):
                self._folder.delete([folder_name + name])
            # The names of setups belong to the run directory itself, all others to `CHECKPOINTS`.
            elif (
                match
                and ("setup" in name) == (not folder_name)
                and writer_number(name) <= lock.number
            ):
                manifest = f"{match[1]}.json"
                # A manifest that cannot be read may refer to any group, so none is deleted.
                if manifest not in names or self._group(folder_name + manifest) not in (None, name):
                    self._folder.delete_group(folder_name + name)

    def _group(self, manifest: str) -> str | None:
        if manifest not in self._groups:
            group = named_group(self._folder, manifest)
            if group is None:
                return None
            self._groups[manifest] = group
        return self._groups[manifest]

    def _log_failure(self, error: OSError) -> None:
        location = self._folder.location
        _log.warning("old files in %s could not be deleted: %s", location, os_error_text(error))
