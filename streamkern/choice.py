"""Which solver "auto" stands for, and what each of them costs.

There are two to choose from. The block solver is at the exact model's error after one to a few
passes, in any memory. The direct solver is the exact model after one pass, but sums p x p matrices
in float64. Both set out with matrices of p^3 FLOPs or so: which is the cheaper depends on how many
rows there are for a center. Where no ridge is set the block solver is taken whatever it costs: with
noisy targets and few rows for a center the exact solution without a ridge is the worse model.
FALKON needs more passes than the block solver, EigenPro far more steps
(`python -m benchmarks.solvers`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from streamkern import eigen
from streamkern.budget import Buffers, Problem, Sizes, Wishes, resolve, setup_flops
from streamkern.errors import MemoryBudgetError

FLOAT64 = 2
"""Time of a float64 FLOP over that of a float32 one."""


def choose(
    problem: Problem, wishes: Wishes, ridge: float, budget_bytes: int
) -> tuple[Sizes, Buffers, str]:
    """Sizes and memory as `budget.resolve` gives them, and why it is this solver, in one sentence.

    Raises MemoryBudgetError and ConfigError as `budget.resolve`.
    """
    if wishes.solver != "auto":
        return *resolve(problem, wishes, budget_bytes), "as set"
    block = resolve(problem, replace(wishes, solver="block"), budget_bytes)
    if wishes.block_size is not None:
        return *block, "chosen, as solver.block_size is set"
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
    costs = sum(flops(problem, block[0])), FLOAT64 * sum(flops(problem, direct[0]))
    words = f"the block solver would take {costs[0]:.1e} FLOPs, the direct one {costs[1]:.1e}"
    words += ", float64 counted twice"
    return (*direct, f"chosen: {words}") if costs[1] <= costs[0] else (*block, f"chosen: {words}")


def flops(problem: Problem, sizes: Sizes) -> tuple[int, int]:
    """(setup, training), leading terms only.

    block: see `budget` and `solver.block`. EigenPro: an eigensystem of s rows, and K(Z, Z) with
    its factor where the projection is exact; per row of a batch K(X, Z) forward and back, K(X, X_s)
    twice, half a period of temporary centers; per period a projection. direct, falkon: see there.
    """
    n, p, d, c = problem.n_rows * problem.epochs, problem.p, problem.d, problem.c
    steps, s, q, m = math.ceil(n / sizes.batch_size), sizes.n_sample, sizes.level, sizes.batch_size
    if sizes.solver == "block":
        b = sizes.block_size
        setup = setup_flops(problem, b, s, sizes.n_probe)
        return setup, 2 * p * (d + 3 * c) * n + 2 * p * b * c * steps
    if sizes.solver == "direct":
        return 0, (p * p + 2 * p * (d + 2 * c)) * n + problem.epochs * p**3 // 3
    if sizes.solver == "falkon":
        return 2 * p**3 + 2 * p * p * d, (2 * n + 4 * p) * p * (d + 3 * c)
    setup = eigen.flops(s, q + 1) + 2 * s * s * d
    row = 2 * p * (d + 2 * c) + 2 * s * (d + q + c)
    if sizes.linear:
        h, coupled = sizes.n_probe, sizes.features == "nystrom"
        setup = 4 * s * p * (d + s) + 2 * h * p * (d + h) + eigen.flops(s, q + 1) * (q > 0)
        setup += (p**3 + 2 * (s + h) * p * p) if coupled else 0
        return setup, 2 * p * (d + 2 * c) * n + (4 * p * (q + coupled * p // 2) * c) * steps
    if sizes.solver == "sgd":
        return 2 * sizes.n_probe**2 * d, 2 * p * (d + c) * n
    if sizes.solver == "eigenpro1":
        setup += 2 * p * (p + s) * (d + q)
        return setup, 4 * p * (d + c) * n + 4 * p * q * c * steps
    if sizes.solver == "eigenpro2":
        return setup, row * n
    row += 2 * s * (d + c) + (sizes.period - 1) * m // 2 * 2 * (d + c)
    projections = steps // sizes.period
    if sizes.projection == "exact":
        return setup + p**3 // 3 + 2 * p * p * d, row * n + 2 * p * p * c * projections
    width = c if sizes.projection == "resident" else c + d
    return setup, row * n + 2 * p * p * width * projections
