"""Expressions of kernels are read and compiled by one thread at a time, and once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from streamkern.backend.expression import once, render
from streamkern.kernels.slope import derivative


class Passing:
    """Garbage whose collection lets another thread go on, and leaves such garbage behind."""

    wanted = False
    turn, done = threading.Event(), threading.Event()

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        if not Passing.wanted:
            return
        if threading.current_thread() is threading.main_thread():
            self.done.clear()
            self.turn.set()
            self.done.wait(0.005)  # which passes where the other one waits for this thread
        Passing()


@pytest.fixture
def collecting_at_every_step() -> Iterator[None]:
    before = gc.get_threshold()
    Passing.wanted = True
    Passing()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)
    Passing.wanted = False


def beside(work: Callable[[], Any], other: Callable[[], Any]) -> list[BaseException]:
    """Errors of `work` here while a thread does `other` whenever a collection lets it."""
    failed: list[BaseException] = []
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            if Passing.turn.wait(0.01):
                try:
                    other()
                except BaseException as error:
                    failed.append(error)
                Passing.turn.clear()
                Passing.done.set()

    thread = threading.Thread(target=answer, name="other")
    thread.start()
    try:
        work()
    except BaseException as error:
        failed.append(error)
    finally:
        over.set()
        thread.join()
    return failed


def test_two_threads_may_read_expressions_at_once(collecting_at_every_step: None) -> None:
    """CPython counts the depth of the trees of all threads together."""
    fresh = iter(range(10**6))

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            render(f"exp(-{next(fresh)}.5 * s) * (1 + s / {next(fresh)}.25)", "f4({})")
            derivative(f"exp(-sqrt(s + {next(fresh)}))")

    def here() -> None:
        for _ in range(3):
            deep(0)

    assert beside(here, lambda: deep(9)) == []


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
