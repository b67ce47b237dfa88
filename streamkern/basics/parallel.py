"""Calls on a pool of threads, with ordered results and a bounded number of calls in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

_T = TypeVar("_T")


def ordered_map(
    pool: ThreadPoolExecutor, calls: Iterable[Callable[[], _T]], n_ahead: int
) -> Generator[_T, None, None]:
    """Yield the results of `calls` in their order, with up to `n_ahead` in flight after the next.

    Closing the generator, or an error in a call, cancels calls that have not begun and waits for
    the rest.
    """
    waiting: deque[Future[_T]] = deque()
    try:
        for call in calls:
            waiting.append(pool.submit(call))
            if len(waiting) > n_ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        wait(waiting)
