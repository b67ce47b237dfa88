"""Check tiled products against dense float64, for every kernel, tile size and mode."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.backend.numba_backend import CompiledBackend, numba_problem
from streamkern.basics.errors import ConfigError
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.points import PRECISIONS, Grid, point_width
from streamkern.kernels.products import KernelOperator
from tests import reference as ref
from tests.solver_problems import RADIAL, Array, Quartic, both, operator, rows

EPS = {"float64": float(np.finfo(np.float64).eps), "exact": float(np.finfo(np.float32).eps)}


def dense(op: KernelOperator, A: Array, B: Array) -> ref.Array:
    """Return K(A, B) in float64 from explicit differences."""
    name, bw = type(op.kernel).__name__.lower(), op.kernel.bandwidth
    A, B = A.astype(np.float64), B.astype(np.float64)
    if name == "quartic":
        return np.asarray(1 / (1 + (ref.distances(A, B) / bw) ** 4))
    return ref.KERNELS[name](A, B, bw)


def profile(kernel: Kernel, sq: ref.Array) -> ref.Array:
    """Return the kernel of scaled squared distances, by the reference, at distances on a line."""
    unit = KernelOperator(type(kernel)(1.0), Backend(1))
    return dense(unit, np.sqrt(sq).reshape(-1, 1), np.zeros((1, 1))).reshape(sq.shape)


def entry_bound(op: KernelOperator, A: Array, B: Array, terms: float = 1.0) -> ref.Array:
    """Return bounds (m, p) of the errors of kernel values in float32.

    A scaled squared distance is a sum of d + 2 products whose sizes add up to at most
    2 (|a|^2 + |b|^2), and each of a, b is rounded twice when it is shifted and scaled: it is off
    by less than 2 (d + 8) eps (|a|^2 + |b|^2). The profile falls, so the error of its value is at
    most its change over that range on either side, and a few rounding errors of its own.
    """
    eps, bw = EPS["exact"], op.kernel.bandwidth
    centre = np.zeros(A.shape[1]) if op.shift is None else np.asarray(op.shift, np.float64)
    a, b = ((X.astype(np.float64) - centre) / bw for X in (A, B))
    norms = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :]
    # The shift itself is rounded before it meets X.
    size = norms + (centre**2).sum() / bw**2
    delta = terms * 2 * (A.shape[1] + 8) * eps * size
    sq = ref.distances(a, b) ** 2
    truth = profile(op.kernel, sq)
    excess_above = profile(op.kernel, np.maximum(sq - delta, 0)) - truth
    excess_below = truth - profile(op.kernel, sq + delta)
    return np.asarray(np.maximum(excess_above, excess_below) + 16 * eps)


# --- agreement with dense float64 ---------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float64", "exact"])
@given(
    name=st.sampled_from([*RADIAL, "quartic"]),
    m=st.integers(1, 40),
    p=st.integers(1, 40),
    d=st.integers(1, 12),
    c=st.integers(1, 3),
    tile=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    mode=st.sampled_from(["W", "keep", "both"]),
    shifted=st.booleans(),
    bw=st.sampled_from([0.5, 2.0, 30.0]),
)
@settings(max_examples=60)
@example("laplace", 5, 7, 3, 1, (5, 7), "both", True, 2.0)
def test_tiled_product_equals_dense(
    precision: str, name: str, m: int, p: int, d: int, c: int, tile: tuple[int, int], mode: str,
    shifted: bool, bw: float,
) -> None:  # fmt: skip
    A, B, W = (rows(i, *s) for i, s in enumerate([(m, d), (p, d), (p, c)]))
    shift = rows(3, d) if shifted else None
    kernel: str | Kernel = Quartic(bw) if name == "quartic" else name
    backend = Backend(1)
    backend.tile_rows, backend.tile_cols = tile
    backend.kept_in_place, backend.norms_in_columns = shifted, c > 1
    op = KernelOperator(get_kernel(kernel, bw), backend, precision, shift)
    A, B, W = (x.astype(op.dtype) for x in (A, B, W))
    out, keep = np.full((m, c), np.nan, op.dtype), np.full((m, p), np.nan, op.dtype)
    result = op.product(
        op.points(A, left=True), op.points(B, right=True), None if mode == "keep" else W,
        out=None if mode == "keep" else out, keep=None if mode == "W" else keep,
    )  # fmt: skip
    assert result is (keep if mode == "keep" else out)
    truth = dense(op, A, B)
    bound = np.full((m, p), 1e-12) if precision == "float64" else entry_bound(op, A, B)
    if mode != "W":
        assert np.all(np.abs(keep - truth) <= bound)
    if mode != "keep":
        size = np.abs(W).astype(np.float64)
        rounding = (p + 2) * EPS[precision] * truth @ size
        assert np.all(np.abs(out - truth @ W.astype(np.float64)) <= bound @ size + rounding)


@pytest.mark.parametrize("name", RADIAL)
def test_near_duplicate_rows_are_accurate_in_float32(name: str) -> None:
    """Check rows whose relative distance of 1e-4 is below the rounding error of the distance."""
    op = operator(name, 3.0, "exact")
    A = rows(0, 30, 20).astype(np.float32)
    steps = 10.0 ** -np.arange(1, 6)
    B = np.concatenate(
        [A + np.float32(step) * rows(1, 30, 20).astype(np.float32) for step in steps]
    )
    K = op.matrix(both(op, A), both(op, B))
    assert np.isfinite(K).all()
    assert K.max() <= 1.0
    assert np.all(np.abs(K - dense(op, A, B)) <= entry_bound(op, A, B))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", RADIAL)
def test_gram_has_exact_ones_on_its_diagonal(name: str, precision: str) -> None:
    op = operator(name, 1.0, precision, tile=(7, 11))
    X = 5 + rows(0, 40, 6)
    K = op.gram(both(op, X))
    np.testing.assert_array_equal(K.diagonal(), 1.0)
    np.testing.assert_allclose(K, K.T, atol=1e-3 if precision != "float64" else 1e-13)
    assert K.min() >= 0
    assert K.max() <= 1.0


@pytest.mark.parametrize("tile", [(4, 5), (100, 100)])
def test_identical_pairs_have_zero_distance(tile: tuple[int, int]) -> None:
    op = operator("laplace", 1.0, "exact", tile=tile)
    A, B = 9 + rows(0, 20, 4), 9 + rows(1, 30, 4)
    i, j = np.array([0, 3, 4, 11, 19]), np.array([29, 4, 4, 0, 17])
    x, z = both(op, A), both(op, B)
    plain, with_pairs = op.matrix(x, z).copy(), np.empty((20, 30), np.float32)
    W = rows(2, 30, 2).astype(np.float32)
    out = op.product(x, z, W, keep=with_pairs, equal_pairs=(i, j))
    np.testing.assert_array_equal(with_pairs[i, j], 1.0)
    plain[i, j] = 1.0
    np.testing.assert_array_equal(with_pairs, plain)
    np.testing.assert_allclose(out, plain @ W, rtol=1e-5, atol=1e-5)


# --- a user's own kernel ------------------------------------------------------------------------


def test_kernel_without_profile_raises() -> None:
    op = KernelOperator(Kernel(), Backend(1), "float64")
    with pytest.raises(NotImplementedError, match=r"Kernel must define profile\(sq, xp\)"):
        op.gram(both(op, rows(0, 3, 2)))


# --- precision modes ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", RADIAL)
def test_fast_precision_equals_kernel_of_rounded_points(name: str) -> None:
    """Check that points are rounded before their distance is measured."""
    op = operator(name, 2.0, "fast", shift=rows(3, 8))
    A, B = rows(0, 40, 8).astype(np.float32), rows(1, 30, 8).astype(np.float32)
    a, b = (
        ((X - rows(3, 8).astype(np.float32)) * np.float32(0.5)).astype(np.float16) for X in (A, B)
    )
    unit = operator(name, 1.0, "exact")
    K = op.matrix(both(op, A), both(op, B))
    assert np.all(np.abs(K - dense(unit, a, b)) <= entry_bound(unit, a, b))
    assert np.abs(K - dense(op, A, B)).max() > 1e-5  # the points did move


@pytest.mark.parametrize("name", RADIAL)
def test_high_precision_is_within_float32_error(name: str) -> None:
    """Check three products for each feature in place of one, which omit less than eps |a| |b|."""
    op = operator(name, 2.0, "high", shift=rows(3, 8))
    A, B = rows(0, 40, 8).astype(np.float32), rows(1, 30, 8).astype(np.float32)
    K = op.matrix(both(op, A), both(op, B))
    error = np.abs(K - dense(op, A, B))
    assert np.all(error <= entry_bound(op, A, B, terms=3.0))
    fast = operator(name, 2.0, "fast", shift=rows(3, 8))
    error_fast = np.abs(fast.matrix(both(fast, A), both(fast, B)) - dense(op, A, B))
    assert error.max() < error_fast.max() / 50


@pytest.mark.parametrize("precision", PRECISIONS)
def test_point_width_equals_prepared_rows(precision: str) -> None:
    op = operator(precision=precision)
    x = both(op, rows(0, 4, 5))
    assert x.left is not None
    assert x.right is not None
    assert x.left.shape == x.right.shape == (4, point_width(5, precision, op.backend, op.kernel))
    assert x.left.dtype == x.right.dtype == op.dtype
    assert len(x) == len(x[:]) == 4
    assert len(x[1:3]) == 2
    assert op.points(rows(0, 4, 5), left=True).right is None


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_prepared_independently_and_in_place(threads: int, precision: str) -> None:
    """Check more rows than a thread takes at a time, written to existing memory."""
    n = 2 * Backend.prepare_rows + 7
    X = rows(0, n, 5)
    with Backend(threads) as backend:
        op = operator(precision=precision, backend=backend, shift=rows(3, 5))
        typed_rows = X.astype(op.dtype)
        room = op.empty_points(n + 3, 5, left=True, right=True)
        in_buffer = op.points(typed_rows, out=room[:n])
        new = both(op, X)
        single = both(op, X[300:301])
        for side in ("left", "right"):
            assert np.shares_memory(getattr(in_buffer, side), getattr(room, side))
            np.testing.assert_array_equal(getattr(in_buffer, side), getattr(new, side))
            np.testing.assert_array_equal(getattr(single, side), getattr(new[300:301], side))
        np.testing.assert_array_equal(typed_rows, X.astype(op.dtype))  # not changed


@pytest.mark.parametrize(
    ("precision", "categorical"), [(each, []) for each in PRECISIONS] + [("exact", [(2, 1.5)])]
)
def test_right_operands_can_serve_as_left_operands(
    precision: str, categorical: list[tuple[int, float]]
) -> None:
    """Check that products have the bits of those with a left side, with more rows than a tile."""
    with Backend(2) as backend:
        plain = operator("laplace", 2.0, precision, backend=backend, tile=(16, 8))
        kernel = plain.kernel.with_categorical(categorical)
        op = KernelOperator(kernel, backend, precision, rows(3, 5), plain.grid)
        A, Z = (rows(seed, n, 5).astype(op.dtype) for seed, n in ((0, 40), (1, 30)))
        W, right = rows(2, 30, 3).astype(op.dtype), op.points(Z, right=True)
        from_left = op.product(op.points(A, left=True), right, W)
        np.testing.assert_array_equal(op.product(op.points(A, right=True), right, W), from_left)


BACKENDS = [Backend] + [CompiledBackend] * (numba_problem() is None)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("norms_in_columns", [True, False])
@given(step=st.sampled_from([1 / 255, 0.013, 3.0]), offset=st.floats(-5, 5), d=st.integers(1, 784))
@settings(max_examples=25)
def test_integer_distances_are_exact(
    kind: type[Backend], norms_in_columns: bool, step: float, offset: float, d: int
) -> None:
    """Check scaled pixels: only the profile and its argument are rounded."""
    rng = np.random.default_rng(d)
    pixels = rng.integers(0, 256, (30, d))
    pixels[7] = pixels[3]
    pixels[8] = pixels[3]
    pixels[8, 0] ^= 1  # as near as pixels can be
    X = (offset + step * pixels).astype(np.float32)
    backend = kind(1)
    backend.norms_in_columns = norms_in_columns
    bandwidth = step * 80 * np.sqrt(d)
    op = KernelOperator(
        get_kernel("laplace", bandwidth), backend, "integer", X.mean(axis=0), Grid(offset, step)
    )
    x = both(op, X)
    truth = np.exp(-ref.distances(pixels * 1.0, pixels * 1.0) * (step / bandwidth))
    K = op.matrix(x, x)
    np.testing.assert_array_equal(K.diagonal(), 1.0)  # without equal pairs
    assert K[3, 7] == K[7, 3] == 1.0
    np.testing.assert_allclose(K, truth, rtol=3e-6, atol=0)


def test_grid_requires_integer_precision() -> None:
    with pytest.raises(ConfigError, match="needs the grid of the features"):
        KernelOperator(get_kernel("laplace", 1.0), Backend(1), "exact", grid=Grid(0.0, 1.0))


# --- the order of the additions -----------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float64", "exact", "high"])
def test_result_has_same_bits_for_any_number_of_threads(precision: str) -> None:
    A, B, W = rows(0, 130, 9), rows(1, 90, 9), rows(2, 90, 3)
    results = []
    for threads in (1, 2, 3):
        with Backend(threads) as backend:
            op = operator("laplace", 2.0, precision, backend=backend, tile=(16, 32))
            keep = np.empty((130, 90), op.dtype)
            out = op.product(both(op, A), both(op, B), W.astype(op.dtype), keep=keep)
            results.append((out, keep, op.gram(both(op, A))))
    for result in results[1:]:
        for one, two in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(one, two)


def test_product_with_empty_operand_is_empty() -> None:
    op = operator()
    empty, x = both(op, np.zeros((0, 3))), both(op, rows(0, 4, 3))
    np.testing.assert_array_equal(op.product(x, empty, np.zeros((0, 2))), np.zeros((4, 2)))
    assert op.product(empty, x, np.zeros((4, 2))).shape == (0, 2)
    assert op.matrix(empty, x).shape == (0, 4)


def test_nan_row_affects_only_its_own_values() -> None:
    op, A = operator(precision="exact"), rows(0, 5, 3)
    A[2, 1] = np.nan
    K = op.matrix(both(op, A), both(op, rows(1, 4, 3)))
    assert np.isnan(K[2]).all()
    assert np.isfinite(np.delete(K, 2, axis=0)).all()


# --- bad settings -------------------------------------------------------------------------------


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, np.nan, np.inf, -np.inf])
def test_bandwidth_must_be_a_positive_number(bandwidth: float) -> None:
    with pytest.raises(ConfigError, match=r"bandwidth=.* must be a finite number above 0"):
        get_kernel("laplace", bandwidth)
