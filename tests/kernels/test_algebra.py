"""Check sums, products, metrics and tables of kernels, L1 distances, and runs with them."""

from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from streamkern.backend.base import Backend
from streamkern.backend.numba_backend import CompiledBackend, numba_problem
from streamkern.basics.errors import ConfigError, ResumeMismatchError
from streamkern.centers.random_rows import median_bandwidth
from streamkern.config.model import ModelConfig
from streamkern.estimator.estimators import KernelRegressor
from streamkern.kernels.base import kernel_name
from streamkern.kernels.builtin import (
    Cauchy,
    Dispersal,
    Gaussian,
    Kernel,
    Laplace,
    LaplaceL1,
    Linear,
    Matern32,
    Matern52,
    Polynomial,
    Product,
    ReluNTK,
    Sum,
    get_kernel,
)
from streamkern.kernels.products import DIAGONAL_ROWS, KernelOperator
from streamkern.train.resolve.problem_shape import resolve_precision
from streamkern.train.saved_model import load_model
from tests import reference as ref
from tests import runs
from tests.runs import array_source, assert_same_bits, final, finished, stopped
from tests.solver_problems import Array, Quartic, both, rows

BACKENDS = [Backend] + [CompiledBackend] * (numba_problem() is None)


def truth(kernel: Kernel, A: Array, B: Array) -> Array:
    """Return K(A, B) in float64, part by part."""
    if kernel.metric is not None:
        A, B = (X * kernel.metric if kernel.metric.ndim == 1 else X @ kernel.metric for X in (A, B))
    name = kernel_name(type(kernel))
    if name in ref.KERNELS:
        return ref.KERNELS[name](A, B, kernel.bandwidth)
    match kernel:
        case Sum():
            parts = zip(kernel.weights, kernel.parts, strict=True)
            return np.asarray(sum(w * truth(part, A, B) for w, part in parts))
        case Product():
            return reduce(np.multiply, (truth(part, A, B) for part in kernel.parts))
        case Dispersal():
            return np.asarray(np.exp(-((cdist(A, B) / kernel.bandwidth) ** kernel.gamma)))
        case Linear():
            return np.asarray(A @ B.T)
        case Polynomial():
            return np.asarray((kernel.gamma * A @ B.T + kernel.c0) ** kernel.degree)
        case ReluNTK(depth=1):
            norms = np.linalg.norm(A, axis=1)[:, None] * np.linalg.norm(B, axis=1)
            u = np.clip(A @ B.T / norms, -1, 1)
            angle = np.pi - np.arccos(u)
            return np.asarray(norms * (2 * u * angle + np.sqrt(1 - u**2)) / np.pi)
    raise AssertionError(kernel)


widths = st.sampled_from([0.8, 2.0, 5.0])
RADIAL_KERNELS = st.one_of(
    *(st.builds(kind, widths) for kind in (Laplace, Gaussian, Cauchy, Matern32, Matern52)),
    st.builds(Dispersal, widths, st.sampled_from([0.5, 1.3, 2.0])),
)
INNER_KERNELS = st.one_of(
    st.builds(Linear),
    st.builds(ReluNTK),
    st.builds(Polynomial, st.integers(1, 3), widths, st.sampled_from([0.0, 1.0])),
)


def composites(leaves: st.SearchStrategy[Kernel]) -> st.SearchStrategy[Kernel]:
    """Return trees of sums and products."""

    def combine(parts: st.SearchStrategy[Kernel]) -> st.SearchStrategy[Kernel]:
        pairs = st.lists(parts, min_size=1, max_size=3)
        weights = st.sampled_from([0.0, 0.5, 1.0, 2.0])
        return st.one_of(
            pairs.map(Product),
            st.tuples(pairs, weights).map(lambda t: Sum(t[0], [t[1]] * (len(t[0]) - 1) + [0.3])),
        )

    return st.recursive(leaves, combine, max_leaves=5)


ANY_KERNEL = st.one_of(
    composites(RADIAL_KERNELS),
    composites(st.one_of(RADIAL_KERNELS, INNER_KERNELS)),
    composites(st.builds(LaplaceL1, widths)),
)


