"""Limit BLAS threads in the tests of solvers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streamkern.backend.base import Backend


@pytest.fixture(autouse=True)
def one_thread_for_a_test() -> Iterator[None]:
    """Limit BLAS to one thread for a whole test.

    Solvers set the same limit in each of thousands of steps; within this one, that costs nothing.
    """
    with Backend(threads=1) as backend, backend.single_threaded_blas():
        yield
