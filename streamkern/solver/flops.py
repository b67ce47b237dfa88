"""How many FLOPs each solver takes."""

from __future__ import annotations

import math

from streamkern.planning import gemm_time
from streamkern.planning.sizes import Problem, Sizes
from streamkern.solver.precondition import eigen


def flops(problem: Problem, sizes: Sizes) -> tuple[int, int]:
    """(setup, training), leading terms only.

    block: `gemm_time.setup_flops` and `solver.block`. EigenPro: an eigensystem of s rows, and
    K(Z, Z) with its factor where the projection is exact; per row of a batch K(X, Z) forward and
    back, K(X, X_s) twice, half a period of temporary centers; per period a projection. direct,
    falkon: see there.
    """
    n, p, d, c = problem.n_rows * problem.epochs, problem.p, problem.d, problem.c
    steps, s, q, m = math.ceil(n / sizes.batch_size), sizes.n_sample, sizes.level, sizes.batch_size
    if sizes.solver == "block":
        work = 2 * p * (d + 3 * c) * n + 2 * p * sizes.block_size * c * steps
        return gemm_time.setup_flops(problem, sizes), work
    if sizes.solver == "direct":
        return 0, (p * p + 2 * p * (d + 2 * c)) * problem.summed + p**3 // 3
    if sizes.solver == "falkon":
        return 2 * p**3 + 2 * p * p * d, (2 * n + 4 * p) * p * (d + 3 * c)
    before = eigen.flops(s, q + 1) + 2 * s * s * d
    row = 2 * p * (d + 2 * c) + 2 * s * (d + q + c)
    if sizes.linear:
        h, coupled = sizes.n_probe, sizes.features == "nystrom"
        before = 4 * s * p * (d + s) + 2 * h * p * (d + h) + eigen.flops(s, q + 1) * (q > 0)
        before += (p**3 + 2 * (s + h) * p * p) if coupled else 0
        return before, 2 * p * (d + 2 * c) * n + (4 * p * (q + coupled * p // 2) * c) * steps
    if sizes.solver == "sgd":
        return 2 * sizes.n_probe**2 * d, 2 * p * (d + c) * n
    if sizes.solver == "eigenpro1":
        before += 2 * p * (p + s) * (d + q)
        return before, 4 * p * (d + c) * n + 4 * p * q * c * steps
    if sizes.solver == "eigenpro2":
        return before, row * n
    row += 2 * s * (d + c) + (sizes.period - 1) * m // 2 * 2 * (d + c)
    projections = steps // sizes.period
    if sizes.projection == "exact":
        return before + p**3 // 3 + 2 * p * p * d, row * n + 2 * p * p * c * projections
    width = c if sizes.projection == "resident" else c + d
    return before, row * n + 2 * p * p * width * projections