def metrics(d: int) -> st.SearchStrategy[Array | None]:
    """Return no metric, scales, and matrices with fewer and with more columns than rows."""
    return st.sampled_from([None, np.abs(rows(8, d)), rows(9, d, 2), rows(9, d, d + 2)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "precision", "examples"),
    # Compiled, every kernel is a function of its own, which takes half a second to make.
    [(Backend, "float64", 60), (Backend, "exact", 60), (CompiledBackend, "exact", 12)],
)
def test_combined_kernel_equals_combination_of_parts(
    kind: type[Backend], precision: str, examples: int
) -> None:
    """Compare with the parts on small tiles, with a shift, for points that are not scaled."""
    if kind is CompiledBackend and numba_problem() is not None:
        pytest.skip("Numba is not installed")

    @given(kernel=ANY_KERNEL, metric=metrics(4), norms_in_columns=st.booleans())
    @settings(max_examples=examples, deadline=None)
    def check(kernel: Kernel, metric: Array | None, norms_in_columns: bool) -> None:
        kernel = kernel.with_metric(metric)
        backend = kind(1)
        backend.tile_rows, backend.tile_cols = 16, 9
        backend.norms_in_columns &= norms_in_columns
        op = KernelOperator(kernel, backend, precision, shift=rows(7, 4))
        A, B, W = rows(0, 40, 4), rows(1, 20, 4), rows(2, 20, 3).astype(op.dtype)
        keep = np.empty((40, 20), op.dtype)
        out = op.product(op.points(A, left=True), op.points(B, right=True), W, keep=keep)
        K = truth(kernel, A, B)
        # A squared distance, here below 200, is known to some eps of that; roots are taken of it.
        size = max(1.0, float(np.abs(K).max()))
        atol = (1e-7 if precision == "float64" else 1e-4) * size
        np.testing.assert_allclose(keep, K, rtol=0, atol=atol)
        np.testing.assert_allclose(out, keep @ W, rtol=0, atol=100 * np.finfo(op.dtype).eps * size)

    check()


@given(kernel=ANY_KERNEL, metric=metrics(4))
@settings(max_examples=60, deadline=None)
def test_kernel_roundtrips_through_description(kernel: Kernel, metric: Array | None) -> None:
    kernel = kernel.with_metric(metric)
    described = json.loads(json.dumps(kernel.describe()))
    restored = get_kernel(described, metric=metric)
    assert restored.describe() == kernel.describe() == described
    assert repr(restored) == repr(kernel)
    assert (restored.geometry, restored.expression) == (kernel.geometry, kernel.expression)
    assert restored.bandwidth == kernel.bandwidth
    if metric is not None:
        with pytest.raises(ConfigError, match="metric, whose numbers a table cannot hold; give"):
            get_kernel(described)


@given(kernel=ANY_KERNEL)
@settings(max_examples=40, deadline=None)
def test_every_kernel_is_positive_semidefinite(kernel: Kernel) -> None:
    X = rows(0, 50, 3)
    K = KernelOperator(kernel, Backend(1), "float64")
    gram = K.gram(both(K, X))
    lam = np.linalg.eigvalsh((gram + gram.T) / 2)
    assert lam.min() > -1e-7 * lam.max()


@pytest.mark.parametrize("kind", BACKENDS)
def test_diagonal_equals_diagonal_of_gram(kind: type[Backend]) -> None:
    """Check more rows than one kernel matrix is computed for, of kernels of every geometry."""
    X = rows(0, DIAGONAL_ROWS + 70, 5)
    for kernel in (Gaussian(1.5), LaplaceL1(2.0), Polynomial(3, 0.1, 2), ReluNTK(3),
                   0.5 * Laplace(3.0) + Gaussian(1.0) * Polynomial(2, 0.5, 1)):  # fmt: skip
        K = KernelOperator(kernel, kind(1), "float64")
        points = K.points(np.float64(X), right=True)
        np.testing.assert_allclose(K.diagonal(points), K.gram(points).diagonal(), rtol=1e-14)
        assert len(K.diagonal(points[:0])) == 0


