"""Error of kernel ridge regression against its ridge, from one Cholesky factor.

Generalised cross-validation (Golub, Heath and Wahba 1979) is the mean squared leave-one-out error
with the mean diagonal entry of the inverse in place of each row's own. With A = K + tau I of n
rows, and targets Y,

    V(tau) = n |A^-1 Y|^2 / tr(A^-1)^2.

For another tau' = tau + delta, A'^-1 = S (I + delta S)^-1 with S = A^-1: both terms are quadratic
forms of functions of S. Lanczos steps with S, each two substitutions with the factor of A, give
their Gauss quadratures for all tau' at once (Golub and Meurant 2010, chapter 4), and random signs
the trace (Hutchinson 1989):

    b^T g(S) b  ~  |b|^2 sum_k u_k^2 g(s_k)

with the eigenvalues s_k of the tridiagonal matrix and the first entries u_k of its eigenvectors.

Cost 4 n^2 `QUADRATURE` FLOPs a column.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

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
"""Lanczos steps. With 12 of them and 8 probes V differed by up to 2 per cent (two tables of 8000
rows), and the same ridges were chosen."""
PROBES = 4
"""Number of columns of random signs. On four tables of 8000 rows the standard error of the trace
was up to .5 per cent with 16 columns, and so is twice that."""
MAX_COLUMNS = 8
"""Number of random combinations of the targets that stand for more outputs."""
STEPS_OF_RIDGE = 4
"""Ridges per power of ten."""
REACH = 6
"""Steps from the ridge of the factor to the smallest and to the largest ridge."""
MAX_NOISE_ROWS, CENTERS_PER_ROW = 4096, 3
"""Largest number of rows from which the noise is estimated, and centers of the run for each."""
MAX_FACTORS = 2
"""Largest number of factors from which a ridge is found."""
RIDGE_TIE = 0.002
"""Relative excess over the least error up to which a larger ridge is preferred."""


def noise_rows(problem: ProblemShape) -> int:
    """Return the number of rows for the noise: more for many centers, if the loss is squares.

    Other losses are fitted to these rows several times.
    """
    n = max(NOISE_ROWS, min(MAX_NOISE_ROWS, problem.p // CENTERS_PER_ROW))
    return min(n if problem.squares else NOISE_ROWS, problem.n_rows)


def noise_of_more_rows(
    op: KernelOperator, Z: Points | None, rows: SampleRows, near: Noise
) -> Noise:
    """Return the noise of more rows, or `near`, that of a part of them.

    The latter is returned if nothing was found from it, if outputs have noises of their own, and if
    equal rows were merged.

    Z, rows : as in `find_noise`.
    """
    known = near.tried and near.exponent < MAX_NOISE_EXPONENT and near.variance > 0
    if not known or near.each or rows.repeats is not None:
        return near
    backend, xp = op.backend, op.backend.xp
    with backend.single_threaded_blas():
        K = weighted_gram(op, Z, rows.X, rows.root)
        Y = rows.Y.astype(np.float64)
        if rows.root is not None:
            Y *= rows.root[:, None]
        scale, diagonal = float(K.diagonal().mean()), xp.arange(len(K))
        tau, tried, counted = near.variance, dict[float, float](), xp.ones(len(K), bool)
        for _ in range(MAX_FACTORS):
            A = K.copy()
            A[diagonal, diagonal] += tau
            if not backend.cholesky(A):
                break
            found = better_ridge(op, A, Y, counted, tau, scale)
            tried |= found.tried
            tau = found.ridge
            if not found.at_edge:
                break
    if not tried:
        return near
    exponent = round(math.log10(tau / scale))
    tried_in_order = sorted(tried.items())
    return replace(near, variance=tau, n_rows=len(K), exponent=exponent, tried=tried_in_order)


class BetterRidge(NamedTuple):
    """The ridge of the least error near that of a factor.

    at_edge : whether it is the smallest or largest that was tried, and others may be better.
    tried : errors by ridge.
    """

    ridge: float
    at_edge: bool
    tried: dict[float, float]


def better_ridge(
    op: KernelOperator, A: Array, Y: Array, counted: Array, tau: float, scale: float
) -> BetterRidge:
    """Return the ridge of the least error near tau, from the factor A (n, n) with the ridge tau.

    Y, counted : as in `errors_of_ridges`. scale : size of the kernel values.
    """
    taus = ridges_near(tau, least_ridge(op, len(A), scale))
    invert = partial(inverted, op.backend, A)
    errors = errors_of_ridges(op.backend, invert, Y, counted, tau, taus)
    found, cut = largest_good(taus, errors), len(taus) <= 2 * REACH
    at_edge = bool(found == taus[-1] or (found == taus[0] and not cut))
    return BetterRidge(found, at_edge, dict(zip(taus.tolist(), errors.tolist(), strict=True)))


def inverted(backend: Backend, A: Array, v: Array) -> Array:
    """Return (A A^T)^-1 v, (n, w) float64. A : (n, n) lower factor, in any precision."""
    solved = backend.xp.array(v, A.dtype)
    backend.solve_lower(A, solved)
    backend.solve_lower(A, solved, transposed=True)
    return solved.astype(np.float64, copy=False)


def least_ridge(op: KernelOperator, n: int, scale: float) -> float:
    """Return the least ridge that the rounding of n x n kernel values of size `scale` leaves.

    With 10 000 rows of friedman1, a fifth of it seemed to have 3 per cent less error than it has.
    """
    return noise_floor(op, n) / 2 * scale


def ridges_near(tau: float, least: float) -> Floats:
    """Return ridges around tau, ascending, none below `least` unless that is above tau."""
    ridges = tau * 10.0 ** (np.arange(-REACH, REACH + 1) / STEPS_OF_RIDGE)
    return ridges[ridges >= min(least, tau)]


def largest_good(ridges: Floats, errors: Floats) -> float:
    """Return the largest ridge with about the least error; ridges and errors : (k,)."""
    return float(ridges[np.flatnonzero(errors <= (1 + RIDGE_TIE) * errors.min())[-1]])


def errors_of_ridges(
    backend: Backend, invert: Callable[[Array], Array], Y: Array, counted: Array, tau: float,
    ridges: Floats,
) -> Floats:  # fmt: skip
    """Return V of each ridge, (k,).

    invert : returns A^-1 v, (n, w), for the ridge tau.
    Y : (n, c) targets, multiplied by the roots of the weights.
    counted : (n,) whether a row has a weight; those without are independent of all others.
    """
    xp, rng = backend.xp, np.random.default_rng(0)
    n, c = Y.shape
    if c > MAX_COLUMNS:
        signs = rng.choice([-1.0, 1.0], (c, MAX_COLUMNS)) / np.sqrt(MAX_COLUMNS)
        Y = Y @ backend.asarray(signs)
    probes = backend.asarray(rng.choice([-1.0, 1.0], (n, PROBES))) * counted[:, None]
    B = xp.concatenate([Y, probes], axis=1)
    sizes = backend.to_host((B**2).sum(axis=0))
    nodes, weights = _quadratures(backend, invert, B)
    s = np.minimum(nodes, 1 / tau)[:, None]  # (columns, 1, steps); of rounding errors, not above
    of_ridge = s / (1 + (ridges - tau)[:, None] * s)
    forms = [sizes[:, None] * (weights[:, None] * of_ridge**power).sum(axis=-1) for power in (1, 2)]
    traces, squares = forms[0][-PROBES:].mean(axis=0), forms[1][:-PROBES].sum(axis=0)
    return np.asarray(float(counted.sum()) * squares / traces**2)


def _quadratures(
    backend: Backend, invert: Callable[[Array], Array], B: Array
) -> tuple[Floats, Floats]:
    """Return nodes and weights of the Gauss quadratures of each column of B, (columns, steps)."""
    xp, columns = backend.xp, B.shape[1]
    T = np.zeros((columns, QUADRATURE, QUADRATURE))
    before, beta = xp.zeros_like(B), np.zeros(columns)
    q = _normalised(xp, B, xp.sqrt((B**2).sum(axis=0)))
    for k in range(QUADRATURE):
        w = invert(q) - backend.asarray(beta) * before
        alpha = (q * w).sum(axis=0)
        w -= alpha * q
        size = xp.sqrt((w**2).sum(axis=0))
        T[:, k, k], beta = backend.to_host(alpha), backend.to_host(size)
        if k + 1 < QUADRATURE:
            T[:, k, k + 1] = T[:, k + 1, k] = beta
        before, q = q, _normalised(xp, w, size)
    nodes, vectors = np.linalg.eigh(T)
    return np.maximum(nodes, 0), vectors[:, 0] ** 2


def _normalised(xp: Array, w: Array, size: Array) -> Array:
    return w / xp.where(size > 0, size, 1.0)
