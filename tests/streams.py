"""Read a source and an epoch plan by simple reference code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from streamkern.store.row_block import RowBlock
from streamkern.stream.order import EpochPlan
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.base import Source, y_shape
from streamkern.stream.sources.unit_edges import unit_sizes

X = np.random.default_rng(0).normal(size=(101, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(101, 2))


class Plain:
    """A source of a user, with the attributes that the protocol requires and no others."""

    def __init__(self, base: Source) -> None:
        for name in (
            "n_rows", "row_shape", "dtype", "n_outputs", "classes", "y_dtype", "feed_transforms",
            "n_units", "fingerprint", "unit_bounds", "read_unit", "describe", "statistics",
        ):  # fmt: skip
            setattr(self, name, getattr(base, name))


def everything(source: Source, seed: int = 0, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows in order, after checking the invariants of each unit."""
    X, y = [], []
    for u in range(source.n_units):
        block = source.read_unit(u, seed, epoch)
        start, stop = source.unit_bounds(u)
        np.testing.assert_array_equal(block.row_ids, np.arange(start, stop))
        assert block.row_ids.dtype == np.int64
        assert block.X.shape == (stop - start, *source.row_shape)
        assert block.X.dtype == source.dtype
        assert block.y.shape == (stop - start, *y_shape(source))
        assert block.y.dtype == source.y_dtype
        X.append(block.X)
        y.append(block.y)
    return np.concatenate(X), np.concatenate(y)


def array_source(unit_rows: int = 8) -> ArraySource:
    """Return a source of the rows X with the targets Y."""
    return ArraySource(X, Y, unit_rows=unit_rows)


def block_bytes_of(source: Source, n_units: int) -> int:
    """Return the block_bytes that hold n_units of `source`."""
    rows = int(unit_sizes(source).max())
    return n_units * rows * (source.read_unit(0, 0, 0).X[0].nbytes + 2 * 8 + 16)


def numbered_rows(n: int, first: int = 0, **options: Any) -> ArraySource:
    """Return the rows (first + k, 0) with the target first + k, in units of 7."""
    X = np.zeros((n, 2), np.float32)
    X[:, 0] = np.arange(first, first + n)
    return ArraySource(X, X[:, 0].astype(np.float64), **{"unit_rows": 7} | options)


def epoch_rows(plan: EpochPlan, sizes: np.ndarray) -> list[np.ndarray]:
    """Return the row ids of each batch by simple code: build every block, then slice."""
    starts = np.concatenate(([0], np.cumsum(sizes)))
    blocks = []
    for k in range(plan.n_blocks):
        units, offsets = plan.block_units(k)
        read = np.concatenate([np.arange(starts[u], starts[u + 1]) for u in units])
        assert offsets[-1] == len(read) == plan.block_rows(k)
        places = np.empty(len(read), np.int64)
        plan.shuffle(k, places)
        shuffled = np.empty_like(read)
        shuffled[places] = read
        blocks.append(shuffled)
    return [
        np.concatenate([blocks[p.block][p.start : p.stop] for p in plan.batch(i)])
        for i in range(plan.n_batches)
    ]


def copies_of(batches: Iterable[RowBlock]) -> list[RowBlock]:
    """Return copies of the batches, because their memory is reused."""
    return [batch.copy() for batch in batches]


def assert_same_rows(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    """Check that two blocks, or two batches, have the same arrays, or None in the same places."""
    for left, right in zip(ours, theirs, strict=True):
        if left is None or right is None:
            assert left is right
        else:
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)


def assert_same(first: list[RowBlock], second: list[RowBlock]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert_same_rows(a, b)
