"""Delays before retries of an operation that failed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

_NOBODY = ("connection refused", "connect call failed", "[errno 111]", "econnrefused")


def backoff_delays(first_s: float, longest_s: float, until: float) -> Iterator[float]:
    """Yield seconds to wait before each retry: up to first_s, twice that, four times … longest_s.

    They are drawn at random, so that many processes that failed together do not retry at once, and
    end before a retry that would begin at `until` or later, a time of `time.monotonic`.
    """
    most = first_s
    while True:
        pause = random.uniform(0, min(most, longest_s))
        if time.monotonic() + pause >= until:
            return
        yield pause
        most = min(2 * most, longest_s)


def is_connection_refused(error: BaseException) -> bool:
    """Return whether nothing listens at the address, by the error or one of its causes."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if isinstance(cause, ConnectionRefusedError) or any(words in text for words in _NOBODY):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
