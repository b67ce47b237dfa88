"""Values made once in a process, also where several threads ask for them at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

ONE_AT_A_TIME = threading.RLock()
"""Held by whoever parses or compiles. A finalizer of the same thread may come back to it."""


def once(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep every value that `make` returns; the first thread makes it, and others wait for it.

    `functools.cache` alone lets all of them make it.
    """
    kept = cache(make)

    @wraps(make)
    def made(*args: _P.args, **values: _P.kwargs) -> _T:
        with ONE_AT_A_TIME:
            return kept(*args, **values)  # type: ignore[arg-type]  # all can be hashed

    return made
