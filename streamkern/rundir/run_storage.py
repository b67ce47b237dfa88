"""Storage for the files of a run: a folder on a disk, or a prefix on an object store.

Both give the same guarantees: writing a file either completes and is durable, or leaves the old
file unchanged; only one process at a time may write; and groups of arrays are zarr stores. On a
disk, this takes fsync, rename and a file lock. On an object store, a put is atomic and durable, and
a `lease` replaces the lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import filelock
from zarr.abc.store import Store
from zarr.storage import LocalStore

from streamkern.basics.errors import EXIT_FAILED, RunError, RunLostError, StreamkernError
from streamkern.basics.machine import is_alive
from streamkern.basics.text import redact, utc_now
from streamkern.filesystem.durable import (
    LocalFiles,
    make_folders,
    sync_folder,
    sync_tree,
    write_durably,
)
from streamkern.filesystem.objects import Objects
from streamkern.filesystem.ownership import file_lock, is_of_group, remove_group
from streamkern.filesystem.urls import local_path, open_objects, path_text
from streamkern.filesystem.zarr_store import ObjectsStore
from streamkern.rundir import lease
from streamkern.rundir.checksums import is_sealed, seal, unseal
from streamkern.rundir.run_log import FileLines, LogLines, ObjectLines, read_parts

_ERRNO_REASONS = {
    errno.EEXIST: "a file is where a folder should be",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would exceed the largest size allowed",
    errno.EROFS: "the file system is read-only",
}


def open_folder(
    location: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> RunStorage:
    """Return the folder at a path or URL; nothing is read or created yet.

    storage_options : as for `open_objects`; a local path does not need them
    """
    text = path_text(location)
    if text.startswith("file://") and urlsplit(text).netloc not in ("", "localhost"):
        raise RunError(
            f"run directory {redact(text)} is on another machine",
            "mount it and give its path, or give the URL of an object store",
        )
    path = local_path(location)
    if path is not None:
        return LocalFolder(path)
    return ObjectFolder(open_objects(text, storage_options=storage_options))


def folder_error(message: str, remedy: str, error: OSError) -> RunError:
    """Return the RunError for an OSError while a folder is taken for writing.

    Without space left, its exit code is 3, as for a disk that fills up later: the command is right.
    """
    run_error = RunError(f"{message}: {os_error_text(error)}", remedy)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        run_error.exit_code = EXIT_FAILED
    return run_error


def os_error_text(error: OSError) -> str:
    """Return the cause of an error as a short text."""
    if isinstance(error, StreamkernError):
        return str(error)
    return _ERRNO_REASONS.get(error.errno or 0) or (error.strerror or str(error)).lower()


# -- on a disk ---------------------------------------------------------------------------------


class LocalFolder:
    """A folder of the local file system, with files by name (``checkpoints/000000000042.json``).

    location : path, for messages
    in_flight_bytes : bytes that are transferred at once to hide the latency of requests; 0 if there
        is none
    used_names : names of files and folders that a run uses, except setups
    """

    in_flight_bytes = 0
    used_names = frozenset({"run.json", "writer.json", "log", "log.jsonl", "checkpoints"})

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self.location = str(self.path)

    def exists(self) -> bool:
        return self.path.is_dir()

    def names(self, folder: str = "") -> set[str]:
        """Return the names in `folder`, "" or ending in "/"; empty if it does not exist."""
        try:
            return set(os.listdir(self.path / folder))
        except (FileNotFoundError, NotADirectoryError):
            if self.path.is_file():
                raise RunError(f"run directory {self.path} is a file", "give a directory") from None
            return set()

    def read(self, name: str) -> bytes:
        """Return the content of a file; raise FileNotFoundError if there is none."""
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically and durably."""
        write_durably(self.path / name, data)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files durably. Missing files are ignored."""
        paths = [self.path / name for name in names]
        for path in paths:
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in paths}:
            sync_folder(folder)

    def delete_group(self, name: str) -> None:
        """Delete a zarr group of a run, but no file in it that another program has written."""
        remove_group(self.path / name)

    def store(self, group: str, *, read_only: bool) -> Store:
        if read_only:
            return LocalStore(self.path / group, read_only=True)
        (self.path / group).mkdir()
        return _NewGroupFiles(self.path / group)

    def sync(self, group: str) -> None:
        """Make all files of `group` durable."""
        sync_tree(self.path / group)

    def acquire_lock(self, last_number: int) -> WriterLock:
        """Acquire the writer lock.

        last_number : highest number of a writer so far; 0 on a disk

        Raises RunLockedError, which names the holder, if another process has it.
        """
        make_folders(self.path)
        lock = file_lock(self.path / "run.lock")
        self._acquire(lock)
        try:
            token = uuid.uuid4().hex
            note = {"pid": os.getpid(), "host": socket.gethostname(), "since": utc_now()}
            self.write("writer.json", seal("writer", note | {"token": token}))
            checkpoints = self.path / "checkpoints"
            checkpoints.mkdir(exist_ok=True)
            # Raises an error now, rather than at the first checkpoint, if it is not writable.
            write_durably(checkpoints / f".probe.{token}.streamkern", b"")
            sync_folder(self.path)
        except BaseException:
            lock.release()
            raise
        return _RunFileLock(self, lock, last_number, token)

    def _acquire(self, lock: filelock.BaseFileLock) -> None:
        """Acquire the lock, or raise an error that names its holder.

        A holder writes writer.json after it has acquired the lock; before that, the file names the
        previous holder. If it names a process that has ended, it is therefore read again for up to
        a second.
        """
        deadline = time.monotonic() + 1.0
        while True:
            with contextlib.suppress(filelock.Timeout):
                lock.acquire()
                return
            holder = self.holder()
            if holder is not None or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        raise lease.locked_error(self.location, holder)

    def holder(self) -> str | None:
        """Return a description of the process in ``writer.json``.

        None if there is no such file, or the process has ended.
        """
        try:
            note = unseal("writer", self.read("writer.json"))
            pid, host, since = int(note["pid"]), str(note["host"]), str(note["since"])
        except (OSError, KeyError):
            return None
        except (ValueError, TypeError):
            return "an unknown process, as writer.json is damaged"
        if host == socket.gethostname() and os.name != "nt" and not is_alive(pid):
            return None
        return f"process {pid} on {host} since {since}"

    def open_log(self, lock: WriterLock) -> LogLines:
        lock.check()
        return FileLines(self.path / "log.jsonl", lock.check)

    def read_log(self) -> bytes:
        """Return all lines of the log.

        A run that was copied from an object store also has parts, whose lines come first.
        """
        files = [*sorted((self.path / "log").glob("*.jsonl")), self.path / "log.jsonl"]
        return b"".join(file.read_bytes() for file in files if file.exists())


class _NewGroupFiles(LocalFiles):
    """Store that writes below an existing folder, and does not create it again if it was moved.

    Files are not written atomically, because they are read only once the whole group is durable.
    """

    def write(self, key: str, data: Any, *, exclusive: bool = False) -> None:
        *folders, name = key.split("/")
        folder = self.root
        for part in folders:
            folder /= part
            folder.mkdir(exist_ok=True)
        with (folder / name).open("xb" if exclusive else "wb") as file:
            file.write(data)


class _RunFileLock:
    """A lock on ``run.lock``, which is valid as long as ``writer.json`` contains its token.

    The file lock ends with its process and cannot be taken over. But the folder may be moved or
    deleted, and after ``run.lock`` was deleted another process can lock a new file.
    """

    def __init__(
        self, folder: LocalFolder, lock: filelock.BaseFileLock, number: int, token: str
    ) -> None:
        self.number = number
        self._folder, self._lock, self._token = folder, lock, token

    def check(self) -> None:
        """Raise RunLostError if the folder is gone or another process has taken over."""
        location = self._folder.location
        try:
            note = unseal("writer", self._folder.read("writer.json"))
        except (FileNotFoundError, NotADirectoryError):
            raise RunLostError(
                f"run directory {location} was moved or deleted",
                "move it back, or give its new path, and run the same command again",
            ) from None
        except OSError as error:
            raise RunLostError(
                f"run directory {location} cannot be read any more: {os_error_text(error)}",
                "solve this problem, and run the same command again",
            ) from error
        except ValueError as error:
            raise RunLostError(
                f"{location}/writer.json is damaged ({error}), so another process may be writing "
                "there",
                "run the same command again",
            ) from None
        if note.get("token") != self._token:
            raise RunLostError(
                f"run directory {location} was taken over by "
                f"{self._folder.holder() or 'another process'} after its run.lock was deleted, so "
                "this process writes nothing more",
                "keep run.lock while a process writes to the directory",
            )

    def release(self) -> None:
        try:
            # Emptied rather than deleted: it also marks the directory as a run of streamkern.
            with contextlib.suppress(OSError, RunLostError):
                self.check()
                self._folder.write("writer.json", seal("writer", {}))
        finally:
            self._lock.release()


# -- on an object store ------------------------------------------------------------------------


class ObjectFolder:
    """Objects below a URL, with the methods of `LocalFolder`.

    A put is atomic, and durable when it returns.
    """

    in_flight_bytes = 64 << 20
    used_names = frozenset({"run.json", "lease", "log", "log.jsonl", "checkpoints"})

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.location = redact(objects.url)

    def exists(self) -> bool:
        return bool(self.objects.list())

    def names(self, folder: str = "") -> set[str]:
        listing = self.objects.list(folder.rstrip("/"))
        return {key.removeprefix(folder).partition("/")[0] for key, _ in listing}

    def read(self, name: str) -> bytes:
        return bytes(self.objects.get(name, is_intact=is_sealed))

    def write(self, name: str, data: bytes) -> None:
        self.objects.put(name, data)

    def delete(self, names: Iterable[str]) -> None:
        self.objects.delete(names)

    def delete_group(self, name: str) -> None:
        keys = [key for key, _ in self.objects.list(name)]
        self.objects.delete([key for key in keys if is_of_group(key.removeprefix(f"{name}/"))])

    def store(self, group: str, *, read_only: bool) -> Store:
        return ObjectsStore(self.objects, group, read_only=read_only)

    def sync(self, group: str) -> None:
        pass

    def acquire_lock(self, last_number: int) -> WriterLock:
        new_lease = lease.Lease(self.objects, ttl_s=lease.TTL_S)
        try:
            new_lease.acquire(last_number)
            new_lease.start()
        except BaseException:
            new_lease.release()
            raise
        return new_lease

    def holder(self) -> str | None:
        return lease.current_holder(self.objects)

    def open_log(self, lock: WriterLock) -> LogLines:
        return ObjectLines(self.objects, lock.number)

    def read_log(self) -> bytes:
        return read_parts(self.objects)


RunStorage = LocalFolder | ObjectFolder
WriterLock = _RunFileLock | lease.Lease
"""The right to write, until it is released or lost.

`number` is higher than the numbers of all earlier writers on an object store.
"""
