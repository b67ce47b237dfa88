"""Compare kernels with trees with scikit-learn's leaves and dense float64."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.tree import DecisionTreeRegressor, ExtraTreeRegressor

import streamkern as sk
from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.backend.numba_backend import CompiledBackend, numba_problem
from streamkern.basics.errors import ConfigError
from streamkern.kernels.agop import GradientSum
from streamkern.kernels.base import Kernel
from streamkern.kernels.builtin import get_kernel
from streamkern.kernels.fourier import FourierFeatures, check_has_frequencies
from streamkern.kernels.notation import kernel_text
from streamkern.kernels.points import PRECISIONS, Grid, point_bytes, point_width, scratch_bytes
from streamkern.kernels.products import KernelOperator
from streamkern.kernels.slope import Slope
from streamkern.kernels.sparse import for_sparse_rows
from streamkern.kernels.tree_partitions import (
    MAX_TREE_NODES,
    MAX_TREES,
    N_TREES,
    TreePartitions,
    placeholder_trees,
    restored_trees,
)
from streamkern.train.resolve.problem_shape import resolve_precision
from tests import fake_cupy
from tests.host_cuda import COMPILER
from tests.solver_problems import Array, both, rows
from tests.traced_memory import traced_memory

D, N, M = 5, 40, 60
CATEGORICAL = ((3, 0.8), (1, 2.5))
SHIFT = np.array([0.1, 2.0, -0.3, 1.5, 0.0])
METRICS = {
    "none": None, "scales": np.array([0.5, 0.3, 2.0, 0.1, 1.0]), "matrix": 0.5 * rows(4, D, 3),
}  # fmt: skip
KERNELS: dict[str, Kernel] = {
    "laplace": sk.Laplace(1.7), "gaussian": sk.Gaussian(2.0), "matern32": sk.Matern32(1.5),
    "matern52": sk.Matern52(1.5), "cauchy": sk.Cauchy(1.5), "dispersal": sk.Dispersal(2.0, 1.3),
    "sum": 0.5 * sk.Laplace(2.0) + 2 * sk.Gaussian(1.0),
    "product": sk.Laplace(3.0) * sk.Cauchy(2.0),
}  # fmt: skip
STUMP = [[[2, 0.5, 1, 2], [0, 0, 1, 1], [0, 0, 2, 2]]]
"""Nodes of a tree with one split, of the third feature."""


def table(n: int, seed: int) -> Array:
    """Return normal columns, except that the second and the fourth have a few whole numbers."""
    X = rows(seed, n, D).astype(np.float32)
    rng = np.random.default_rng(seed)
    X[:, 1], X[:, 3] = rng.integers(0, 4, n), rng.integers(-5, 5, n)
    return X


def grown(n_trees: int, max_leaves: int = 6, seed: int = 5) -> list[Any]:
    """Return fitted scikit-learn trees, which differ in their numbers of nodes."""
    rng, X = np.random.default_rng(seed), table(200, seed)
    return [
        DecisionTreeRegressor(max_leaf_nodes=2 + k % (max_leaves - 1), random_state=k).fit(
            X, X[:, k % D] ** 2 + rng.normal(size=200)
        )
        for k in range(n_trees)
    ]


def leaves_of(trees: list[Any], X: Array) -> Array:
    """Return the leaves (n, T) of the rows X by scikit-learn."""
    return np.stack([tree.apply(X) for tree in trees], axis=1)


def written_leaves(partitions: TreePartitions, X: Array) -> Array:
    """Return the leaves (n, T) of the rows X."""
    out = np.full((len(X), len(partitions)), -1.0)
    partitions.write_leaves(np, X, out)
    return out


def squared_distances(kernel: Kernel, A: Array, B: Array, trees: list[Any]) -> Array:
    """Return the squared distances (n, m) by their definition, in float64."""
    unequal = (leaves_of(trees, A)[:, None] != leaves_of(trees, B)).mean(axis=2)
    A, B = A.astype(np.float64), B.astype(np.float64)
    metric = np.ones(D) if kernel.metric is None else kernel.metric
    a, b = (X * metric if metric.ndim == 1 else X @ metric for X in (A, B))
    squares = ((a[:, None] - b) ** 2).sum(axis=2)
    for column, weight in kernel.categorical:
        squares += weight * (A[:, None, column] != B[:, column])
    assert kernel.trees is not None
    return np.asarray(squares + kernel.trees.weight * unequal)


def dense(kernel: Kernel, A: Array, B: Array, trees: list[Any]) -> Array:
    """Return the kernel's values, by its profile in float64."""
    sq = squared_distances(kernel, A, B, trees)
    return np.asarray(kernel.profile(sq / kernel.bandwidth**2, np))


