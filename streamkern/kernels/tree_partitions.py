"""Partitions of the features by decision trees, whose cells a kernel compares.

Each tree divides the space of the features into cells, its leaves. With T trees and the weight w,
the squared distance of a kernel is

    |A^T (x - z)|^2 + (w / T) * (number of trees in which x and z are in different leaves),

where M = A A^T is the metric. The second term is w / 2T times the squared Euclidean distance of the
one-hot codes of the leaves. The whole is therefore a squared distance in a Euclidean space, and the
kernel stays positive definite. Trees whose splits suit the targets give a kernel that changes in
steps where the targets do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.basics.errors import ConfigError

if TYPE_CHECKING:
    from streamkern.backend.base import Array

SPLIT_FEATURE, SPLIT_VALUE, LEFT_NODE, RIGHT_NODE = range(4)
"""Columns of a node: a row with x[feature] <= value goes to the node `LEFT_NODE`, and other rows to
the node `RIGHT_NODE`. Both are the node itself if it is a leaf."""
MAX_TREES, MAX_NODES = 255, 256
"""Largest numbers of trees, and of nodes of a tree: leaves are compared, and counted, as bytes."""


@dataclass(frozen=True, eq=False)
class TreePartitions:
    """Trees with the same number of nodes, and their weight in squared distances.

    nodes : (T, k, 4) float64, the nodes of each tree, the root first, see `SPLIT_FEATURE`
    weight : squared distance of two rows that are in different leaves of all trees
    """

    nodes: Floats
    weight: float

    def __post_init__(self) -> None:
        if not _are_trees(self.nodes):
            raise ConfigError(
                f"nodes of shape {self.nodes.shape} and dtype {self.nodes.dtype} are no trees",
                f"give an array (trees, nodes, 4) of at most {MAX_TREES} trees with at most "
                f"{MAX_NODES} nodes: a feature, a value, and the numbers of two later nodes",
            )
        if not 0 < self.weight < np.inf:
            raise ConfigError(
                f"trees of weight {self.weight} need a finite weight above 0",
                "leave the trees out, or raise the weight",
            )

    @classmethod
    def of_trees(cls, trees: Sequence[Any], weight: float) -> TreePartitions:
        """Return the partitions of fitted scikit-learn trees.

        Thresholds are rounded down to float32, the precision in which the trees were fitted: the
        same float32 numbers are below them.
        """
        k = max(tree.tree_.node_count for tree in trees)
        nodes = np.zeros((len(trees), k, 4))
        nodes[:, :, LEFT_NODE] = nodes[:, :, RIGHT_NODE] = np.arange(k)
        for own, tree in zip(nodes, trees, strict=True):
            fitted = tree.tree_
            splits = np.flatnonzero(fitted.children_left >= 0)
            rounded = fitted.threshold[splits].astype(np.float32)
            above = rounded > fitted.threshold[splits]
            rounded[above] = np.nextafter(rounded[above], np.float32(-np.inf))
            own[splits, SPLIT_FEATURE], own[splits, SPLIT_VALUE] = fitted.feature[splits], rounded
            own[splits, LEFT_NODE] = fitted.children_left[splits]
            own[splits, RIGHT_NODE] = fitted.children_right[splits]
        return cls(nodes, weight)

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        return f"TreePartitions({len(self)} trees, weight={self.weight:g})"

    def check(self, d: int) -> None:
        """Raise ConfigError unless the trees split features of 0, ..., d - 1."""
        n_features = int(self.nodes[:, :, SPLIT_FEATURE].max()) + 1
        if n_features > d:
            raise ConfigError(
                f"the trees of the kernel split {n_features} features, but the points have {d}",
                "give the points all features that the trees were fitted to",
            )

    @cached_property
    def depth(self) -> int:
        """Number of splits on the longest way from a root to a leaf."""
        reached = np.zeros(len(self), np.int64)[:, None]  # all nodes at this depth
        numbers, depth = np.arange(len(self))[:, None], 0
        while True:
            children = self.nodes[numbers, reached][:, :, LEFT_NODE:].astype(np.int64)
            if (children == reached[:, :, None]).all():
                return depth
            reached, depth = children.reshape(len(self), -1), depth + 1

    def write_leaves(self, xp: Any, X: Array, out: Array) -> None:
        """Write the leaf of each tree that the rows X (m, d) are in to `out` (m, T).

        The features are compared in float32. A leaf is the number of its node.
        """
        features, thresholds, children = self._on_device(xp)
        X = xp.asarray(X, np.float32)
        k = self.nodes.shape[1]
        first = xp.arange(len(self)) * k  # the root of each tree, in the nodes of all trees
        rows = xp.arange(len(X))[:, None] * X.shape[1]
        node = xp.zeros((len(X), len(self)), np.int64) + first
        X = X.reshape(-1)
        for _ in range(self.depth):
            is_right = X.take(rows + features.take(node)) > thresholds.take(node)
            node = children.take(2 * node + is_right)
        out[...] = node - first

    def _on_device(self, xp: Any) -> tuple[Array, Array, Array]:
        """Return features (T k,), thresholds (T k,) and children (2 T k,), which count the nodes of
        all trees."""
        k = self.nodes.shape[1]
        children = self.nodes[:, :, LEFT_NODE:] + k * np.arange(len(self))[:, None, None]
        return (
            xp.asarray(self.nodes[:, :, SPLIT_FEATURE].ravel().astype(np.int64)),
            xp.asarray(self.nodes[:, :, SPLIT_VALUE].ravel().astype(np.float32)),
            xp.asarray(children.ravel().astype(np.int64)),
        )

    def describe(self) -> dict[str, Any]:
        """Return number, weight and SHA-256 digest of the trees, as JSON values."""
        digest = hashlib.sha256(np.ascontiguousarray(self.nodes).tobytes()).hexdigest()
        return {"n": len(self), "weight": self.weight, "sha256": digest}


def placeholder_trees(n: int) -> TreePartitions:
    """Return n trees with one leaf each, for the plan of a run that may look for trees."""
    return TreePartitions(np.zeros((n, 1, 4)), 1.0)


def _are_trees(nodes: npt.NDArray[Any]) -> bool:
    """Return whether an array holds trees whose nodes are in front of their children."""
    if nodes.ndim != 3 or nodes.shape[2] != 4 or not np.isfinite(nodes).all():
        return False
    n_trees, k = nodes.shape[:2]
    if not (0 < n_trees <= MAX_TREES and 0 < k <= MAX_NODES):
        return False
    children, own = nodes[:, :, LEFT_NODE:], np.arange(k)
    are_leaves = (children == own[:, None]).all(axis=2)
    are_splits = ((children > own[:, None]) & (children < k)).all(axis=2)
    integers = nodes[:, :, [SPLIT_FEATURE, LEFT_NODE, RIGHT_NODE]]
    are_numbers = bool(((integers >= 0) & (integers % 1 == 0)).all())
    return are_numbers and bool((are_leaves | are_splits).all())


def restored_trees(description: Any, nodes: npt.NDArray[Any] | None) -> TreePartitions | None:
    """Return the trees of a kernel from its description; None if it has none.

    Raises ConfigError if the nodes are missing.
    """
    if description is None:
        return None
    if nodes is None:
        raise ConfigError(
            f"the kernel has {description['n']} trees, whose nodes a table cannot hold",
            "give the Kernel object itself",
        )
    return TreePartitions(np.asarray(nodes, np.float64), float(description["weight"]))


def no_trees_error(kernel: object) -> ConfigError:
    """Return the error for a kernel that cannot compare the leaves of trees."""
    return ConfigError(
        f"{kernel} cannot have trees: it is not a function of the Euclidean distance of dense rows",
        "use a kernel of the Euclidean distance, such as 'laplace'",
    )
