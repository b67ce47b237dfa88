"""A limit of BLAS threads that the tests of solvers set once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streamkern.backend.base import Backend


@pytest.fixture(autouse=True)
def one_thread_for_a_test() -> Iterator[None]:
    """Set the limit of one BLAS thread around a test, and not for each of thousands of steps.

    It is that of every backend, and nested in it their own costs nothing. Each test begins and ends
    without it.
    """
    with Backend(threads=1) as backend, backend.single_threaded_blas():
        yield
