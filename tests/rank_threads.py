"""Ranks that are threads of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

from threadpoolctl import threadpool_limits

from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import RankLostError
from streamkern.train.loop import rank_coordinator
from tools.rank_threads import Threads

T = TypeVar("T")


def on_threads(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """Return the result of each rank; a rank that fails ends the others.

    The BLAS has one thread, as its limit is one for all threads of a process: a rank that leaves
    `Backend.single_threaded_blas` would lift it for the others, and so change their last bits.
    Ranks agree after every step, so that a test knows where they stop.
    """
    results: list[Any] = [None] * size
    failures: dict[int, BaseException] = {}

    def one(ranks: Threads) -> None:
        try:
            results[ranks.rank] = work(ranks)
        except BaseException as error:
            failures[ranks.rank] = error
            ranks.abort()

    threads = [threading.Thread(target=one, args=(ranks,)) for ranks in Threads.made(size)]
    with threadpool_limits(1, "blas"), patch.object(rank_coordinator, "AGREEMENT_INTERVAL_S", 0.0):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        first = sorted(failures, key=lambda rank: (type(failures[rank]) is RankLostError, rank))
        raise failures[first[0]]
    return results
