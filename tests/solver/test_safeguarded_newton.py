"""Check that Newton steps over several ranks are the steps of a single process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.backend.batch import Batch
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.basics.errors import DivergenceError
from streamkern.losses.base import Loss
from streamkern.losses.errors import Huber, Quantile
from streamkern.losses.log_link import Gamma
from streamkern.losses.log_loss import LogLoss
from streamkern.losses.scaled import ScaledLoss
from streamkern.solver.base import Solver, State
from streamkern.solver.falkon_newton_step import FalkonNewtonSolver
from streamkern.solver.method import Work
from streamkern.solver.methods import find
from streamkern.solver.safeguarded_newton import SafeguardedNewton
from tests.plans import solver_settings
from tests.rank_threads import on_threads
from tests.solver_problems import SEED, Array, both, make_case, operator, problem_of

RIDGE, BATCHES = 1e-3, 3
"""Ridge of the steps, and number of batches of an epoch."""
LOSSES: dict[str, tuple[Loss, Callable[[Array], Array]]] = {
    "log_loss": (LogLoss(), lambda Y: np.eye(2)[(Y[:, 0] > Y[:, 1]).astype(int)]),
    "quantile": (Quantile(0.9, width=[0.3, 0.3]), lambda Y: Y),
    "huber": (Huber([0.5, 0.5]), lambda Y: Y),
    "gamma": (Gamma().in_unit(np.ones(2)), lambda Y: np.exp(Y)),
}
"""Losses of two outputs, and functions that make their targets of those of `make_case`."""
GRIDS = [(2, 1), (3, 1), (8, 1), (1, 2), (1, 3), (2, 2), (3, 2)]
"""Ranks that share rows, and ranks that share centers."""


def train(
    name: str, loss_name: str, ranks: Communicator = SINGLE, columns: int = 1,
    w: Array | None = None, steps: int = 5 * BATCHES, reduced_after: int | None = None,
) -> tuple[Any, State, list[float]]:  # fmt: skip
    """Return the solver of a rank after some steps, its state, and the losses.

    columns : number of columns of the grid of ranks.
    reduced_after : number of steps after which the sums are reduced to rank 0, as for a checkpoint.
    """
    loss, to_targets = LOSSES[loss_name]
    op = operator(backend=Backend(threads=1))
    case = make_case(op, name, options=solver_settings(ridge=RIDGE))
    Y, size = to_targets(case.Y), ranks.size // columns
    problem = replace(problem_of(case.Z, 2), ranks=ranks.size, center_ranks=columns)
    scaled = ScaledLoss(loss, op.backend, op.dtype, np.zeros(2), np.ones(2))
    work = Work(
        op, both(op, case.Z), problem, case.sizes, case.options, SEED, ranks=ranks, loss=scaled
    )
    solver: Solver = find(name, "kernel", squares=False).assemble(work, case.setup)
    state, losses = solver.init(), []
    for t in range(steps):
        ids = case.batch(t % BATCHES)
        own_ids = ids[ids * 7 % 11 % size == ranks.rank // columns]
        weights = None if w is None else w[own_ids]
        batch = Batch(case.X[own_ids], Y[own_ids], own_ids, weights, n_rows=len(ids))
        losses.append(float(solver.step(state, batch)[0].sum()))
        if t + 1 == reduced_after:
            solver.reduce_to_rank_0(state)
        if (t + 1) % BATCHES == 0:
            solver.end_epoch(state)
    return solver, state, losses


def assert_equal_parts(one: State, on_ranks: list[tuple[Any, State, list[float]]]) -> None:
    """Assert that each array of a checkpoint is that of one process, at a rank's centers."""
    method = find(on_ranks[0][0].name, "kernel", squares=False)
    for solver, state, _ in on_ranks:
        for key, array in solver.arrays(state).items():
            if key in solver.sums_of_rows(state) and solver.partition.grid.row:
                assert not array.any()  # the ranks of row 0 have the sums
                continue
            full, ids = one.pending.get(key, getattr(one, key, None)), None
            if not solver.partition.is_replicated:
                ids = method.rows_of(key, 24, solver.partition)
            part = full if ids is None else full[ids]
            # The step of Newton's method is the solution of equations with a condition of 1e5.
            scale = (1e-9 if solver.name == "direct" else 1e-11) * abs(full).max(initial=1)
            np.testing.assert_allclose(array, part, rtol=0, atol=scale, err_msg=key)