@pytest.mark.parametrize("kind", BACKENDS)
def test_kernels_have_same_bits_for_any_number_of_threads(kind: type[Backend]) -> None:
    A, B, W = rows(0, 130, 9), rows(1, 90, 9), rows(2, 90, 3).astype(np.float32)
    for kernel in (
        LaplaceL1(2.0), Polynomial(5, 0.1, 2), ReluNTK(4),
        0.5 * Laplace(3.0, metric=rows(4, 9, 5)) + Gaussian(1, metric=rows(4, 9, 5)) * Polynomial(
            2, metric=rows(4, 9, 5)),
    ):  # fmt: skip
        results = []
        for threads in (1, 2, 3):
            with kind(threads) as backend:
                backend.tile_rows, backend.tile_cols = 16, 32
                op = KernelOperator(kernel, backend, shift=A.mean(axis=0))
                results.append((op.product(both(op, A), both(op, B), W), op.gram(both(op, A))))
                one = op.points(A[37:38].astype(np.float32), right=True)
                np.testing.assert_array_equal(one.right, both(op, A).right[37:38])  # type: ignore[index]
        for result in results[1:]:
            for left, right in zip(results[0], result, strict=True):
                np.testing.assert_array_equal(left, right)


def test_l1_distances_of_equal_rows_are_zero() -> None:
    for kind in BACKENDS:
        op = KernelOperator(LaplaceL1(3.0), kind(1), "exact", shift=rows(2, 19))
        X = 50 + rows(0, 300, 19)
        X[7] = X[200]
        K = op.matrix(both(op, X), both(op, X))
        np.testing.assert_array_equal(K.diagonal(), 1.0)
        assert K[7, 200] == K[200, 7] == 1.0
        # 19 differences of numbers near 50, rounded to 4e-6 each before the shift.
        np.testing.assert_allclose(K, truth(op.kernel, X, X), atol=1e-4)


def test_repr_and_description_are_readable() -> None:
    kernel = 0.5 * Laplace(3.0) + Gaussian(1.0) * Polynomial(2)
    assert repr(kernel) == (
        "0.5 * Laplace(bandwidth=3) + Gaussian(bandwidth=1) * Polynomial(degree=2, gamma=1, c0=1)"
    )
    assert kernel.describe() == {
        "kernel": "sum",
        "parts": [
            {"kernel": "laplace", "bandwidth": 3.0},
            {
                "kernel": "product",
                "parts": [
                    {"kernel": "gaussian", "bandwidth": 1.0},
                    {"kernel": "polynomial", "degree": 2, "gamma": 1.0, "c0": 1.0},
                ],
            },
        ],
        "weights": [0.5, 1.0],
    }
    assert repr(np.float64(2) * (Laplace(1) + Cauchy(2))) == (
        "2 * Laplace(bandwidth=1) + 2 * Cauchy(bandwidth=2)"
    )
    assert repr((Laplace(1) + Cauchy(2)) * Gaussian(3)) == (
        "(Laplace(bandwidth=1) + Cauchy(bandwidth=2)) * Gaussian(bandwidth=3)"
    )


def test_user_kernels_can_be_combined() -> None:
    kernel = Quartic(2.0) * Linear() + Laplace(1.0)
    assert kernel.expression is None
    op = KernelOperator(kernel, Backend(1), "float64")
    A, B = rows(0, 9, 3), rows(1, 8, 3)
    K = A @ B.T / (1 + (cdist(A, B) / 2) ** 4) + np.exp(-cdist(A, B))
    np.testing.assert_allclose(op.matrix(both(op, A), both(op, B)), K, atol=1e-12)
    assert repr(get_kernel(kernel.describe())) == repr(kernel)


def test_open_bandwidth_is_filled_by_get_kernel() -> None:
    for kernel in (Quartic("auto"), Laplace("auto")):
        assert get_kernel(kernel, lambda geometry: 3.0).describe() == type(kernel)(3.0).describe()


