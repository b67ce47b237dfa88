"""Write local files that survive a power cut.

A file is created under a temporary name, synced and renamed, and then its folder is synced, because
the name of a file is content of its folder. A zarr store is complete once its metadata is written,
so all chunks are synced before the metadata (`LocalFiles`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zarr.storage import LocalStore

from streamkern.basics.errors import ConfigError
from streamkern.basics.text import redact

if TYPE_CHECKING:
    from zarr.abc.buffer import Buffer

_SYNC_AT_ONCE_BYTES = 1 << 20  # files of this size are synced when they are written
_SYNC_THREADS = 8
_TEMPORARY_NAME = re.compile(r"\.[^/]+\.[0-9a-f]{32}\.streamkern")


def is_temporary(name: str) -> bool:
    """Return whether only an interrupted `write_durably` can have left a file of this name."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


def sync_file(path: Path) -> None:
    """Return once the content of a file is durable; its name is part of its folder."""
    # Windows syncs only files that are open for writing.
    fd = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Return once the names in `folder` are durable."""
    if os.name == "nt":  # Windows cannot open a folder to sync it
        return
    try:
        sync_file(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # as on a mounted bucket
            raise


def sync_tree(folder: Path) -> None:
    """Return once everything below `folder`, and its own name, is durable."""

    def fail(error: OSError) -> None:
        raise error

    # In parallel: a file system makes several files durable with one write of its journal.
    with ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="streamkern-sync") as pool:
        for parent, _, names in os.walk(folder, topdown=False, onerror=fail):
            _sync_all(pool, [Path(parent, name) for name in names])
            sync_folder(Path(parent))
    sync_folder(folder.parent)


def sync_files(root: Path, files: Sequence[Path]) -> None:
    """Return once these files, and the names that lead to them from `root`, are durable."""
    with ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="streamkern-sync") as pool:
        _sync_all(pool, files)
    folders = {folder for file in files for folder in file.parents if folder.is_relative_to(root)}
    for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
        sync_folder(folder)


def _sync_all(pool: ThreadPoolExecutor, files: Sequence[Path]) -> None:
    """Return once the content of these files is durable."""
    try:
        list(pool.map(sync_file, files))
    except RuntimeError:  # the system gives no thread: sync the files one after another
        for file in files:
            sync_file(file)


def check_writable(path: Path, shown_path: str | None = None) -> None:
    """Raise ConfigError unless a file or folder can be made at `path`.

    Missing parent folders are allowed: the first existing one is tested.

    shown_path : the path in the message, without secrets
    """
    folder = path.absolute() if path.is_dir() else path.absolute().parent
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = "is a file" if error.errno == errno.ENOTDIR else f"{error.strerror}".lower()
        raise ConfigError(
            f"{shown_path or path} cannot be written to ({folder}: {reason})",
            "give another path",
        ) from None


def make_folders(folder: Path) -> None:
    """Make `folder` and its missing parents, with durable names."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def write_atomically(path: Path, data: Any, *, exclusive: bool = False, sync: bool = True) -> None:
    """Write `data`, bytes-like or a list of such, to `path`: all of it or nothing.

    exclusive : leave an existing file as it is, and raise FileExistsError
    sync : make the file survive a power cut, not only the end of this process
    """
    if exclusive and os.path.lexists(path):  # zarr checks for every array that its group exists
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.streamkern")
    try:
        with temporary.open("xb", buffering=0) as file:
            for part in _data_parts(data):
                write_all(file, memoryview(part).cast("B"))
            if sync:
                os.fsync(file.fileno())
        if exclusive:
            os.link(temporary, path)
            temporary.unlink()
        else:
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_durably(path: Path, data: Any, *, exclusive: bool = False) -> None:
    """Write as `write_atomically` does, and durably; the folder must exist."""
    write_atomically(path, data, exclusive=exclusive)
    sync_folder(path.parent)


def write_all(file: Any, view: memoryview) -> None:
    """Write all bytes to an unbuffered file, whose `write` may store only a part of them."""
    while view:
        view = view[file.write(view) :]


def _data_parts(data: Any) -> Any:
    """Return data as a list of bytes-like parts."""
    return data if isinstance(data, list | tuple) else [data]


class LocalFiles(LocalStore):
    """A local folder as a zarr store that is written durably.

    Metadata are durable once they are written. Chunks may not have reached the disk yet, and are
    durable once `sync_store` returns; call it before writing the metadata that declare them
    complete.
    """

    async def set(self, key: str, value: Buffer) -> None:
        await asyncio.to_thread(self.write, key, value.as_buffer_like())

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        with contextlib.suppress(FileExistsError):
            await asyncio.to_thread(self.write, key, value.as_buffer_like(), exclusive=True)

    def set_sync(self, key: str, value: Buffer) -> None:
        self.write(key, value.as_buffer_like())

    def replace(self, key: str, data: Any) -> None:
        """Replace the data at `key` durably; at any time either the old or the new data exists."""
        self._check_writable()
        write_durably(self.root / key, data)

    def write(self, key: str, data: Any, *, exclusive: bool = False) -> None:
        """Write bytes-like data, or a list of it, to `key`; for durability see the class."""
        self._check_writable()
        path = self.root / key
        if key.endswith("zarr.json"):
            make_folders(path.parent)
            write_durably(path, data, exclusive=exclusive)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            n_bytes = sum(memoryview(part).nbytes for part in _data_parts(data))
            # Syncing large files as they are written shortens the last sync.
            sync = n_bytes >= _SYNC_AT_ONCE_BYTES
            write_atomically(path, data, exclusive=exclusive, sync=sync)


def sync_store(store: Any) -> None:
    """Return once all data in a zarr store is durable; on an object store it is already."""
    if isinstance(store, LocalFiles):
        sync_tree(store.root)


_FULL_DISK_ERRORS = {  # number -> problem, remedy
    errno.ENOSPC: ("no space left", "free some space"),
    errno.EDQUOT: ("no space left", "free some space"),
    errno.EFBIG: ("a file would exceed the largest size allowed", "raise the limit (ulimit -f)"),
}


@contextlib.contextmanager
def disk_full_hint(location: str, *, resumes: bool = True) -> Iterator[None]:
    """Add the place and a remedy to the errors "no space left" and "file too large" of a block.

    resumes : whether the same command continues where it stopped, rather than starting anew
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL_DISK_ERRORS:
            raise
        problem, remedy = _FULL_DISK_ERRORS[error.errno]
        raise OSError(
            error.errno,
            f"{problem} while writing {redact(location)}; {remedy} and run the same command again"
            + ", which continues where it stopped" * resumes,
            error.filename,
        ) from error
