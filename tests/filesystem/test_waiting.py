"""Check the pauses between retries, and that cancelled requests stay cancelled."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable

import pytest

from streamkern.filesystem.waiting import await_within, backoff_delays

FIRST_S, LONGEST_S = 0.1, 10.0
# Each pause is drawn evenly between 0 and its bound, which doubles up to LONGEST_S.
BOUNDS_S = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]


def draw_delays(until: float) -> list[float]:
    """Return the delays before the deadline `until`, at most one for each bound."""
    return list(itertools.islice(backoff_delays(FIRST_S, LONGEST_S, until), len(BOUNDS_S)))


def test_pauses_double_up_to_the_longest() -> None:
    samples = [draw_delays(time.monotonic() + 1000) for _ in range(400)]
    largest = [max(column) for column in zip(*samples, strict=True)]
    smallest = [min(column) for column in zip(*samples, strict=True)]
    # Of 400 draws, all are below 0.95 of the bound with probability 0.95^400 = 1e-9.
    for bound, low, high in zip(BOUNDS_S, smallest, largest, strict=True):
        assert 0 <= low < 0.05 * bound
        assert 0.95 * bound < high <= bound


def test_no_retry_starts_after_the_deadline() -> None:
    assert draw_delays(time.monotonic()) == []
    for _ in range(100):
        # The clock hardly advances here, so every pause must end before the deadline by itself.
        assert all(pause < 1.0 for pause in draw_delays(time.monotonic() + 1.0))


async def _check_cancellation(answer: asyncio.Future[None], request: Awaitable[None]) -> None:
    """Cancel a request just as its `answer` fails, and check that it raises CancelledError."""
    task = asyncio.ensure_future(await_within(60.0, request))
    await asyncio.sleep(0.01)
    if not answer.done():
        answer.set_exception(OSError("server error"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_cancelled_request_that_fails_is_cancelled() -> None:
    async def trial() -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await _check_cancellation(answer, answer)

    asyncio.run(trial())


def test_cancellation_that_a_library_reports_as_error_is_cancellation() -> None:
    async def reported() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise OSError("the connection was closed") from None

    async def trial() -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.set_result(None)
        await _check_cancellation(answer, reported())

    asyncio.run(trial())


def test_request_errors_and_timeouts_are_raised() -> None:
    async def fails() -> None:
        raise OSError("server error")

    with pytest.raises(OSError, match="server error"):
        asyncio.run(await_within(60.0, fails()))
    with pytest.raises(TimeoutError):
        asyncio.run(await_within(0.01, asyncio.sleep(30)))
