"""Check the position of ranks in a grid, and their parts of batches and center blocks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.backend.rank_grid import CenterPartition, RankGrid
from streamkern.basics.errors import ConfigError

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6))
WIDTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def grids(rows: int, columns: int) -> list[RankGrid]:
    """Return the grid of each rank."""
    return [RankGrid(rank, rows * columns, columns) for rank in range(rows * columns)]


def blocks_of(widths: list[int]) -> list[slice]:
    edges = np.cumsum([0, *widths]).tolist()
    return [slice(a, b) for a, b in pairwise(edges)]


@given(SHAPES, st.integers(0, 50))
def test_grid_parts_cover_all_rows(shape: tuple[int, int], n: int) -> None:
    """Check the parts of rows, columns and ranks, whose sizes differ by at most one."""
    ranks = grids(*shape)
    assert [(r.row, r.column) for r in ranks] == [
        (i, j) for i in range(shape[0]) for j in range(shape[1])
    ]
    for parts in (
        [r.of_row(n) for r in ranks if r.column == 0],
        [r.of_column(n) for r in ranks if r.row == 0],
    ):
        assert [p.start for p in parts] + [n] == [0, *(p.stop for p in parts)]
        sizes = [p.stop - p.start for p in parts]
        assert max(sizes) - min(sizes) <= 1
    covered_rows = [i for r in ranks for i in range(r.of_rank(n).start, r.of_rank(n).stop)]
    assert sorted(covered_rows) == list(range(n))
    assert all(r.of_column(n).start <= r.of_rank(n).start for r in ranks)
    assert all(r.of_rank(n).stop <= r.of_column(n).stop for r in ranks)


@given(SHAPES, WIDTHS)
def test_every_center_belongs_to_one_grid_column(shape: tuple[int, int], widths: list[int]) -> None:
    """Check that a column has its centers in all its rows, in the global order."""
    blocks, shares = blocks_of(widths), []
    for grid in grids(*shape):
        partition = CenterPartition(blocks, grid)
        shares.append(partition)
        assert partition.p == sum(widths)
        assert partition.n == len(partition.ids)
        assert (np.diff(partition.ids) > 0).all()
        all_of_them = np.arange(partition.p)
        for b, block in enumerate(blocks):
            column_centers = all_of_them[block][partition.in_block[b]]
            np.testing.assert_array_equal(partition.ids[partition.local[b]], column_centers)
            part, local = partition.stripe(b)
            np.testing.assert_array_equal(partition.ids[local], all_of_them[block][part])
    columns = [partition.ids.tolist() for partition in shares[: shape[1]]]
    assert sorted(i for ids in columns for i in ids) == list(range(sum(widths)))
    assert all(s.ids.tolist() == columns[s.grid.column] for s in shares)


@given(SHAPES, WIDTHS, st.integers(1, 9))
def test_centers_are_partitioned_within_a_part(
    shape: tuple[int, int], widths: list[int], step: int
) -> None:
    """Check that each center is in one part, for any parts and number of blocks."""
    for grid in grids(*shape):
        partition, global_ids = CenterPartition(blocks_of(widths), grid), np.full(sum(widths), -1)
        for start in range(0, partition.p, step):
            part = slice(start, min(start + step, partition.p))
            for in_part, in_own in partition.within(part):
                assert 0 <= in_part.start < in_part.stop <= part.stop - part.start
                assert in_part.stop - in_part.start == in_own.stop - in_own.start
                assert (global_ids[part][in_part] == -1).all()
                global_ids[part][in_part] = np.arange(in_own.start, in_own.stop)
        np.testing.assert_array_equal(global_ids[partition.ids], np.arange(partition.n))
        assert (global_ids >= 0).sum() == partition.n


@given(SHAPES, WIDTHS, st.integers(0, 35))
def test_array_parts_equal_partition(shape: tuple[int, int], widths: list[int], k: int) -> None:
    """Check arrays of all centers and of one block; a part stays unchanged."""
    ranks, blocks = grids(*shape), blocks_of(widths)
    partition = CenterPartition(blocks, ranks[k % len(ranks)])
    Z = np.random.default_rng(0).normal(size=(partition.p, 3))
    of_block = {f"G.{b}": Z[block] for b, block in enumerate(blocks)}
    arrays = {"Z": Z, "alpha": Z[:, 0], "H.0": Z} | of_block
    parts = partition.parts(arrays, ("Z", "alpha", "G."))
    assert parts.keys() == arrays.keys() - {"H.0"}
    for name, a in parts.items():
        np.testing.assert_array_equal(a, arrays[name][partition.rows(name)])
        assert partition.is_replicated <= (a is arrays[name])
    assert all(partition.parts(parts, ("Z", "alpha", "G."))[name] is a for name, a in parts.items())


@pytest.mark.parametrize(("size", "columns"), [(3, 2), (1, 2), (2, 0), (2, 4)])
def test_grid_columns_must_divide_ranks(size: int, columns: int) -> None:
    with pytest.raises(ConfigError, match=rf"run\.center_ranks={columns} must divide"):
        RankGrid(0, size, columns)


def test_part_refuses_array_with_wrong_row_count() -> None:
    partition = CenterPartition([slice(0, 6)], RankGrid(0, 2, 2))
    with pytest.raises(ValueError, match=r"must have .* rows, but has 5"):
        partition.part(np.zeros(5))
