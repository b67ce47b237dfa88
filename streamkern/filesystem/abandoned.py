"""Remove folders in the temporary directory whose owner was killed.

They are of drivers of ranks, and of fits that read files through a store.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Final

import filelock

RANKS: Final = "streamkern-ranks-"
FIT: Final = "streamkern-fit-"
LOCK: Final = ".streamkern.lock"


def remove_abandoned() -> None:
    """Remove the folders of processes that are gone: those with our lock, which nobody holds."""
    parent = Path(tempfile.gettempdir())
    for left in (*parent.glob(f"{RANKS}*"), *parent.glob(f"{FIT}*")):
        with contextlib.suppress(OSError, filelock.Timeout):
            if (left / LOCK).is_file() and not left.is_symlink():
                with filelock.FileLock(left / LOCK, timeout=0):
                    shutil.rmtree(left, ignore_errors=True)


def locked_folder(prefix: str) -> tuple[Path, filelock.BaseFileLock]:
    """Return a new folder in the temporary directory and its lock, which is held from its first
    moment under that name. Folders that killed processes have left are removed before."""
    remove_abandoned()
    made = Path(tempfile.mkdtemp(prefix=".streamkern-"))
    lock = filelock.FileLock(made / LOCK, thread_local=False)
    try:
        lock.acquire(timeout=0)
        return made.rename(made.parent / made.name.replace(".streamkern-", prefix)), lock
    except BaseException:
        remove_locked(made, lock)
        raise


def remove_locked(folder: Path, lock: filelock.BaseFileLock) -> None:
    """Remove a folder of `locked_folder`, and give its lock back."""
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
