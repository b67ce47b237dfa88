"""Remove folders in the temporary directory whose owner was killed.

They belong to drivers of ranks, and to fits that read files through a store. A shell that waits for
the end of the owner removes them; without a shell, the next command does.
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
FIT: Final = "streamkern-fit-"
LOCK_FILE: Final = ".streamkern.lock"
# Ranks may write for a moment after their driver has ended.
_REMOVE: Final = (
    'read -r _; for _ in 1 2 3 4 5; do rm -rf -- "$1"; [ -e "$1" ] || exit 0; sleep 1; done'
)
_guards: dict[Path, subprocess.Popen[bytes]] = {}


def remove_abandoned() -> None:
    """Remove the folders of processes that have ended: they hold our lock file, but no lock."""
    parent = Path(tempfile.gettempdir())
    for left in (*parent.glob(f"{RANKS_PREFIX}*"), *parent.glob(f"{FIT}*")):
        with contextlib.suppress(OSError, filelock.Timeout):
            if (left / LOCK_FILE).is_file() and not left.is_symlink():
                with filelock.FileLock(left / LOCK_FILE, timeout=0):
                    shutil.rmtree(left, ignore_errors=True)


def locked_folder(prefix: str) -> tuple[Path, filelock.BaseFileLock]:
    """Return a new folder in the temporary directory and its lock.

    The lock is held from the moment the folder has its name. Folders left by killed processes are
    removed before.
    """
    remove_abandoned()
    made = Path(tempfile.mkdtemp(prefix=".streamkern-"))
    lock = filelock.FileLock(made / LOCK_FILE, thread_local=False)
    try:
        lock.acquire(timeout=0)
        folder = made.rename(made.parent / made.name.replace(".streamkern-", prefix))
        _guard(folder)
        return folder, lock
    except BaseException:
        remove_locked(made, lock)
        raise


def remove_locked(folder: Path, lock: filelock.BaseFileLock) -> None:
    """Remove a folder of `locked_folder`, and release its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    guard = _guards.pop(folder, None)
    if guard is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            # A line ends its wait: closing may not, as other processes may hold the pipe.
            guard.communicate(b"\n", timeout=10)


def _guard(folder: Path) -> None:
    """Start a process that removes the folder once this one has ended, however it ends.

    The end of this process closes the pipe that the guard reads from. The signals of a terminal do
    not reach the guard.
    """
    if os.name == "posix":
        with contextlib.suppress(OSError):
            _guards[folder] = subprocess.Popen(
                ["/bin/sh", "-c", _REMOVE, "sh", os.fspath(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, cwd="/",
            )  # fmt: skip
