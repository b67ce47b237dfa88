"""h -> theta over ranks that share out the centers is that of one rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.backend.rank_grid import CenterPartition, RankGrid
from streamkern.backend.ranks import Communicator
from streamkern.kernels.points import Points
from streamkern.planning.memory import RANK_SLAB_BYTES
from streamkern.solver import rank_sums, striped_projection
from streamkern.solver.precondition.low_rank import build_low_rank
from streamkern.solver.projection import ExactProjection, IterativeProjection
from streamkern.solver.rank_sums import ColumnSums, RowSums
from streamkern.solver.striped_projection import (
    StripedExactProjection,
    StripedIterativeProjection,
)
from tests.maths import both, operator, rows
from tests.rank_threads import on_threads

GRIDS = [(1, 2), (1, 5), (2, 2), (3, 2), (2, 4)]


def share_of(ranks: Communicator, columns: int, p: int) -> CenterPartition:
    return CenterPartition([slice(0, p)], RankGrid(ranks.rank, ranks.size, columns))


@pytest.mark.parametrize("p", [3, 50])  # of which some columns have none
@pytest.mark.parametrize(("rows_of_grid", "columns"), GRIDS)
def test_exact(rows_of_grid: int, columns: int, p: int) -> None:
    """By rows of the factor, in place."""
    Z, h = rows(0, p, 3), rows(1, p, 2)
    one = ExactProjection.build(operator(), both(operator(), Z))
    theta = one.solve(h.copy())

    def solved(ranks: Communicator) -> Any:
        op, share = operator(backend=Backend(threads=1)), share_of(ranks, columns, p)
        own = share.at[0]
        projection = StripedExactProjection(op, one.L[own, : own.stop].copy(), share, ranks)
        mine = h[own].copy()
        assert projection.solve(mine) is mine
        return mine, own

    for mine, own in on_threads(rows_of_grid * columns, solved):
        np.testing.assert_allclose(mine, theta[own], rtol=0, atol=1e-12 * np.abs(theta).max())


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("rows_of_grid", "columns"), GRIDS)
@pytest.mark.parametrize(("s", "batch"), [(30, 16), (10, 7), (50, 1), (8, 50)])
def test_iterative(
    rows_of_grid: int, columns: int, s: int, batch: int, resident: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Batch by batch, with a sample that one column has or all; a second time as well, behind
    centers that travel one batch at a time, or some."""
    monkeypatch.setattr(striped_projection, "ON_THEIR_WAY", 20)
    Z, h = rows(0, 50, 3), rows(1, 50, 2)
    op = operator(tile=(7, 16))
    z = both(op, Z)
    P = build_low_rank(op, z[:s], z, level=6)
    theta = IterativeProjection(op, z, P, batch=batch).solve(h)

    def solved(ranks: Communicator) -> Any:
        own_op, share = operator(backend=Backend(threads=1)), share_of(ranks, columns, 50)
        mine: Points = both(own_op, Z)[share.at[0]]
        projection = StripedIterativeProjection(
            own_op, mine, P.E, P.D, P.rule, share, ranks, batch=batch, resident=resident
        )
        given = h[share.at[0]].copy()
        found = [projection.solve(given).copy() for _ in range(2)]
        np.testing.assert_array_equal(*found)
        np.testing.assert_array_equal(given, h[share.at[0]])
        return found[0], share.at[0], 0 if projection.K is None else projection.K.size

    many = on_threads(rows_of_grid * columns, solved)
    for found, own, kept in many:
        np.testing.assert_allclose(found, theta[own], rtol=0, atol=1e-12 * np.abs(theta).max())
        assert kept <= (50 / rows_of_grid + rows_of_grid) * -(-50 // columns)
    if resident:
        assert sum(kept for _, _, kept in many) == 50 * 50


@pytest.mark.parametrize("edges", [(0, 7), (0, 2, 7), (0, 1, 5, 7)])
@pytest.mark.parametrize(("rows_of_grid", "columns"), [(1, 1), (3, 1), (1, 3), (3, 2)])
def test_sums_over_a_part_of_the_ranks(
    rows_of_grid: int, columns: int, edges: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over rows and over columns of the grid, a few centers at a time, of one block or of several;
    and what a column's first rank has."""
    assert rank_sums.RANK_SLAB_BYTES == RANK_SLAB_BYTES
    monkeypatch.setattr(rank_sums, "RANK_SLAB_BYTES", 2 * 8 * 3)
    held = rows(0, 6, 4, 2), rows(1, 6, 7, 2)  # of each rank: rows of a batch, centers

    def summed(ranks: Communicator) -> Any:
        blocks = [slice(*each) for each in pairwise(edges)]
        share = CenterPartition(blocks, RankGrid(ranks.rank, ranks.size, columns))
        backend, grid = Backend(threads=1), share.grid
        down = ColumnSums(ranks, share, backend)
        across = RowSums(ranks, grid, backend)
        across.begin(4, 4 * grid.rows)
        a, b = held[0][ranks.rank].copy(), held[1][ranks.rank][share.ids]
        return grid, share.ids, across.sum(a), down.sum(b.copy()), down.of_first(b.copy())

    for grid, ids, a, b, first in on_threads(rows_of_grid * columns, summed):
        in_row = [grid.row * columns + k for k in range(columns)]
        in_column = [k * columns + grid.column for k in range(rows_of_grid)]
        np.testing.assert_allclose(a, held[0][in_row].sum(axis=0), rtol=0, atol=1e-14)
        np.testing.assert_allclose(b, held[1][in_column].sum(axis=0)[ids], rtol=0, atol=1e-14)
        np.testing.assert_array_equal(first, held[1][grid.column][ids])
