"""`once`: threads that ask for the same value at once get the one that the first of them makes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from streamkern.basics.once import once


def test_threads_that_ask_at_once_get_one_value() -> None:
    made, together = list[int](), threading.Barrier(4)

    @once
    def value(key: int) -> object:
        made.append(key)
        return object()

    def ask(_: int) -> object:
        together.wait()
        return value(3)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, range(4)))) == 1
    assert made == [3]
    assert value(4) is not value(3)


def test_an_error_is_not_kept_and_values_may_need_each_other() -> None:
    tries = list[int]()

    @once
    def first() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ZeroDivisionError
        return 1

    @once
    def second() -> int:
        return first() + 1

    with pytest.raises(ZeroDivisionError):
        second()
    assert second() == second() == 2
    assert len(tries) == 2
