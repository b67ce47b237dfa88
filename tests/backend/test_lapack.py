"""LAPACK's routines compute what they say, and let other threads go on meanwhile."""

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

Array = npt.NDArray[Any]
rng = np.random.default_rng(0)
DTYPES = [np.float32, np.float64]


def positive(n: int, dtype: npt.DTypeLike) -> Array:
    A = rng.standard_normal((n, n))
    return (A @ A.T / n + np.eye(n)).astype(dtype)


def close(actual: Array, expected: Array) -> None:
    """To the rounding of a few hundred well conditioned equations."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e3 * np.finfo(actual.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 97])
def test_the_factor_comes_in_the_place_of_the_lower_part(n: int, dtype: Any) -> None:
    A = positive(n, dtype)
    whole = np.full((n, n + 3), 7, dtype)  # rows of a wider array
    whole[:, :n] = np.tril(A) + np.triu(np.full_like(A, np.nan), 1)
    assert lapack.potrf(whole[:, :n])
    close(np.tril(whole[:, :n]), np.linalg.cholesky(A))
    assert (whole[:, n:] == 7).all()
    assert np.isnan(whole[:, :n][np.triu_indices(n, 1)]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_positive_has_no_factor(dtype: Any) -> None:
    assert not lapack.potrf(np.diag(np.array([1, -1, 1], dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [0, 1, 5])
def test_triangular_equations_are_solved_in_place(k: int, dtype: Any) -> None:
    n = 31
    whole = np.tril(positive(2 * n, dtype))
    L = whole[n:, n:]  # a block of it
    for transposed in (False, True):
        B = rng.standard_normal((n, k)).astype(dtype)
        X = B.copy()
        lapack.trsm(L, X, transposed=transposed)
        close((L.T if transposed else L) @ X, B)
    B = rng.standard_normal((k, n)).astype(dtype)
    X = B.copy()
    lapack.trsm(L, X, right=True)
    close(X @ L.T, B)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (60, 60), (200, 7)])
def test_the_largest_eigenpairs(n: int, k: int, dtype: Any) -> None:
    A = positive(n, dtype)
    before = A.copy()
    values, vectors = lapack.syevr(A, k)
    close(values, np.linalg.eigvalsh(A)[n - k :])
    close(A @ vectors, vectors * values)
    close(vectors.T @ vectors, np.eye(k, dtype=dtype))
    np.testing.assert_array_equal(A, before)


@pytest.mark.parametrize("work", ["potrf", "trsm", "syevr"])
def test_other_threads_go_on(work: str) -> None:
    """A routine that keeps the interpreter would be over before the other thread says a word."""
    A = positive(1500, np.float64)
    L = np.linalg.cholesky(A)
    calls: dict[str, Callable[[], Any]] = {
        "potrf": lambda: lapack.potrf(A.copy()),
        "trsm": lambda: lapack.trsm(L, A),
        "syevr": lambda: lapack.syevr(A, 100),
    }
    under_way, seen = threading.Event(), 0

    def watch() -> None:
        nonlocal seen
        while under_way.is_set():
            time.sleep(0.001)
            seen += 1

    under_way.set()
    other = threading.Thread(target=watch)
    other.start()
    began = seen
    calls[work]()
    ended = seen
    under_way.clear()
    other.join()
    assert ended - began > 3


def blas_threads() -> set[int]:
    return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}


def test_the_last_thread_out_restores_the_limit_that_the_first_one_found() -> None:
    """No thread keeps the hold on limits that threadpoolctl gives it while it is alive."""
    blas, seen = lapack.blas_libraries(), list[set[int]]()
    turns = threading.Barrier(2, timeout=60)

    def first() -> None:
        with lapack.one_thread(blas):
            seen.append(blas_threads())
            turns.wait()
            turns.wait()
        turns.wait()
        turns.wait()
        with threadpool_limits(3, user_api="blas"):
            seen.append(blas_threads())

    with threadpool_limits(2, user_api="blas"):
        thread = threading.Thread(target=first)
        thread.start()
        turns.wait()
        with lapack.one_thread(blas):
            turns.wait()
            turns.wait()
            seen.append(blas_threads())
        seen.append(blas_threads())
        turns.wait()
        thread.join()
        assert seen == [{1}, {1}, {2}, {3}]
        with lapack.one_thread(blas), lapack.one_thread(blas):
            assert blas_threads() == {1}
        assert blas_threads() == {2}
