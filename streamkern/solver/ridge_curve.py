"""Error of kernel ridge regression as a function of the ridge, from one Cholesky factor.

Generalised cross-validation (Golub, Heath and Wahba 1979) is the mean squared leave-one-out error,
with all diagonal entries of the inverse replaced by their mean. With A = K + tau I for n rows, and
targets Y,

    V(tau) = n |A^-1 Y|^2 / tr(A^-1)^2.

For another tau' = tau + delta, A'^-1 = S (I + delta S)^-1 with S = A^-1, so that numerator and
trace are quadratic forms b^T g(S) b. Lanczos steps with S, each of two substitutions with the
factor of A, give their Gauss quadratures for all tau' at once (Golub and Meurant 2010, chapter 4):

    b^T g(S) b  ~  |b|^2 sum_k u_k^2 g(s_k)

with the eigenvalues s_k of the tridiagonal matrix and the first entries u_k of its eigenvectors.
The vectors b are the columns of Y for the numerator, and columns of random signs for the trace
(Hutchinson 1989).

In the terms of `solver.kernel_ridge`, tau is n ridge plus the jitter of the factor.

Cost 4 n^2 `QUADRATURE` FLOPs per column.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.basics.array_types import Floats
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.problem import ProblemShape
from streamkern.solver.precondition.noise import (
    MAX_NOISE_EXPONENT,
    NOISE_ROWS,
    Noise,
    weighted_gram,
)
from streamkern.solver.precondition.norm import noise_floor
from streamkern.solver.precondition.samples import SampleRows

QUADRATURE = 8
"""Number of Lanczos steps. Measured in docs/explanation/solver-measured.md."""
PROBES = 4
"""Number of columns of random signs, with which the standard error of the trace is about 1 %."""
MAX_COLUMNS = 8
"""Number of random combinations that replace the outputs if there are more."""
STEPS_PER_DECADE = 4
"""Number of values of tau' per power of ten."""
REACH = 6
"""Number of values of tau' below, and above, the tau of the factor."""
MAX_NOISE_ROWS, CENTERS_PER_ROW = 4096, 3
"""Largest number of rows from which the noise is estimated, and centers per such row."""
MAX_FACTORS = 2
"""Largest number of factors in a search for tau."""
RIDGE_TIE = 0.002
"""Largest relative excess over the least error at which a larger tau is preferred."""
PROBE_SEED = 0
"""Seed of the random signs: equal data has the same tau in every run."""


