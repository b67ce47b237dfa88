"""Check kernels of the inner product against float64, for every backend and size of tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics.pairwise import (  # type: ignore[import-untyped, unused-ignore]
    linear_kernel,
    polynomial_kernel,
)

from streamkern.backend.base import Backend
from streamkern.backend.numba_backend import CompiledBackend, numba_problem
from streamkern.basics.errors import ConfigError
from streamkern.kernels.base import Kernel
from streamkern.kernels.builtin import InnerKernel, Linear, Polynomial, ReluNTK
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.norm import jittered_cholesky
from tests.solver_problems import Array, both, rows

BACKENDS = [Backend] + [CompiledBackend] * (numba_problem() is None)


def relu_ntk(A: Array, B: Array, depth: int) -> Array:
    """Return the kernel of Jacot et al. 2018, with covariances of every layer as 2 x 2 matrices."""
    K = np.empty((len(A), len(B)))
    for i, a in enumerate(A):
        for j, b in enumerate(B):
            aa, bb, ab = a @ a, b @ b, a @ b
            tangent = ab
            for _ in range(depth):
                # 2 E[relu(u) relu(v)] and 2 E[1(u > 0) 1(v > 0)]; the variances stay as they are.
                angle = np.arccos(np.clip(ab / np.sqrt(aa * bb), -1, 1))
                ab = np.sqrt(aa * bb) * (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / np.pi
                tangent = tangent * (np.pi - angle) / np.pi + ab
            K[i, j] = tangent
    return K


TRUTH: dict[str, tuple[Kernel, Any]] = {
    "linear": (Linear(), linear_kernel),
    "polynomial 1": (Polynomial(1, 0.5, 0.0), lambda A, B: polynomial_kernel(A, B, 1, 0.5, 0)),
    "polynomial 2": (Polynomial(2), lambda A, B: polynomial_kernel(A, B, 2, 1.0, 1)),
    "polynomial 5": (Polynomial(5, 0.1, 2), lambda A, B: polynomial_kernel(A, B, 5, 0.1, 2)),
    "ntk 1": (ReluNTK(), lambda A, B: relu_ntk(A, B, 1)),
    "ntk 4": (ReluNTK(4), lambda A, B: relu_ntk(A, B, 4)),
}


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("precision", ["float64", "exact"])
@given(
    name=st.sampled_from(sorted(TRUTH)),
    m=st.integers(1, 30),
    p=st.integers(1, 30),
    d=st.integers(1, 9),
    tile=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    mode=st.sampled_from(["W", "keep", "both"]),
)
@settings(max_examples=30, deadline=None)
def test_tiled_product_equals_dense(
    precision: str, kind: type[Backend], name: str, m: int, p: int, d: int,
    tile: tuple[int, int], mode: str,
) -> None:  # fmt: skip
    kernel, truth = TRUTH[name]
    backend = kind(1)
    backend.tile_rows, backend.tile_cols = tile
    op = KernelOperator(kernel, backend, precision, shift=rows(3, d))  # the shift is ignored
    A, B, W = (rows(i, *s).astype(op.dtype) for i, s in enumerate([(m, d), (p, d), (p, 2)]))
    keep = None if mode == "W" else np.full((m, p), np.nan, op.dtype)
    result = op.product(
        op.points(A, left=True), op.points(B, right=True), None if mode == "keep" else W, keep=keep
    )
    K = truth(A.astype(np.float64), B.astype(np.float64))
    eps = float(np.finfo(op.dtype).eps)
    # The error of the product of two points, or its square root if an angle is small.
    bound = 60 * eps * truth(np.abs(A).astype(np.float64), np.abs(B).astype(np.float64))
    if "ntk" in name:
        bound = np.sqrt(60 * eps) * np.linalg.norm(A, axis=1)[:, None] * np.linalg.norm(B, axis=1)
    if keep is not None:
        assert np.all(np.abs(keep - K) <= bound)
    if mode != "keep":
        assert np.all(np.abs(result - K @ W) <= bound @ np.abs(W) + p * eps * np.abs(K) @ np.abs(W))


@pytest.mark.parametrize("name", sorted(TRUTH))
@pytest.mark.parametrize("precision", ["float64", "exact"])
def test_gram_is_positive_and_has_exact_diagonal(name: str, precision: str) -> None:
    kernel, truth = TRUTH[name]
    op = KernelOperator(kernel, Backend(1), precision)
    X = rows(0, 60, 5)
    X[-1] = X[0]
    K = op.gram(both(op, X))
    exact = truth(X, X)
    diagonal = exact.diagonal()
    if isinstance(kernel, ReluNTK):  # where the angle is 0, the truth has lost half its digits
        diagonal = (kernel.depth + 1) * (X * X).sum(axis=1)
    np.testing.assert_allclose(K.diagonal(), diagonal, rtol=20 * np.finfo(op.dtype).eps)
    assert np.linalg.eigvalsh(exact).min() > -1e-10 * exact.max()
    L, jitter = jittered_cholesky(op, both(op, X))
    assert 0 < jitter < 1e-3 * exact.max()
    np.testing.assert_allclose(L @ L.T, K + jitter * np.eye(60), atol=1e-4 * exact.max())


def test_jitter_scales_with_the_kernel() -> None:
    """Check that a scaled kernel has the same scaled factor."""
    X = rows(0, 40, 3)
    small, large = (
        jittered_cholesky(op, both(op, X))
        for op in (KernelOperator(Polynomial(1, g, g), Backend(1), "exact") for g in (1.0, 2.0**20))
    )
    assert large[1] == small[1] * 2**20
    np.testing.assert_array_equal(large[0], small[0] * 2**10)


def test_tangent_kernel_at_zero_is_zero() -> None:
    op = KernelOperator(ReluNTK(2), Backend(1), "exact")
    K = op.gram(both(op, np.array([[0.0, 0.0], [1.0, 2.0]])))
    np.testing.assert_allclose(K, [[0, 0], [0, 15]], rtol=1e-6)


# --- numbers of the columns ---------------------------------------------------------------------


class Waves(InnerKernel):
    """cos(x.w + b): rows of Z are (w, b)."""

    expression = "cos(p + z)"

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        p += z
        return xp.cos(p, out=p)  # type: ignore[no-any-return, unused-ignore]

    def columns(self, Z: Array) -> tuple[Array, Array]:
        return Z[:, :-1], Z[:, -1]


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("precision", ["float64", "exact"])
def test_kernel_may_define_column_parameters(precision: str, kind: type[Backend]) -> None:
    backend = kind(1)
    backend.tile_rows, backend.tile_cols = 7, 11
    op = KernelOperator(Waves(), backend, precision)
    X, Z, W = rows(0, 600, 4), rows(1, 30, 5), rows(2, 30, 2)
    z = op.points(Z, right=True)
    result = op.product(op.points(X, left=True), z, W.astype(op.dtype))
    np.testing.assert_allclose(
        result, np.cos(X @ Z[:, :4].T + Z[:, 4]) @ W, atol=1e-12 if precision == "float64" else 1e-4
    )
    assert z.norms is not None
    np.testing.assert_array_equal(z[3:9].norms, Z[3:9, 4].astype(op.dtype))


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Polynomial(0), "degree=0 must be a whole number between 1 and 20"),
        (lambda: Polynomial(2.5), "degree=2.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: Polynomial(2, gamma=0), "gamma=0 must be a finite number above 0"),
        (lambda: Polynomial(2, gamma=10**400), "must be a finite number above 0"),
        (lambda: Polynomial(2, c0=-1), "c0=-1 must be a finite number, 0 or above"),
        (lambda: ReluNTK(0), "depth=0 must be a whole number between 1 and 50"),
    ],
)
def test_invalid_parameters_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()
