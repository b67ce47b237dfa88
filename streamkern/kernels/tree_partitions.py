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
from collections.abc import Mapping, Sequence
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


N_TREES = 96
"""Number of trees of a kernel whose trees a run grows. It is a multiple of eight, because compiled
code compares eight columns at once."""
MAX_TREES, MAX_TREE_NODES = 255, 256
"""Largest numbers of trees, and of nodes of a tree, so that one byte holds the number of trees in
which two rows differ, and the number of a leaf."""


@dataclass(frozen=True, eq=False)
class TreePartitions:
    """Trees with the same number of nodes, and their weight in squared distances.

    nodes : (T, k, 4) float64, the nodes of each tree, the root first, see `SPLIT_FEATURE`. A node
        comes after the nodes that lead to it. At most `MAX_TREES` trees and `MAX_TREE_NODES` nodes.
    weight : squared distance of two rows that are in different leaves of all trees
    """

    nodes: Floats
    weight: float

    def __post_init__(self) -> None:
        nodes = np.array(self.nodes)
        if not _are_trees(nodes):
            raise ConfigError(
                f"nodes of shape {nodes.shape} and dtype {nodes.dtype} are no trees",
                "give an array (trees, nodes, 4) of features, thresholds, left and right nodes, in "
                "which nodes come after those that lead to them",
            )
        n_trees, k, _ = nodes.shape
        if n_trees > MAX_TREES or k > MAX_TREE_NODES:
            raise ConfigError(
                f"{n_trees} trees of {k} nodes are too many: a kernel can have {MAX_TREES} trees "
                f"of {MAX_TREE_NODES} nodes",
                "give fewer or smaller trees",
            )
        if not 0 < self.weight < np.inf:
            raise ConfigError(
                f"trees of weight {self.weight} need a finite weight above 0",
                "leave the trees out, or raise the weight",
            )
        nodes = nodes.astype(np.float64)
        nodes.flags.writeable = False
        object.__setattr__(self, "nodes", nodes)

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

    def __repr__(self) -> str:
        return f"TreePartitions({len(self)} trees, weight={self.weight:g})"

    def __len__(self) -> int:
        return len(self.nodes)

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
        children = self.nodes[:, :, LEFT_NODE:].astype(np.int64)
        trees = np.arange(len(self))
        depths = np.full(self.nodes.shape[:2], -1)  # -1 for nodes to which no way leads
        depths[:, 0] = 0
        for node in range(depths.shape[1]):
            reached = trees[(depths[:, node] >= 0) & (children[:, node, 0] != node)]
            for child in children[reached, node].T:
                below = np.maximum(depths[reached, child], depths[reached, node] + 1)
                depths[reached, child] = below
        return int(depths.max())

    def write_leaves(self, xp: Any, X: Array, out: Array) -> None:
        """Write the leaf of each tree that the rows X (m, d) are in to `out` (m, T).

        The features are compared in float32. A leaf is the number of its node, below 256.
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

    def scratch_bytes(self, d: int) -> int:
        """Return the bytes of temporary arrays of `write_leaves` for each row of d features."""
        return 4 * d + 8 + (3 * 8 + 2) * len(self)

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


def _are_trees(nodes: npt.NDArray[Any]) -> bool:
    """Return whether an array has the form of `TreePartitions.nodes`, of any size."""
    if nodes.dtype.kind not in "fiu" or nodes.ndim != 3 or nodes.shape[2] != 4 or not nodes.size:
        return False
    features, links = nodes[:, :, SPLIT_FEATURE], nodes[:, :, LEFT_NODE:]
    whole_numbers = nodes[:, :, [SPLIT_FEATURE, LEFT_NODE, RIGHT_NODE]]
    if not np.isfinite(nodes).all() or (whole_numbers % 1).any() or features.min() < 0:
        return False
    own = np.arange(nodes.shape[1])[:, None]
    is_leaf = (links == own).all(axis=2)
    return bool((is_leaf | (links > own).all(axis=2)).all() and links.max() < nodes.shape[1])


def placeholder_trees(n: int = N_TREES) -> TreePartitions:
    """Return n trees, each a single leaf, for plans of the memory; by default as many as a run
    grows."""
    return TreePartitions(np.zeros((n, 1, 4)), 1.0)


def restored_trees(description: Any, nodes: npt.NDArray[Any] | None) -> TreePartitions | None:
    """Return the trees of a kernel from its description; None if it has none.

    Raises ConfigError if the nodes are missing, or the description is none.
    """
    if description is None:
        return None
    weight = description.get("weight") if isinstance(description, Mapping) else None
    if nodes is None or isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(
            f"the kernel has trees={description}, whose nodes a table cannot hold",
            "give the Kernel object itself",
        )
    return TreePartitions(nodes, float(weight))


def no_trees_error(kernel: object) -> ConfigError:
    """Return the error for a kernel that cannot compare the leaves of trees."""
    return ConfigError(
        f"{kernel} cannot have trees: it is not a function of the Euclidean distance of dense rows",
        "use a kernel of the Euclidean distance, such as 'laplace'",
    )