@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("falkon", *grid) for grid in GRIDS] + [("direct", rows, 1) for rows in (2, 3, 8)],
)
def test_ranks_take_the_steps_of_one_process(name: str, rows: int, columns: int, loss: str) -> None:
    """Check weighted rows, short batches, ranks without rows, and a checkpoint within an epoch."""
    size, (steps, within) = rows * columns, (5 * BATCHES, 4 * BATCHES + 2)
    for w in (None, np.random.default_rng(1).uniform(0.2, 3, 240)):
        _, expected, losses = train(name, loss, w=w)
        on_ranks = on_threads(
            size,
            lambda r: train(name, loss, r, columns, w, steps, reduced_after=within - 1),  # noqa: B023
        )
        assert_equal_parts(expected, on_ranks)
        for solver, state, rank_losses in on_ranks:
            np.testing.assert_allclose(rank_losses, losses, rtol=1e-10)
            assert (state.rows, state.passes) == (expected.rows, expected.passes)
            # Equal bits, because replicas that differ would drift apart.
            column_arrays = on_ranks[solver.partition.grid.column][0].arrays(
                on_ranks[solver.partition.grid.column][1]
            )
            for key, array in solver.arrays(state).items():
                np.testing.assert_array_equal(array, column_arrays[key], err_msg=key)
        assert_equal_parts(
            train(name, loss, w=w, steps=within)[1],
            on_threads(size, lambda r: train(name, loss, r, columns, w, within, within)),  # noqa: B023
        )


@pytest.mark.parametrize("loss", ["huber", "gamma"])
@pytest.mark.parametrize(("name", "size", "columns"), [
    ("direct", 3, 1), ("falkon", 3, 1), ("falkon", 2, 2), ("falkon", 4, 2)
])  # fmt: skip
def test_results_with_rank_dependent_rounding_are_broadcast(
    name: str, size: int, columns: int, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that all ranks take the step and the decision of rank 0, with errors of 0.1 %."""
    product, multiply = SafeguardedNewton._inner_product, FalkonNewtonSolver._preconditioned

    def inner_product_with_noise(self: Any, a: Array, b: Array) -> float:
        return product(self, a, b) * (1 + 1e-3 * self.ranks.rank)

    def precondition_with_noise(self: Any, r: Array) -> Array:
        return np.asarray(multiply(self, r) * (1 + 1e-3 * self.partition.grid.row))

    monkeypatch.setattr(SafeguardedNewton, "_inner_product", inner_product_with_noise)
    monkeypatch.setattr(FalkonNewtonSolver, "_preconditioned", precondition_with_noise)
    on_ranks = on_threads(size, lambda r: train(name, loss, r, columns))
    for solver, state, _ in on_ranks:
        first, first_state, _ = on_ranks[solver.partition.grid.column]
        arrays = first.arrays(first_state)
        for key, array in solver.arrays(state).items():
            np.testing.assert_array_equal(array, arrays[key], err_msg=key)


def test_all_ranks_decide_alike_whether_a_step_is_shortened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check a rank that would reject a step which rank 0 accepts."""
    product = SafeguardedNewton._inner_product

    def ascending_elsewhere(self: Any, a: Array, b: Array) -> float:
        return product(self, a, b) + 1e6 * self.ranks.rank

    monkeypatch.setattr(SafeguardedNewton, "_inner_product", ascending_elsewhere)
    on_ranks = on_threads(2, lambda r: train("direct", "huber", r))
    slopes = [state.pending["slopes"] for _, state, _ in on_ranks]
    np.testing.assert_array_equal(*slopes)
    assert slopes[0][1] == 1


@pytest.mark.parametrize("name", ["direct", "falkon"])
def test_all_ranks_end_if_one_has_a_gradient_that_is_not_finite(name: str) -> None:
    def back_off(ranks: Communicator) -> bool:
        solver, state, _ = train(name, "huber", ranks, steps=BATCHES)
        if ranks.rank == 1:
            state.pending["gradient"][0, 0] = np.nan
        with pytest.raises(DivergenceError):
            solver.back_off(state, state.average, 0.5)
        return True

    assert all(on_threads(2, back_off))
