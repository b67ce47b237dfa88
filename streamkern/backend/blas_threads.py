"""Limit of the threads of a BLAS call, a setting of the whole process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from threadpoolctl import ThreadpoolController


class OneThread:
    """Limit of one thread per BLAS call, shared by all backends because it is the process's own.

    The first user saves the old limit and the last one restores it, whichever backends they are.
    """

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._limit: Any = None

    @contextmanager
    def __call__(self, blas: ThreadpoolController) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                _disown(blas)
                self._limit = blas.limit(limits=1, user_api="blas")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    _disown(blas)
                    self._limit.restore_original_limits()
                    _disown(blas)


one_thread = OneThread()


def _disown(blas: ThreadpoolController) -> None:
    """Release the libraries from the thread that controls them.

    Newer threadpoolctl lets only the first thread set limits, and ignores limits of others.
    """
    for library in blas.lib_controllers:
        clear = getattr(library, "clear_controlling_thread", None)
        if clear is not None:
            clear(force=True)
