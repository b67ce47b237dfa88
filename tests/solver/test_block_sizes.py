"""Check planned sizes: they fit, grow with the memory, and refusals name the least memory."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.errors import MemoryBudgetError
from streamkern.config.solver import SolverConfig
from streamkern.kernels.points import PRECISIONS
from streamkern.planning.memory import Buffers
from streamkern.planning.problem import MiB, ProblemShape, device_costs
from streamkern.planning.sizes import MAX_PROBE, auto_batch, nearest_power_of_two, sample_sizes
from streamkern.solver.block_sizes import (
    BlockSizes,
    measured_batch,
    worthwhile_batch,
)
from streamkern.solver.methods import METHODS, find, resolve
from tests.plans import PLAIN, planned, problems, solver_settings

GiB = 1024 * MiB


SOLVERS = ("auto", "block", "eigenpro3", "eigenpro4", "direct", "falkon")
FEATURED = [name for name in METHODS if any("fourier" in m.features for m in METHODS[name])]
problems_and_settings = st.one_of(
    st.tuples(
        problems(),
        st.builds(
            solver_settings, name=st.sampled_from(SOLVERS),
            projection=st.sampled_from(["auto", "exact", "resident", "inexact"]),
        ),
    ),
    st.tuples(
        st.builds(replace, problems(), features=st.sampled_from(["fourier", "nystrom"])),
        st.builds(solver_settings, name=st.sampled_from(FEATURED)),
    ),
)  # fmt: skip
"""A problem, and the settings of its solver."""
shares = st.floats(0.01, 1.2)
"""Budgets, relative to the memory of the largest plan."""


def attempt(
    problem: ProblemShape, options: SolverConfig, budget: int
) -> tuple[Any, Buffers] | None:
    """Return the plan for the budget, or None if it is too small."""
    try:
        return planned(problem, options, budget)
    except MemoryBudgetError:
        return None


@given(problems_and_settings, shares)
def test_planned_sizes_fit_budget(case: tuple[ProblemShape, SolverConfig], share: float) -> None:
    problem, options = case
    budget = int(share * planned(problem, options, 10**16)[1].peak)
    plan = attempt(problem, options, budget)
    if plan is None:
        assert share < 1
        return
    sizes, buffers = plan
    assert buffers.peak <= budget
    assert buffers.lines == find(sizes.solver, problem.features).count(problem, sizes).lines
    assert buffers.peak == max(buffers.total(phase) for phase in buffers.phases)
    assert all(size >= 0 for _, _, size in buffers.lines)


@given(problems_and_settings, shares, shares)
def test_more_memory_never_gives_smaller_sizes(
    case: tuple[ProblemShape, SolverConfig], one: float, two: float
) -> None:
    """Check that more memory gives larger blocks, and for equal blocks larger batches."""
    problem, options = case
    best = planned(problem, options, 10**16)[1].peak
    small, large = (attempt(problem, options, int(s * best)) for s in sorted((one, two)))
    if small is None:
        return
    assert large is not None
    a, b = small[0], large[0]
    if type(a) is not type(b):  # `auto` has the direct solver where its matrices fit
        assert (a.solver, b.solver) == ("block", "direct")
        return
    blocks = isinstance(a, BlockSizes)
    if blocks:
        assert b.block_size >= a.block_size
    key = {"block": "block_size", "direct": "n_sums"}.get(a.solver, "projection")
    if getattr(a, key, None) == getattr(b, key, None):
        assert b.batch_size >= a.batch_size
        if blocks and b.batch_size == a.batch_size:
            assert b.keep >= a.keep
    if b == a:
        assert large[1].peak == small[1].peak


@given(problems_and_settings)
def test_sizes_are_consistent_with_data(case: tuple[ProblemShape, SolverConfig]) -> None:
    problem, options = case
    sizes, _ = planned(problem, options, 10**16)
    n, fields = problem.n_rows, vars(sizes)
    assert 1 <= sizes.batch_size <= n
    if sizes.solver in ("direct", "falkon"):
        assert (sizes.n_sample, sizes.n_probe) == (0, 0)
        return
    assert (sizes.solver != "sgd") == (sizes.n_sample > 0)
    assert 1 <= sizes.n_probe <= n
    # held out, or all rows, but never a part of the sample's own rows
    assert sizes.n_sample + sizes.n_probe <= n or sizes.n_probe == n <= MAX_PROBE
    if sizes.solver == "block":
        assert 1 <= sizes.block_size <= problem.p
    elif sizes.solver == "sgd":
        assert sizes.level == 0
    else:
        assert 1 <= sizes.level < sizes.n_sample <= n
    assert fields.get("projection", "exact") in ("exact", "resident", "inexact")
    period = fields.get("period", 1)
    assert period == 1 or (period > 1 and sizes.solver == "eigenpro4")


@given(problems_and_settings)
def test_refusal_names_the_smallest_budget(case: tuple[ProblemShape, SolverConfig]) -> None:
    """Check that it suffices in its printed precision, and that 1 MiB or .1 GiB less does not."""
    problem, options = case
    with pytest.raises(MemoryBudgetError) as caught:
        planned(problem, options, 1)
    assert isinstance(caught.value, MemoryError)
    match = re.search(r"the smallest plan needs ([\d.]+) (MiB|GiB)", str(caught.value))
    assert match is not None
    unit = MiB if match[2] == "MiB" else GiB
    step = MiB if unit == MiB else GiB // 10
    named = int(float(match[1]) * unit)
    assert attempt(problem, options, named + step) is not None
    assert attempt(problem, options, named - step - 1) is None


@pytest.mark.parametrize("solver", ["block", "eigenpro3", "eigenpro4"])
def test_fixed_sizes_are_kept(solver: str) -> None:
    fixed = solver_settings(
        name=solver, block_size=777, n_nystrom=999, level=55, period=4,
        projection="inexact",
    )  # fmt: skip
    problem = replace(PLAIN, batch_size=123)
    sizes, _ = planned(problem, fixed, 10**13)
    assert sizes.batch_size == 123
    if solver == "block":
        assert sizes.block_size == 777
    else:
        assert (sizes.n_sample, sizes.level, sizes.projection) == (999, 55, "inexact")
        assert sizes.period == (4 if solver == "eigenpro4" else 1)
    with pytest.raises(MemoryBudgetError, match=r"^memory=70 MiB is not enough for n_centers="):
        planned(problem, fixed, 70 * MiB)


def reason(problem: ProblemShape, options: SolverConfig, budget: int) -> str | None:
    """Return the reason that `plan` prints for the sizes."""
    method, sizes, _, _ = resolve(problem, options, budget)
    return method.reason(problem, options, sizes)


def time_to_learn(problem: ProblemShape, b: int) -> tuple[float, float, float]:
    """Return predicted times of a block: setup, setup and 5 p (p / b) rows, and all rows.

    In FLOPs, a kernel entry at 400 and an entry of the preconditioner at 80 a step.
    """
    p, d, c = problem.p, problem.d, problem.c
    s, h = sample_sizes(problem.n_rows, max(2 * b, 4096), min(max(-(-b // 2), 512), MAX_PROBE))
    m = problem.batch_size or max(256, 2 ** round(np.log2(p / 4)))
    setup = p * b * (2 * s + h + 5 * b / 3) + 4 * b**3 / 3 + p * (b + s + h) * (2 * d + 400)
    row = p * (2 * d + 6 * c + 400 + 80 * b / m)
    return setup, setup + 5 * p * p / b * row, problem.n_rows * problem.epochs * row


@pytest.mark.parametrize("epochs", [1, 5, 500])
@pytest.mark.parametrize("d", [16, 784])
@pytest.mark.parametrize("p", [500, 2000, 8000])
@pytest.mark.parametrize("m", [None, 7])
def test_block_size_minimises_time_or_a_quarter_of_the_run(
    m: int | None, p: int, d: int, epochs: int
) -> None:
    problem = replace(PLAIN, n_rows=10 * p, p=p, d=d, epochs=epochs, c=1, width=d + 2, batch_size=m)
    chosen = planned(problem, solver_settings("block"), 10**13)[0].block_size
    halvings = [p // 2**k for k in range(6) if p // 2**k >= 256]
    times = {b: time_to_learn(problem, b) for b in halvings}
    soonest = min(halvings, key=lambda b: times[b][1])
    affordable = [b for b in halvings if times[b][0] <= max(0.25 * times[b][2], 3e11)]
    assert chosen == max([soonest, *affordable])
    if epochs == 500:
        assert chosen == p
    why = reason(problem, solver_settings("block"), 10**13)
    assert why is not None
    assert ("near the exact model soonest" in why, "at most 25%" in why) == (
        chosen == soonest,
        chosen > soonest,
    )


def test_memory_limited_block_is_explained() -> None:
    best = planned(PLAIN, solver_settings("block"), 10**13)
    less = best[1].peak * 2 // 3
    assert planned(PLAIN, solver_settings("block"), less)[0].block_size < best[0].block_size
    why = reason(PLAIN, solver_settings("block"), less)
    assert why == (
        "block_size: the largest that fits the memory; with more it would be "
        f"{best[0].block_size}\n"
        "batch_size: about a quarter of the centers, from 256 to 4096 and no more than there are "
        "rows"
    )


@pytest.mark.parametrize(
    "options", [solver_settings("block", block_size=200), solver_settings("direct")]
)
def test_fixed_or_missing_sizes_have_no_explanation(options: SolverConfig) -> None:
    assert reason(replace(PLAIN, batch_size=64), options, 10**13) is None


# Fig. 6 of EP3: 60 000 centers and noisy images, with the bytes of a point on tensor cores.
LARGE = replace(PLAIN, n_rows=10**8, epochs=1, p=60_000, ridge=False, point_bytes=2 * 3 * 784)


def on_device(problem: ProblemShape, precision: str) -> ProblemShape:
    return replace(problem, costs=device_costs(precision))


@given(problems(), st.sampled_from(PRECISIONS))
def test_device_batch_lies_between_cpu_and_critical_batch(
    problem: ProblemShape, precision: str
) -> None:
    """Check that no allowed power of two has more progress m / (1 + m / critical) in m + h."""
    device = on_device(problem, precision)
    costs, p, c = device.costs, device.p, device.c
    cpu_batch = auto_batch(problem)
    largest_batch = min(16_384, nearest_power_of_two(p / 4), problem.n_rows)
    assert auto_batch(device) == cpu_batch
    for b in (p, -(-p // 4)):
        sketches = costs.column * 16
        row = costs.entry + int(2 * device.d * costs.points) + 6 * c + sketches
        h = max(costs.apply, 2 * c) * b / row
        for critical in (1.0, 0.1 * p, 1.0 * p):
            m = worthwhile_batch(device, b, critical)
            assert cpu_batch <= m <= max(cpu_batch, largest_batch)
            powers = (1 << k for k in range(20))
            allowed = sorted({cpu_batch, *(m for m in powers if cpu_batch <= m <= largest_batch)})
            speed = {k: k / (1 + k / critical) / (k + h) for k in allowed}
            assert speed[m] > 0.85 * max(speed.values())
        assert worthwhile_batch(problem, b, 1e9) == cpu_batch


def test_device_batch_for_sixty_thousand_centers() -> None:
    """Check numbers that were computed by hand.

    H takes 124 b, and a row 428 + 2 d + 6 c + 2 * 16 = 2088, of which "high" takes 0.24 * 2 d. So h
    is 3563 and 8303, and sqrt(p h) is 14 600 and 22 300.
    """
    for precision, m, b in (("exact", 16_384, 60_000), ("high", 16_384, 60_000)):
        sizes = planned(on_device(LARGE, precision), solver_settings("block"), 70 * GiB)[0]
        assert (sizes.batch_size, sizes.block_size) == (m, b)
    why = reason(on_device(LARGE, "high"), solver_settings("block"), 70 * GiB)
    assert why is not None
    assert f"as reading H takes as long as {124 * 60_000 // 896} rows of a step (measured" in why
    on_cpu = planned(LARGE, solver_settings("block", block_size=60_000), 70 * GiB)[0]
    assert on_cpu.batch_size == 4096


def test_setup_lowers_device_batch_to_optimum() -> None:
    """Check sqrt(critical h) for h = 8303, the limit of a CPU's batch, and a batch that is set."""
    device, options = on_device(LARGE, "high"), solver_settings("block")
    sizes = planned(device, options, 70 * GiB)[0]
    for critical, m in ((1e9, 16_384), (60_000, 16_384), (8000, 8192), (2000, 4096), (1, 4096)):
        assert measured_batch(device, sizes, critical) == m
        assert measured_batch(replace(device, batch_size=9), sizes, critical) == 16_384
    small = planned(LARGE, options, 70 * GiB)[0]
    assert measured_batch(LARGE, small, 1.0) == small.batch_size == 4096


