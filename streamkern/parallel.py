"""Calls on a pool of threads, their results in order, a bounded number of them under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import TypeVar

T = TypeVar("T")


def in_turn(
    pool: ThreadPoolExecutor, calls: Iterable[Callable[[], T]], n_ahead: int
) -> Generator[T, None, None]:
    """The results of `calls` in their order; up to `n_ahead` are under way behind the next one.

    Closing the generator, or an error in a call, cancels what has not begun and waits for the rest.
    """
    waiting: deque[Future[T]] = deque()
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


def resumed(
    pool: ThreadPoolExecutor,
    kept: Iterable[Callable[[], T | None]],
    missing: Callable[[int], Iterable[Callable[[], T]]],
    n_ahead: int,
) -> Iterator[T]:
    """The results of `kept` up to the first None, item k, then those of `missing(k)`."""
    first = 0
    with closing(in_turn(pool, kept, n_ahead)) as found:
        for item in found:
            if item is None:
                break
            yield item
            first += 1
    yield from in_turn(pool, missing(first), n_ahead)
