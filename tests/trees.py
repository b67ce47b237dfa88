"""A table whose targets change in steps, for tests of kernels with trees."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from sklearn.tree import DecisionTreeRegressor

from streamkern.kernels.tree_partitions import TreePartitions

Floats = npt.NDArray[np.float64]


def step_table(n: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Return rows (n, 8) and targets (n,) that depend on combinations of thresholds."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, 8))
    y = 2.0 * (X[:, 0] > 0) * (X[:, 1] > 0.3) + (X[:, 2] > -0.5) * (X[:, 3] < 0.2)
    return X, y + 0.1 * rng.normal(size=n)


def fitted_trees(
    n_trees: int, weight: float = 1.0, dtype: npt.DTypeLike = np.float32
) -> tuple[TreePartitions, list[DecisionTreeRegressor]]:
    """Return trees of different sizes that fit `step_table`, and the trees of scikit-learn."""
    X, y = step_table(300)
    X, trees = X.astype(dtype), []
    for k in range(n_trees):
        tree = DecisionTreeRegressor(max_leaf_nodes=2 + k % 7, max_features=3, random_state=k)
        trees.append(tree.fit(X, y + 0.1 * k * X[:, k % 8]))
    return TreePartitions.of_trees(trees, weight), trees