def test_half_factors_halve_the_time_of_reading_H_on_a_device() -> None:
    """Check sqrt(critical h) for h = 62 * 60 000 / 896 = 4151, and choices on a CPU."""
    options, halves = (
        solver_settings("block", factor_dtype=dtype) for dtype in ("auto", "float16")
    )
    device = on_device(LARGE, "high")
    sizes = planned(device, halves, 70 * GiB)[0]
    assert (sizes.half_factors, sizes.batch_size) == (True, 16_384)
    why = str(reason(device, halves, 70 * GiB))
    assert f"as reading H takes as long as {62 * 60_000 // 896} rows of a step (measured" in why
    for critical, whole, half in ((60_000, 16_384, 16_384), (8000, 8192, 4096)):
        assert measured_batch(device, replace(sizes, half_factors=False), critical) == whole
        assert measured_batch(device, sizes, critical) == half
    on_cpu, halves_on_cpu = (planned(LARGE, each, 70 * GiB)[0] for each in (options, halves))
    assert halves_on_cpu == replace(on_cpu, half_factors=True)


def test_plan_counts_entries_of_half_factors_apart() -> None:
    sizes = BlockSizes("block", 4096, 0, 0, 0, 0, block_size=15_000, keep=True)
    whole, half = (
        METHODS["block"][0].op_counts(LARGE, replace(sizes, half_factors=each))[1]
        for each in (False, True)
    )
    entries = 60_000 * 15_000 * -(-(10**8) // 4096)
    assert (whole.half_swept, half.half_swept) == (0, entries)
    assert whole.swept - half.swept == entries


def test_block_has_priority_over_device_batch() -> None:
    """Check that with less memory the batch becomes smaller before the block does."""
    device, options = on_device(LARGE, "high"), solver_settings("block")
    small = replace(device, costs=replace(device.costs, max_batch=4096))
    budgets = [k * GiB for k in (20, 8, 7, 5, 4)]
    plans = [planned(device, options, budget)[0] for budget in budgets]
    assert [sizes.batch_size for sizes in plans] == [16_384, 16_384, 8192, 8192, 4096]
    for sizes, budget in zip(plans, budgets, strict=True):
        assert sizes.block_size == planned(small, options, budget)[0].block_size
    why = str(reason(device, options, 4 * GiB))
    assert "batch_size: the largest that fits the memory; with more it would be 16384" in why


@pytest.mark.parametrize("solver", ["sgd", "eigenpro1", "eigenpro2"])
def test_in_place_methods_need_every_row(solver: str) -> None:
    problem = replace(PLAIN, n_rows=10_000)
    sizes, buffers = planned(problem, solver_settings(solver), 10**13)
    assert find(solver, "kernel").in_place
    if solver == "eigenpro1":
        assert (sizes.batch_size, sizes.n_sample, sizes.level) == (256, 4800, 160)
    assert not any(
        "K(Z, Z)" in buffer_name or "K(X, Z)" in buffer_name for _, buffer_name, _ in buffers.lines
    )


@pytest.mark.parametrize(
    ("blocks", "batch", "blocks_per_step"),
    [(4, 4096, 1 / 2), (64, 65536, 2), (128, 8192, 1), (128, 65536, 4)],
)
def test_plan_counts_ridge_blocks(blocks: int, batch: int, blocks_per_step: float) -> None:
    """Check that more blocks are counted if there are many, but at most a batch."""
    b = 8192
    problem = replace(PLAIN, p=blocks * b, n_rows=1 << 20, epochs=1, finds_ridge=True)
    sizes = BlockSizes("block", batch, 0, 0, 0, 0, block_size=b, keep=True)
    with_ridge, without_ridge = (
        METHODS["block"][0].op_counts(shape, sizes)[1].entries
        for shape in (problem, replace(problem, finds_ridge=False))
    )
    assert with_ridge - without_ridge == blocks_per_step * problem.p * b * (1 << 20) / batch
