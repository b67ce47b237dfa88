"""Check that ranks which share rows and centers take the steps of a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.backend.batch import Batch
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.solver.base import Solver, State
from streamkern.solver.falkon_step import FalkonSolver
from tests.plans import solver_settings
from tests.rank_threads import on_threads
from tests.solver_problems import Array, Case, make_case, operator

OVER_RANKS = [
    *("block", "blocks", "blocks, recomputed", "blocks, fourier", "block, nystrom", "falkon"),
    *("direct", "direct, fourier", "direct, nystrom"),
    *("eigenpro3", "eigenpro3, resident", "eigenpro3, inexact", "eigenpro4"),
]  # fmt: skip


def train(
    case: Case, ranks: Communicator, assign: Callable[[Array], Array], w: Array | None = None,
    steps: int = 7, columns: int = 1,
) -> tuple[Solver, State, list[float]]:  # fmt: skip
    """Return the solver of a rank after some steps, its state, and the losses.

    assign : function of the row numbers of a batch that returns the row of the grid for each.
    columns : number of columns of the grid.
    """
    dtype, precision = case.op.dtype, case.op.precision
    op = operator(precision=precision, backend=Backend(threads=1), shift=case.op.shift)
    solver = case.solver(op=op, ranks=ranks, center_ranks=columns)
    state, losses = solver.init(), []
    for t in range(steps):
        ids = case.batch(t)
        own_ids = ids[assign(ids) == ranks.rank // columns]
        X, Y = (a[own_ids].astype(dtype) for a in (case.X, case.Y))
        weights = None if w is None else w[own_ids].astype(dtype)
        batch = Batch(X, Y, own_ids, weights, n_rows=len(ids))
        losses.append(float(solver.step(state, batch)[0].sum()))
        if t % 3 == 2:
            solver.end_epoch(state)
    solver.reduce_to_rank_0(state)
    return solver, state, losses


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("ridge", [0.0, 1e-3])
@pytest.mark.parametrize("name", OVER_RANKS)
def test_ranks_take_the_steps_of_one_process(name: str, ridge: float, size: int) -> None:
    """Check weighted rows and short batches, also with fewer rows than ranks."""
    case = make_case(operator(), name, options=solver_settings(ridge=ridge))
    for w in (None, np.random.default_rng(1).uniform(0.2, 3, len(case.X))):
        _, expected, losses = train(case, SINGLE, lambda ids: 0 * ids, w)
        on_ranks = on_threads(size, lambda r: train(case, r, lambda ids: ids * 7 % 11 % size, w))  # noqa: B023
        for _, state, rank_losses in on_ranks:
            # Solutions of equations have the rounding of their sums times a condition of 1e5.
            tolerance = 1e-9 if name.startswith("direct") else 1e-12
            np.testing.assert_allclose(state.alpha, expected.alpha, rtol=0, atol=tolerance)
            np.testing.assert_allclose(state.average, expected.average, rtol=0, atol=tolerance)
            np.testing.assert_allclose(rank_losses, losses, rtol=tolerance)
            assert state.rows == expected.rows
        solver, gathered, _ = on_ranks[0]
        for key in solver.sums_of_rows(gathered):
            array, total = gathered.pending[key], expected.pending[key]
            np.testing.assert_allclose(
                array, total, rtol=1e-9, atol=1e-11 * abs(total).max(initial=0)
            )
        # Equal bits, because replicas that differ would drift apart.
        assert all((s.alpha == on_ranks[0][1].alpha).all() for _, s, _ in on_ranks)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(0, 2**31), st.sampled_from(["block", "blocks"]))
def test_rows_may_be_on_any_rank(size: int, seed: int, name: str) -> None:
    """Check that one rank may have all rows, and another none."""
    case = make_case(operator(), name, options=solver_settings(ridge=1e-4))
    owners = np.random.default_rng(seed).integers(0, size, len(case.X))
    owners[: seed % len(owners)] = size - 1
    _, expected, _ = train(case, SINGLE, lambda ids: 0 * ids, steps=4)
    for _, state, _ in on_threads(size, lambda r: train(case, r, lambda ids: owners[ids], None, 4)):
        np.testing.assert_allclose(state.alpha, expected.alpha, rtol=0, atol=1e-12)


@pytest.mark.parametrize("columns", [1, 2])
def test_float32_loss_equals_that_of_one_rank(columns: int) -> None:
    """Check four digits, because the sums have another order."""
    case = make_case(operator(precision="exact"), "blocks", options=solver_settings(ridge=1e-3))
    _, _, losses = train(case, SINGLE, lambda ids: 0 * ids)
    rows = 4 // columns
    for _, _, rank_losses in on_threads(
        4, lambda r: train(case, r, lambda ids: ids % rows, columns=columns)
    ):
        np.testing.assert_allclose(rank_losses, losses, rtol=1e-4)


GRIDS = [(rows, columns) for rows in range(1, 5) for columns in range(2, 8 // rows + 1)]
ON_GRIDS: list[tuple[int, int, str, dict[str, Any], float]] = [
    (3, 2, "block", {}, 1e-3),
    (1, 3, "block", {}, 0.0),
    (2, 2, "blocks", {}, 0.0),
    (4, 2, "blocks", {}, 0.3),
    (2, 3, "blocks, recomputed", {}, 1e-3),
    (2, 4, "blocks", {"block_size": 3}, 1e-3),
    (4, 2, "blocks", {"batch_size": 3}, 1e-3),
    (2, 2, "blocks, fourier", {}, 1e-3),
    (3, 2, "block, nystrom", {}, 1e-3),
    *[(*grid, "eigenpro4", {}, 0.0) for grid in GRIDS],
    (2, 2, "eigenpro4", {"projection": "resident", "period": 2}, 0.0),
    (1, 5, "eigenpro4", {"projection": "inexact"}, 0.0),
    (4, 2, "eigenpro4", {"batch_size": 3}, 0.0),
    (2, 3, "eigenpro3", {}, 0.0),
    (3, 2, "eigenpro3, resident", {}, 0.0),
    (2, 4, "eigenpro3, inexact", {}, 0.0),
    *[(*grid, "falkon", {}, 1e-3) for grid in GRIDS],
    (2, 2, "falkon", {}, 0.0),
    (4, 2, "falkon", {"batch_size": 3}, 1e-3),
]


def assert_temporary_centers_equal(
    one: Solver, expected: State, on_ranks: list[tuple[Solver, State, list[float]]]
) -> None:
    """Assert that the columns together have each temporary center once."""
    for key in one.temporary_center_arrays:
        array = one.arrays(expected).get(key)
        if array is not None:
            columns = on_ranks[0][0].partition.grid.columns
            parts = [solver.arrays(state)[key] for solver, state, _ in on_ranks[:columns]]
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            rows = [np.sort(a, axis=0) for a in (np.concatenate(parts), array)]
            np.testing.assert_allclose(*rows, rtol=0, atol=1e-12)


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize(
    ("rows", "columns", "name", "changes", "ridge"),
    [*[(*grid, "blocks", {}, 1e-3) for grid in GRIDS], *ON_GRIDS],
)
def test_rank_grid_takes_the_steps_of_one_process(
    rows: int, columns: int, name: str, changes: dict[str, Any], ridge: float
) -> None:
    """Check weighted rows, short batches, and fewer rows or centers of a block than ranks."""
    case = make_case(operator(), name, options=solver_settings(ridge=ridge), **changes)
    size, steps, centers = rows * columns, 7 if name == "falkon" else 4, {}
    for w in (None, np.random.default_rng(1).uniform(0.2, 3, len(case.X))):
        one, expected, losses = train(case, SINGLE, lambda ids: 0 * ids, w, steps)
        on_ranks = on_threads(
            size,
            lambda r: train(case, r, lambda ids: ids * 7 % 11 % rows, w, steps, columns),  # noqa: B023
        )
        assert_temporary_centers_equal(one, expected, on_ranks)
        for solver, state, rank_losses in on_ranks:
            own_centers = solver.partition.ids
            centers[solver.partition.grid.column] = own_centers
            for a, full in ((state.alpha, expected.alpha), (state.average, expected.average)):
                np.testing.assert_allclose(a, full[own_centers], rtol=0, atol=1e-12)
            for key, a in solver.arrays(state).items():
                if key in solver.sums_of_rows(state) and solver.partition.grid.row:
                    continue  # the ranks of row 0 have the sums
                if key in solver.temporary_center_arrays:
                    continue  # in the order of the ranks
                row_ids = case.method.rows_of(key, 24, solver.partition)
                full = expected.pending.get(key, getattr(expected, key, None))
                part = full if row_ids is None else full[row_ids]
                np.testing.assert_allclose(a, part, rtol=0, atol=1e-11)
            np.testing.assert_allclose(rank_losses, losses, rtol=1e-12)
            assert (state.rows, state.n_pending) == (expected.rows, expected.n_pending)
        # Equal bits, because replicas that differ would drift apart.
        for solver, state, _ in on_ranks:
            _, column_state, _ = on_ranks[solver.partition.grid.column]
            np.testing.assert_array_equal(state.alpha, column_state.alpha)
        assert sorted(np.concatenate(list(centers.values())).tolist()) == list(range(24))


@pytest.mark.parametrize("precision", ["float64", "exact"])
@pytest.mark.parametrize(("size", "columns"), [(3, 1), (2, 2), (4, 2), (6, 3)])
def test_state_with_rank_dependent_rounding_is_broadcast(
    size: int, columns: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that checkpoints have equal bits in a column, and that only needed arrays are sent."""
    case = make_case(operator(precision=precision), "falkon", options=solver_settings(ridge=0))
    pc, end_epoch = 24 * case.Y.shape[1], FalkonSolver.end_epoch
    rounded = FalkonSolver._preconditioned, FalkonSolver._dot
    noise, sent, taken = 1e-3, list[int](), list[bool]()

    def precondition_with_noise(self: FalkonSolver, r: Array) -> Array:
        return np.asarray(rounded[0](self, r) * (1 + noise * self.partition.grid.row))

    def dot_with_noise(self: FalkonSolver, a: Array, b: Array) -> Array:
        return np.asarray(rounded[1](self, a, b) * (1 + noise * self.ranks.rank))

    def end_and_count(self: FalkonSolver, state: State) -> dict[str, Any]:
        total, before = self.ranks._total, len(sent)

        def total_and_count(mine: Array) -> Array:
            sent.append(mine.size if mine.size > 4 * case.Y.shape[1] else 0)
            return total(mine)

        if not self.ranks.rank:
            self.ranks._total = total_and_count  # type: ignore[method-assign]
        if state.passes == 2:  # as if there had been weights that these are too bad for
            state.pending["least"] *= 1e-9
        facts = end_epoch(self, state)
        self.ranks._total = total  # type: ignore[method-assign]
        if not self.ranks.rank:
            taken.append(facts["taken"])
            rows, column_state = size > columns, not state.passes - 1
            full = (2 if columns > 1 else 1) * (1 + column_state) + (4 + 2 * column_state) * rows
            assert sum(sent[before:]) == full * pc
        return facts

    monkeypatch.setattr(FalkonSolver, "_preconditioned", precondition_with_noise)
    monkeypatch.setattr(FalkonSolver, "_dot", dot_with_noise)
    monkeypatch.setattr(FalkonSolver, "end_epoch", end_and_count)
    on_ranks = on_threads(
        size,
        lambda r: train(case, r, lambda ids: ids % (size // columns), None, 12, columns),
    )
    assert taken[:3] == [True, True, False]
    for solver, state, _ in on_ranks:
        one, column_state, _ = on_ranks[solver.partition.grid.column]
        arrays = one.arrays(column_state)
        assert all((a == arrays[name]).all() for name, a in solver.arrays(state).items())


def test_centers_are_broadcast_bit_by_bit() -> None:
    """Check all precisions, also half, which the collective cannot sum."""
    case = make_case(operator(), "blocks", options=solver_settings(ridge=1e-3))
    Z = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float16)

    def gather_block(ranks: Communicator) -> Array:
        solver: Any = case.solver(ranks=ranks, center_ranks=2)
        total, kinds = ranks._total, set[Any]()

        def total_and_record(mine: Array) -> Array:
            kinds.add(mine.dtype)
            return total(mine)

        ranks._total = total_and_record  # type: ignore[method-assign]
        part = solver.partition
        with part.lend_gathered(part.part(Z), part.blocks[1]) as full:
            assert kinds == {np.dtype(np.uint8)}
            return np.array(full)

    for full in on_threads(4, gather_block):
        np.testing.assert_array_equal(full, Z[6:12])


def test_factor_stripes_equal_whole_factor() -> None:
    """Check stripes of equal work, which together are the factor."""
    case = make_case(operator(), "block", options=solver_settings(ridge=1e-3))
    full: Any = train(case, SINGLE, lambda ids: 0 * ids, steps=0)[0]
    parts: list[Any] = on_threads(3, lambda r: train(case, r, lambda ids: ids % 3, steps=0)[0])
    H = np.zeros((24, 24))
    for solver in parts:
        rows = solver.ranks.triangle(24)
        H[rows, : rows.stop] = solver.preconditioner.H[0]
        assert solver.preconditioner.H[0].size < 0.45 * H.size
        assert solver.preconditioner.L.shape == solver.preconditioner.H[0].shape
    np.testing.assert_array_equal(H, full.preconditioner.H[0])


def test_back_off_is_equal_on_all_ranks() -> None:
    """Check that all ranks restore the same state, and evaluate the ridge term together."""
    case = make_case(operator(), "blocks", options=solver_settings(ridge=1e-2))

    def back_off(ranks: Communicator, size: int) -> tuple[Array, Array]:
        solver, state, _ = train(case, ranks, lambda ids: ids % size)
        solver.back_off(state, state.average.copy(), 0.5)
        return state.alpha, state.pending["ridge_values"]

    alpha, values = back_off(SINGLE, 1)
    for a, v in on_threads(3, lambda ranks: back_off(ranks, 3)):
        np.testing.assert_allclose(a, alpha, rtol=0, atol=1e-12)
        np.testing.assert_allclose(v, values, rtol=0, atol=1e-12)