@pytest.fixture
def backends() -> Iterator[list[Backend]]:
    """Yield the backends of the CPU, with small tiles."""
    all_backends = [Backend(2), *([CompiledBackend(2)] if numba_problem() is None else [])]
    for backend in all_backends:
        backend.tile_rows, backend.tile_cols = 16, 24
    yield all_backends
    for backend in all_backends:
        backend.close()


# --- partitions ---------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10**6), n_trees=st.integers(1, 5), max_leaves=st.integers(2, 40),
    size=st.sampled_from([1e-30, 1.0, 1e6, 1e30]), few_values=st.booleans(), random=st.booleans(),
)  # fmt: skip
def test_leaves_equal_those_of_scikit_learn(
    seed: int, n_trees: int, max_leaves: int, size: float, few_values: bool, random: bool
) -> None:
    """Check rows, and values at the thresholds and beside them, in float32 and float64."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(60, 3))
    X = (np.rint(2 * X) if few_values else X) * size
    kind = ExtraTreeRegressor if random else DecisionTreeRegressor
    trees = [
        kind(max_leaf_nodes=max_leaves, random_state=k).fit(X, rng.normal(size=60))
        for k in range(n_trees)
    ]
    partitions = TreePartitions.of_trees(trees, 1.0)
    assert partitions.depth == max(tree.get_depth() for tree in trees)
    thresholds = np.concatenate([t.tree_.threshold[t.tree_.feature >= 0] for t in trees])
    values = [X.ravel(), thresholds]
    for dtype in (np.float32, np.float64):
        at = thresholds.astype(dtype)
        values += [at, np.nextafter(at, dtype(-np.inf)), np.nextafter(at, dtype(np.inf))]
    fresh = rng.choice(np.concatenate(values), (300, 3))
    for rows_ in (X, X.astype(np.float32), fresh, fresh.astype(np.float32)):
        np.testing.assert_array_equal(written_leaves(partitions, rows_), leaves_of(trees, rows_))


def test_thresholds_separate_neighbouring_numbers() -> None:
    """Check a threshold between neighbouring float32 numbers, whose middle is rounded."""
    for low in np.array([1, 1 + 2.0**-23, 16777215, -3], np.float32):
        high = np.nextafter(low, np.float32(np.inf))
        X = np.array([[low], [high]], np.float32)
        tree = DecisionTreeRegressor().fit(X, [0, 1])
        partitions = TreePartitions.of_trees([tree], 1.0)
        np.testing.assert_array_equal(written_leaves(partitions, X), tree.apply(X)[:, None])


def test_tree_without_splits_has_one_leaf() -> None:
    """Check it alone, and beside a tree that has splits."""
    X = table(30, 0)
    constant = DecisionTreeRegressor().fit(X, np.zeros(30))
    alone = TreePartitions.of_trees([constant], 1.0)
    assert (len(alone), alone.depth) == (1, 0)
    np.testing.assert_array_equal(written_leaves(alone, X), 0)
    trees = [constant, *grown(2)]
    partitions = TreePartitions.of_trees(trees, 1.0)
    np.testing.assert_array_equal(written_leaves(partitions, X), leaves_of(trees, X))


def chain(k: int, *, last_first: bool = False) -> Array:
    """Return the nodes (1, k, 4) of a tree of (k - 1) / 2 splits below each other.

    last_first : whether the way goes to the right nodes
    """
    nodes = np.zeros((1, k, 4))
    nodes[0, :, 2] = nodes[0, :, 3] = np.arange(k)
    for node in range(0, k - 2, 2):
        order = [1, 2] if last_first else [2, 1]
        nodes[0, node] = [0, node if last_first else -node, node + order[0], node + order[1]]
    return nodes


@pytest.mark.parametrize("last_first", [False, True])
def test_deep_trees_and_unreachable_nodes_have_their_depth(last_first: bool) -> None:
    """Check chains of 127 splits, for which the nodes at a depth must not be counted twice."""
    nodes = chain(255, last_first=last_first)
    partitions = TreePartitions(nodes, 1.0)
    assert partitions.depth == 127
    X = np.arange(-300, 300, dtype=np.float32)[:, None]
    expected = np.empty(len(X))
    for i, x in enumerate(X[:, 0]):
        node = 0
        while nodes[0, node, 2] != node:
            node = int(nodes[0, node, 2 if x <= nodes[0, node, 1] else 3])
        expected[i] = node
    np.testing.assert_array_equal(written_leaves(partitions, X)[:, 0], expected)
    unreachable = np.array([*STUMP[0][:1], *STUMP[0][1:], [0, 0, 4, 5], [0, 0, 4, 4], [0, 0, 5, 5]])
    assert TreePartitions(unreachable[None], 1.0).depth == 1


def test_partitions_are_copies() -> None:
    nodes = np.array(STUMP, np.float64)
    partitions = TreePartitions(nodes, 2.0)
    nodes[0, 0, 1] = 9.0
    np.testing.assert_array_equal(partitions.nodes, STUMP)
    with pytest.raises(ValueError, match="read-only"):
        partitions.nodes[0, 0, 1] = 9.0
    for same in (pickle.loads(pickle.dumps(partitions)), copy.deepcopy(partitions)):
        np.testing.assert_array_equal(same.nodes, STUMP)
        assert (same.weight, same.depth) == (2.0, 1)
        assert same.describe() == partitions.describe()


def nodes_with(**changes: Any) -> Array:
    """Return the nodes of a tree with one split, with other numbers in some nodes.

    changes : node -> its four numbers
    """
    nodes = np.array(STUMP, np.float64)
    for name, numbers in changes.items():
        nodes[0, int(name[1:])] = numbers
    return nodes


@pytest.mark.parametrize(
    "nodes",
    [
        np.zeros((3, 4)), np.zeros((0, 3, 4)), np.zeros((2, 0, 4)), np.zeros((1, 1, 3)),
        np.zeros((1, 1, 5)), np.zeros((1, 1, 4), complex), np.zeros((1, 1, 4), bool),
        np.full((1, 1, 4), "0"), np.full((1, 1, 4), None), np.float64(1.0),
        nodes_with(n0=[2, np.nan, 1, 2]), nodes_with(n0=[2, np.inf, 1, 2]),
        nodes_with(n0=[np.nan, 0, 1, 2]), nodes_with(n0=[2, 0, np.nan, 2]),
        nodes_with(n0=[0.5, 0, 1, 2]), nodes_with(n0=[-1, 0, 1, 2]),
        nodes_with(n0=[2, 0, 1, 3]), nodes_with(n0=[2, 0, -1, 2]), nodes_with(n0=[2, 0, 1.5, 2]),
        nodes_with(n0=[2, 0, 0, 2]), nodes_with(n0=[2, 0, 1, 0]), nodes_with(n1=[0, 0, 0, 2]),
        nodes_with(n1=[0, 0, 2, 2], n2=[0, 0, 1, 1]), nodes_with(n2=[0, 0, 0, 0]),
    ],
)  # fmt: skip
def test_arrays_that_are_no_trees_are_refused(nodes: Any) -> None:
    """Check shapes, dtypes, NaN, and numbers of nodes with fractions or that form a cycle."""
    with pytest.raises(ConfigError, match="are no trees; give an array"):
        TreePartitions(nodes, 1.0)
    with pytest.raises(ConfigError, match="are no trees; give an array"):
        get_kernel({"kind": "laplace", "trees": {"n": 1, "weight": 1.0}}, trees=nodes)


@pytest.mark.parametrize("weight", [0, -1.0, np.nan, np.inf])
def test_weights_must_be_finite_and_above_0(weight: float) -> None:
    with pytest.raises(ConfigError, match="need a finite weight above 0"):
        TreePartitions(np.array(STUMP), weight)
    with pytest.raises(ConfigError, match="need a finite weight above 0"):
        TreePartitions.of_trees(grown(2), weight)


def test_largest_numbers_of_trees_and_nodes(backends: list[Backend]) -> None:
    """Check that distances are right at the limits of a byte, and that more is refused."""
    many = TreePartitions(np.repeat(STUMP, MAX_TREES, axis=0), 1.0)
    large = TreePartitions(chain(MAX_TREE_NODES - 1), 1.0)
    X = np.array([[-300, 0, 0], [300, 0, 1]], np.float32)
    assert sorted(written_leaves(large, X)[:, 0]) == [1, 254]
    for partitions in (many, large):
        for backend in backends:
            op = KernelOperator(sk.Gaussian(1.0, metric=[0, 0, 0]).with_trees(partitions), backend)
            np.testing.assert_allclose(op.gram(both(op, X))[0], [1, np.exp(-0.5)], rtol=1e-6)
    with pytest.raises(ConfigError, match=r"256 trees of 3 nodes are too many.*255 trees of 256"):
        TreePartitions(np.repeat(STUMP, MAX_TREES + 1, axis=0), 1.0)
    with pytest.raises(ConfigError, match="1 trees of 257 nodes are too many"):
        TreePartitions(chain(MAX_TREE_NODES + 1), 1.0)
    X = table(2000, 0)
    tree = DecisionTreeRegressor().fit(X, rows(0, 2000))
    with pytest.raises(ConfigError, match="nodes are too many"):
        TreePartitions.of_trees([tree], 1.0)


def test_scratch_memory_is_planned() -> None:
    partitions = TreePartitions.of_trees(grown(96), 1.0)
    kernel, n = sk.Laplace(1.0).with_trees(partitions), 2000
    for dtype, precision in ((np.float32, "exact"), (np.float64, "float64")):
        X, out = table(n, 0).astype(dtype), np.empty((n, 96), dtype)
        partitions.write_leaves(np, X, out)
        with traced_memory() as traced:
            partitions.write_leaves(np, X, out)
        planned = n * scratch_bytes(D, precision, kernel)
        assert 0.6 * planned < traced.peak < 1.05 * planned + 100_000


# --- kernels with trees -------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-12), ("exact", 2e-5)])
def test_kernel_with_trees_equals_definition(
    precision: str, tolerance: float, name: str, metric: str, backends: list[Backend]
) -> None:
    trees = grown(12)
    kernel = KERNELS[name].with_metric(METRICS[metric]).with_categorical(CATEGORICAL)
    kernel = kernel.with_trees(TreePartitions.of_trees(trees, 3.0))
    A, B, W = table(N, 0), table(M, 1), rows(2, M, 3)
    truth = dense(kernel, A, B, trees)
    for backend in backends:
        op = KernelOperator(kernel, backend, precision, SHIFT)
        left = op.points(A.astype(op.dtype), left=True)
        right = op.points(B.astype(op.dtype), right=True)
        np.testing.assert_allclose(op.matrix(left, right), truth, rtol=0, atol=tolerance)
        product = op.product(left, right, W.astype(op.dtype))
        np.testing.assert_allclose(product, truth @ W, rtol=0, atol=50 * tolerance)


@pytest.mark.parametrize("categorical", [(), CATEGORICAL])
@pytest.mark.parametrize("n_trees", [1, 5, 8, 12, 96, 97, MAX_TREES])
def test_any_number_of_trees_is_computed(
    n_trees: int, categorical: tuple[tuple[int, float], ...], backends: list[Backend]
) -> None:
    """Check the values, the diagonal and the smallest eigenvalue of a matrix of equal sides."""
    trees = grown(n_trees)
    kernel = sk.Gaussian(2.0).with_trees(TreePartitions.of_trees(trees, 5.0))
    kernel, A = kernel.with_categorical(categorical), table(M, 0)
    A[1] = A[0]
    truth = dense(kernel, A, A, trees)
    assert np.linalg.eigvalsh(truth)[0] > -1e-13
    for precision, tolerance in (("float64", 1e-12), ("exact", 1e-5)):
        for backend in backends:
            op = KernelOperator(kernel, backend, precision, SHIFT)
            points = both(op, A)
            np.testing.assert_allclose(op.gram(points), truth, rtol=0, atol=tolerance)
            np.testing.assert_array_equal(op.diagonal(points), 1)
            right_only = op.points(A.astype(op.dtype), right=True)
            K = op.matrix(right_only, right_only)
            np.testing.assert_array_equal(K, op.matrix(points, points))


def test_trees_equal_one_hot_codes_of_leaves() -> None:
    """Compare with half the squared distance of one-hot codes, times the weight of a tree."""
    A, B, trees, weight = table(N, 0), table(M, 1), grown(7), 1.7
    eye = np.sqrt(weight / 7 / 2) * np.eye(20)
    coded = [np.column_stack([X, eye[leaves_of(trees, X)].reshape(len(X), -1)]) for X in (A, B)]
    kernel = sk.Laplace(2.0).with_trees(TreePartitions.of_trees(trees, weight))
    op = KernelOperator(kernel, Backend(1), "float64")
    plain = KernelOperator(sk.Laplace(2.0), Backend(1), "float64")
    K = op.matrix(both(op, A), both(op, B))
    expected = plain.matrix(both(plain, coded[0]), both(plain, coded[1]))
    np.testing.assert_allclose(K, expected, rtol=1e-9)


def test_values_depend_on_no_other_rows(backends: list[Backend]) -> None:
    """Check bits of one row, of a row in a tile, and of rows written to existing memory."""
    kernel = sk.Laplace(2.0).with_trees(TreePartitions.of_trees(grown(13), 2.0))
    n = 2 * Backend.prepare_rows + 7
    for backend in backends:
        op = KernelOperator(kernel, backend, "exact", SHIFT)
        X = table(n, 0)
        room = op.empty_points(n, D, left=True, right=True)
        op.points(X, out=room)
        new, single = both(op, X), both(op, X[300:301])
        for side in ("left", "right"):
            np.testing.assert_array_equal(getattr(room, side), getattr(new, side))
            np.testing.assert_array_equal(getattr(single, side), getattr(new[300:301], side))


@pytest.mark.parametrize("precision", ["exact", "float64"])
def test_planned_width_equals_prepared_rows(precision: str, backends: list[Backend]) -> None:
    kernel = sk.Laplace(2.0).with_trees(TreePartitions.of_trees(grown(13), 2.0))
    for metric in METRICS.values():
        full = kernel.with_metric(metric).with_categorical(CATEGORICAL)
        for backend in backends:
            op = KernelOperator(full, backend, precision, SHIFT)
            x = op.points(table(4, 0).astype(op.dtype), right=True)
            assert x.right is not None
            assert x.width == point_width(D, precision, backend, full)
            norms = 0 if x.norms is None else x.norms.nbytes
            assert x.right.nbytes + norms == 4 * point_bytes(D, precision, backend, full)


def test_placeholder_is_as_wide_as_trees_of_a_run() -> None:
    kernel = sk.Laplace(1.0).with_trees(placeholder_trees())
    assert point_width(D, "exact", Backend(1), kernel) == N_TREES + point_width(
        D, "exact", Backend(1), sk.Laplace(1.0)
    )


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_device_computes_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the stand-in for CuPy, whose arrays refuse what those of a device refuse."""
    fake_cupy.install(monkeypatch)
    trees = grown(12)
    kernel = sk.Laplace(1.7).with_trees(TreePartitions.of_trees(trees, 3.0))
    kernel = kernel.with_categorical(CATEGORICAL)
    A, B = table(N, 0), table(M, 1)
    truth = dense(kernel, A, B, trees)
    with get_backend("gpu") as backend, backend.active():
        for precision, tolerance in (("float64", 1e-12), ("exact", 2e-5)):
            op = KernelOperator(kernel, backend, precision, SHIFT)
            K = backend.to_host(op.matrix(both(op, A), both(op, B)))
            np.testing.assert_allclose(K, truth, rtol=0, atol=tolerance)


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["laplace", "gaussian", "sum"])
def test_gradients_equal_finite_differences(
    name: str, metric: str, backends: list[Backend]
) -> None:
    """Compare with finite differences, at rows that are not near a threshold."""
    trees, h = grown(12), 1e-5
    kernel = KERNELS[name].with_metric(METRICS[metric]).with_categorical(CATEGORICAL[:1])
    kernel = kernel.with_trees(TreePartitions.of_trees(trees, 3.0))
    X, Z, alpha = table(N, 0).astype(np.float64), table(M, 1).astype(np.float64), rows(2, M, 2)
    splits = [(j, t) for tree in trees for j, t in
              zip(tree.tree_.feature, tree.tree_.threshold, strict=True) if j >= 0]  # fmt: skip
    X = X[np.min([np.abs(X[:, j] - t) for j, t in splits], axis=0) > 1e-3]
    assert len(X) > 25
    w = np.random.default_rng(3).uniform(0.2, 2, len(X))

    def f(by: Array) -> Array:
        sq = squared_distances(kernel.with_categorical(()), X + by, Z, trees)
        sq += sum(weight * (X[:, None, j] != Z[:, j]) for j, weight in kernel.categorical)
        return np.asarray(kernel.profile(sq / kernel.bandwidth**2, np) @ alpha)

    g = np.stack([(f(h * e) - f(-h * e)) / (2 * h) for e in np.eye(D)], axis=1)
    truth = np.einsum("m,mic,mjc->ij", w, g, g) / w.sum()
    for precision, tolerance in (("float64", 1e-6), ("exact", 2e-3)):
        for backend in backends:
            op = KernelOperator(kernel, backend, precision, SHIFT)
            total = GradientSum(op, op.points(Z, right=True), alpha.astype(op.dtype))
            for part in (slice(0, 20), slice(20, None)):
                total.add(X[part].astype(op.dtype), w[part].astype(op.dtype))
            atol = tolerance * np.abs(truth).max()
            np.testing.assert_allclose(total.mean(), truth, rtol=0, atol=atol)