def test_kernel_names_of_other_libraries_are_accepted() -> None:
    """Check names that mean the same kernel, and messages for other parameters."""
    for name in ("rbf", "RBF", "Gaussian", "GAUSSIAN", "squared_exponential"):
        assert repr(get_kernel(name, 2.0)) == repr(Gaussian(2.0))
    for kind, name, remedy in (
        (Gaussian, "sigma", "use bandwidth="), (Quartic, "length_scale", "use bandwidth="),
        (Gaussian, "gamma", "1 / sqrt"), (Laplace, "nu", "Matern32 or Matern52"),
        (Polynomial, "coef0", "use c0="), (Linear, "sigma", "it takes metric"),
        (Laplace, "coef0", "it takes bandwidth"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"has no parameter '{name}'; .*{re.escape(remedy)}"):
            kind(**{name: 2.0})


# --- tables -------------------------------------------------------------------------------------


def test_kernel_tables_take_bandwidths_by_geometry() -> None:
    table = {
        "kind": "sum",
        "weights": [2, 1, 1],
        "parts": ["laplace", {"kind": "gaussian", "bandwidth": 2.0}, {"kind": "polynomial"}],
    }
    kernel = get_kernel(table, lambda geometry: {"distance": 7.0}[geometry])
    assert repr(kernel) == repr(2 * Laplace(7) + Gaussian(2) + Polynomial())
    assert repr(get_kernel({"kind": "laplace", "bandwidth": "auto"}, 3.0)) == repr(Laplace(3.0))
    assert repr(get_kernel("laplace_l1", {"l1": 4.0}.__getitem__)) == repr(LaplaceL1(4.0))
    assert repr(get_kernel("relu_ntk", 3.0)) == "ReluNTK(depth=1)"


def test_median_of_l1_distances_is_exact() -> None:
    Z = rows(0, 50, 6)
    distances = np.abs(Z[:, None] - Z).sum(axis=2)[np.triu_indices(50, 1)]
    assert median_bandwidth(Z, "cityblock") == pytest.approx(np.median(distances))


INVALID_TABLES: dict[str, tuple[Any, str]] = {
    "parameter": (
        {"kind": "polynomial", "degre": 2},
        "kernel 'polynomial' has no parameter 'degre'; it takes degree, gamma, c0",
    ),
    "none taken": ({"kind": "linear", "c0": 1}, "has no parameter 'c0'; it takes none"),
    "text": ({"kind": "laplace", "bandwidth": "wide"}, "bandwidth='wide' must be a finite number"),
    "truth": ({"kind": "laplace", "bandwidth": True}, "bandwidth=True must be a finite number"),
    "negative": ({"kind": "sum", "parts": ["laplace"], "weights": [-1]}, "weights=-1 must be a"),
    "l1": ({"kind": "product", "parts": ["laplace", "laplace_l1"]}, "kernels of the L1 distance"),
}
"""Tables whose refusal `tests.remedies` does not test, or not for a part of a table."""


@pytest.mark.parametrize("name", sorted(INVALID_TABLES))
def test_invalid_kernel_tables_are_refused(name: str) -> None:
    table, message = INVALID_TABLES[name]
    with pytest.raises(ConfigError, match=message):
        get_kernel(table)
    with pytest.raises(ConfigError, match=f"^model.kernel: .*{message}"):
        ModelConfig(kernel=table)


def test_unused_bandwidth_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.bandwidth=2 is not used by any part of model\.kern"
    ):
        ModelConfig(kernel={"kind": "polynomial"}, bandwidth=2.0)
    assert ModelConfig(kernel="polynomial").bandwidth == "auto"


@pytest.mark.parametrize(
    ("metric", "shape"), [(np.zeros((2, 2, 2)), r"\(2, 2, 2\)"), ([], r"\(0,\)")]
)
def test_metric_of_wrong_shape_is_refused(metric: Any, shape: str) -> None:
    with pytest.raises(ConfigError, match=f"metric of shape {shape}"):
        Laplace(1.0, metric=metric)


@pytest.mark.parametrize(
    ("kernel", "refused", "chosen"),
    [
        (Laplace(1.0, metric=np.ones((3, 2))), "integer", "high"),
        (Linear(), "high", "exact"),
        (LaplaceL1(1.0), "fast", "exact"),
    ],
    ids=["metric", "inner product", "L1 distance"],
)
def test_kernel_determines_precision_of_bytes(kernel: Kernel, refused: str, chosen: str) -> None:
    backend, dtype = Backend(1), np.dtype(np.uint8)
    with pytest.raises(ConfigError, match=f"precision='{refused}' (is for|requires)"):
        resolve_precision(refused, dtype, [], backend, kernel)
    backend.tensor_cores = True
    assert resolve_precision("auto", dtype, [], backend, kernel) == (chosen, None)


