"""Values computed once per process, even if several threads request them at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

ONE_AT_A_TIME = threading.RLock()
"""Lock for parsing and compiling; reentrant, because a finalizer on the same thread may need it."""


def once(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Cache every value that `make` returns; the first thread computes it, and others wait for it.

    With `functools.cache` alone each of these threads would compute it.
    """
    kept = cache(make)

    @wraps(make)
    def made(*args: _P.args, **values: _P.kwargs) -> _T:
        with ONE_AT_A_TIME:
            return kept(*args, **values)  # type: ignore[arg-type]  # all can be hashed

    return made