def test_slope_has_the_trees_of_its_kernel() -> None:
    trees = grown(9)
    kernel = sk.Gaussian(2.0).with_trees(TreePartitions.of_trees(trees, 3.0))
    A, B = table(N, 0), table(M, 1)
    op = KernelOperator(Slope(kernel), Backend(1), "float64", SHIFT)
    expected = -0.5 * dense(kernel, A, B, trees)  # phi(s) = exp(-s / 2)
    np.testing.assert_allclose(op.matrix(both(op, A), both(op, B)), expected, rtol=1e-6)


# --- descriptions and refusals ------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_with_trees_roundtrips_through_description(name: str) -> None:
    trees = grown(3)
    partitions = TreePartitions.of_trees(trees, 0.1)
    kernel = KERNELS[name].with_categorical(CATEGORICAL).with_trees(partitions)
    described = json.loads(json.dumps(kernel.describe()))
    assert list(kernel.arrays()) == ["trees"]
    restored = get_kernel(described, trees=kernel.arrays()["trees"])
    assert restored.describe() == kernel.describe() != KERNELS[name].describe()
    assert restored.trees is not None
    assert restored.trees.weight == 0.1
    A, B = table(9, 0), table(9, 1)
    np.testing.assert_array_equal(*(dense(k, A, B, trees) for k in (kernel, restored)))
    in_metric = kernel.with_metric(np.ones(D))
    assert list(in_metric.arrays()) == ["metric", "trees"]
    assert get_kernel(in_metric.describe(), **in_metric.arrays()).describe() == in_metric.describe()
    assert kernel.with_bandwidth(9.0).trees is partitions
    assert kernel.with_categorical(()).with_trees(None).describe() == KERNELS[name].describe()
    assert KERNELS[name].trees is None
    other = kernel.with_trees(TreePartitions.of_trees(grown(3, seed=6), 0.1))
    assert other.describe() != kernel.describe()
    assert kernel_text(described).endswith(" with 3 trees")
    assert repr(kernel).endswith(" with 3 trees")
    with pytest.raises(ConfigError, match=r"trees.*a table cannot hold; give the Kernel object"):
        get_kernel(described)


