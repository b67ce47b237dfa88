"""Trees whose leaves a kernel compares."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.basics.errors import ConfigError
from streamkern.kernels.builtin import get_kernel
from streamkern.kernels.points import point_columns
from streamkern.kernels.products import KernelOperator
from streamkern.kernels.tree_partitions import MAX_NODES, MAX_TREES, TreePartitions
from tests.trees import fitted_trees, step_table

DISTANCE_KERNELS = (sk.Laplace, sk.Gaussian, sk.Cauchy, sk.Matern32, sk.Matern52)


def leaves(trees: TreePartitions, X: np.ndarray) -> np.ndarray:
    out = np.empty((len(X), len(trees)))
    trees.write_leaves(np, X, out)
    return out


def squared_distances(kernel: Any, X: np.ndarray, Z: np.ndarray) -> np.ndarray:
    """Return the squared distances of the module docstring, in float64."""
    a, b = (A if kernel.metric is None else A @ kernel.metric for A in (X, Z))
    s = ((a[:, None] - b) ** 2).sum(axis=2)
    for j, weight in kernel.categorical:
        s += weight * (X[:, j, None] != Z[:, j])
    unequal = leaves(kernel.trees, X)[:, None] != leaves(kernel.trees, Z)
    return np.asarray(s + kernel.trees.weight * unequal.mean(axis=2))


# -- leaves ---------------------------------------------------------------------------------------


def test_leaves_are_those_of_sklearn() -> None:
    """Check rows at the thresholds as well, in float32 and in float64."""
    trees, fitted = fitted_trees(20)
    X = step_table(500, 1)[0].astype(np.float32)
    thresholds = np.unique(np.concatenate([tree.tree_.threshold for tree in fitted]))
    at_thresholds = np.resize(thresholds.astype(np.float32), X.shape)
    for rows in (X, at_thresholds):
        expected = np.stack([tree.apply(rows) for tree in fitted], axis=1)
        np.testing.assert_array_equal(leaves(trees, rows), expected)
        np.testing.assert_array_equal(leaves(trees, rows.astype(np.float64)), expected)
    assert trees.depth == max(tree.get_depth() for tree in fitted)


@pytest.mark.parametrize("change", [
    lambda nodes: nodes[0],
    lambda nodes: nodes[:, :, :3],
    lambda nodes: nodes[:0],
    lambda nodes: np.where(np.arange(4) == 1, np.nan, nodes),
    lambda nodes: nodes + np.array([0, 0, 0.5, 0]),
    lambda nodes: nodes - np.array([1, 0, 0, 0]),
    lambda nodes: nodes + np.array([0, 0, 0, 100]),
    lambda nodes: np.where(np.arange(nodes.shape[1])[:, None] == 1, [0, 0, 0, 0], nodes),
    lambda nodes: np.resize(nodes, (MAX_TREES + 1, *nodes.shape[1:])),
    lambda nodes: np.zeros((1, MAX_NODES + 1, 4)),
])  # fmt: skip
def test_arrays_that_are_no_trees_are_refused(change: Any) -> None:
    """Nodes in front of their parents would be a circle, and leaves above 255 no bytes."""
    nodes = fitted_trees(3)[0].nodes
    TreePartitions(nodes, 1.0)
    with pytest.raises(ConfigError, match="are no trees"):
        TreePartitions(change(nodes), 1.0)


@pytest.mark.parametrize("weight", [0.0, -1.0, np.inf, np.nan])
def test_weight_must_be_positive(weight: float) -> None:
    with pytest.raises(ConfigError, match="need a finite weight above 0"):
        TreePartitions(fitted_trees(2)[0].nodes, weight)


# -- kernel values --------------------------------------------------------------------------------


@pytest.mark.parametrize("accelerator", ["none", "auto"])
@pytest.mark.parametrize("precision", ["exact", "float64"])
@pytest.mark.parametrize("n_trees", [1, 5, 16, 97, MAX_TREES])
def test_values_equal_float64_brute_force(accelerator: str, precision: str, n_trees: int) -> None:
    trees, _ = fitted_trees(n_trees, weight=3.0)
    rng = np.random.default_rng(0)
    X, Z = (step_table(n, seed)[0].astype(np.float32) for n, seed in ((70, 1), (60, 2)))
    X[:, 7], Z[:, 7] = rng.integers(0, 3, 70), rng.integers(0, 3, 60)
    for number, kind in enumerate(DISTANCE_KERNELS):
        metric = rng.normal(size=(8, 3)) if number % 2 else None
        kernel = kind(1.5, metric=metric).with_trees(trees)
        kernel = kernel.with_categorical([(7, 0.7)]) if number > 1 else kernel
        s = squared_distances(kernel, X.astype(np.float64), Z.astype(np.float64)) / 1.5**2
        with get_backend("cpu", 2, accelerator) as backend:
            op = KernelOperator(kernel, backend, precision, Z.mean(axis=0))
            points = op.points(Z, right=True)
            K = op.matrix(op.points(X, left=True), points)
            assert points.right is not None
            assert points.right.shape[1] >= point_columns(8, precision, kernel)
        tolerance = 1e-12 if precision == "float64" else 2e-5
        np.testing.assert_allclose(K, kernel.profile(s, np), atol=tolerance)


def test_gram_is_positive_definite() -> None:
    trees, _ = fitted_trees(40, weight=5.0)
    X = step_table(200, 1)[0]
    op = KernelOperator(sk.Laplace(1.0).with_trees(trees), Backend(1), "float64", None)
    K = op.gram(op.points(X, right=True))
    assert (np.diag(K) == 1).all()
    assert np.linalg.eigvalsh(K).min() > 0


def test_kernels_without_distances_are_refused() -> None:
    trees, _ = fitted_trees(2)
    for kernel in (sk.Linear(), sk.LaplaceL1(1.0)):
        with pytest.raises(ConfigError, match="cannot have trees"):
            kernel.with_trees(trees)
    with pytest.raises(ConfigError, match="categorical features or trees"):
        sk.Laplace(1.0).with_trees(trees) + sk.Gaussian(2.0)
    for precision in ("high", "fast"):
        with pytest.raises(ConfigError, match="or leaves of trees"):
            KernelOperator(sk.Laplace(1.0).with_trees(trees), Backend(1), precision, None)
    with pytest.raises(ConfigError, match="the trees of the kernel split"):
        sk.Laplace(1.0).with_trees(trees).features(1)


def test_description_restores_kernel() -> None:
    trees, _ = fitted_trees(3, weight=0.5)
    kernel = sk.Matern32(2.0, metric=np.eye(8)).with_trees(trees)
    description = kernel.describe()
    restored = get_kernel(description, **kernel.arrays())
    assert restored.describe() == description
    X = step_table(20)[0]
    assert restored.trees is not None
    np.testing.assert_array_equal(leaves(restored.trees, X), leaves(trees, X))
    with pytest.raises(ConfigError, match="3 trees, whose nodes a table cannot hold"):
        get_kernel(description, metric=kernel.metric)
    for twin in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert twin.describe() == description
    assert "trees" not in kernel.with_trees(None).describe()
    assert repr(kernel).endswith("with 3 trees")
