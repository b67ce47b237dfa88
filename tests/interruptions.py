"""Ways in which a test ends a call or a process, and waits until something has happened.

Worker processes of clusters import this file, so it imports little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0


class Killed(BaseException):
    """Ends a process in a test: nothing that it would do afterwards has an effect."""


class Stop(Exception):
    """Ends a call from its own progress function."""


def eventually(true: Callable[[], object]) -> None:
    """Wait until `true()` is true; fail after `PATIENCE_S`."""
    give_up = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.01)
