"""Check sums over parts of a rank grid, and that ranks build the preconditioner of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.backend.rank_grid import RankGrid
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.kernels.fourier import frequencies
from streamkern.planning.problem import ProblemShape
from streamkern.solver.block import BlockMethod
from streamkern.solver.block_sizes import BlockSizes
from streamkern.solver.precondition import partition
from streamkern.solver.precondition.block import BlockPreconditioner, block_slices, build_block
from streamkern.solver.precondition.block_factor import BlockInputs
from streamkern.solver.precondition.noise import Noise
from streamkern.solver.precondition.partition import Centers, Partition
from streamkern.solver.precondition.samples import Sample, merge_center_targets
from tests.rank_threads import on_threads
from tests.solver_problems import both, featured, operator, rows
from tests.traced_memory import traced_memory

P, N, PROBE = 48, 150, 120


def build_preconditioner(
    ranks: Communicator, *, blocks: int, weighted: bool, knows_centers: bool, ridge: bool,
    explicit: bool, is_partitioned: bool = False,
) -> BlockPreconditioner:  # fmt: skip
    """Return the preconditioner of 48 centers, as this rank builds it.

    knows_centers : whether some centers are rows of the sample, and the targets of all are known.
    is_partitioned : whether each rank has only its stripe of the centers.
    """
    backend = Backend(threads=1)
    op = operator(backend=backend)
    op = featured(op, "fourier", P) if explicit else op
    Z = frequencies(operator().kernel, 4, P, 3) if explicit else rows(0, P, 4)
    X = np.concatenate([Z[:9], rows(1, N - 9, 4)]) if knows_centers else rows(1, N, 4)
    Y = np.stack([np.sin(X[:, 0]), X[:, 1] ** 2], axis=1) + 0.3 * rows(2, N, 2)
    probe = rows(3, PROBE, 4)
    Y_probe = np.stack([np.sin(probe[:, 0]), probe[:, 1] ** 2], axis=1) + 0.3 * rows(4, PROBE, 2)
    root = np.random.default_rng(5).uniform(0.3, 2, N) if weighted else None
    center_index = np.where(np.arange(N) < 9, np.arange(N), -1) if knows_centers else None
    center_targets = (
        merge_center_targets(backend, np.arange(P), rows(6, P, 2), None, p=P, n_rows=400)
        if knows_centers
        else None
    )
    S = Sample(op.points(X, left=True), Y, root, center_index=center_index).shard(ranks)
    noise = Noise(1e-6, 1000, False)  # so that the first block estimates it again
    centers = Centers.of(both(op, Z), backend, ranks)
    if is_partitioned:
        centers = Centers.of(both(op, Z[ranks.stripe(P)]), backend, ranks, P, is_partitioned=True)
    inputs = BlockInputs(
        op, centers, S, Sample(op.points(probe, left=True), Y_probe), center_targets, batch=100.0
    )
    return build_block(
        inputs, block_slices(P, -(-P // blocks)), noise=noise,
        n_effective_rows=2000.0 if ridge else None, sweeps=6,
    )  # fmt: skip


def assemble_factor(ranks: list[BlockPreconditioner], attribute: Any) -> np.ndarray[Any, Any]:
    """Return a lower triangular factor, given the preconditioners of all ranks."""
    parts = [attribute(pre) for pre in ranks]
    n = sum(len(part) for part in parts)
    return np.concatenate([np.pad(a, ((0, 0), (0, n - a.shape[1]))) for a in parts])


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param({}, id="plain"),
        pytest.param({"weighted": True}, id="weighted"),
        pytest.param({"knows_centers": True}, id="known centers"),
        pytest.param({"ridge": True}, id="ridge"),
        pytest.param({"weighted": True, "knows_centers": True, "ridge": True}, id="all of these"),
        pytest.param({"explicit": True, "ridge": True}, id="explicit features"),
    ],
)
def test_ranks_build_the_preconditioner_of_one_process(
    case: dict[str, bool], blocks: int, size: int
) -> None:
    """Check that each rank has its rows of the factors, and all ranks equal bits of the rest."""
    options = dict.fromkeys(("weighted", "knows_centers", "ridge", "explicit"), False) | case
    expected = build_preconditioner(SINGLE, blocks=blocks, **options)
    on_ranks = on_threads(size, lambda ranks: build_preconditioner(ranks, blocks=blocks, **options))
    for b in range(blocks):
        H = assemble_factor(on_ranks, lambda pre: pre.H[b])  # noqa: B023
        np.testing.assert_allclose(
            H, expected.H[b], rtol=0, atol=1e-10 * np.abs(expected.H[b]).max()
        )
        np.testing.assert_allclose(on_ranks[0].sketches[b], expected.sketches[b], rtol=0, atol=1e-8)
    assert (on_ranks[0].L is None) == (expected.L is None)
    if expected.L is not None:
        np.testing.assert_allclose(
            assemble_factor(on_ranks, lambda pre: pre.L), expected.L, rtol=0, atol=1e-12
        )
    np.testing.assert_allclose(on_ranks[0].start, expected.start, rtol=0, atol=1e-9)
    assert (on_ranks[0].values is None) == (expected.values is None)
    if expected.values is not None:
        np.testing.assert_allclose(on_ranks[0].values, expected.values, rtol=0, atol=1e-9)
    assert on_ranks[0].start_rows == expected.start_rows == N
    assert on_ranks[0].jitters == expected.jitters
    assert on_ranks[0].mu == pytest.approx(expected.mu, rel=1e-9)
    assert on_ranks[0].ridge == pytest.approx(expected.ridge, rel=1e-9)
    for one, other in zip(on_ranks[0].rules, expected.rules, strict=True):
        assert one.lambda_1 == pytest.approx(other.lambda_1, rel=1e-6)
        assert one.leverage == pytest.approx(other.leverage, rel=1e-8)
        assert one.mean == pytest.approx(other.mean, rel=1e-8)
    for other in on_ranks[1:]:
        assert (other.start == on_ranks[0].start).all()
        assert other.rules == on_ranks[0].rules
        assert (other.mu, other.ridge, other.jitters) == (
            on_ranks[0].mu,
            on_ranks[0].ridge,
            on_ranks[0].jitters,
        )
        assert all(
            (a == b).all() for a, b in zip(other.sketches, on_ranks[0].sketches, strict=True)
        )


def test_sample_shard_knows_global_row_counts() -> None:
    """Check the number of rows of all ranks, and of those that are no centers of a block."""
    op = operator()
    center_index = np.array([0, -1, 5, 2, -1, 6, -1])
    S = Sample(op.points(rows(0, 7, 4), left=True), rows(1, 7, 1), center_index=center_index)
    counts = on_threads(
        3, lambda r: (len(S.shard(r)), S.shard(r).n_rows, S.shard(r).n_outside(slice(0, 3)))
    )
    assert [n for _, n, _ in counts] == [7, 7, 7]
    assert sum(k for k, _, _ in counts) == 7
    assert {k for _, _, k in counts} == {5}
    assert replace(S).n_outside(slice(5, 7)) == 5


@pytest.mark.parametrize(("blocks", "size"), [(1, 3), (3, 2), (3, 4)])
@pytest.mark.parametrize("explicit", [False, True])
def test_ranks_with_center_partition_build_the_same_preconditioner(
    explicit: bool, blocks: int, size: int
) -> None:
    """Check the bits of arrays with a row for each center, of which a rank has its stripe."""
    options = dict.fromkeys(("weighted", "knows_centers"), not explicit) | {"ridge": True}
    options |= {"explicit": explicit}
    replicated, partitioned = (
        on_threads(size, partial(build_preconditioner, blocks=blocks, is_partitioned=it, **options))
        for it in (False, True)
    )
    for one, other in zip(
        replicated, partitioned, strict=True
    ):  # equal bits, as all ranks receive the same centers
        assert (one.rules, one.mu, one.jitters) == (other.rules, other.mu, other.jitters)
        for a, b in zip([*one.H, one.L], [*other.H, other.L], strict=True):
            assert (a is None and b is None) or np.array_equal(a, b)
    for name in ("start", "values"):
        expected, parts = getattr(replicated[0], name), [getattr(pre, name) for pre in partitioned]
        assert expected is None or np.array_equal(np.concatenate(parts), expected)
    for b, G in enumerate(replicated[0].sketches):
        assert np.array_equal(np.concatenate([pre.sketches[b] for pre in partitioned]), G)


def test_no_rank_holds_all_centers() -> None:
    """Check that the peak memory of two ranks in this process is near the sum of the plan."""
    p, b, s, h, d, size = 400, 50, 120, 60, 400, 2
    sizes = BlockSizes("block", 1, s, h, 0, 0, block_size=b, keep=True)
    problem = ProblemShape(
        n_rows=10**6, epochs=1, d=d, c=1, p=p, row_bytes=8, unit_rows=1, itemsize=8, threads=1,
        width=d + 2, tile_bytes=0, ranks=size, center_ranks=2,
    )  # fmt: skip
    names = (
        "block factors H", "weights learned from the sample", "factors of one block, probe",
        "kernel products with targets, residuals", "partial sums of products",
        "tiles of matrix products",
        "sketches of the leverage", "sweeps over the blocks: values, directions",
        "centers of one block",
    )  # fmt: skip
    lines = BlockMethod().count(problem, sizes).lines
    planned_bytes = sum(
        n
        for phase, buffer_name, n in lines
        if phase in ("always", "setup") and buffer_name in names
    )
    ops = [operator(backend=Backend(threads=1), bandwidth=20.0) for _ in range(size)]
    Z, X, probe = rows(0, p, d), rows(1, s, d), rows(2, h, d)
    stripes = on_threads(size, lambda ranks: both(ops[ranks.rank], Z[ranks.stripe(p)]))

    def build(ranks: Communicator) -> None:
        op = ops[ranks.rank]
        op.backend.tile_rows = op.backend.tile_cols = 64
        centers = Centers.of(stripes[ranks.rank], op.backend, ranks, p, is_partitioned=True)
        S = Sample(op.points(X, left=True), rows(3, s, 1)).shard(ranks)
        P = Sample(op.points(probe, left=True), rows(4, h, 1))
        inputs = BlockInputs(op, centers, S, P)
        build_block(inputs, block_slices(p, b), sweeps=2, damping=1e-3)

    with traced_memory() as traced:
        on_threads(size, build)
    peak = traced.peak
    sample_bytes = (s + h) * (d + 4) * 8
    row_bytes = problem.prepared_row_bytes
    sum_bytes = 3 * b * row_bytes  # a block is broadcast: two copies, and their sum
    other_bytes = 1 << 18  # tiles, vectors of Lanczos steps, Python objects
    limit = size * (planned_bytes + sample_bytes + sum_bytes + other_bytes)
    # The bounds are close enough to notice a rank with all centers.
    assert limit - (p - b) * problem.prepared_row_bytes < peak <= limit


@pytest.mark.parametrize("edges", [(0, 7), (0, 2, 7), (0, 1, 5, 7)])
@pytest.mark.parametrize(("rows_of_grid", "columns"), [(1, 1), (3, 1), (1, 3), (3, 2)])
def test_sums_over_grid_rows_and_columns_equal_numpy(
    rows_of_grid: int, columns: int, edges: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the sums, and broadcasts from the first rank of a column, for one or several blocks."""
    monkeypatch.setattr(partition, "RANK_SLAB_BYTES", 2 * 8 * 3)  # 3 centers of 2 float64 numbers
    values = rows(0, 6, 4, 2), rows(1, 6, 7, 2)  # each rank has 4 rows of a batch and 7 centers

    def compute_sums(ranks: Communicator) -> Any:
        blocks = [slice(*edge_pair) for edge_pair in pairwise(edges)]
        grid = RankGrid(ranks.rank, ranks.size, columns)
        part = Partition(blocks, grid, ranks, Backend(threads=1))
        part.begin_batch(4, 4 * grid.rows)
        a, b = values[0][ranks.rank].copy(), values[1][ranks.rank][part.ids]
        sums = part.row_sum(a), part.column_sum(b.copy()), part.column_broadcast(b.copy())
        return grid, part.ids, *sums

    for grid, ids, a, b, broadcast in on_threads(rows_of_grid * columns, compute_sums):
        in_row = [grid.row * columns + k for k in range(columns)]
        in_column = [k * columns + grid.column for k in range(rows_of_grid)]
        np.testing.assert_allclose(a, values[0][in_row].sum(axis=0), rtol=0, atol=1e-14)
        np.testing.assert_allclose(b, values[1][in_column].sum(axis=0)[ids], rtol=0, atol=1e-14)
        np.testing.assert_array_equal(broadcast, values[1][grid.column][ids])


@pytest.mark.parametrize("columns", [1, 3])
def test_all_ranks_get_the_largest_value(columns: int) -> None:
    def compute_largest(ranks: Communicator) -> Any:
        grid = RankGrid(ranks.rank, ranks.size, columns)
        partition = Partition([slice(0, 9)], grid, ranks, Backend(threads=1))
        return partition.largest(np.asarray([2.0, 7.0, 3.0][ranks.rank]))

    assert [float(value) for value in on_threads(3, compute_largest)] == [7.0, 7.0, 7.0]
