"""Remove folders in the temporary directory whose owner was killed.

Owners are drivers of runs with several ranks, and `fit` calls that ingest files into a temporary
store. A small /bin/sh process removes the folder when its owner exits; on systems without /bin/sh,
the next streamkern command removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import filelock

RANKS_PREFIX: Final = "streamkern-ranks-"
FIT_PREFIX: Final = "streamkern-fit-"
LOCK_FILE: Final = ".streamkern.lock"
_NEW_PREFIX: Final = ".streamkern-"  # of a folder whose lock is not held yet
# Ranks may write for a moment after their driver has ended.
_REMOVE_SCRIPT: Final = (
    'read -r _; for _ in 1 2 3 4 5; do rm -rf -- "$1"; [ -e "$1" ] || exit 0; sleep 1; done'
)
_guard_processes: dict[Path, subprocess.Popen[bytes]] = {}


def remove_abandoned() -> None:
    """Remove the folders of processes that have ended.

    Such a folder contains a lock file of streamkern whose lock no process holds.
    """
    parent = Path(tempfile.gettempdir())
    for folder in (*parent.glob(f"{RANKS_PREFIX}*"), *parent.glob(f"{FIT_PREFIX}*")):
        with contextlib.suppress(OSError, filelock.Timeout):
            if (folder / LOCK_FILE).is_file() and not folder.is_symlink():
                with filelock.FileLock(folder / LOCK_FILE, timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)


def create_locked_folder(prefix: str) -> tuple[Path, filelock.BaseFileLock]:
    """Return a new folder in the temporary directory and its lock.

    The folder gets its final name only once the lock is held. Folders left by killed processes are
    removed first.
    """
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_NEW_PREFIX))
    lock = filelock.FileLock(folder / LOCK_FILE, thread_local=False)
    try:
        lock.acquire(timeout=0)
        folder = folder.rename(folder.with_name(folder.name.replace(_NEW_PREFIX, prefix)))
        _guard(folder)
    except BaseException:
        remove_locked(folder, lock)
        raise
    return folder, lock


def remove_locked(folder: Path, lock: filelock.BaseFileLock) -> None:
    """Remove a folder made by `create_locked_folder`, and release its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    guard = _guard_processes.pop(folder, None)
    if guard is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            # Closing the pipe may not wake the guard: other processes may have inherited it.
            guard.communicate(b"\n", timeout=10)


def _guard(folder: Path) -> None:
    """Start a process that removes the folder once this one has ended, however it ends.

    The guard waits on a pipe that the operating system closes when this process ends. It has its
    own session, so terminal signals do not reach it.
    """
    if os.name == "posix":
        with contextlib.suppress(OSError):
            _guard_processes[folder] = subprocess.Popen(
                ["/bin/sh", "-c", _REMOVE_SCRIPT, "sh", os.fspath(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, cwd="/",
            )  # fmt: skip
