"""Check the operations of the backend against NumPy, and its thread pool."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.backend import devices as module
from streamkern.backend.base import Backend, tiles
from streamkern.backend.devices import get_backend, gpu_problem
from streamkern.basics.errors import BackendError, ConfigError
from streamkern.basics.machine import available_cpus
from streamkern.basics.optional import install_command
from tests.solver_problems import Array, rows
from tests.traced_memory import traced_memory

DTYPES = [np.float32, np.float64]


def close_to(actual: Array, desired: Array, growth: float = 1.0) -> None:
    """Compare to 100 eps times the largest number and `growth`, a bound of the condition number."""
    eps = float(np.finfo(actual.dtype).eps)
    scale = float(np.abs(desired).max())
    np.testing.assert_allclose(actual, desired, rtol=0, atol=100 * eps * growth * scale)


def positive(seed: int, b: int, dtype: npt.DTypeLike) -> Array:
    """Return a well-conditioned positive definite matrix."""
    R = rows(seed, b, 2 * b)
    return np.ascontiguousarray((R @ R.T / b + np.eye(b)).astype(dtype))


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most that was allocated at one time during a call, after a first call."""
    call()
    with traced_memory() as traced:
        call()
    return traced.peak


@given(st.integers(0, 100), st.integers(1, 30))
def test_tiles_cover_the_range_in_order(n: int, size: int) -> None:
    parts = tiles(n, size)
    assert [i for part in parts for i in range(n)[part]] == list(range(n))
    assert all(0 < part.stop - part.start <= size for part in parts)


