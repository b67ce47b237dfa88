"""Compare kernels with categorical features with dense float64."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.backend.numba_backend import CompiledBackend, numba_problem
from streamkern.basics.errors import ConfigError
from streamkern.kernels.agop import GradientSum
from streamkern.kernels.base import Kernel
from streamkern.kernels.builtin import get_kernel
from streamkern.kernels.fourier import FourierFeatures
from streamkern.kernels.importances import describe_metric, importances
from streamkern.kernels.notation import kernel_text
from streamkern.kernels.points import PRECISIONS, Grid
from streamkern.kernels.products import KernelOperator
from streamkern.train.resolve.problem_shape import resolve_precision
from tests.solver_problems import Array, both, rows

D, N, M = 5, 40, 60
CATEGORICAL = ((3, 0.8), (1, 2.5))
SHIFT = np.array([0.1, 2.0, -0.3, 1.5, 0.0])
METRICS = {
    "none": None, "scales": np.array([0.5, 0.3, 2.0, 0.1, 1.0]), "matrix": 0.5 * rows(4, D, 3),
}  # fmt: skip
KERNELS: dict[str, Kernel] = {
    "laplace": sk.Laplace(1.7), "gaussian": sk.Gaussian(2.0), "matern52": sk.Matern52(1.5),
    "dispersal": sk.Dispersal(2.0, 1.3), "sum": 0.5 * sk.Laplace(2.0) + 2 * sk.Gaussian(1.0),
    "product": sk.Laplace(3.0) * sk.Cauchy(2.0),
}  # fmt: skip


def table(n: int, seed: int) -> Array:
    """Return normal columns, except that the second and the fourth have a few whole numbers."""
    X = rows(seed, n, D).astype(np.float32)
    rng = np.random.default_rng(seed)
    X[:, 1], X[:, 3] = rng.integers(0, 4, n), rng.integers(-5, 5, n)
    return X


def squared_distances(kernel: Kernel, A: Array, B: Array) -> Array:
    """Return the squared distances (n, m) by their definition, in float64."""
    A, B = A.astype(np.float64), B.astype(np.float64)
    metric = np.ones(D) if kernel.metric is None else kernel.metric
    a, b = (X * metric if metric.ndim == 1 else X @ metric for X in (A, B))
    squares = ((a[:, None] - b) ** 2).sum(axis=2)
    for column, weight in kernel.categorical:
        squares += weight * (A[:, None, column] != B[:, column])
    return np.asarray(squares)


def dense(kernel: Kernel, A: Array, B: Array) -> Array:
    """Return the kernel's values, by its profile in float64."""
    return np.asarray(kernel.profile(squared_distances(kernel, A, B) / kernel.bandwidth**2, np))


@pytest.fixture
def backends() -> Iterator[list[Backend]]:
    """Yield the backends of the CPU, with small tiles."""
    all_backends = [Backend(2), *([CompiledBackend(2)] if numba_problem() is None else [])]
    for backend in all_backends:
        backend.tile_rows, backend.tile_cols = 16, 24
    yield all_backends
    for backend in all_backends:
        backend.close()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-12), ("exact", 2e-5)])
def test_categorical_kernel_equals_definition(
    precision: str, tolerance: float, name: str, metric: str, backends: list[Backend]
) -> None:
    kernel = KERNELS[name].with_metric(METRICS[metric]).with_categorical(CATEGORICAL)
    A, B, W = table(N, 0), table(M, 1), rows(2, M, 3)
    truth = dense(kernel, A, B)
    assert (
        squared_distances(kernel, A, B) != squared_distances(kernel.with_categorical(()), A, B)
    ).any()
    for backend in backends:
        op = KernelOperator(kernel, backend, precision, SHIFT)
        left, right = op.points(A.astype(op.dtype), left=True), op.points(B.astype(op.dtype),
                                                                           right=True)  # fmt: skip
        np.testing.assert_allclose(op.matrix(left, right), truth, rtol=0, atol=tolerance)
        product = op.product(left, right, W.astype(op.dtype))
        np.testing.assert_allclose(product, truth @ W, rtol=0, atol=50 * tolerance)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_any_number_of_categorical_features_is_accepted(n: int, backends: list[Backend]) -> None:
    categorical = [(j, 0.5 + j) for j in range(n)]
    A, B = np.random.default_rng(0).integers(0, 3, (2, N, D)).astype(np.float32)
    kernel = sk.Gaussian(2.0).with_categorical(categorical)
    for backend in backends:
        op = KernelOperator(kernel, backend, "exact", SHIFT)
        K = op.matrix(both(op, A), both(op, B))
        np.testing.assert_allclose(K, dense(kernel, A, B), rtol=0, atol=1e-5)


