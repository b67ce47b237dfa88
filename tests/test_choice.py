"""Which solver "auto" is, and that `plan` says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.budget import Problem, Wishes, resolve
from streamkern.choice import choose, flops
from streamkern.errors import MemoryBudgetError

GIB = 1 << 30
PROBLEM = Problem(
    n_rows=20_000, epochs=1, d=64, c=10, p=2000, row_bytes=256, unit_rows=1000, itemsize=4,
    threads=2, width=66, tile_bytes=1 << 20,
)  # fmt: skip


@given(
    n=st.integers(3000, 10**6), p=st.integers(200, 3000), c=st.integers(1, 300),
    d=st.integers(1, 800), epochs=st.integers(1, 5),
)  # fmt: skip
def test_with_a_ridge_it_is_the_cheaper_one(n: int, p: int, c: int, d: int, epochs: int) -> None:
    problem = replace(PROBLEM, n_rows=n, p=p, c=c, d=d, width=d + 2, epochs=epochs)
    sizes, _, reason = choose(problem, Wishes(), 1e-3, 64 * GIB)
    costs = {}
    for name, counted in (("block", 1), ("direct", 2)):
        costs[name] = counted * sum(flops(problem, resolve(problem, Wishes(name), 64 * GIB)[0]))
    assert sizes.solver == min(costs, key=lambda name: (costs[name], name == "block"))
    assert f"{costs['block']:.1e} FLOPs, the direct one {costs['direct']:.1e}" in reason


def test_few_rows_for_a_center_are_summed_and_many_streamed() -> None:
    for n, solver in ((4000, "direct"), (200_000, "block")):
        assert choose(replace(PROBLEM, n_rows=n), Wishes(), 1e-3, 64 * GIB)[0].solver == solver


@pytest.mark.parametrize(
    ("wishes", "ridge", "memory", "reason"),
    [
        (Wishes(), 0.0, 64 * GIB, "no ridge is set"),
        (Wishes(block_size=500), 1e-3, 64 * GIB, "block_size is set"),
        (Wishes(), 1e-3, GIB // 4, "do not fit the memory"),
        (Wishes("block"), 1e-3, 64 * GIB, "as set"),
    ],
)
def test_otherwise_it_is_the_block_solver(
    wishes: Wishes, ridge: float, memory: int, reason: str
) -> None:
    problem = replace(PROBLEM, n_rows=4000, p=3000)
    sizes, buffers, why = choose(problem, wishes, ridge, memory)
    assert sizes.solver == "block"
    assert reason in why
    assert (sizes, buffers) == resolve(problem, replace(wishes, solver="block"), memory)


def test_what_fits_no_solver_is_refused() -> None:
    with pytest.raises(MemoryBudgetError, match="the smallest plan needs"):
        choose(PROBLEM, Wishes(), 0.0, 1 << 20)
