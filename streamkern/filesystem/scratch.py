"""Files that a call needs while it runs: in a separate folder, resumable, deleted at the end.

The folder's name is derived from the output, so the same command finds it again and two outputs
never share one. Its first file marks the folder as streamkern's. Only files with a known name in a
marked folder are ever deleted, and a lock excludes a second call for the same output.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import filelock

from streamkern.basics.errors import ConfigError, CorruptChunkError, DataError
from streamkern.basics.message import mention
from streamkern.basics.text import redact
from streamkern.basics.values import parse_json
from streamkern.filesystem.durable import (
    check_writable,
    disk_full_hint,
    is_temporary,
    make_folders,
    sync_file,
    sync_folder,
    write_all,
    write_durably,
)
from streamkern.filesystem.ownership import remove
from streamkern.filesystem.urls import local_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STATE_FILE, _LOCK_NAME = "scratch.json", ".streamkern.lock"
_DATA_FILE_NAME = re.compile(r"\d+\.(?:rows|keys)")
_STATE_MARK = {"streamkern": "scratch"}
# Version of the entries of the state, including the entries that callers pass to `save`.
SCRATCH_SCHEMA = 1


def scratch_folder(
    out_url: str | os.PathLike[str],
    parent: str | os.PathLike[str] | None = None,
    ending: str = ".ingest",
) -> Path:
    """Return the scratch folder of an output: in `parent`, by default beside a local output."""
    local_out = local_path(out_url)
    location = str(out_url) if local_out is None else str(local_out.resolve())
    name = re.split(r"[/\\]", location.rstrip("/\\"))[-1]
    folder_name = f"{name}-{hashlib.sha256(location.encode()).hexdigest()[:12]}{ending}"
    if parent is not None:
        return (local_path(parent) or Path(parent)) / folder_name
    if local_out is not None:
        return local_out.resolve().parent / folder_name
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"streamkern-{user}" / folder_name


def check_parent(parent: str | os.PathLike[str]) -> None:
    """Raise ConfigError unless scratch can be written in `parent`, which need not exist yet."""
    local = local_path(parent)
    if local is None:
        raise ConfigError(
            f"{mention('scratch', redact(parent))} must be a local folder", "give a path"
        )
    check_writable(local / "scratch", mention("scratch", os.fspath(parent)))


class Scratch:
    """The scratch files in a folder, which are created when they are first needed.

    As a context manager it releases the folder at its end, and leaves files in it that `discard`
    has not deleted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._identity = ""
        self._lock = filelock.FileLock(folder / _LOCK_NAME, timeout=0, thread_local=False)
        self._sizes: dict[str, int] = {}
        self._crcs: dict[str, int] = {}  # CRC-32 of each file
        # For each file that is being read in order: the bytes read, and their CRC-32.
        self._progress: dict[str, tuple[int, int]] = {}
        self._unsaved_files: set[str] = set()  # files with data that is not durable yet
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="streamkern-scratch")
        self._saving: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._saver.shutdown()
        self._lock.release()

    def claim(self) -> None:
        """Exclude every other call for the same output from now on, with or without files.

        Raises DataError as `restore` does.
        """
        make_folders(self.folder.parent)
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        self._check_ours()
        self._acquire_lock()

    def restore(self, identity: str) -> Any:
        """Return the state that was last saved for this `identity`, or None; delete other files.

        Raises DataError if the folder is not streamkern's, or is in use by another call.
        """
        self._identity = identity
        if not os.path.lexists(self.folder):
            return None
        self._check_ours()
        self._acquire_lock()
        saved = self._read_state()
        if not saved or saved["identity"] != identity or not self._truncate_to_saved(saved):
            self._sizes, self._crcs = {}, {}
            self.sweep()
            self.save(None, wait=True)
            return None
        return saved["state"]

    def has_state(self, identity: str) -> bool:
        """Return whether the folder has a state for an identity that begins with `identity`."""
        saved = self._read_state() if self.folder.is_dir() else None
        return saved is not None and str(saved.get("identity", "")).startswith(identity)

    def clear(self, identity: str) -> None:
        """Delete the files if their identity begins with `identity`, or if there is no state.

        A call that was killed while it deleted its files leaves files without a state.
        """
        if not self.folder.is_dir():
            return
        saved = self._read_state()
        is_of_identity = saved and saved["identity"].startswith(identity)
        if is_of_identity or not self._file_names():
            with contextlib.suppress(DataError):  # another call is deleting the files
                self._acquire_lock()
            self.discard()

    def append(self, name: str, data: NDArray[Any]) -> None:
        """Append an array to a file."""
        if not self._lock.is_locked:
            self.claim()
            self.save(None, wait=True)
        with disk_full_hint(str(self.folder)), (self.folder / name).open("ab", 0) as file:
            write_all(file, data.data.cast("B"))
        self._sizes[name] = self._sizes.get(name, 0) + data.nbytes
        self._crcs[name] = zlib.crc32(data.data.cast("B"), self._crcs.get(name, 0))
        self._unsaved_files.add(name)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes in each file."""
        return self._sizes

    def read(self, name: str, start: int, out: NDArray[Any]) -> None:
        """Fill an array with the content of a file from byte `start` on.

        Raises CorruptChunkError if a file that is read in order, to its end, fails its checksum;
        then all scratch files are deleted, because nothing can be resumed from them.
        """
        with (self.folder / name).open("rb", 0) as file:
            file.seek(start)
            view = out.data.cast("B")
            while view:
                n = file.readinto(view)
                if not n:
                    raise OSError(f"{self.folder / name} is shorter than it was written")
                view = view[n:]
            if hasattr(os, "posix_fadvise"):  # frees the pages, as each byte is read once
                os.posix_fadvise(file.fileno(), start, out.nbytes, os.POSIX_FADV_DONTNEED)
        position, crc_read = self._progress.get(name, (0, 0)) if start else (0, 0)
        if position != start:
            return  # not in order: the CRC of the bytes before is unknown
        crc_read = zlib.crc32(out.data.cast("B"), crc_read)
        end = start + out.nbytes
        self._progress[name] = (end, crc_read)
        if end == self._sizes[name] and crc_read != self._crcs[name]:
            self.discard()
            raise CorruptChunkError(
                f"{self.folder / name} was altered since it was written, so the scratch files were "
                "deleted",
                "run the same command again, which writes them again",
            )

    def forget(self, name: str) -> None:
        """Leave a file out of the next saved state, after which `sweep` may delete it."""
        del self._sizes[name], self._crcs[name]
        self._unsaved_files.discard(name)

    def sweep(self) -> None:
        """Delete the files that are not in the state."""
        remove(
            self.folder, lambda key: bool(_DATA_FILE_NAME.fullmatch(key)) and key not in self._sizes
        )

    def save(self, state: Any, *, wait: bool = False) -> None:
        """Save the appended data and `state`, the caller's JSON, durably.

        wait : whether to return only once they are durable
        """
        self._wait_for_save()
        unsaved_files, self._unsaved_files = self._unsaved_files, set()
        body = json.dumps(
            {
                "identity": self._identity, "sizes": self._sizes, "crcs": self._crcs,
                "state": state,
            }
        )  # fmt: skip
        text = json.dumps(
            {**_STATE_MARK, "schema": SCRATCH_SCHEMA, "crc": _crc(body), "body": body}
        )
        self._saving = self._saver.submit(self._write, unsaved_files, text)
        if wait:
            self._wait_for_save()

    def discard(self) -> None:
        """Delete the files, and the folder if nothing else is in it."""
        with contextlib.suppress(OSError):  # a state that could not be saved is no longer needed
            self._wait_for_save()
        if self._lock.is_locked:
            # The mark is deleted last: after a kill it still identifies the folder.
            remove(self.folder, lambda key: _DATA_FILE_NAME.fullmatch(key) is not None)
            remove(self.folder, lambda key: key in (_STATE_FILE, _LOCK_NAME) or is_temporary(key))
            self._lock.release()
            with contextlib.suppress(OSError):  # something is left in it
                self.folder.rmdir()
        self._sizes.clear()
        self._crcs.clear()
        self._unsaved_files.clear()

    def _check_ours(self) -> None:
        """Raise DataError if the folder is a file, or holds files but no state of a scratch."""
        if not self.folder.is_dir():
            raise DataError(
                f"scratch folder {self.folder} is a file",
                "move it away, or give another scratch folder",
            )
        names = self._file_names()
        if names and self._read_state() is None:
            raise DataError(
                f"scratch folder {self.folder} holds {min(names)!r}, which streamkern did not "
                "write",
                "move it away, or give another scratch folder",
            )

    def _file_names(self) -> list[str]:
        """Return the names in the folder, without the lock and temporary files of any call."""
        return [n for n in os.listdir(self.folder) if n != _LOCK_NAME and not is_temporary(n)]

    def _acquire_lock(self) -> None:
        """Acquire the lock at once; raise DataError if another call holds it."""
        if self._lock.is_locked:
            return
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise DataError(
                f"scratch folder {self.folder} is in use by another call for the same output",
                "wait until it has ended",
            ) from None

    def _read_state(self) -> dict[str, Any] | None:
        """Return the saved state with its identity, sizes and CRCs.

        The result is {} if the state is damaged or of another schema, and None without a mark.
        """
        try:
            document = parse_json((self.folder / _STATE_FILE).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(document, dict) or not _STATE_MARK.items() <= document.items():
            return None
        body = str(document.get("body"))
        if (document.get("schema"), document.get("crc")) != (SCRATCH_SCHEMA, _crc(body)):
            return {}
        saved: dict[str, Any] = json.loads(body)
        return saved

    def _truncate_to_saved(self, saved: dict[str, Any]) -> bool:
        """Undo the writes after the last `save`; return False if some of the saved data is lost."""
        for name, size in saved["sizes"].items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size < size:
                return False
            os.truncate(path, size)
        self._sizes, self._crcs = saved["sizes"], saved["crcs"]
        self.sweep()
        return True

    def _wait_for_save(self) -> None:
        """Wait until the last `save` is durable; raise its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _write(self, unsaved_files: set[str], text: str) -> None:
        """Make files durable, and then the state."""
        with disk_full_hint(str(self.folder)):
            for name in sorted(unsaved_files):  # in the order in which they will be read
                sync_file(self.folder / name)
            sync_folder(self.folder)
            write_durably(self.folder / _STATE_FILE, text.encode())


def _crc(text: str) -> int:
    return zlib.crc32(text.encode())