def test_kernels_with_trees_are_copied_and_pickled() -> None:
    trees = grown(3)
    kernel = sk.Laplace(2.0, metric=np.ones(D)).with_trees(TreePartitions.of_trees(trees, 0.1))
    A, op = table(9, 0), KernelOperator(kernel, Backend(1), "float64")
    for same in (pickle.loads(pickle.dumps(kernel)), copy.copy(kernel), copy.deepcopy(kernel)):
        assert same.describe() == kernel.describe()
        other = KernelOperator(same, Backend(1), "float64")
        np.testing.assert_array_equal(op.gram(both(op, A)), other.gram(both(other, A)))


@pytest.mark.parametrize("trees", [3, "many", True, [], {}, {"n": 1}, {"n": 1, "weight": "1"},
                                   {"n": 1, "weight": True}])  # fmt: skip
def test_texts_that_describe_no_trees_are_refused(trees: Any) -> None:
    with pytest.raises(ConfigError, match="a table cannot hold"):
        get_kernel({"kind": "laplace", "bandwidth": 1.0, "trees": trees}, trees=np.array(STUMP))
    assert restored_trees(None, np.array(STUMP)) is None


@pytest.mark.parametrize(
    "kernel",
    [
        sk.LaplaceL1(1.0), sk.Polynomial(2), sk.Gaussian(1.0) + sk.Polynomial(2),
        FourierFeatures(4, sk.Gaussian(1.0).describe()), for_sparse_rows(sk.Gaussian(1.0)),
    ],
)  # fmt: skip
def test_trees_need_a_kernel_of_distance(kernel: Kernel) -> None:
    assert kernel.with_trees(None).trees is None
    with pytest.raises(ConfigError, match="not a function of the Euclidean distance of dense rows"):
        kernel.with_trees(TreePartitions(np.array(STUMP), 1.0))


