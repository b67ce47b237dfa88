"""Check that scratch arrays do not overlap, and that their memory is reused."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamkern.backend.workspaces import SharedWorkspaces, Workspaces

DTYPES = (np.float32, np.float64, np.bool_, np.float16)


def test_workspaces_in_use_never_overlap() -> None:
    rng, workspaces = np.random.default_rng(0), Workspaces()
    for _ in range(50):
        with ExitStack() as blocks:
            arrays_in_use: list[np.ndarray] = []
            for k in range(int(rng.integers(1, 6))):
                shape = tuple(int(n) for n in rng.integers(0, 40, rng.integers(1, 4)))
                array = blocks.enter_context(workspaces.lend(np, shape, DTYPES[k % 4]))
                assert (array.shape, array.dtype) == (shape, np.dtype(DTYPES[k % 4]))
                assert array.flags.c_contiguous
                assert not any(np.shares_memory(array, used) for used in arrays_in_use)
                arrays_in_use.append(array)


def counting_namespace() -> tuple[Any, list[int]]:
    """Return NumPy with functions that record their allocations."""
    allocations: list[int] = []

    def empty(n_bytes: int, dtype: Any) -> np.ndarray:
        allocations.append(n_bytes)
        return np.empty(n_bytes, dtype)

    return SimpleNamespace(empty=empty), allocations


def test_repeated_step_allocates_nothing() -> None:
    xp, allocations = counting_namespace()
    workspaces = Workspaces()

    def step(rows: int) -> None:
        with workspaces.lend(xp, (8, 8, 2), np.float32):
            for width in (60, 60, 7):
                with (
                    workspaces.lend(xp, (rows, width), np.float32),
                    workspaces.lend(xp, (rows, 2), np.float64),
                ):
                    pass
        with workspaces.lend(xp, (10, 30), np.float32):
            pass

    for _ in range(3):
        step(100)
    allocations_before = list(allocations)
    for rows in (100, 100, 37, 100):
        step(rows)
    assert allocations == allocations_before
    assert sum(allocations[-3:]) < 2 * (8 * 8 * 2 * 4 + 100 * 60 * 4 + 100 * 2 * 8)


def in_threads(use: Callable[[], None], n: int) -> None:
    """Call a function on n threads, one after the other."""
    for _ in range(n):
        thread = threading.Thread(target=use, name="streamkern-test")
        thread.start()
        thread.join()


def test_workspaces_are_per_thread_and_released_on_error() -> None:
    xp, allocations = counting_namespace()
    workspaces = Workspaces()

    def use() -> None:
        with pytest.raises(KeyError), workspaces.lend(xp, (5,), np.float32):
            raise KeyError
        with workspaces.lend(xp, (5,), np.float32):
            pass

    in_threads(use, 2)
    use()
    assert allocations == [20, 20, 20]


def test_threads_share_workspaces_of_one_stream() -> None:
    """Check that there are as many buffers as were in use at once, for any number of threads."""
    xp, allocations = counting_namespace()
    workspaces = SharedWorkspaces(lambda: None)

    def use() -> None:
        with workspaces.lend(xp, (5,), np.float32):
            pass

    in_threads(use, 3)
    assert allocations == [20]
    with workspaces.lend(xp, (9,), np.uint8) as a, workspaces.lend(xp, (9,), np.uint8) as b:
        assert not np.shares_memory(a, b)


class Pool:
    """A memory pool as CuPy's: it keeps freed blocks, and lends each for a request of its size."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.n_bytes = self.peak = 0

    def empty(self, n_bytes: int, dtype: Any) -> np.ndarray:
        if n_bytes in self.free:
            self.free.remove(n_bytes)
        else:
            self.n_bytes += n_bytes
            self.peak = max(self.peak, self.n_bytes)
        array = np.empty(n_bytes, dtype)
        weakref.finalize(array, self.free.append, n_bytes)
        return array

    def free_all_blocks(self) -> None:
        self.n_bytes -= sum(self.free)
        self.free.clear()


def test_a_larger_array_takes_the_place_of_the_smaller_one_in_a_pool() -> None:
    """Check the peak of a pool while scratch memory grows, beside a buffer that is in use."""
    pool, MiB = Pool(), 1 << 20
    workspaces = SharedWorkspaces(pool.free_all_blocks)
    with workspaces.lend(pool, (MiB,), np.uint8):
        for size in (40, 50, 70, 60):
            with workspaces.lend(pool, (size * MiB,), np.uint8):
                pass
    assert pool.peak == 71 * MiB


def test_small_arrays_do_not_empty_the_pool() -> None:
    """Check that memory which others use again is not returned to the device for a few bytes."""
    emptied: list[int] = []
    workspaces = SharedWorkspaces(lambda: emptied.append(1))
    for size in (1000, 2000, 4000):
        with workspaces.lend(np, (size,), np.float32):
            pass
    assert not emptied
