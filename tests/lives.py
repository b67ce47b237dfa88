"""The lives of calls and processes: how a test ends one, and waits for another.

Worker processes of clusters import this file, so it imports little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0


class Killed(BaseException):
    """The end of a process: nothing it would do afterwards has any effect."""


class Stop(Exception):
    """The end of a call, from its own progress."""


def eventually(true: Callable[[], object]) -> None:
    """Wait until `true()`; fail when it never is."""
    give_up = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.01)