def test_categorical_values_are_compared_exactly(backends: list[Backend]) -> None:
    """Check values that differ in the last bit, far from the shift."""
    large_value = np.float32(1e6)
    next_value = np.nextafter(large_value, np.float32(2e6))
    X = np.array([[large_value], [next_value], [large_value]], np.float32)
    for backend in backends:
        kernel = sk.Gaussian(1.0, metric=[1e-8]).with_categorical([(0, 2.0)])
        op = KernelOperator(kernel, backend, "exact", np.zeros(1))
        K = op.gram(both(op, X))
        np.testing.assert_allclose(K[0], [1.0, np.exp(-1), 1.0], rtol=1e-6)


def test_categorical_features_equal_one_hot_code() -> None:
    """Compare with half the squared distance of one-hot codes, times the weight."""
    A, B, weight = table(N, 0), table(M, 1), 1.7
    coded = [np.column_stack([X, np.sqrt(weight / 2) * np.eye(10)[X[:, 3].astype(int) + 5]])
             for X in (A, B)]  # fmt: skip
    op = KernelOperator(sk.Laplace(2.0).with_categorical([(3, weight)]), Backend(1), "float64")
    plain = KernelOperator(sk.Laplace(2.0), Backend(1), "float64")
    K = op.matrix(both(op, A), both(op, B))
    expected = plain.matrix(both(plain, coded[0]), both(plain, coded[1]))
    np.testing.assert_allclose(K, expected, rtol=1e-9)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["laplace", "gaussian", "sum"])
def test_categorical_gradients_equal_finite_differences(
    name: str, metric: str, backends: list[Backend]
) -> None:
    """Compare with finite differences along the features that are not categorical."""
    kernel = KERNELS[name].with_metric(METRICS[metric]).with_categorical(CATEGORICAL)
    X, Z, alpha, h = table(N, 0), table(M, 1).astype(np.float64), rows(2, M, 2), 1e-5
    X, w = X.astype(np.float64), np.random.default_rng(3).uniform(0.2, 2, N)

    def f(by: Array) -> Array:
        steps = sum(weight * (X[:, None, j] != Z[:, j]) for j, weight in kernel.categorical)
        sq = squared_distances(kernel.with_categorical(()), X + by, Z) + steps
        return np.asarray(kernel.profile(sq / kernel.bandwidth**2, np) @ alpha)

    g = np.stack([(f(h * e) - f(-h * e)) / (2 * h) for e in np.eye(D)], axis=1)
    truth = np.einsum("m,mic,mjc->ij", w, g, g) / w.sum()
    for precision, tolerance in (("float64", 1e-6), ("exact", 2e-3)):
        for backend in backends:
            op = KernelOperator(kernel, backend, precision, SHIFT)
            total = GradientSum(op, op.points(Z, right=True), alpha.astype(op.dtype))
            total.add(X[:25].astype(op.dtype), w[:25].astype(op.dtype))
            total.add(X[25:].astype(op.dtype), w[25:].astype(op.dtype))
            atol = tolerance * np.abs(truth).max()
            np.testing.assert_allclose(total.mean(), truth, rtol=0, atol=atol)


@pytest.mark.parametrize("name", KERNELS)
def test_categorical_kernel_roundtrips_through_description(name: str) -> None:
    kernel = KERNELS[name].with_categorical(CATEGORICAL)
    described = json.loads(json.dumps(kernel.describe()))
    restored = get_kernel(described)
    assert restored.categorical == CATEGORICAL
    assert restored.describe() == kernel.describe() != KERNELS[name].describe()
    np.testing.assert_array_equal(*(dense(k, table(9, 0), table(9, 1)) for k in (kernel, restored)))
    with_metric = kernel.with_metric(np.ones(D))
    assert get_kernel(with_metric.describe(), metric=with_metric.metric).categorical == CATEGORICAL
    assert kernel.with_bandwidth(9.0).categorical == CATEGORICAL
    assert kernel.with_categorical(()).describe() == KERNELS[name].describe()
    assert "categorical 3 (weight 0.8), 1 (weight 2.5)" in kernel_text(described)
    assert str(CATEGORICAL) in repr(kernel)


