"""Check that the shards of several ranks form a whole batch, and each unit is read once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern.store.row_block import RowBlock
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.buffers import MIN_UNITS_PER_RANK, Shard
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.transforms import RandomFlip
from tests.streams import copies_of

X = np.random.default_rng(0).normal(size=(203, 3)).astype(np.float32)
IMAGES = np.random.default_rng(2).integers(0, 256, (203, 1, 3, 1)).astype(np.uint8)
Y = np.random.default_rng(1).normal(size=(203, 2))


class CountingSource(ArraySource):
    """Rows of arrays that count the reads of each unit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: Counter[int] = Counter()

    def read_unit(self, u: int, seed: int, epoch: int) -> RowBlock:
        self.read[u] += 1
        return super().read_unit(u, seed, epoch)


def read_batches(source: Source, shard: Shard, *, start: int = 0, **kwargs: Any) -> list[RowBlock]:
    """Return the batches of a shard in two epochs."""
    with BatchReader(source, seed=3, shard=shard, **kwargs) as reader:
        return copies_of(reader.epochs(0, 2, start))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 5), unit_rows=st.integers(1, 60), mix=st.integers(1, 60),
    batch_size=st.integers(1, 120), start=st.integers(0, 1),
)  # fmt: skip
def test_rank_shares_form_the_whole_batch(
    size: int, unit_rows: int, mix: int, batch_size: int, start: int
) -> None:
    """Check order and draws of the rows of all ranks together, from any batch on."""
    source = AugmentedSource(ArraySource(IMAGES, Y, unit_rows=unit_rows), 2, [RandomFlip()])
    row_bytes = 3 + 2 * 8 + 16
    options: dict[str, Any] = {
        "batch_size": batch_size, "block_bytes": mix * unit_rows * row_bytes, "start": start,
    }  # fmt: skip
    full = read_batches(source, Shard(), **options)
    parts = [read_batches(source, Shard(rank, size), **options) for rank in range(size)]
    for batch, *shards in zip(full, *parts, strict=True):
        location = {row: at for at, row in enumerate(batch.row_ids.tolist())}
        places = [[location[row] for row in s.row_ids.tolist()] for s in shards]
        assert sorted(at for part in places for at in part) == list(range(len(batch.row_ids)))
        for s, at in zip(shards, places, strict=True):
            assert at == sorted(at)
            np.testing.assert_array_equal(s.X, batch.X[at])
            np.testing.assert_array_equal(s.y, batch.y[at])


@pytest.mark.parametrize("size", [2, 3])
def test_each_unit_is_read_by_one_rank(size: int) -> None:
    """Check blocks with enough units; no rank has much more than its shard."""
    reads: Counter[int] = Counter()
    rows_held = []
    for rank in range(size):
        source = CountingSource(X, Y, unit_rows=2)
        batches = read_batches(source, Shard(rank, size), batch_size=50, block_bytes=40 * 2 * 48)
        reads += source.read
        rows_held.append(sum(len(b.row_ids) for b in batches))
    assert set(reads.values()) == {2}  # in two epochs
    assert len(reads) == 102
    assert max(rows_held) <= 1.1 * sum(rows_held) / size


def test_few_units_are_read_by_all_ranks() -> None:
    """Check that every rank keeps as many rows as the others."""
    source = CountingSource(X, Y, unit_rows=101)
    assert source.n_units < MIN_UNITS_PER_RANK * 2
    batch_rows = [
        [len(b.row_ids) for b in read_batches(source, Shard(rank, 2), batch_size=50)]
        for rank in range(2)
    ]
    assert batch_rows == [[25, 25, 25, 25, 2] * 2, [25, 25, 25, 25, 1] * 2]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 6))
def test_units_of_any_size_are_distributed_evenly(rows: list[int], size: int) -> None:
    """Check that ranks get about equal rows and, of equal units, about equal numbers."""
    sizes = np.array(rows)
    assigned = [Shard(rank, size).assigned_units(sizes) for rank in range(size)]
    assert sorted(np.concatenate(assigned).tolist()) == list(range(len(rows)))
    assert max(sizes[units].sum() for units in assigned) <= sizes.sum() / size + sizes.max()
    equal_sizes = np.full(len(rows), 7)
    assert Shard(size - 1, size).assigned_units(equal_sizes).tolist() == list(
        range(size - 1, len(rows), size)
    )
