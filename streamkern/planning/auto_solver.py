"""Which solver "auto" stands for.

There are two to choose from. The block solver is at the exact model's error after one to a few
passes, in any memory. The direct solver is the exact model after one pass, or, where transforms
make every pass another one, after all of them, but sums p x p matrices in float64. Which of them is
there sooner depends on how many rows there are for a center. Where no ridge is set the block solver
is taken whatever it costs: with noisy targets and few rows for a center the exact solution without
a ridge is the worse model. FALKON needs more passes than the block solver, EigenPro far more steps
(`python -m benchmarks.solvers`).
"""

from __future__ import annotations

from dataclasses import replace

from streamkern.basics.errors import MemoryBudgetError
from streamkern.planning import gemm_time
from streamkern.planning.budget import resolve
from streamkern.planning.memory import Buffers
from streamkern.planning.sizes import Problem, Sizes, Wishes


def choose(
    problem: Problem, wishes: Wishes, ridge: float, budget_bytes: int
) -> tuple[Sizes, Buffers, str]:
    """Sizes and memory as `budget.resolve` gives them, and why it is this solver, in one sentence.

    Raises MemoryBudgetError and ConfigError as `budget.resolve`.
    """
    if wishes.solver != "auto":
        return *resolve(problem, wishes, budget_bytes), "as set"
    block = resolve(problem, replace(wishes, solver="block"), budget_bytes)
    setting = wishes.steps if wishes.block_size is None else "block_size"
    if setting is not None:
        return *block, f"chosen, as solver.{setting} is set"
    if wishes.features != "kernel":
        return *block, f"chosen for {wishes.features} features"
    if not ridge:
        return *block, (
            "chosen, as no ridge is set: averaged steps are then a better model than the exact "
            "solution where targets are noisy"
        )
    try:
        direct = resolve(problem, replace(wishes, solver="direct"), budget_bytes)
    except MemoryBudgetError:
        return *block, "chosen, as the p x p matrices of the direct solver do not fit the memory"
    one, other = gemm_time.until_learned(problem, block[0]), gemm_time.direct(problem)
    if other <= one:
        return *direct, (
            f"chosen, as it is expected to have the exact model {one / other:.3g} times as soon as "
            "the block solver would come near it"
        )
    return *block, (
        f"chosen, as it is expected near the exact model {other / one:.3g} times as soon as the "
        "direct solver would have it"
    )