# --- runs ---------------------------------------------------------------------------------------

RUNS: dict[str, Any] = {
    "polynomial": {"kind": "polynomial", "degree": 2, "gamma": 0.1},
    "linear": "linear",
    "relu_ntk": {"kind": "relu_ntk", "depth": 2},
    "laplace_l1": "laplace_l1",
    "sum": {"kind": "sum", "weights": [0.5, 1], "parts": ["laplace", {"kind": "polynomial"}]},
}


@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("solver", ["block", "eigenpro3"])
@pytest.mark.parametrize("name", sorted(RUNS))
def test_run_with_combined_kernel_learns_resumes_and_loads(
    name: str, solver: str, tmp_path: Path
) -> None:
    overrides = {"model.kernel": RUNS[name], "model.bandwidth": "auto", "solver.name": solver}
    overrides |= {"data.epochs": 3, "model.fit_intercept": False}
    if solver == "eigenpro3":
        overrides["data.batch_size"] = 10  # below the critical batch of all of them
    uninterrupted = finished(runs.settings(tmp_path / "whole", **overrides), source=array_source())
    config = runs.settings(tmp_path / "cut", **overrides)
    stopped(config, 3, source=array_source())
    resumed = finished(config, source=array_source(), test=array_source(10, 5))
    assert_same_bits(final(tmp_path / "cut"), final(tmp_path / "whole"))
    X = runs.arrays(10, 5)[0]
    kernel = resumed.model.op.kernel
    assert json.loads(json.dumps(resumed.meta["kernel"])) == kernel.describe()
    if name != "relu_ntk":
        K = truth(kernel, X.astype(np.float64), np.float64(resumed.Z))
        f = K @ np.float64(resumed.model.weights)
        np.testing.assert_allclose(resumed.model.values(X), f, rtol=1e-3, atol=1e-3)
    model = load_model(tmp_path / "whole", device="cpu", threads=1)
    np.testing.assert_array_equal(model.values(X), uninterrupted.model.values(X))
    model.backend.close()


def test_metric_is_saved_with_run(tmp_path: Path) -> None:
    X, d = runs.arrays(10, 5)[0], runs.D
    kernel = 0.5 * Laplace(2.0, metric=rows(3, d, 2)) + Gaussian(1.0, metric=rows(3, d, 2))
    overrides = {"model.kernel": kernel, "model.bandwidth": "auto"}
    config = runs.settings(tmp_path, **overrides, **{"model.fit_intercept": False})
    stopped(config, 2, source=array_source())
    other_metric = config.with_overrides({"model.kernel": kernel.with_metric(rows(4, d, 2))})
    with pytest.raises(ResumeMismatchError, match=r"model\.kernel: other contents"):
        finished(other_metric, source=array_source())
    result = finished(config, source=array_source(), test=array_source(10, 5))
    f = truth(kernel, np.float64(X), np.float64(result.Z)) @ np.float64(result.model.weights)
    np.testing.assert_allclose(result.model.values(X), f, rtol=1e-3, atol=1e-3)
    model = load_model(tmp_path, device="cpu", threads=1)
    assert model.op.kernel.describe() == kernel.describe()
    np.testing.assert_array_equal(model.values(X), result.model.values(X))
    model.backend.close()


def test_estimator_accepts_kernel_tables_and_sums() -> None:
    X = rows(0, 300, 3)
    y = 1 + X[:, 0] * X[:, 1] - X[:, 2]
    for kernel in ({"kind": "polynomial", "degree": 2}, Polynomial(2) + 0.1 * Linear()):
        model = KernelRegressor(kernel, n_centers=40, device="cpu", threads=1).fit(X, y)
        fresh = rows(1, 50, 3)
        assert model.score(fresh, 1 + fresh[:, 0] * fresh[:, 1] - fresh[:, 2]) > 0.999
    assert model.bandwidth_ == 1.0
    with pytest.raises(ConfigError, match=r"^kernel: kernel 'linear' has no parameter 'c0'"):
        KernelRegressor({"kind": "linear", "c0": 1}).fit(X, y)
