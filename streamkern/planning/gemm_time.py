"""Time of the block and the direct solver, in FLOPs at the speed of a GEMM.

More than their FLOPs by what is no multiplication. An entry of a kernel matrix is a distance, an
exponential, and a number written once and read twice; an entry of the preconditioner is read twice
a step, whatever the number of outputs. `ENTRY` and `APPLY` are what these took on two cores with
200 GFLOP/s; on a GPU both sides are larger by about the same factor.
"""

from __future__ import annotations

from streamkern.planning.sizes import Problem, Sizes

ENTRY, APPLY = 400, 80
ROWS_TO_LEARN = 5
"""See `alternatives`."""


def setup(problem: Problem, sizes: Sizes) -> int:
    """Of the block solver, in FLOPs at GEMM speed."""
    b, sampled = sizes.block_size, sizes.n_sample + sizes.n_probe
    return setup_flops(problem, sizes) + ENTRY * problem.p * (b + sampled)


def training(problem: Problem, sizes: Sizes) -> int:
    """The same of all its steps."""
    return problem.n_rows * problem.epochs * _row(problem, sizes)


def until_learned(problem: Problem, sizes: Sizes) -> int:
    """Of its setup and as many rows as it takes to be near the exact model."""
    rows = ROWS_TO_LEARN * problem.p**2 // sizes.block_size
    return setup(problem, sizes) + rows * _row(problem, sizes)


def direct(problem: Problem) -> int:
    """Of the direct solver, which is done after one pass over rows that come again."""
    p, d, c = problem.p, problem.d, problem.c
    double = problem.float64
    sums = double * p * p + p * (ENTRY + 2 * d + 2 * double * c)
    return int(problem.summed * sums + double * p**3 / 3)


def _row(problem: Problem, sizes: Sizes) -> int:
    """Of one row in a step of the block solver."""
    p, d, c = problem.p, problem.d, problem.c
    # A ridge on one block is as much again, with the factor of K(Z, Z).
    factors = 2 if problem.ridge and sizes.block_size == p else 1
    apply = factors * max(APPLY, 2 * c) * sizes.block_size // sizes.batch_size
    return p * (2 * (d + 3 * c) + ENTRY + apply)


def setup_flops(problem: Problem, sizes: Sizes) -> int:
    """Of all blocks of b centers together, with a sample of s rows and a probe of h.

    Per block (2 s + h) b^2 to whiten the sample, for its covariance and for the probe's features,
    5/3 b^3 for three Cholesky factors and two inverses, and the three kernel matrices; for the
    first block about 4/3 b^3 to find its damping.
    """
    p, b, s, h = problem.p, sizes.block_size, sizes.n_sample, sizes.n_probe
    kernels = 2 * (b + s + h) * problem.d
    return p * ((2 * s + h) * b + 5 * b * b // 3 + kernels) + 4 * b**3 // 3
