"""Requests on fsspec's event loop, for callers on threads and on other loops, and their retries.

A caller that stops waiting, by Ctrl-C, because its reader was closed, or because the interpreter
ends, cancels its request: no result may arrive later.
"""

from __future__ import annotations

import asyncio
import atexit
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

import fsspec.asyn

from streamkern.basics.errors import StorageError

_MAX_CONCURRENT_REQUESTS = 32  # in one call of `gather_requests`
_POLL_INTERVAL_S, _CANCEL_TIMEOUT_S = 0.1, 5.0

_T = TypeVar("_T")


def run_request(request: Coroutine[Any, Any, _T], stopped: threading.Event | None = None) -> _T:
    """Run a request on fsspec's event loop and wait; if the wait ends early, cancel the request.

    Raises StorageError once `stopped` is set.
    """
    future = _submit(request)
    try:
        while stopped is not None and not future.done():
            wait([future], timeout=_POLL_INTERVAL_S)
            if stopped.is_set() and not future.done():
                raise StorageError(
                    "the request was cancelled because its reader was closed",
                    "open the reader again",
                )
        return future.result()
    except BaseException:
        if not future.done():
            future.cancel()
            wait([future], timeout=_CANCEL_TIMEOUT_S)
        raise


async def gather_requests(requests: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T]:
    """Return the results of all requests, run concurrently; the first error cancels the others."""
    semaphore = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)

    async def limited(request: Callable[[], Awaitable[_T]]) -> _T:
        async with semaphore:
            return await request()

    tasks = [asyncio.ensure_future(limited(request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def await_within(limit_s: float, request: Awaitable[_T]) -> _T:
    """Await a request; raise TimeoutError after `limit_s`, CancelledError if the task is cancelled.

    A library may turn a cancellation into an error of its own, and so does `asyncio.wait_for` of
    Python 3.11 if the request fails in the same instant; the caller would then try again.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await request
    except Exception as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError from error
        raise


async def on_storage_loop(request: Coroutine[Any, Any, _T]) -> _T:
    """Await, on any event loop, a request that has to run on fsspec's."""

    async def outcome() -> tuple[_T | None, Exception | None]:
        # If several concurrent requests fail, zarr raises the first error and drops the others;
        # asyncio would print the errors that nobody retrieves. So an error is a result here.
        try:
            return await request, None
        except Exception as error:
            return None, error

    result, error = await asyncio.wrap_future(_submit(outcome()))
    if error is not None:
        raise error
    return cast("_T", result)


_pending_requests: set[Future[Any]] = set()


def _submit(request: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Start a request on fsspec's event loop."""
    future = asyncio.run_coroutine_threadsafe(request, fsspec.asyn.get_loop())
    _pending_requests.add(future)
    future.add_done_callback(_pending_requests.discard)
    return future


@atexit.register
def _end_requests() -> None:
    """Cancel all requests: a response during the shutdown of the interpreter would abort it."""
    futures = list(_pending_requests)
    for future in futures:
        future.cancel()
    wait(futures, timeout=_CANCEL_TIMEOUT_S)


_CONNECTION_REFUSED_TEXTS = (
    "connection refused",
    "connect call failed",
    "[errno 111]",
    "econnrefused",
)


def backoff_delays(first_s: float, longest_s: float, deadline: float) -> Iterator[float]:
    """Yield the seconds to wait before each retry, drawn uniformly below a growing bound.

    The bound is `first_s` and doubles with each retry, up to `longest_s`. Random delays keep many
    processes that failed together from retrying together. The delays end before a retry that
    would begin at `deadline` or later, a time of `time.monotonic`.
    """
    bound_s = first_s
    while True:
        delay_s = random.uniform(0, min(bound_s, longest_s))
        if time.monotonic() + delay_s >= deadline:
            return
        yield delay_s
        bound_s = min(2 * bound_s, longest_s)


def is_connection_refused(error: BaseException) -> bool:
    """Return whether nothing listens at the address, by the error or one of its causes."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if isinstance(cause, ConnectionRefusedError) or any(
            words in text for words in _CONNECTION_REFUSED_TEXTS
        ):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