@pytest.mark.parametrize(
    ("categorical", "message"),
    [
        ([(0, 1.0), (0, 2.0)], "must name each feature once"),
        ([(-1, 1.0)], "must name each feature once, by its number"),
        ([(0, 0.0)], "finite weights above 0"),
        ([(0, np.inf)], "finite weights above 0"),
        ([(0, np.nan)], "finite weights above 0"),
        ([(0.5, 1.0)], "pairs of a feature and its weight"),
        ([("a", 1.0)], "pairs of a feature and its weight"),
        ([0, 1], "pairs of a feature and its weight"),
        (3, "pairs of a feature and its weight"),
    ],
)
def test_invalid_categorical_lists_are_refused(categorical: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sk.Laplace(1.0).with_categorical(categorical)
    with pytest.raises(ConfigError, match=message):
        get_kernel({"kind": "laplace", "bandwidth": 1.0, "categorical": categorical})


@pytest.mark.parametrize(
    "kernel",
    [
        sk.LaplaceL1(1.0), sk.Polynomial(2), sk.Gaussian(1.0) + sk.Polynomial(2),
        FourierFeatures(4, sk.Gaussian(1.0).describe()),
    ],
)  # fmt: skip
def test_categorical_needs_a_kernel_of_distance(kernel: Kernel) -> None:
    assert kernel.with_categorical(()).categorical == ()
    with pytest.raises(ConfigError, match="not a function of the Euclidean distance"):
        kernel.with_categorical([(0, 1.0)])


def test_combined_kernels_refuse_parts_with_categorical_features() -> None:
    laplace, gauss = (k(1.0).with_categorical([(0, 1.0)]) for k in (sk.Laplace, sk.Gaussian))
    plain = sk.Gaussian(2.0)
    sums = (plain + plain).with_categorical([(0, 1.0)])
    products = (plain * plain).with_categorical([(0, 1)])
    for make in (
        lambda: laplace + gauss, lambda: plain + gauss, lambda: 2 * laplace,
        lambda: laplace * plain, lambda: sums + plain, lambda: 3.0 * sums,
        lambda: products * plain,
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="has a part with categorical"):
            make()


def test_categorical_refuses_precisions_that_round_features() -> None:
    kernel = sk.Laplace(1.0).with_categorical(CATEGORICAL)
    for precision in PRECISIONS:
        grid = Grid(0.0, 1.0) if precision == "integer" else None
        if precision in ("exact", "float64"):
            KernelOperator(kernel, Backend(1), precision, None, grid)
            assert resolve_precision(precision, np.dtype("f4"), [], Backend(1), kernel)[0]
            continue
        with pytest.raises(ConfigError, match="compares some, or leaves of trees, for equality"):
            KernelOperator(kernel, Backend(1), precision, None, grid)
        with pytest.raises(ConfigError, match="compares some, or leaves of trees, for equality"):
            resolve_precision(precision, np.dtype("f4"), [], Backend(1), kernel)


def test_precision_auto_is_exact_for_categorical() -> None:
    backend = get_backend("cpu")
    backend.tensor_cores = True
    for dtype in (np.uint8, np.float32):
        kernel = sk.Laplace(1.0).with_categorical(CATEGORICAL)
        assert resolve_precision("auto", np.dtype(dtype), [], backend, kernel) == ("exact", None)
        kernel = kernel.with_metric(np.ones(D))
        assert resolve_precision("auto", np.dtype(dtype), [], backend, kernel) == ("exact", None)


def test_importances_include_categorical_features() -> None:
    """Check the shares of the squared distance of two rows of standardised features."""
    categorical = ((0, 4.0), (2, 2.0))
    expected = np.array([1.0 + 2.0, 4.0, 0.0 + 1.0]) / 8
    np.testing.assert_allclose(importances(np.array([1.0, 2.0, 0.0]), categorical), expected)
    A = np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    np.testing.assert_allclose(importances(A, categorical), expected)
    np.testing.assert_allclose(importances(1e-170 * np.ones(3), categorical), [2 / 3, 0, 1 / 3])
    np.testing.assert_allclose(importances(np.zeros(3), categorical), [2 / 3, 0, 1 / 3])
    for metric in (np.array([1.0, 2.0, 0.0]), A):
        summary = describe_metric(metric, "abc", categorical)
        expected_shares = dict(zip("abc", expected, strict=True))
        assert dict(summary["importances"]) == pytest.approx(expected_shares)
        np.testing.assert_allclose(summary["spectrum"][:2], [0.8, 0.2])
