"""Export the comparison of the leaves of trees, see `kernels.tree_partitions`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats, Ints
from streamkern.kernels.tree_partitions import (
    LEFT_NODE,
    RIGHT_NODE,
    SPLIT_FEATURE,
    SPLIT_VALUE,
    TreePartitions,
)
from streamkern.train.export.traced import Graph, Traced

TREES_AT_ONCE = 8
"""Number of trees whose leaves are found by one matrix product."""


class _Paths(NamedTuple):
    """The splits and the leaves of some trees.

    With b, 1 where a row goes to the right at a split and 0 where it goes to the left, the row is
    in the leaf l if and only if (b @ directions)_l = n_right_l.

    features, values : (s,) features and values of the splits
    directions : (s, k) 1 for a split at which the way to a leaf goes right, -1 left, 0 not passed
    n_right : (k,) number of times that the way to a leaf goes right
    numbers : (k, t) number of the leaf in the column of its tree, 0 in other columns
    """

    features: Ints
    values: Floats
    directions: Floats
    n_right: Floats
    numbers: Floats


def unequal_leaves(
    graph: Graph, X: Traced, trees: TreePartitions, centers: npt.NDArray[np.float64]
) -> Traced:
    """Return the number of trees in which rows and centers are in different leaves, (n, p).

    X : (n, d), scaled. centers : (p, d), scaled
    """
    center_leaves = np.empty((len(centers), len(trees)))
    trees.write_leaves(np, centers, center_leaves)
    rows, n_equal = X.astype(np.float32), graph.add_constant(0.0, X.dtype)
    n_trees = 0
    for start in range(0, len(trees), TREES_AT_ONCE):
        nodes = trees.nodes[start : start + TREES_AT_ONCE]
        paths = _paths(nodes)
        if not len(paths.features):  # no tree splits, so all leaves are equal
            continue
        values = graph.add_constant(paths.values[None], np.float32)
        is_right = (rows.take(paths.features, axis=1) > values).astype(X.dtype)
        in_leaf = (is_right @ paths.directions).equals(paths.n_right[None]).astype(X.dtype)
        leaves = in_leaf @ paths.numbers
        for t in range(len(nodes)):
            is_equal = leaves.take([t], axis=1).equals(center_leaves[None, :, start + t])
            n_equal = n_equal + is_equal.astype(X.dtype)
        n_trees += len(nodes)
    unequal: Traced = n_equal * -1.0 + float(n_trees)
    return unequal


def _paths(nodes: Floats) -> _Paths:
    """Return the splits and leaves of trees, given their nodes (t, k, 4)."""
    splits: list[tuple[int, float]] = []
    leaves: list[tuple[int, int, dict[int, int]]] = []  # tree, number, and direction of each split
    for t, tree in enumerate(nodes):
        open_nodes: list[tuple[int, dict[int, int]]] = [(0, {})]
        while open_nodes:
            number, way = open_nodes.pop()
            left, right = int(tree[number, LEFT_NODE]), int(tree[number, RIGHT_NODE])
            if left == number:
                leaves.append((t, number, way))
                continue
            split = len(splits)
            splits.append((int(tree[number, SPLIT_FEATURE]), float(tree[number, SPLIT_VALUE])))
            open_nodes += [(left, way | {split: -1}), (right, way | {split: 1})]
    directions = np.zeros((len(splits), len(leaves)))
    numbers = np.zeros((len(leaves), len(nodes)))
    for k, (t, number, way) in enumerate(leaves):
        directions[list(way), k] = list(way.values())
        numbers[k, t] = number
    features, values = zip(*splits, strict=True) if splits else ((), ())
    return _Paths(
        np.array(features, np.int64), np.array(values), directions,
        (directions > 0).sum(axis=0).astype(np.float64), numbers,
    )  # fmt: skip
