"""Chunks of remote stores kept in a local folder, so that a second epoch does not fetch them again.

    folder/CACHEDIR.TAG        file that marks a folder as a cache; no other folder is used
    folder/lock                lock file of the writer that reserves bytes for an entry
    folder/total               number of bytes of all entries, as text
    folder/new/<random>        entry that is being written
    folder/<store>/<object>    complete entry
    folder/<store>/used        empty file that is touched while the store is being read

An entry holds its name, its length and a CRC-32C of everything, verified in every read; one that
does not match is deleted and fetched again. (CRC-32C detects the errors of a disk, but is no
protection against a person who writes there.) An entry is named by a hash of the store's
fingerprint, its URL and the object's key, so a store that replaces another one never uses the
entries of that store.
Only chunks are kept: metadata, which holds the fingerprint, is read from the storage each time a
store is opened.

When the limit is reached, entries of stores that no process has read for an hour are evicted,
beginning with the store that was unused for longest. A store in use never evicts its own entries:
every epoch reads each chunk once in a new order, so the least recently used entry is often needed
next. A cache with room for half of a store keeps the first half, and finds half of the chunks
in every later epoch. Only files named like an entry, in hexadecimal digits, are evicted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import filelock
import google_crc32c
import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.text import redact
from streamkern.basics.values import checked_number, is_whole_number, to_builtin
from streamkern.basics.warning import warn
from streamkern.filesystem.durable import is_temporary, write_all, write_durably
from streamkern.filesystem.objects import Bytes
from streamkern.filesystem.traffic import Counters
from streamkern.filesystem.urls import local_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

IDLE_S = 3600.0
_HEADER = struct.Struct("<4sIQ32s")  # magic bytes, checksum of the rest, size of the object, name
_MAGIC_BYTES, _CHECKSUM_START = b"skc1", 8  # the checksum covers the file from this byte on
_NEW_FOLDER, _LOCK_FILE, _TOTAL_FILE, _USED_FILE = "new", "lock", "total", "used"
# The convention of bford.info/cachedir, which backup tools respect. It is the folder's first file.
_TAG_FILE = "CACHEDIR.TAG"
_TAG_CONTENT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n# Chunks of remote stores, by streamkern.\n"
)
_STORE_FOLDER_NAME = _UNFINISHED_NAME = re.compile("[0-9a-f]{32}")
_ENTRY_NAME = re.compile("[0-9a-f]{64}")
_DISK_BLOCK_BYTES = 4096  # a file occupies a multiple of this on a disk
_FRACTION_AFTER_EVICTION = 0.9  # of the limit: entries are evicted down to this
_READ_BYTES = 1 << 20  # a piece is checked while it is still in the processor's cache
_LOCK_TIMEOUT_S = 5.0  # an entry is not kept if the lock takes longer
_MIN_INTERVAL_S = 60.0  # between two records of use, and between two evictions of a full cache
_UNFINISHED_MAX_AGE_S = 600.0  # an entry not finished after this long belongs to a killed process


@dataclass
class CacheCounts(Counters):
    """Number of chunks requested, by outcome.

    hits : found
    misses : fetched
    dropped : entries deleted because they failed their checksum
    """

    hits: int = 0
    misses: int = 0
    dropped: int = 0


class EntryName(NamedTuple):
    """The name of an entry: the folder of its store, and its own SHA-256."""

    store: str
    entry: bytes


class Cache:
    """A folder of entries, up to `size` bytes. Safe to share between threads and processes.

    The limit may be exceeded by one entry per thread that writes at the same time. A folder that is
    read-only, lost or on a full disk ends caching with one warning, and reading continues without
    a cache.

    Parameters
    ----------
    folder : local folder, created if missing; ConfigError if it holds other files than a cache
    size : bytes of all entries, or "auto": half of the free space of the disk when it is opened,
        where the bytes of the cache itself count as free. Processes may give different sizes.
    idle_s : entries of stores not read for this long may be evicted

    Attributes
    ----------
    counts : counts of the chunks that were requested from this object
    limit : largest number of bytes of all entries
    """

    def __init__(
        self, folder: str | os.PathLike[str], size: int | str = "auto", *, idle_s: float = IDLE_S
    ) -> None:
        path = local_path(folder)
        if path is None:
            raise ConfigError(
                f"{mention('cache', redact(folder))} must be a local folder", "give a path"
            )
        size = to_builtin(size)
        if size != "auto" and (not is_whole_number(size) or size < 1):
            raise ConfigError(
                f'{mention("cache_size", size)} must be "auto" or a number of bytes, 1 or more',
                'write for example "10 GB"',
            )
        self.folder, self.size = path.absolute(), size
        self.idle_s = checked_number("idle_s", idle_s)
        self.counts = CacheCounts()
        self._lock = filelock.FileLock(self.folder / _LOCK_FILE)
        # Taken before the file lock, because waiting for a file lock is polling.
        self._thread_lock = threading.Lock()
        self._is_disabled = False  # whether an OSError has ended caching
        self._total_is_known = False  # whether this object has counted all entries
        self._full_until = 0.0  # nothing is written before this time of the monotonic clock
        self._use_records: dict[str, float] = {}  # monotonic time of the last record of each store
        self.limit = 0
        try:
            self._create_folder()
            free_bytes = shutil.disk_usage(self.folder).free + (self._recorded_total() or 0)
            self.limit = free_bytes // 2 if size == "auto" else int(size)
        except OSError as error:
            self._disable(error)

    def __repr__(self) -> str:
        return f"Cache({str(self.folder)!r}, {self.limit})"

    def __reduce__(self) -> Any:
        # On another machine, the cache is the folder of the same name there.
        return partial(Cache, str(self.folder), self.size, idle_s=self.idle_s), ()

    def _create_folder(self) -> None:
        """Make the folder and tag it; raise ConfigError if it holds other files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file_names = [name for name in os.listdir(self.folder) if not is_temporary(name)]
        if not self._is_ours():  # after listing: a process that opens it meanwhile tags it first
            if file_names:
                raise ConfigError(
                    f"{mention('cache', str(self.folder))} holds {min(file_names)!r} and is not a "
                    "cache of streamkern",
                    "give a new or empty folder",
                )
            write_durably(self.folder / _TAG_FILE, _TAG_CONTENT)
        (self.folder / _NEW_FOLDER).mkdir(exist_ok=True)

    def _is_ours(self) -> bool:
        try:
            return (self.folder / _TAG_FILE).read_bytes() == _TAG_CONTENT
        except (FileNotFoundError, IsADirectoryError):
            return False

    def read(self, name: EntryName) -> NDArray[np.uint8] | None:
        """Return the object kept under `name`, verified, in a new buffer; None without one."""
        if self._is_disabled:
            return None
        path = self._path(name)
        try:
            with path.open("rb", buffering=0) as file:
                data = _verified_object(file, name.entry)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._disable(error)
            return None
        if data is None:
            self.counts.add(dropped=1)
            self.drop(name)
            return None
        self._record_use(name.store)
        return data

    def drop(self, name: EntryName) -> None:
        """Delete the object under `name`."""
        with contextlib.suppress(OSError):
            self._path(name).unlink()
            with self._thread_lock:
                self._total_is_known, self._full_until = False, 0.0  # try to make room again

    def write(self, name: EntryName, data: Bytes) -> None:
        """Keep an object under `name`, if there is room; an entry is complete or not there."""
        payload = np.frombuffer(data, np.uint8)
        temporary = self.folder / _NEW_FOLDER / uuid.uuid4().hex
        try:
            if not self._reserve(_bytes_on_disk(_HEADER.size + payload.nbytes)):
                return
            try:
                with temporary.open("xb", buffering=0) as file:
                    write_all(file, memoryview(_entry_header(payload, name.entry)))
                    write_all(file, payload.data)
                self._path(name).parent.mkdir(exist_ok=True)
                temporary.replace(self._path(name))
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            self._record_use(name.store)
        except OSError as error:
            self._disable(error)

    def _path(self, name: EntryName) -> Path:
        return self.folder / name.store / name.entry.hex()

    def _record_use(self, store: str) -> None:
        """Record that a store is in use, at most once a minute."""
        now = time.monotonic()
        if now - self._use_records.get(store, -_MIN_INTERVAL_S) >= _MIN_INTERVAL_S:
            self._use_records[store] = now
            with contextlib.suppress(OSError):
                (self.folder / store / _USED_FILE).touch()

    def _disable(self, error: OSError) -> None:
        """End caching by this object; warn at the first call."""
        with self._thread_lock:
            is_first, self._is_disabled = not self._is_disabled, True
        if is_first:
            warn(
                f"the cache {self.folder} cannot be used ({error.strerror or error}); chunks are "
                "read from the storage every time"
            )

    # -- the limit -------------------------------------------------------------------------

    def _reserve(self, n_bytes: int) -> bool:
        """Count an entry before it is written, evicting others; return whether there is room."""
        if self._is_disabled or n_bytes > self.limit or time.monotonic() < self._full_until:
            return False
        if not self._is_ours():
            raise FileNotFoundError(errno.ENOENT, "it was moved, deleted or replaced")
        start_s = time.monotonic()
        try:
            with (
                self._thread_lock,
                self._lock.acquire(timeout=_LOCK_TIMEOUT_S, poll_interval=0.005),
            ):
                total = self._recorded_total() if self._total_is_known else None
                if total is None or total + n_bytes > self.limit:
                    total = self._make_room(n_bytes)
                    self._total_is_known = True
                has_room = total + n_bytes <= self.limit
                # Before the entry: a kill between the two makes the count too large, not too small.
                (self.folder / _TOTAL_FILE).write_text(str(total + n_bytes * has_room))
                if not has_room:  # counting is slow: spend at most a fiftieth of the time on it
                    now_s = time.monotonic()
                    self._full_until = now_s + max(_MIN_INTERVAL_S, 50 * (now_s - start_s))
        except filelock.Timeout:
            return False
        return has_room

    def _recorded_total(self) -> int | None:
        """Return the recorded number of bytes of all entries; None without a record."""
        try:
            return int((self.folder / _TOTAL_FILE).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def _make_room(self, n_bytes: int) -> int:
        """Count all entries; evict some if `n_bytes` more exceed the limit; return the bytes."""
        now = time.time()
        unfinished: list[_CacheFile] = []
        finished: list[_CacheFile] = []
        for folder in _folder_entries(self.folder):
            if not folder.is_dir(follow_symlinks=False):
                continue
            if folder.name == _NEW_FOLDER:
                unfinished += _files(folder.path, _UNFINISHED_NAME, 0.0)
            elif _STORE_FOLDER_NAME.fullmatch(folder.name):
                finished += _files(folder.path, _ENTRY_NAME, _last_use_time(Path(folder.path)))
        total = sum(file.n_bytes for file in unfinished + finished)
        idle = [file for file in finished if now - file.last_used >= self.idle_s]
        abandoned = [file for file in unfinished if now - file.modified > _UNFINISHED_MAX_AGE_S]
        if total + n_bytes > self.limit:
            target_bytes = int(_FRACTION_AFTER_EVICTION * self.limit) - n_bytes
            total = _evict(abandoned + idle, total, target_bytes)
        # If the limit was lowered, entries in use may exceed it, too.
        in_use = [file for file in finished if now - file.last_used < self.idle_s]
        return _evict(in_use, total, self.limit)


# ------------------------------------------------------------------------------------- files


def _entry_header(payload: NDArray[np.uint8], name: bytes) -> bytes:
    """Return the header of an entry; its checksum covers size, name and object."""
    checked_bytes = struct.pack("<Q32s", payload.nbytes, name)
    crc = google_crc32c.extend(google_crc32c.value(checked_bytes), payload)
    return _HEADER.pack(_MAGIC_BYTES, crc, payload.nbytes, name)


def _verified_object(file: Any, name: bytes) -> NDArray[np.uint8] | None:
    """Return the object in an entry, or None if it is not intact or has another name."""
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size:
        return None
    magic_bytes, crc, size_in_header, name_in_header = _HEADER.unpack(head)
    size = os.fstat(file.fileno()).st_size - _HEADER.size
    if (magic_bytes, size_in_header, name_in_header) != (_MAGIC_BYTES, size, name):
        return None
    data = np.empty(size, np.uint8)
    crc_read, n_read = google_crc32c.value(head[_CHECKSUM_START:]), 0
    while n := file.readinto(data[n_read : n_read + _READ_BYTES].data):
        crc_read = google_crc32c.extend(crc_read, data[n_read : n_read + n])
        n_read += n
    return data if (n_read, crc_read) == (size, crc) else None


def _bytes_on_disk(n_bytes: int) -> int:
    """Return the bytes that a file of `n_bytes` occupies: whole blocks of the disk."""
    return -(-n_bytes // _DISK_BLOCK_BYTES) * _DISK_BLOCK_BYTES


def _folder_entries(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Yield what is in a folder; nothing if the folder does not exist."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        yield from entries


class _CacheFile(NamedTuple):
    """A file of the cache; files are sorted in the order in which they are evicted.

    last_used, modified : Unix times of the last use of its store (0 for an unfinished entry) and of
        its last change, in seconds
    n_bytes : bytes that it occupies on the disk
    """

    last_used: float
    modified: float
    path: str
    n_bytes: int


def _files(folder: str, name: re.Pattern[str], last_used: float) -> Iterator[_CacheFile]:
    """Yield the files of a folder whose names match. last_used : as in `_CacheFile`"""
    for file in _folder_entries(folder):
        if name.fullmatch(file.name):
            with contextlib.suppress(FileNotFoundError):
                status = file.stat()
                n_bytes = _bytes_on_disk(status.st_size)
                yield _CacheFile(last_used, status.st_mtime, file.path, n_bytes)


def _last_use_time(store: Path) -> float:
    """Return the Unix time at which a store was last used, in seconds of the disk's clock."""
    for path in (store / _USED_FILE, store):
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_mtime
    return 0.0


def _evict(files: list[_CacheFile], total: int, target_bytes: int) -> int:
    """Delete files, the least recently used first, down to `target_bytes`; return the bytes left.

    total : bytes of all files of the cache
    """
    for file in sorted(files):
        if total <= target_bytes:
            break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.path)
        total -= file.n_bytes
    return total
