"""Check products of float16 parts against float64, on the CPU and on the stand-in for CuPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from streamkern.backend import split_products
from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.backend.split_products import add_split_gram, solve_split_right
from tests import fake_cupy
from tests.host_cuda import COMPILER
from tests.solver_problems import rows

PANEL, N = 16, 60
WIDTHS = pytest.mark.parametrize("b", [7, 16, 48, 53])
"""Widths of a part of a panel, of one, of several, and of several and a part."""


@pytest.fixture(params=["cpu", "gpu"])
def backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Backend]:  # fmt: skip
    monkeypatch.setattr(split_products, "SPLIT_PANEL", PANEL)
    if request.param == "gpu":
        if COMPILER is None:
            pytest.skip("needs a C++ compiler")
        fake_cupy.install(monkeypatch)
    with get_backend(request.param) as backend, backend.active():
        yield backend


def triangle(b: int) -> np.ndarray:
    """Return a well-conditioned lower triangle in float32."""
    return np.tril(0.3 * rows(3, b, b) + 2 * np.eye(b)).astype(np.float32)


@WIDTHS
def test_solution_is_as_accurate_as_in_float32(backend: Backend, b: int) -> None:
    """Check B = X L^T for the solution X, for entries far outside the range of float16."""
    L = triangle(b)
    B = (1e8 * rows(4, N, b)).astype(np.float32)
    X = solve_split_right(backend, backend.asarray(L), backend.asarray(B.copy()))
    X = backend.to_host(X).astype(np.float64)
    bound = 2.0**-21 * np.abs(X) @ np.abs(L.T)
    assert (np.abs(X @ L.T - B) <= bound).all()


@WIDTHS
def test_gram_matrix_is_added_as_accurately_as_in_float32(backend: Backend, b: int) -> None:
    W = (1e6 * rows(5, N, b)).astype(np.float32)
    C = (1e10 * rows(6, b, b)).astype(np.float32)
    added = backend.asarray(C.copy())
    add_split_gram(backend, added, backend.asarray(W), 0.25)
    W64 = W.astype(np.float64)
    bound = 2.0**-21 * (np.abs(C) + 0.25 * np.abs(W64.T) @ np.abs(W64))
    error = np.abs(backend.to_host(added) - (C + 0.25 * W64.T @ W64))
    assert (np.tril(error) <= bound).all()


@pytest.mark.parametrize("invalid", [np.nan, np.inf])
def test_invalid_number_reaches_the_gram_matrix(invalid: float, backend: Backend) -> None:
    W = np.ones((N, 48), np.float32)
    W[20, 18] = invalid
    C = backend.asarray(np.zeros((48, 48), np.float32))
    with np.errstate(invalid="ignore", over="ignore"):
        add_split_gram(backend, C, backend.asarray(W), 1.0)
    assert not np.isfinite(backend.to_host(C)[18, 18])


def test_operands_of_large_products_are_float16_and_sums_are_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check the GEMMs of the device: dtypes, numbers of terms, and the float32 products."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(split_products, "SPLIT_PANEL", PANEL)
    calls: list[tuple[str, int, tuple[int, ...]]] = []
    with get_backend("gpu") as backend, backend.active():
        gemm = backend.blas.gemm

        def count(A: np.ndarray, B: np.ndarray, out: np.ndarray, **options: object) -> None:
            calls.append((A.dtype.name, A.shape[1], out.shape))
            gemm(A, B, out, **options)

        monkeypatch.setattr(backend.blas, "gemm", count)
        W = backend.asarray(rows(7, 40, 48), np.float32)
        solve_split_right(backend, backend.asarray(triangle(48)), W)
        assert calls == [("float32", 16, (40, 32)), ("float16", 48, (40, 16))]
        calls.clear()
        add_split_gram(backend, backend.xp.zeros((48, 48), np.float32), W, 1.0)
    assert calls == [
        ("float16", 3 * k, shape) for k in (16, 16, 8) for shape in ((16, 32), (16, 48))
    ]
