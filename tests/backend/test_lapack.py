"""Check LAPACK routines, and that other threads run in the meantime."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from streamkern.backend import lapack
from streamkern.backend.base import Backend

Array = npt.NDArray[Any]
rng = np.random.default_rng(0)


def positive_definite(n: int, dtype: npt.DTypeLike) -> Array:
    """Return a random positive definite matrix (n, n)."""
    A = rng.standard_normal((n, n))
    return (A @ A.T / n + np.eye(n)).astype(dtype)


@pytest.mark.parametrize("work", ["potrf", "trsm", "syevr"])
def test_lapack_releases_interpreter_lock(work: str) -> None:
    """Check that another thread works during a routine."""
    A = positive_definite(1500, np.float64)
    L = np.linalg.cholesky(A)
    calls: dict[str, Callable[[], Any]] = {
        "potrf": lambda: lapack.potrf(A.copy()),
        "trsm": lambda: lapack.trsm(L, A),
        "syevr": lambda: lapack.syevr(A, 100),
    }
    under_way, n_checks = threading.Event(), 0

    def watch() -> None:
        nonlocal n_checks
        while under_way.is_set():
            time.sleep(0.001)
            n_checks += 1

    under_way.set()
    watcher = threading.Thread(target=watch)
    watcher.start()
    start_time = n_checks
    calls[work]()
    ended = n_checks
    under_way.clear()
    watcher.join()
    assert ended - start_time > 3


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_column_is_solved_in_place(transposed: bool, dtype: npt.DTypeLike) -> None:
    """Check a column of a wider array, and that the upper triangle is not read."""
    L, B = positive_definite(30, dtype), rng.standard_normal((30, 4)).astype(dtype)
    X, lower = B.copy(), np.tril(L).astype(np.float64)
    lapack.trsv(L, X[:, 1], transposed=transposed)
    truth = np.linalg.solve(lower.T if transposed else lower, B[:, 1])
    np.testing.assert_allclose(X[:, 1], truth, atol=1e3 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(X[:, [0, 2, 3]], B[:, [0, 2, 3]])


def test_few_columns_are_solved_without_trsm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this because `trsm` copies the triangle, which takes longer than the solution."""
    L, B = np.linalg.cholesky(positive_definite(9, np.float64)), rng.standard_normal((9, 2))
    truth = np.linalg.solve(L, B)
    monkeypatch.setattr(lapack, "trsm", None)
    np.testing.assert_allclose(Backend(1).solve_lower(L, B), truth, rtol=1e-12)


def blas_threads() -> set[int]:
    return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}


def test_last_thread_restores_blas_limit_of_first() -> None:
    """Check that no thread keeps the limit that threadpoolctl gives it."""
    blas, limits = lapack.blas_libraries(), list[set[int]]()
    turns = threading.Barrier(2, timeout=60)

    def first() -> None:
        with lapack.one_thread(blas):
            limits.append(blas_threads())
            turns.wait()
            turns.wait()
        turns.wait()
        turns.wait()
        with threadpool_limits(3, user_api="blas"):
            limits.append(blas_threads())

    with threadpool_limits(2, user_api="blas"):
        thread = threading.Thread(target=first)
        thread.start()
        turns.wait()
        with lapack.one_thread(blas):
            turns.wait()
            turns.wait()
            limits.append(blas_threads())
        limits.append(blas_threads())
        turns.wait()
        thread.join()
        assert limits == [{1}, {1}, {2}, {3}]
        with lapack.one_thread(blas), lapack.one_thread(blas):
            assert blas_threads() == {1}
        assert blas_threads() == {2}
