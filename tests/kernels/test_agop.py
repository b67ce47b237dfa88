"""Check sums of gradient outer products against differences of f in float64."""

from __future__ import annotations

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.kernels import agop
from streamkern.kernels.agop import GradientSum
from streamkern.kernels.builtin import (
    Cauchy,
    Dispersal,
    Gaussian,
    Kernel,
    Laplace,
    Matern32,
    Matern52,
)
from streamkern.kernels.points import Grid
from streamkern.kernels.products import KernelOperator
from tests.solver_problems import Array, rows

D, P, M, C = 5, 40, 60, 3
Z, ALPHA = rows(0, P, D), rows(1, P, C)
X = np.concatenate([Z[:10], rows(2, M - 10, D)])
"""Rows, the first ten of which are equal to centers."""
W = np.random.default_rng(3).uniform(0.2, 2, M)
SHIFT = np.array([0.1, -0.3, 0.2, 0.0, 0.5])
KERNELS = {
    "laplace": Laplace(2.0), "gaussian": Gaussian(1.5), "cauchy": Cauchy(2.0),
    "matern32": Matern32(1.5), "matern52": Matern52(3.0), "dispersal": Dispersal(2.0, 1.3),
    "sum": Laplace(2.0) * Gaussian(3.0) + 0.5 * Cauchy(1.0),
    "matrix": Laplace(2.0, metric=rows(4, D, 3)),
    "scales": Gaussian(2.0, metric=np.array([0.5, 2.0, 1.0, 0.1, 1.5])),
}  # fmt: skip


def agop_of(
    kernel: Kernel, precision: str = "float64", backend: Backend | None = None,
    X: Array = X, w: Array | None = W, grid: Grid | None = None,
) -> Array:  # fmt: skip
    """Return the average gradient outer product, summed in two parts."""
    op = KernelOperator(kernel, backend or Backend(1), precision, SHIFT, grid)
    backend = op.backend
    X, z, alpha = (backend.asarray(a, op.dtype) for a in (X, Z, ALPHA))
    total = GradientSum(op, op.points(z, right=True), alpha)
    for part in (slice(0, 25), slice(25, None)):
        total.add(X[part], None if w is None else backend.asarray(w[part], op.dtype))
    return total.mean()


def by_differences(kernel: Kernel, X: Array, w: Array) -> Array:
    """Return the average gradient outer product, by differences of f in float64."""
    op, h = KernelOperator(kernel, Backend(1), "float64", SHIFT), 1e-5
    centers = op.points(Z, right=True)

    def f(Y: Array) -> Array:
        return op.product(op.points(Y, left=True), centers, ALPHA)

    g = np.stack([(f(X + h * e) - f(X - h * e)) / (2 * h) for e in np.eye(D)], axis=1)
    return np.asarray(np.einsum("m,mic,mjc->ij", w, g, g) / w.sum())


@pytest.mark.parametrize("name", KERNELS)
def test_agop_is_mean_of_gradient_outer_products(name: str) -> None:
    truth = by_differences(KERNELS[name], X, W)
    np.testing.assert_allclose(agop_of(KERNELS[name]), truth, atol=1e-6 * np.abs(truth).max())


@pytest.mark.full(all_but_every=5)
@pytest.mark.parametrize("precision", ["exact", "high"])
@pytest.mark.parametrize("name", KERNELS)
def test_agop_in_float32_is_accurate_at_centers(name: str, precision: str) -> None:
    """Check that the kink of a kernel at a center loses at most three digits, in one row of six."""
    kinks = name in ("laplace", "dispersal", "sum", "matrix")
    truth = agop_of(KERNELS[name])
    for backend in (Backend(1), get_backend("cpu")):
        actual = agop_of(KERNELS[name], precision, backend)
        tolerance = 2e-3 if kinks else 2e-6
        np.testing.assert_allclose(actual, truth, atol=tolerance * np.abs(truth).max())


def test_agop_of_integer_features_is_scaled_by_step() -> None:
    pixels = np.random.default_rng(0).integers(0, 9, (P + M, D)).astype(np.float64)
    z, x = pixels[:P] * 0.25 - 1, pixels[P:] * 0.25 - 1
    sums = []
    for precision, grid in (("float64", None), ("integer", Grid(-1.0, 0.25))):
        op = KernelOperator(Gaussian(2.0), Backend(1), precision, SHIFT, grid)
        total = GradientSum(op, op.points(z.astype(op.dtype), right=True), ALPHA.astype(op.dtype))
        total.add(x.astype(op.dtype))
        sums.append(total.mean())
    np.testing.assert_allclose(sums[1], sums[0], rtol=1e-5, atol=1e-6 * np.abs(sums[0]).max())


def test_agop_without_weights_weights_rows_equally() -> None:
    kernel = KERNELS["matern32"]
    np.testing.assert_allclose(agop_of(kernel, w=None), agop_of(kernel, w=np.ones(M)), rtol=1e-12)


def test_agop_does_not_depend_on_output_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = agop_of(KERNELS["laplace"])
    monkeypatch.setattr(agop, "MAX_DERIVATIVE_COLUMNS", 2 * (D + 1))
    # Entries are sums of terms of both signs, as large as the largest of them.
    atol = 1e-12 * float(np.abs(truth).max())
    np.testing.assert_allclose(agop_of(KERNELS["laplace"]), truth, rtol=0, atol=atol)


def test_agop_without_rows_is_zero() -> None:
    op = KernelOperator(Gaussian(1.0), Backend(1), "float64")
    total = GradientSum(op, op.points(Z, right=True), ALPHA)
    np.testing.assert_array_equal(total.mean(), np.zeros((D, D)))