def noise_rows(problem: ProblemShape) -> int:
    """Return the number of rows from which the noise is estimated.

    It grows with the number of centers for the squared error only, because other losses are fitted
    to these rows several times.
    """
    n = max(NOISE_ROWS, min(MAX_NOISE_ROWS, problem.p // CENTERS_PER_ROW))
    return min(n if problem.squares else NOISE_ROWS, problem.n_rows)


def noise_of_more_rows(
    op: KernelOperator, Z: Points | None, rows: SampleRows, few_rows_noise: Noise
) -> Noise:
    """Return the noise estimated from `rows`, or `few_rows_noise` if it cannot be improved.

    It cannot be improved if it is not an estimate or is the largest noise, if every output has its
    own noise, or if equal rows were merged.

    Z, rows : as in `find_noise`.
    few_rows_noise : the noise estimated from some of the rows.
    """
    noise = few_rows_noise
    is_estimate = noise.trials and noise.exponent < MAX_NOISE_EXPONENT and noise.variance > 0
    if not is_estimate or noise.per_output or rows.repeats is not None:
        return noise
    backend, xp = op.backend, op.backend.xp
    with backend.single_threaded_blas():
        K = weighted_gram(op, Z, rows.X, rows.root)
        Y = rows.Y.astype(np.float64)
        if rows.root is not None:
            Y *= rows.root[:, None]
        scale, diagonal = float(K.diagonal().mean()), xp.arange(len(K))
        tau, errors, has_weight = noise.variance, dict[float, float](), xp.ones(len(K), bool)
        for _ in range(MAX_FACTORS):
            L = K.copy()
            L[diagonal, diagonal] += tau
            if not backend.cholesky(L):
                break
            best = better_tau(op, L, Y, has_weight, tau, scale)
            errors |= best.errors
            tau = best.tau
            if not best.at_edge:
                break
    if not errors:
        return noise
    exponent = round(math.log10(tau / scale))
    return replace(
        noise, variance=tau, n_rows=len(K), exponent=exponent, trials=sorted(errors.items())
    )


class BetterTau(NamedTuple):
    """The tau with the least error among several values near the tau of a factor.

    at_edge : whether it is the smallest or largest of them, so that a value beyond may be better.
    errors : error V of each value.
    """

    tau: float
    at_edge: bool
    errors: dict[float, float]


def better_tau(
    op: KernelOperator, L: Array, Y: Array, has_weight: Array, tau: float, scale: float
) -> BetterTau:
    """Return the tau' with the least error near tau.

    L : (n, n) lower factor of K + tau I.
    Y, has_weight, tau : as in `errors_of_taus`.
    scale : size of the kernel values.
    """
    taus = taus_near(tau, smallest_tau(op, len(L), scale))
    invert = partial(apply_inverse, op.backend, L)
    errors = errors_of_taus(op.backend, invert, Y, has_weight, tau, taus)
    best = largest_near_optimal(taus, errors)
    # Values below `smallest_tau` are left out. The lowest value is then no edge, as no lower value
    # may be used.
    starts_at_smallest = len(taus) < 2 * REACH + 1
    at_edge = bool(best == taus[-1] or (best == taus[0] and not starts_at_smallest))
    return BetterTau(best, at_edge, dict(zip(taus.tolist(), errors.tolist(), strict=True)))


def apply_inverse(backend: Backend, L: Array, v: Array) -> Array:
    """Return (L L^T)^-1 v, (n, k) float64. L : (n, n) lower factor, in any precision."""
    solved = backend.xp.array(v, L.dtype)
    backend.solve_lower(L, solved)
    backend.solve_lower(L, solved, transposed=True)
    return solved.astype(np.float64, copy=False)


def smallest_tau(op: KernelOperator, n: int, scale: float) -> float:
    """Return the smallest tau whose error is not distorted by rounding.

    n : number of rows.
    scale : size of the kernel values.
    """
    return noise_floor(op, n) / 2 * scale


def taus_near(tau: float, smallest: float) -> Floats:
    """Return values around tau, ascending, none below `smallest` or, if tau is lower, below tau."""
    taus = tau * 10.0 ** (np.arange(-REACH, REACH + 1) / STEPS_PER_DECADE)
    return taus[taus >= min(smallest, tau)]


def largest_near_optimal(taus: Floats, errors: Floats) -> float:
    """Return the largest tau with about the least error. taus, errors : (k,)."""
    return float(taus[np.flatnonzero(errors <= (1 + RIDGE_TIE) * errors.min())[-1]])


def errors_of_taus(
    backend: Backend, invert: Callable[[Array], Array], Y: Array, has_weight: Array, tau: float,
    taus: Floats,
) -> Floats:  # fmt: skip
    """Return the error V of each tau', (k,).

    invert : function that returns A^-1 v, (n, j) for v (n, j), with A = K + tau I.
    Y : (n, c) targets, multiplied by the square roots of the sample weights.
    has_weight : (n,) whether a row has a weight above 0.
    taus : (k,) values of tau'.
    """
    xp, rng = backend.xp, np.random.default_rng(PROBE_SEED)
    n, c = Y.shape
    if c > MAX_COLUMNS:
        signs = rng.choice([-1.0, 1.0], (c, MAX_COLUMNS)) / np.sqrt(MAX_COLUMNS)
        Y = Y @ backend.asarray(signs)
    probes = backend.asarray(rng.choice([-1.0, 1.0], (n, PROBES))) * has_weight[:, None]
    B = xp.concatenate([Y, probes], axis=1)
    squared_norms = backend.to_host((B**2).sum(axis=0))[:, None]
    nodes, weights = _quadratures(backend, invert, B)
    # Eigenvalues of A^-1 are at most 1 / tau; rounding may raise a node above that.
    s = np.minimum(nodes, 1 / tau)[:, None]  # (columns, 1, steps)
    inverse = s / (1 + (taus - tau)[:, None] * s)  # eigenvalues of A'^-1, (columns, k, steps)
    # b^T A'^-1 b and b^T A'^-2 b for each column b of B.
    inverse_forms, squared_inverse_forms = (
        squared_norms * (weights[:, None] * inverse**power).sum(axis=-1) for power in (1, 2)
    )
    traces = inverse_forms[-PROBES:].mean(axis=0)
    squares = squared_inverse_forms[:-PROBES].sum(axis=0)
    return np.asarray(float(has_weight.sum()) * squares / traces**2)


def _quadratures(
    backend: Backend, invert: Callable[[Array], Array], B: Array
) -> tuple[Floats, Floats]:
    """Return nodes and weights of the Gauss quadratures of each column of B, (columns, steps)."""
    xp, columns = backend.xp, B.shape[1]
    T = np.zeros((columns, QUADRATURE, QUADRATURE))
    q_before, beta = xp.zeros_like(B), np.zeros(columns)
    q = _normalise_columns(xp, B, xp.sqrt((B**2).sum(axis=0)))
    for k in range(QUADRATURE):
        w = invert(q) - backend.asarray(beta) * q_before
        alpha = (q * w).sum(axis=0)
        w -= alpha * q
        norms = xp.sqrt((w**2).sum(axis=0))
        T[:, k, k], beta = backend.to_host(alpha), backend.to_host(norms)
        if k + 1 < QUADRATURE:
            T[:, k, k + 1] = T[:, k + 1, k] = beta
        q_before, q = q, _normalise_columns(xp, w, norms)
    nodes, vectors = np.linalg.eigh(T)
    return np.maximum(nodes, 0), vectors[:, 0] ** 2


def _normalise_columns(xp: Any, w: Array, norms: Array) -> Array:
    """Return w divided by the norms of its columns; columns of norm 0 stay 0."""
    return w / xp.where(norms > 0, norms, 1.0)