def test_combined_kernels_refuse_parts_with_trees() -> None:
    trees = TreePartitions(np.array(STUMP), 1.0)
    laplace, gauss = (k(1.0).with_trees(trees) for k in (sk.Laplace, sk.Gaussian))
    plain = sk.Gaussian(2.0)
    sums, products = ((each).with_trees(trees) for each in (plain + plain, plain * plain))
    for make in (
        lambda: laplace + gauss, lambda: plain + gauss, lambda: 2 * laplace,
        lambda: laplace * plain, lambda: sums + plain, lambda: 3.0 * sums,
        lambda: products * plain,
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="has a part with categorical features or trees"):
            make()


def test_fourier_features_and_sparse_rows_refuse_trees() -> None:
    kernel = sk.Gaussian(1.0).with_trees(TreePartitions(np.array(STUMP), 1.0))
    with pytest.raises(ConfigError, match="compares some features, or leaves of trees"):
        check_has_frequencies(kernel)
    with pytest.raises(ConfigError, match="categorical features or trees"):
        for_sparse_rows(kernel)


def test_trees_refuse_precisions_that_round_features() -> None:
    kernel = sk.Laplace(1.0).with_trees(TreePartitions(np.array(STUMP), 1.0))
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


def test_trees_need_the_features_that_they_split(backends: list[Backend]) -> None:
    partitions = TreePartitions(np.array(STUMP), 1.0)
    partitions.check(3)
    with pytest.raises(ConfigError, match="split 3 features, but the points have 2"):
        partitions.check(2)
    op = KernelOperator(sk.Gaussian(1.0).with_trees(partitions), backends[0])
    with pytest.raises(ConfigError, match="split 3 features, but the points have 2"):
        op.points(np.zeros((4, 2), np.float32), left=True)
