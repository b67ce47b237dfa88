"""Check which solver "auto" chooses, and the reason that `plan` prints."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from streamkern.basics.errors import MemoryBudgetError
from streamkern.config.solver import SolverConfig
from streamkern.planning.problem import ProblemShape
from streamkern.solver.block_sizes import setup_flops
from streamkern.solver.methods import BLOCK, DIRECT, METHODS, choose_method, find
from tests.plans import PLAIN, planned, solver_settings

GIB = 1 << 30
PROBLEM = ProblemShape(
    n_rows=20_000, epochs=1, d=64, c=10, p=2000, row_bytes=256, unit_rows=1000, itemsize=4,
    threads=2, width=66, tile_bytes=1 << 20,
)  # fmt: skip
RIDGED = solver_settings(ridge=1e-3)


@given(
    n=st.integers(3000, 10**6), p=st.integers(200, 3000), c=st.integers(1, 300),
    d=st.integers(1, 800), epochs=st.integers(1, 5), double=st.sampled_from([1.0, 2.0, 64.0]),
)  # fmt: skip
def test_auto_with_ridge_chooses_faster_solver(
    n: int, p: int, c: int, d: int, epochs: int, double: float
) -> None:
    """Check the choice by times that were computed by hand.

    A kernel value takes 400 FLOPs; blocks of b need 5 p (p / b) rows.
    """
    problem = replace(PROBLEM, n_rows=n, p=p, c=c, d=d, width=d + 2, epochs=epochs, float64=double)
    _, sizes, _, reason = choose_method(problem, solver_settings(ridge=1e-3), 64 * GIB)
    block = planned(problem, solver_settings("block"), 64 * GIB)[0]
    b, m = block.block_size, block.batch_size
    setup = setup_flops(problem, block) + 400 * p * (b + block.n_sample + block.n_probe)
    step = p * (2 * d + 6 * c + 400 + max(80, 2 * c) * b // m)
    one = setup + 5 * p * p // b * step
    direct_time = int(n * (double * p * p + p * (400 + 2 * d + 2 * double * c)) + double * p**3 / 3)
    assert sizes.solver == ("direct" if direct_time <= one else "block")
    assert f"{max(one / direct_time, direct_time / one):.3g} times as soon as" in reason
    assert "FLOPs" not in reason  # `plan` shows FLOPs as work, not as time


@given(
    n=st.integers(30_000, 10**7), p=st.integers(1000, 3000), d=st.integers(1, 800),
    epochs=st.integers(1, 9), block_size=st.sampled_from([None, 200, 1000]),
)  # fmt: skip
@example(n=20_000, p=2000, d=64, epochs=5, block_size=1000).via("two blocks")
@example(n=45_000, p=2000, d=64, epochs=5, block_size=1000).via("just two")
@example(n=46_500, p=2000, d=64, epochs=5, block_size=1000).via("just five")
def test_sample_is_five_blocks_if_affordable(
    n: int, p: int, d: int, epochs: int, block_size: int | None
) -> None:
    problem = replace(PROBLEM, n_rows=n, p=p, d=d, width=d + 2, epochs=epochs)
    sizes = planned(problem, solver_settings("block", block_size=block_size), 64 * GIB)[0]
    b, m = sizes.block_size, sizes.batch_size
    step = p * (2 * d + 6 * 10 + 400 + 80 * b // m)
    s, h = max(5 * b, 4096), max(b, 512)
    flops = p * ((2 * s + h) * b + 5 * b * b // 3 + 2 * (b + s + h) * d) + 4 * b**3 // 3
    share = (flops + 400 * p * (b + s + h)) / (n * epochs * step)
    assume(abs(share - 0.1) > 1e-6)
    few = max(2 * b, 4096), max(-(-b // 2), 512)
    assert (sizes.n_sample, sizes.n_probe) == ((s, h) if share < 0.1 else few)


@given(n=st.integers(3000, 10**6), p=st.integers(200, 3000))
def test_direct_op_counts_include_one_pass(n: int, p: int) -> None:
    """Check that one pass is counted for any number of epochs with the same rows."""
    problem = replace(PROBLEM, n_rows=n, p=p)
    sizes = planned(problem, solver_settings("direct"), 64 * GIB)[0]
    assert DIRECT.op_counts(replace(problem, epochs=7), sizes) == DIRECT.op_counts(problem, sizes)


@given(n=st.integers(3000, 10**5), p=st.integers(200, 3000), epochs=st.integers(1, 9))
def test_passes_over_new_rows_are_all_summed(n: int, p: int, epochs: int) -> None:
    """Check that they count as one pass over all their rows, in the plan and in the choice."""
    with_new_rows = replace(PROBLEM, n_rows=n, p=p, epochs=epochs, repeats=False)
    one_epoch = replace(PROBLEM, n_rows=n * epochs, p=p)
    sizes = planned(one_epoch, solver_settings("direct"), 64 * GIB)[0]
    assert DIRECT.op_counts(with_new_rows, sizes) == DIRECT.op_counts(one_epoch, sizes)
    assert DIRECT.time(with_new_rows) == DIRECT.time(one_epoch)


@pytest.mark.parametrize(
    ("options", "memory", "reason"),
    [
        (solver_settings(ridge=0.0), 64 * GIB, "as the ridge is 0"),
        (solver_settings(ridge=1e-3, block_size=500), 64 * GIB, "solver.block_size is set"),
        (solver_settings(ridge=1e-3, average=False), 64 * GIB, "solver.average is set"),
        (solver_settings(ridge=1e-3, warm_start="run"), 64 * GIB, "solver.warm_start is set"),
        (RIDGED, GIB // 4, "do not fit the memory"),
    ],
)
def test_auto_chooses_block_solver_otherwise(
    options: SolverConfig, memory: int, reason: str
) -> None:
    problem = replace(PROBLEM, n_rows=4000, p=3000)
    method, sizes, buffers, why = choose_method(problem, options, memory)
    assert method is BLOCK
    assert reason in why
    block = options.model_copy(update={"name": "block"})
    assert (sizes, buffers) == planned(problem, block, memory)


def test_solver_name_identifies_one_method_per_features_and_loss() -> None:
    """Check any order of `METHODS`."""
    for name, methods in METHODS.items():
        for features in {feature for method in methods for feature in method.features}:
            for squares in (True, False):
                usable = [
                    method
                    for method in methods
                    if features in method.features
                    and (method.minimises_squares if squares else method.minimises_losses)
                ]
                assert len(usable) <= 1, (name, features, squares)
                assert all(find(name, features, squares=squares) is feature for feature in usable)


def test_problem_beyond_memory_is_refused() -> None:
    with pytest.raises(MemoryBudgetError, match="the smallest plan needs"):
        choose_method(PROBLEM, solver_settings(), 1 << 20)


@pytest.mark.parametrize("name", ["direct", "falkon", "sgd", "eigenpro2"])
def test_remedies_for_too_little_memory_can_help(name: str) -> None:
    n, d = 4_000, 5_000  # long rows and few centers: the p x p matrices are small
    p = n if find(name, "kernel").in_place else 300
    wide = replace(PLAIN, n_rows=n, d=d, p=p, width=d, row_bytes=4 * d)
    with pytest.raises(MemoryBudgetError) as caught:
        planned(wide, solver_settings(name), 1 << 20)
    message = str(caught.value)
    assert "solver='auto'" not in message
    assert ("or lower n_centers" in message) == (p != n)
    assert ("or use another solver" in message) == (p == n)
