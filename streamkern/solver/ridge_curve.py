"""Leave-one-out error of kernel ridge regression as a function of the ridge, from one factor.

With A = K + tau I for n rows, targets Y (n, c) and a = A^-1 Y, row i is predicted by the other rows
with the error a_i / (A^-1)_ii (Rasmussen and Williams 2006, eq. 5.12). The mean squared error is

    V(tau) = 1/n sum_i |a_i|^2 / (A^-1)_ii^2.

For another tau' = tau + delta, A'^-1 = S (I + delta S)^-1 with S = A^-1. From a vector b, Lanczos
steps with S, each of two substitutions with the factor of A, give orthonormal Q (n, steps) and a
tridiagonal matrix T = U diag(s) U^T, with which for all tau' at once

    A'^-1 b      ~  |b| Q U diag(g) u,    g = s / (1 + delta s),    u = U^T e_1,
    b^T A'^-1 b  ~  |b|^2 sum_k u_k^2 g_k

(Golub and Meurant 2010, chapter 4). The columns of Y give a, and unit vectors e_i the diagonal
entries of some rows.

The entry of a row depends on how isolated it is: 1 / (A^-1)_ii is the variance of the row, in the
Gaussian process with covariance A, if the other rows are known. Rows are therefore sorted by their
variance if only `KNOWN_ROWS` rows are known. The entries of `MEASURED_ROWS` of them are computed,
and the logarithms of the others are interpolated. A few rows may have most of the squared error:
the computed entries are denser towards the most isolated row, and those of the rows with the
largest errors are among them.

With one mean for all rows, V is generalised cross-validation (Golub, Heath and Wahba 1979), which
ignores the errors of isolated rows: with a smooth kernel, it chose ridges with up to five times the
leave-one-out error (docs/explanation/solver-measured.md). Only runs that earlier versions began
still use it.

In the terms of `solver.kernel_ridge`, tau is n ridge plus the jitter of the factor.

Cost 4 n^2 `QUADRATURE` FLOPs per vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.basics.array_types import Bools, Floats, Ints
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
ISOLATED_ROWS, EVEN_ROWS, LARGEST_ERRORS = 24, 8, 16
"""Largest numbers of rows whose diagonal entries are computed: rows that are denser towards the
most isolated one, evenly spaced rows, and the rows with the largest errors."""
MEASURED_ROWS = ISOLATED_ROWS + EVEN_ROWS + LARGEST_ERRORS
KNOWN_ROWS = 512
"""Largest number of rows that are known when rows are sorted by their variance."""
SIGNS = 4
"""Vectors of random signs for the trace (Hutchinson 1989) in generalised cross-validation; the
standard error of the trace is then about 1 %."""
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
SEED = 0
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
        tau, errors, known = noise.variance, dict[float, float](), known_rows(len(K))
        has_weight = np.ones(len(K), bool)
        for _ in range(MAX_FACTORS):
            L = K.copy()
            L[diagonal, diagonal] += tau
            if not backend.cholesky(L):
                break
            variances = conditional_variances(backend, K[:, known], K.diagonal(), known, tau)
            best = better_tau(op, L, Y, has_weight, tau, scale, variances)
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


class SortedRows(NamedTuple):
    """Rows with a weight, sorted by about their diagonal entry of A^-1, the most isolated last.

    rows : (r,) indices of the rows, on the host.
    measured : (k,) ascending positions in `rows` of the rows whose diagonal entries are computed.
    vectors : (n, k) unit vectors of the measured rows, on the device.
    """

    rows: Ints
    measured: Ints
    vectors: Array


def known_rows(n: int) -> slice:
    """Return which of n rows are known in `conditional_variances`: every k-th, in case of an order.

    They are at most half of the rows, and at most `KNOWN_ROWS`.
    """
    return slice(0, None, max(2, -(-n // KNOWN_ROWS)))


def conditional_variances(
    backend: Backend, columns: Array, diagonal: Array, known: slice, tau: float
) -> Floats:
    """Return the variance of each row in a Gaussian process, (n,) on the host.

    The covariance is K + tau I. The known rows are given, or for a known row the others of them.

    columns : (n, r) columns of K of the known rows.
    diagonal : (n,) of K.
    """
    xp = backend.xp
    L = xp.array(columns[known], np.float64)
    index = xp.arange(len(L))
    L[index, index] += tau
    variances = xp.array(diagonal, np.float64) + tau
    if backend.cholesky(L):
        W = backend.solve_lower(L, xp.array(columns.T, np.float64, order="C"))
        variances -= xp.einsum("ij,ij->j", W, W)
        variances[known] = 1 / (backend.inverse_lower(L) ** 2).sum(axis=0)
    return np.asarray(np.maximum(backend.to_host(variances), tau))


def sorted_rows(
    backend: Backend, variances: Floats, squares: Floats, has_weight: Bools
) -> SortedRows:  # fmt: skip
    """Return the rows sorted by their variances, and which of them are measured.

    `EVEN_ROWS` measured rows are evenly spaced. The distances of `ISOLATED_ROWS` from the most
    isolated row are a geometric sequence. `LARGEST_ERRORS` have about the largest errors.

    variances : (n,) of `conditional_variances`.
    squares : (n,) squared norms of the rows of A^-1 Y.
    has_weight : (n,) whether a row has a weight above 0, which some row has.
    """
    rows = np.argsort(variances, kind="stable")
    rows = rows[has_weight[rows]]
    distances = np.rint(np.geomspace(1, len(rows), ISOLATED_ROWS))
    even = len(rows) * (np.arange(EVEN_ROWS) + 0.5) / EVEN_ROWS
    largest = np.argsort((squares * variances**2)[rows], kind="stable")[-LARGEST_ERRORS:]
    positions = np.concatenate([len(rows) - distances, even, largest])
    measured = np.unique(positions.astype(np.int64))
    vectors = backend.xp.zeros((len(variances), len(measured)))
    vectors[backend.asarray(rows[measured]), backend.xp.arange(len(measured))] = 1
    return SortedRows(rows, measured, vectors)


def center_variances(op: KernelOperator, Z: Points, root: Array, tau: float) -> Floats:
    """Return the `conditional_variances` of rows that are the centers Z (n, d).

    root : (n,) square roots of the sample weights.
    """
    backend, known = op.backend, known_rows(len(Z))
    known_Z, ids = Z[known], np.arange(len(Z))[known]
    columns = backend.xp.empty((len(Z), len(known_Z)), op.dtype)
    op.product(Z, known_Z, keep=columns, equal_pairs=(ids, np.arange(len(known_Z))))
    columns *= root[:, None] * root[known]
    return conditional_variances(backend, columns, op.diagonal(Z) * root**2, known, tau)


def better_tau(
    op: KernelOperator, L: Array, Y: Array, has_weight: Bools, tau: float, scale: float,
    variances: Floats | None,
) -> BetterTau:  # fmt: skip
    """Return the tau' with the least error near tau.

    L : (n, n) lower factor of K + tau I.
    Y, tau : as in `errors_of_taus`.
    has_weight : (n,) whether a row has a weight above 0, on the host.
    scale : size of the kernel values.
    variances : (n,) of `conditional_variances`; None for generalised cross-validation.
    """
    backend = op.backend
    taus = taus_near(tau, smallest_tau(op, len(L), scale))
    invert = partial(apply_inverse, backend, L)
    if variances is None:
        counted = backend.asarray(has_weight)
        errors = cross_validation_errors(backend, invert, Y, counted, tau, taus)
    else:
        Y = combine_outputs(backend, Y, np.random.default_rng(SEED))
        squares = backend.to_host((invert(Y) ** 2).sum(axis=1))
        rows = sorted_rows(backend, variances, squares, has_weight)
        errors = errors_of_taus(backend, invert, Y, rows, tau, taus)
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
    backend: Backend, invert: Callable[[Array], Array], Y: Array, rows: SortedRows, tau: float,
    taus: Floats,
) -> Floats:  # fmt: skip
    """Return the error V of each tau', (k,), summed over the outputs.

    invert : function that returns A^-1 v, (n, j) for v (n, j), with A = K + tau I.
    Y : (n, c) targets, multiplied by the square roots of the sample weights.
    rows : rows with a weight, whose diagonal entries are estimated.
    taus : (k,) values of tau'.
    """
    xp, c = backend.xp, Y.shape[1]
    B = xp.concatenate([Y, rows.vectors], axis=1)
    T, basis = _lanczos(backend, invert, B, n_kept=c)
    s, U = np.linalg.eigh(T)
    # Eigenvalues of A^-1 are at most 1 / tau; rounding may raise one of T above that.
    s = np.clip(s, 0, 1 / tau)[:, None]
    inverse = s / (1 + (taus - tau)[:, None] * s)  # of A'^-1, (columns, k, steps)
    norms, u = backend.to_host(xp.sqrt((B**2).sum(axis=0))), U[:, 0]
    forms = norms[:, None] ** 2 * (u[:, None] ** 2 * inverse).sum(axis=-1)  # b^T A'^-1 b
    log_entries = np.log(forms[c:])  # of the diagonals, (measured rows, k)
    positions = np.arange(len(rows.rows))
    # Coefficients of A'^-1 y in the basis of each column y of Y, (c, k, steps).
    coefficients = np.einsum("cst,ckt,ct->cks", U[:c], inverse[:c], norms[:c, None] * u[:c])
    errors = np.zeros(len(taus))
    for k, of_outputs in enumerate(backend.asarray(coefficients.transpose(1, 2, 0))):
        a = sum(q * of_step for q, of_step in zip(basis, of_outputs, strict=True))
        numerators = backend.to_host((a**2).sum(axis=1))[rows.rows]
        entries = np.exp(np.interp(positions, rows.measured, log_entries[:, k]))
        errors[k] = (numerators / entries**2).mean()
    return errors


def cross_validation_errors(
    backend: Backend, invert: Callable[[Array], Array], Y: Array, has_weight: Array, tau: float,
    taus: Floats,
) -> Floats:  # fmt: skip
    """Return the error of each tau' by generalised cross-validation, (k,), over all outputs.

    With A' = K + tau' I, it is n |A'^-1 Y|^2 / tr(A'^-1)^2. Every operation, and the order of the
    random draws, is as in earlier versions, so that a run they began chooses the same ridge.

    has_weight : (n,) whether a row has a weight above 0.
    invert, Y, tau, taus : as in `errors_of_taus`.
    """
    rng = np.random.default_rng(SEED)
    Y = combine_outputs(backend, Y, rng)
    probes = backend.asarray(rng.choice([-1.0, 1.0], (len(Y), SIGNS))) * has_weight[:, None]
    B = backend.xp.concatenate([Y, probes], axis=1)
    squared_norms = backend.to_host((B**2).sum(axis=0))[:, None]
    s, U = np.linalg.eigh(_lanczos(backend, invert, B, n_kept=0)[0])
    s, weights = np.clip(s, 0, 1 / tau)[:, None], U[:, 0] ** 2
    inverse = s / (1 + (taus - tau)[:, None] * s)  # of A'^-1, (columns, k, steps)
    # b^T A'^-1 b and b^T A'^-2 b for each column b of B.
    inverse_forms, squared_inverse_forms = (
        squared_norms * (weights[:, None] * inverse**power).sum(axis=-1) for power in (1, 2)
    )
    traces = inverse_forms[-SIGNS:].mean(axis=0)
    squares = squared_inverse_forms[:-SIGNS].sum(axis=0)
    return np.asarray(float(has_weight.sum()) * squares / traces**2)


def combine_outputs(backend: Backend, Y: Array, rng: np.random.Generator) -> Array:
    """Return Y (n, c), or `MAX_COLUMNS` random combinations of its columns if c is larger.

    The expected sum of squares is the same for each row.
    """
    if Y.shape[1] <= MAX_COLUMNS:
        return Y
    signs = rng.choice([-1.0, 1.0], (Y.shape[1], MAX_COLUMNS)) / np.sqrt(MAX_COLUMNS)
    return Y @ backend.asarray(signs)


def _lanczos(
    backend: Backend, invert: Callable[[Array], Array], B: Array, n_kept: int
) -> tuple[Floats, list[Array]]:
    """Return the tridiagonal matrices of Lanczos steps, and the vectors of the first columns.

    B : (n, columns) vectors from which the steps start.
    n_kept : number of columns whose orthonormal vectors are returned, (n, n_kept) of each step.
    """
    xp, columns = backend.xp, B.shape[1]
    T = np.zeros((columns, QUADRATURE, QUADRATURE))
    q_before, beta = xp.zeros_like(B), np.zeros(columns)
    q = _normalise_columns(xp, B, xp.sqrt((B**2).sum(axis=0)))
    basis = []
    for k in range(QUADRATURE):
        basis.append(q[:, :n_kept].copy())
        w = invert(q) - backend.asarray(beta) * q_before
        alpha = (q * w).sum(axis=0)
        w -= alpha * q
        norms = xp.sqrt((w**2).sum(axis=0))
        T[:, k, k], beta = backend.to_host(alpha), backend.to_host(norms)
        if k + 1 < QUADRATURE:
            T[:, k, k + 1] = T[:, k + 1, k] = beta
        q_before, q = q, _normalise_columns(xp, w, norms)
    return T, basis


def _normalise_columns(xp: Any, w: Array, norms: Array) -> Array:
    """Return w divided by the norms of its columns; columns of norm 0 stay 0."""
    return w / xp.where(norms > 0, norms, 1.0)
