"""Compare arguments for cuBLAS with the intended products, by a column-major stand-in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.backend.device_algebra import _block_rows
from streamkern.backend.row_major import RowMajor, triangle_parts
from tests import numpy_cublas
from tests.numpy_cublas import HANDLE, TYPES, addressed

SIZES = st.integers(1, 6)
GAPS = st.integers(0, 2)
PRECISIONS = st.sampled_from([(np.float32, 1e-5), (np.float64, 1e-13)])


@pytest.fixture(scope="module")
def blas() -> RowMajor:
    return RowMajor(numpy_cublas, TYPES, lambda: HANDLE)


def matrix(seed: int, rows: int, columns: int, dtype: Any, gap: int = 0) -> Any:
    """Return random numbers as a view whose rows are `gap` elements apart."""
    full = np.random.default_rng([seed, 3]).normal(size=(rows, columns + gap)).astype(dtype)
    return addressed(full)[:, :columns]


def lower(seed: int, b: int, dtype: Any, gap: int) -> Any:
    """Return a well-conditioned lower triangular matrix with rubbish above the diagonal."""
    L = matrix(seed, b, b, dtype, gap)
    L[np.diag_indices(b)] += 4
    return L


def assert_close(actual: Any, desired: Any, tolerance: float) -> None:
    """Check that two arrays agree to `tolerance`, relative to 1 plus the largest number."""
    size = 1 + abs(desired).max(initial=0)
    np.testing.assert_allclose(actual, desired, rtol=0, atol=tolerance * size)


@given(SIZES, SIZES, SIZES, GAPS, PRECISIONS, st.booleans(), st.sampled_from([0.0, 1.0, -0.5]))
def test_products_equal_reference(
    blas: RowMajor, r: int, k: int, c: int, gap: int, precision: Any, transposed: bool, beta: float
) -> None:
    dtype, tolerance = precision
    A, out = matrix(0, r, k, dtype, gap), matrix(2, r, c, dtype, gap)
    B = matrix(1, c, k, dtype, gap) if transposed else matrix(1, k, c, dtype, gap)
    truth = 0.75 * (A @ (B.T if transposed else B)) + beta * out
    if beta == 0:
        out[...] = np.nan
    blas.gemm(A, B, out, transposed=transposed, alpha=0.75, beta=beta)
    assert_close(out, truth, tolerance)


@given(SIZES, SIZES, SIZES, GAPS, PRECISIONS)
def test_products_with_transposed_left_side(
    blas: RowMajor, r: int, k: int, c: int, gap: int, precision: Any
) -> None:
    dtype, tolerance = precision
    A, B, out = matrix(0, k, r, dtype, gap), matrix(1, k, c, dtype, gap), matrix(2, r, c, dtype)
    truth = 2 * (A.T @ B)
    blas.gemm(A, B, out, left_transposed=True, alpha=2)
    assert_close(out, truth, tolerance)


@given(
    st.integers(0, 40), SIZES, st.integers(2, 50), GAPS, PRECISIONS, st.booleans(), st.booleans()
)
def test_products_with_triangular_operand(
    blas: RowMajor, n: int, c: int, block: int, gap: int, precision: Any, transposed: bool,
    columns: bool,
) -> None:  # fmt: skip
    """Check also a right side with contiguous columns, and sizes that are not halved evenly."""
    dtype, tolerance = precision
    A = matrix(0, n, n, dtype, gap)
    A *= np.tri(n, dtype=dtype)
    B = matrix(1, c, n, dtype, gap).T if columns else matrix(1, n, c, dtype, gap)
    out = matrix(2, n, c, dtype, gap)
    truth = 0.5 * ((A.T if transposed else A) @ B)
    out[...] = np.nan
    blas.lower(A, B, out, block, transposed=transposed, scale=0.5)
    assert_close(out, truth, tolerance)


@pytest.mark.parametrize("transposed", [False, True])
def test_half_precision_triangle_product_accumulates_in_float32(
    blas: RowMajor, transposed: bool
) -> None:
    A, B = (matrix(seed, 40, columns, np.float16) for seed, columns in ((0, 40), (1, 6)))
    A *= np.tri(40, dtype=np.float16)
    out = matrix(2, 40, 6, np.float32)
    wide = A.T.astype(np.float64) if transposed else A.astype(np.float64)
    blas.lower(A, B, out, 7, transposed=transposed)
    assert_close(out, wide @ B.astype(np.float64), 1e-5)


@pytest.mark.parametrize(
    ("n", "launches", "share"),
    [(4000, 1, 1.0), (4096, 2, 0.75), (15_000, 3, 0.625), (15_001, 4, 0.625), (60_000, 5, 0.53125)],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_triangle_parts_read_few_zeros(
    n: int, launches: int, share: float, transposed: bool
) -> None:
    parts = triangle_parts(n, 4096, n, 10, 10, transposed)
    assert len(parts) == launches
    entries = sum(part.r * part.k * part.n_products for part in parts)
    assert entries / n**2 == pytest.approx(share, rel=1e-3)


def test_scalars_are_allocated_once() -> None:
    """Check that each product gets its own numbers, in its precision."""
    blas = RowMajor(numpy_cublas, TYPES, lambda: HANDLE)
    for _ in range(3):
        for dtype in (np.float32, np.float64):
            A, B, out = (matrix(k, 3, 3, dtype) for k in range(3))
            for alpha, beta in ((1.0, 0.0), (0.0, 1.0), (-2.0, 1.0)):
                truth = alpha * (A @ B) + beta * out
                blas.gemm(A, B, out, alpha=alpha, beta=beta)
                assert_close(out, truth, 1e-5)
    assert len(blas._numbers) == 6


@given(SIZES, SIZES, SIZES)
def test_half_precision_products_accumulate_in_float32(
    blas: RowMajor, r: int, k: int, c: int
) -> None:
    A, B = (np.rint(1000 * matrix(i, n, k, np.float64)) for i, n in enumerate((r, c)))
    half = [addressed(a.clip(-2048, 2048).astype(np.float16)) for a in (A, B)]
    out = addressed(np.full((r, c), np.nan, np.float32))
    blas.gemm(*half, out, transposed=True)
    np.testing.assert_array_equal(out, half[0].astype(np.float32) @ half[1].astype(np.float32).T)


@pytest.mark.parametrize(("r", "k", "c"), [(0, 2, 3), (2, 0, 3), (2, 3, 0)])
def test_products_with_empty_operands(blas: RowMajor, r: int, k: int, c: int) -> None:
    out = addressed(np.ones((r, c)))
    blas.gemm(matrix(0, r, k, np.float64), matrix(0, k, c, np.float64), out, beta=1)
    np.testing.assert_array_equal(out, np.ones((r, c)))
    blas.gemm(matrix(0, r, k, np.float64), matrix(0, k, c, np.float64), out)
    np.testing.assert_array_equal(out, np.zeros((r, c)))


@given(SIZES, st.integers(0, 6), GAPS, PRECISIONS, st.booleans())
def test_triangular_solves_equal_reference(
    blas: RowMajor, b: int, k: int, gap: int, precision: Any, transposed: bool
) -> None:
    dtype, tolerance = precision
    L, B = lower(0, b, dtype, gap), matrix(1, b, k, dtype, gap)
    original, full = np.array(B), np.tril(L).astype(np.float64)
    blas.solve_lower(L, B, transposed=transposed)
    assert_close((full.T if transposed else full) @ B, original, tolerance)
    B = matrix(2, k, b, dtype, gap)
    original = np.array(B)
    blas.solve_lower(L, B, right=True)
    assert_close(B @ full.T, original, tolerance)


@given(SIZES, st.integers(0, 6), GAPS, PRECISIONS)
def test_add_gram_writes_lower_triangle(
    blas: RowMajor, b: int, k: int, gap: int, precision: Any
) -> None:
    dtype, tolerance = precision
    C, W = matrix(0, b, b, dtype, gap), matrix(1, k, b, dtype, gap)
    original, truth = np.array(C), C + 0.3 * (W.T @ W)
    blas.add_gram(C, W, 0.3)
    assert_close(np.tril(C), np.tril(truth), tolerance)
    np.testing.assert_array_equal(np.triu(C, 1), np.triu(original, 1))


def test_non_contiguous_rows_are_refused(blas: RowMajor) -> None:
    A, out = matrix(0, 4, 3, np.float64), addressed(np.zeros((4, 4)))
    with pytest.raises(AssertionError, match="rows must be contiguous"):
        blas.gemm(A, matrix(0, 4, 6, np.float64)[:, ::2], out, transposed=True)
    with pytest.raises(AssertionError, match="rows must be contiguous"):
        blas.gemm(A, A, out.T, transposed=True)


@pytest.mark.parametrize("transposed", [False, True])
def test_operands_may_have_contiguous_columns(transposed: bool, blas: RowMajor) -> None:
    A, B, out = (
        matrix(0, 4, 3, np.float64),
        matrix(1, 4, 5, np.float64),
        matrix(2, 3, 5, np.float64),
    )
    blas.gemm(A.T, addressed(np.ascontiguousarray(B.T)) if transposed else B, out,
              transposed=transposed)  # fmt: skip
    np.testing.assert_allclose(out, A.T @ B, rtol=1e-14)
    operands = matrix(3, 4, 4, np.float64)
    blas.gemm(A, A if transposed else A.T, operands, transposed=transposed)
    np.testing.assert_allclose(operands, A @ A.T, rtol=1e-14)


@pytest.mark.parametrize(
    ("n", "dtype", "launches", "share"),
    [
        (5000, np.float32, 1, 1.0), (8000, np.float32, 2, 0.75), (15_000, np.float32, 3, 0.625),
        (15_000, np.float16, 2, 0.75), (60_000, np.float32, 8, 0.5078),
    ],
)  # fmt: skip
def test_a_launch_more_saves_64_mb_of_zeros(
    n: int, dtype: Any, launches: int, share: float
) -> None:
    """Check launches, and that another halving of the triangle would save less."""
    A = np.broadcast_to(np.zeros((), dtype), (n, n))
    block = _block_rows(A)
    parts = triangle_parts(n, block, n, 10, 10, False)
    n_bytes, finer = (
        A.itemsize * sum(part.r * part.k * part.n_products for part in products)
        for products in (parts, triangle_parts(n, block // 2, n, 10, 10, False))
    )
    assert len(parts) == launches
    assert n_bytes / A.itemsize / n**2 == pytest.approx(share, rel=1e-3)
    assert n_bytes - finer < 64.1e6
