"""Remove folders in the temporary directory whose owner, a driver of ranks, was killed."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Final

import filelock

RANKS: Final = "streamkern-ranks-"
LOCK: Final = ".streamkern.lock"


def remove_abandoned() -> None:
    """Remove the folders of drivers that are gone: those with our lock, which nobody holds."""
    for left in Path(tempfile.gettempdir()).glob(f"{RANKS}*"):
        with contextlib.suppress(OSError, filelock.Timeout):
            if (left / LOCK).is_file() and not left.is_symlink():
                with filelock.FileLock(left / LOCK, timeout=0):
                    shutil.rmtree(left, ignore_errors=True)