# --- dense algebra ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b", [1, 2, 37, 150])
def test_cholesky_returns_lower_factor(b: int, dtype: npt.DTypeLike) -> None:
    A = positive(b, b, dtype)
    L = A.copy()
    L[np.triu_indices(b, 1)] = np.nan  # only the lower part is read
    assert Backend(1).cholesky(L)
    close_to(L, np.linalg.cholesky(A.astype(np.float64)), b)
    assert not L[np.triu_indices(b, 1)].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_cholesky_factors_part_of_array(dtype: npt.DTypeLike) -> None:
    """Check rows of a wider array, whose other columns stay unchanged."""
    full = np.zeros((40, 50), dtype)
    A = positive(0, 30, dtype)
    full[:30, :30] = A
    L = full[:30, :30]
    assert Backend(1).cholesky(L)
    close_to(L, np.linalg.cholesky(A.astype(np.float64)))
    assert not full[30:].any()
    assert not full[:, 30:].any()
    B = rows(1, 30, 2).astype(dtype)
    close_to(Backend(1).solve_lower(L, B.copy()), np.linalg.solve(L.astype(np.float64), B), 30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cholesky_keeps_entries_above_diagonal_squares(
    dtype: npt.DTypeLike, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamkern.backend.dense.SINGLE_THREAD_COLUMNS", 8)
    A, backend = positive(0, 50, dtype), Backend(2)
    backend.chunk = 32
    L, squares = A.copy(), np.arange(50) // backend.diagonal_square(50)
    above = squares[:, None] < squares
    L[above] = 7
    assert backend.cholesky(L, keep_upper=True)
    close_to(np.tril(L), np.linalg.cholesky(A.astype(np.float64)), 50)
    assert above.any()
    assert (L[above] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_cholesky_fails_on_indefinite_or_non_finite_matrix(dtype: npt.DTypeLike) -> None:
    A = positive(0, 30, dtype)
    for i, j, value in ((20, 20, -1.0), (0, 0, np.nan), (29, 3, np.nan), (29, 29, np.inf)):
        invalid = A.copy()
        invalid[i, j] = value
        assert not Backend(1).cholesky(invalid)
    assert not Backend(1).cholesky(np.zeros((3, 3), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("b", "k"), [(1, 1), (5, 1), (60, 2), (60, 7), (7, 60)])
def test_triangular_solves_equal_reference(b: int, k: int, dtype: npt.DTypeLike) -> None:
    backend = Backend(1)
    L = positive(b, b, dtype)
    assert backend.cholesky(L)
    B, W = rows(1, b, k).astype(dtype), rows(2, k, b).astype(dtype)
    L64 = L.astype(np.float64)
    for transposed, truth in ((False, np.linalg.solve(L64, B)), (True, np.linalg.solve(L64.T, B))):
        X = B.copy()
        assert backend.solve_lower(L, X, transposed) is X
        close_to(X, truth, b)
    X = W.copy()
    assert backend.solve_lower_right(L, X) is X
    close_to(X, np.linalg.solve(L64, W.T).T, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("b", [1, 2, 16, 17, 150])
def test_triangular_solve_of_triangular_right_side(
    b: int, threads: int, dtype: npt.DTypeLike
) -> None:
    L, B = positive(b, b, dtype), np.tril(rows(1, b, b)).astype(dtype)
    with Backend(threads) as backend:
        backend.chunk = 32
        assert backend.cholesky(L)
        X = B.copy()
        assert backend.solve_lower_triangular(L, X) is X
        inverse, eye = backend.inverse_lower(L), np.eye(b, dtype=L.dtype)
        np.testing.assert_array_equal(inverse, backend.solve_lower_triangular(L, eye))
    close_to(X, np.linalg.solve(L.astype(np.float64), B), b)
    close_to(inverse, np.linalg.inv(L.astype(np.float64)), b)
    assert not np.triu(X, 1).any()
    assert not np.triu(inverse, 1).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_gram_and_mirror_equal_gram_matrix(dtype: npt.DTypeLike) -> None:
    C, parts = np.zeros((50, 50), dtype), [rows(i, 20 + i, 50).astype(dtype) for i in range(3)]
    C[np.triu_indices(50, 1)] = 9.0  # the upper part does not matter
    for W in parts:
        Backend(1).add_gram(C, W, 0.25)
    full = np.concatenate(parts).astype(np.float64)
    close_to(np.tril(C), np.tril(full.T @ full / 4))
    Backend(1).mirror_lower(C)
    np.testing.assert_array_equal(C, C.T)
    close_to(C, full.T @ full / 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_gram_of_triangle_skips_zeros(dtype: npt.DTypeLike) -> None:
    backend, C = Backend(2), np.zeros((100, 100), dtype)
    backend.chunk = 32
    W = np.tril(rows(0, 100, 100)).astype(dtype)
    expected = np.tril(W.T.astype(np.float64) @ W / 4)
    for cols in range(0, 100, 32):  # whole blocks above the diagonal
        W[:cols, cols : cols + 32] = np.nan
    backend.add_gram(C, W, 0.25, lower=True)
    close_to(np.tril(C), expected)


def test_mirror_lower_spans_several_blocks() -> None:
    C = rows(0, 2100, 2100).astype(np.float32)
    expected = np.tril(C) + np.tril(C, -1).T
    Backend(1).mirror_lower(C)
    np.testing.assert_array_equal(C, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("m", "k", "c"), [(1, 1, 1), (70, 33, 1), (33, 70, 5), (90, 90, 3)])
def test_products_equal_numpy(m: int, k: int, c: int, threads: int, dtype: npt.DTypeLike) -> None:
    A, B, Bt = (rows(i, *shape).astype(dtype) for i, shape in enumerate([(m, k), (k, c), (m, c)]))
    wide = np.zeros((m, k + 9), dtype)
    wide[:, 4 : 4 + k] = A
    with Backend(threads) as backend:
        backend.chunk = 16
        for left in (A, wide[:, 4 : 4 + k]):  # a block of columns of K(X, Z) is not contiguous
            out, out_t = np.full((m, c), np.nan, dtype), np.full((k, c), np.nan, dtype)
            assert backend.matmul(left, B, out) is out
            assert backend.matmul_t(left, Bt, out_t) is out_t
            close_to(out, A.astype(np.float64) @ B)
            close_to(out_t, A.T.astype(np.float64) @ Bt)
        if m == k:
            L = np.tril(A)
            close_to(backend.matmul(L, B, out, lower=True), L.astype(np.float64) @ B)
            close_to(backend.matmul_t(L, B, out_t, lower=True), L.T.astype(np.float64) @ B)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", [1, 2, 5])
def test_product_of_one_row_has_same_bits_as_in_a_batch(c: int, dtype: npt.DTypeLike) -> None:
    tile, W = rows(1, 20, 300).astype(dtype), rows(2, 300, c).astype(dtype)
    batch_product, row_products = np.zeros((2, 20, c), dtype)
    backend = Backend(1)
    backend.add_product(tile, W, batch_product)
    for i in range(20):
        backend.add_product(tile[i : i + 1], W, row_products[i : i + 1])
    # Bit for bit on some processors. On Intel's OpenBLAS adds up the last of few rows otherwise.
    terms = np.abs(tile).astype(np.float64) @ np.abs(W)
    assert (np.abs(row_products - batch_product) <= 2 * np.finfo(dtype).eps * terms).all()
    close_to(batch_product, tile.astype(np.float64) @ W)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_algebra_allocates_no_large_array(dtype: npt.DTypeLike) -> None:
    """Check that less than a tenth of a matrix is allocated.

    A wrong memory order would copy all of it.
    """
    b, c = 400, 3
    backend = Backend(1)
    A, L = positive(0, b, dtype), positive(0, b, dtype)
    assert backend.cholesky(L)
    K, square = rows(1, b, b).astype(dtype), np.zeros((b, b), dtype)
    thin, out = rows(2, b, c).astype(dtype), np.zeros((b, c), dtype)

    def factor() -> None:
        square[...] = A
        backend.cholesky(square)

    calls: list[Callable[[], object]] = [
        factor,
        lambda: backend.solve_lower(L, K),
        lambda: backend.solve_lower(L, K, transposed=True),
        lambda: backend.solve_lower_right(L, K),
        lambda: backend.add_gram(square, K, 1e-3),
        lambda: backend.matmul(A, thin, out),
        lambda: backend.matmul_t(A, thin, out),
        lambda: backend.matmul(L, thin, out, lower=True),
        lambda: backend.matmul_t(L, thin, out, lower=True),
    ]
    for i, call in enumerate(calls):
        assert peak_bytes(call) < A.nbytes / 10, f"call {i}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (60, 7), (60, 60), (200, 7)])
def test_top_eigenpairs_are_in_descending_order(n: int, k: int, dtype: npt.DTypeLike) -> None:
    A = positive(3, n, dtype)
    original = A.copy()
    lam, E = Backend(1).top_eigh(A, k)
    truth = np.linalg.eigvalsh(A.astype(np.float64))[::-1]
    close_to(lam, truth[:k])
    close_to(A @ E, E.astype(np.float64) * lam, 10)
    close_to((E.T @ E).astype(dtype), np.eye(k), 10)
    np.testing.assert_array_equal(A, original)


# --- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lower", [False, True])
def test_products_have_same_bits_for_any_number_of_threads(lower: bool) -> None:
    A, B = np.tril(rows(0, 200, 200)).astype(np.float32), rows(1, 200, 4).astype(np.float32)
    results = []
    for threads in (1, 2, 3):
        with Backend(threads) as backend:
            backend.chunk = 32
            out, out_t = np.empty_like(B), np.empty_like(B)
            backend.matmul(A, B, out, lower=lower)
            backend.matmul_t(A, B, out_t, lower=lower)
            results.append((out, out_t))
    for out, out_t in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(out_t, results[0][1])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_run_calls_every_item_once(threads: int) -> None:
    items_run: list[int] = []
    with Backend(threads) as backend:
        backend.run(items_run.append, range(100))
        backend.run(items_run.append, [])
        backend.run(items_run.append, (i for i in [100]))
    assert sorted(items_run) == list(range(101))


@pytest.mark.parametrize("threads", [1, 3])
def test_run_raises_error_and_starts_no_further_items(threads: int) -> None:
    items_run: list[int] = []

    def fail_at_5(i: int) -> None:
        items_run.append(i)
        if i == 5:
            raise ValueError("tile 5")

    with Backend(threads) as backend:
        with pytest.raises(ValueError, match="tile 5"):
            backend.run(fail_at_5, range(10_000))
        assert len(items_run) < 10_000
        n_seen = len(items_run)
        backend.run(items_run.append, [0])  # and can be used again
        assert len(items_run) == n_seen + 1


def test_run_ignores_underflow_settings_of_caller() -> None:
    """Check that results do not depend on the thread, which may be the caller's."""
    backend, out, barrier = Backend(threads=2), np.full(2, 1e-300), threading.Barrier(2)

    def underflow(k: int) -> None:
        barrier.wait(timeout=60)
        out[k : k + 1] *= 1e-300

    try:
        with np.errstate(all="raise"):
            backend.run(underflow, range(2))
    finally:
        backend.close()
    assert not out.any()


def test_run_raises_after_all_threads_have_stopped() -> None:
    """Check that the caller may free the output as soon as `run` has raised."""
    has_started, has_failed, has_finished = threading.Event(), threading.Event(), threading.Event()

    def work(i: int) -> None:
        if i == 0:
            has_started.wait()
            has_failed.set()
            raise ValueError("first")
        has_started.set()
        has_failed.wait()
        threading.Event().wait(0.05)  # still at work while the other has failed
        has_finished.set()

    with Backend(2) as backend:
        with pytest.raises(ValueError, match="first"):
            backend.run(work, [0, 1])
        assert has_finished.is_set()


def test_close_ends_threads_and_backend_can_be_reused() -> None:
    def ours() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("streamkern-tile")]

    backend = Backend(2)
    backend.run(lambda i: None, range(10))
    assert ours()
    backend.close()
    backend.close()
    assert not ours()
    items_run: list[int] = []
    backend.run(items_run.append, range(3))
    assert items_run == [0, 1, 2]


# --- names --------------------------------------------------------------------------------------


def test_get_backend_accepts_device_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_problem", lambda index=0: f"none of {index}")
    with pytest.warns(UserWarning, match="device='auto' uses the CPU: none of 0"):
        auto = get_backend("auto", threads=2)
    with get_backend("cpu", threads=1) as cpu, auto:
        assert (cpu.name, cpu.threads) == ("cpu", 1)
        assert (auto.name, auto.threads) == ("cpu", 2)
    for name, index in (("gpu", 0), ("gpu:3", 3)):
        with pytest.raises(BackendError, match=rf"device='{name}' cannot be used: none of {index}"):
            get_backend(name)
    for name in ("tpu", "gpu:x", "gpu0", ""):
        with pytest.raises(ConfigError, match="is not known"):
            get_backend(name)
    with pytest.raises(ConfigError, match="threads=0"):
        get_backend("cpu", threads=0)


def test_gpu_problem_describes_missing_cupy_and_driver_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert gpu_problem() == f"CuPy is not installed ({install_command('gpu-cuda12')})"

    def no_driver(index: int) -> None:
        raise OSError("driver too old")

    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=no_driver))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    assert gpu_problem(2) == "no usable CUDA device 2 (OSError: driver too old)"


def test_backend_defaults_to_threads_and_memory_of_process() -> None:
    with Backend() as backend:
        assert backend.threads == available_cpus() >= 1
        assert backend.memory_available() > 0


def test_description_is_json_serialisable() -> None:
    description = Backend(1).describe()
    assert description["device"] == "cpu"
    assert json.loads(json.dumps(description)) == description


def test_cpu_uploads_are_views() -> None:
    backend = Backend(1)
    host = np.arange(12, dtype=np.uint8).reshape(3, 4)
    uploader = backend.uploader(2)
    assert np.shares_memory(uploader.upload(host), host)
    uploader.close()
    assert np.shares_memory(backend.to_host(host), host)
    assert backend.asarray(host.T).flags.c_contiguous
