"""Check the memory and the operations in the plan of Newton's method against its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamkern.backend.batch import Batch
from streamkern.losses.base import Loss
from streamkern.losses.log_link import Gamma
from streamkern.losses.log_loss import LogLoss
from streamkern.losses.scaled import ScaledLoss
from streamkern.planning.memory import Buffers
from streamkern.planning.problem import ProblemShape
from streamkern.solver.direct import DirectSizes
from streamkern.solver.newton import Newton
from streamkern.solver.newton_step import NewtonSolver
from tests.plans import PLAIN
from tests.solver_problems import both, operator, rows
from tests.traced_memory import traced_memory

D = 4


def problem(p: int, c: int, m: int, **changes: Any) -> tuple[ProblemShape, DirectSizes]:
    shape = replace(PLAIN, n_rows=3 * m, d=D, width=D + 2, p=p, c=c, threads=1, **changes)
    return shape, DirectSizes("direct", m, 0, 0, 1 << 20, 1 << 20, 1)


@pytest.mark.parametrize("loss", [LogLoss(), Gamma()])
@pytest.mark.parametrize("writes_checkpoints", [True, False])
@pytest.mark.parametrize("precision", ["exact", "float64"])
@pytest.mark.parametrize(
    ("p", "c", "m"), [(600, 2, 1800), (600, 6, 20), (600, 2, 20), (60, 40, 2400)]
)
def test_planned_buffers_equal_those_of_a_pass(
    p: int, c: int, m: int, precision: str, writes_checkpoints: bool, loss: Loss
) -> None:
    op = operator(precision=precision)
    Z, X = both(op, rows(0, p, D)), rows(1, m, D).astype(op.dtype)
    Y = np.eye(c, dtype=op.dtype)[np.arange(m) % c]
    if isinstance(loss, Gamma):
        loss, Y = loss.in_unit(np.ones(c)), Y + op.dtype.type(0.1)
    shape, sizes = problem(
        p, c, m, itemsize=op.dtype.itemsize, writes_checkpoints=writes_checkpoints
    )
    buffers, needs = Buffers(), Newton().needs(shape, sizes)
    Newton().add_buffers(buffers, shape, sizes)

    def train() -> None:
        scaled = ScaledLoss(loss, op.backend, op.dtype, np.zeros(c), np.ones(c))
        solver = NewtonSolver(op, Z, ridge=1e-3, n_outputs=c, max_batch=m, loss=scaled)
        state = solver.init()
        checkpoint: list[Any] = []
        for _ in range(2):
            solver.step(state, Batch(X, Y, np.arange(m)))
            checkpoint.clear()
            checkpoint = (
                [array.copy() for array in state.pending.values()] if writes_checkpoints else []
            )
            solver.end_epoch(state)
        assert len(checkpoint) == writes_checkpoints * len(state.pending)
        assert state.pending["G"].nbytes == needs.sums
        assert solver.values.shape == (needs.product_rows, needs.outputs)
        assert needs.outputs == Newton().outputs(shape)

    train()  # loads everything
    with traced_memory() as traced:
        train()
    peak = traced.peak
    planned = buffers.total("train") - buffers.total("always")  # tiles, which p does not fill
    assert 0.77 * planned < peak <= planned


def test_op_counts_equal_those_of_steps() -> None:
    """Check the FLOPs of `newton_step`: a row takes c p^2 + 2 p (d + 3 c), and a pass c p^3 / 3."""
    p, c, m, epochs = 60, 7, 100, 5
    shape, sizes = problem(p, c, m, epochs=epochs)
    setup, steps = Newton().op_counts(shape, sizes)
    assert setup.flops(shape) == 0
    row = c * p**2 + 2 * p * (D + 3 * c)
    assert steps.flops(shape) == epochs * (3 * m * row + c * p**3 // 3)
    assert steps.wide_factors == epochs * c * p**3 / 3
    # The Hessians, with one half computed, and the gradient are in float64.
    assert steps.wide_products == epochs * 3 * m * (c * p**2 + 2 * p * c)
