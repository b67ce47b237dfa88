"""EigenPro's preconditioner, which damps the top eigendirections of a sample.

`step_rule` gives the step size that it allows.

If rows have sample weights w, the stream is that of sqrt(w) phi(x), as for the block
preconditioner: the rows of the sample and of the probe are scaled by sqrt(w) in their kernel
matrices, and nothing else changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.optional import on_demand
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.norm import NO_OVERLAP, check_overlap, eps, weigh_gram
from streamkern.solver.precondition.step_rule import EIGENVALUE_STEPS, StepRule, top_eigenvalue

Roots = tuple[Array, Array]
"""Square roots of the sample weights of a sample (s,) and of a probe (h,)."""


@dataclass(frozen=True)
class LowRankPreconditioner:
    """EigenPro's preconditioner, with the top q eigendirections damped to the (q+1)-th.

    EP2, EP3 eq. 29-30: with eigenpairs (lam_i, e_i) of K(X_s, X_s) / s,

        P = I - sum_i (1 - lam_{q+1} / lam_i) psi_i psi_i^T,

    so that a gradient K(., X) g becomes K(., X) g - K(., X_s) E D E^T K(X_s, X) g with
    D_i = (1 - lam_{q+1} / lam_i) / lam_i / s.

    X_s : points, s rows.
    E : (s, q).
    D : (q,).
    rule : step rule, measured on fresh rows.
    """

    X_s: Points
    E: Array
    D: Array
    rule: StepRule

    def correction(
        self, op: KernelOperator, x: Points, g: Array, out: Array, *,
        same: tuple[Array, Array] | None = None, part: slice = slice(None),
    ) -> Array:  # fmt: skip
        """Write E D E^T K(X_s, X) g to `out`, (s, c): the weights on X_s for a gradient g on X.

        x : right points, m rows.
        g : (m, c).
        same : (i, j), row i of X_s is row j of X.
        part : rows of X_s whose kernel values are used; the results of parts add up to that of all.

        Cost 2 s m (d + c) FLOPs, a tile of memory.
        """
        values = op.product(self.X_s[part], x, g, out=out[part], same=same)
        return damp(op.backend, self.E, self.D, values, out, part)


def damp(
    backend: Backend, E: Array, D: Array, values: Array, out: Array, part: slice = slice(None)
) -> Array:
    """Write E D E^T g to `out`, (s, c).

    values : the rows `part` of g, whose other rows are 0; they may be rows of `out`.
    """
    with backend.workspace((E.shape[1], values.shape[1]), out.dtype) as damped:
        backend.matmul_t(E[part], values, damped)
        damped *= D[:, None]
        return backend.matmul(E, damped, out)


def build_low_rank(
    op: KernelOperator, X_s: Points, probe: Points, *, level: int, seed: int = 0,
    roots: Roots | None = None,
) -> LowRankPreconditioner:  # fmt: skip
    """Return the preconditioner of a sample, with its step rule, measured on `probe`.

    With weights, the kernel is sqrt(w_i w_j) k(x_i, x_j); sqrt(w) goes into E.

    Public codes take lam_{q+1} for lambda_1; measured on fresh rows the top eigenvalue is up to 1.6
    times that. Cost as of K(X_s, X_s) and of `top_eigenpairs`.
    """
    s, xp = len(X_s), op.backend.xp
    sample_root, probe_root = roots or (None, None)
    K = weigh_gram(op.gram(X_s), sample_root)
    K *= 1 / s
    lam, E = sample_eigenpairs(op, K, level, seed)
    E, tail, lam = xp.ascontiguousarray(E[:, :-1]), lam[-1], lam[:-1]
    # The tail is an upper estimate, so the last of the others may seem to be below it.
    D = xp.maximum(1 - tail / lam, 0) / lam / s
    if sample_root is not None:
        E *= sample_root[:, None]
    plain = LowRankPreconditioner(X_s, E, D, StepRule(1.0, 1.0))
    return LowRankPreconditioner(X_s, E, D, measure_low_rank(op, plain, probe, seed, probe_root))


FLOOR, EXTENDED_FLOOR = 100, 1000
"""Smallest eigenvalue that is damped, in eps of the largest one: of a sample, and of functions that
are extended to all rows. In float32, eigenvalues of K / s are off by 1 to 3 eps of the largest for
s from 500 to 2000. EigenPro 1 diverged on 60 rows of a Gaussian kernel, the only data tried, in 9
of 12 runs (four levels, three seeds) with the smallest eigenvalue at 5 to 100 eps, in 1 of 3 at 320
eps, and in none of 3 at 760; with the floor in none of 36."""


def sample_eigenpairs(
    op: KernelOperator, K: Array, level: int, seed: int, floor: int = FLOOR
) -> tuple[Array, Array]:
    """Return the top level + 1 eigenpairs of K (s, s), without those at the level of rounding.

    K : K(X_s, X_s) / s, overwritten. Returns (q + 1,) descending and (s, q + 1), 1 <= q <= level.
    floor : the smallest eigenvalue, in eps of the largest
    """
    s = len(K)
    if not 1 <= level < s:
        raise ConfigError(
            f"{mention('level', level)} must lie between 1 and n_nystrom - 1 = {s - 1}"
        )
    trace = float(K.diagonal().sum())
    check_overlap(op, trace, "trace of the sample")
    try:
        lam, E = top_eigenpairs(op.backend, K, level + 1, seed)
    except (np.linalg.LinAlgError, ValueError) as error:  # LAPACK's error for numbers near overflow
        raise ConfigError(NO_OVERLAP.format(op.kernel, f"trace {trace:g}")) from error
    # Directions at the level of rounding have no meaningful eigenvalue: leave them alone.
    usable = min(level, int((lam > floor * eps(op.dtype) * float(lam[0])).sum()) - 1)
    if usable < 1:
        raise ConfigError(
            f"{mention('n_nystrom', s)}: K(X_s, X_s) has rank 1 to working precision",
            "check the data for outliers, or give a smaller bandwidth or another solver",
        )
    return lam[: usable + 1], E[:, : usable + 1]


def measure_low_rank(
    op: KernelOperator, P: LowRankPreconditioner | None, probe: Points, seed: int,
    root: Array | None,
) -> StepRule:  # fmt: skip
    """Return ell = max k_P(x, x) and lambda_1 of K_P(probe, probe) / h.

    k_P is the preconditioned kernel.

    P : None for the kernel itself.
    root : (h,) square roots of the sample weights of the probe.
    """
    K = op.gram(probe)
    if P is None:
        return rule_of_gram(op, K, None, root, [seed, 3], checked=True)
    return rule_of_gram(op, K, (op.product(probe, P.X_s, P.E), P.D), root, [seed, 3])


def rule_of_gram(
    op: KernelOperator, K: Array, damped: tuple[Array, Array] | None, root: Array | None,
    seed: list[int], *, checked: bool = False,
) -> StepRule:  # fmt: skip
    """Return the largest diagonal entry and lambda_1 / h of K - Q D Q^T, scaled by the weights.

    K : (h, h), overwritten.
    damped : Q (h, q) and D (q,).
    root : (h,) square roots of the sample weights.
    checked : raise ConfigError unless the leverage is finite and above 0.
    """
    h = len(K)
    if damped is not None:
        Q, D = damped
        for rows in tiles(h, 512):
            K[rows] -= (Q[rows] * D) @ Q.T
    weigh_gram(K, root)
    leverage = float(K.diagonal().max())
    if checked:
        check_overlap(op, leverage, "leverage")
    start = op.backend.asarray(np.random.default_rng(seed).standard_normal(h), op.dtype)
    lambda_1 = top_eigenvalue(op.backend, lambda v: K @ v / h, start, EIGENVALUE_STEPS)
    return StepRule(leverage, lambda_1)


def build_extended(
    op: KernelOperator, Z: Points, X_s: Points, probe: Points, *, level: int, tau: float = 1.0,
    seed: int = 0, root: Array | None = None,
) -> LowRankPreconditioner:  # fmt: skip
    """Return EigenPro 1.0's preconditioner: eigenfunctions of a sample, extended to all rows.

    The eigenpairs (lam_i, e_i) of K(X_s, X_s) / s give functions psi_i = K(., X_s) e_i / sqrt(s
    lam_i), orthonormal in the RKHS. With T = (1/n) sum_j k(x_j, .) <k(x_j, .), .> the covariance of
    all n rows,

        T psi_i / lam_i = K(., X) a_i,     a_i = psi_i(X) / (n lam_i)

    is Nystrom's extension in weights on all rows, and one step of subspace iteration: close to
    psi_i, and closer to the eigenfunctions of T. These functions are nearly orthonormal but not
    quite, and then I - sum_i (1 - tau lam_{q+1} / lam_i) psi_i psi_i^T may have a negative
    eigenvalue, with which no step size converges. Orthonormal vectors a_i, as in the public code,
    do not prevent it; orthonormal functions do. They are the best eigenpairs in the span (Rayleigh-
    Ritz): for A = [a_1 ...],

        G = A^T K A  (inner products),     B = (K A)^T (K A) / n  (covariance),     B u = lam G u.

    It takes one pass over K(X, X).

    The step rule is measured on `probe`.

    Z : all n rows.
    X_s : s of them.
    probe : h of them.
    root : (h,) square roots of the sample weights of the probe.

    The points of the preconditioner are Z, its E is (n, q), its D = 1 - tau lam_{q+1} / lam_i. Cost
    as of K(X_s, X_s), its eigenpairs, and 2 n (n + s) (d + q) FLOPs; memory 3 n q elements.
    """
    xp, n, s = op.backend.xp, len(Z), len(X_s)
    K = op.gram(X_s)
    K *= 1 / s
    lam, e = sample_eigenpairs(op, K, level, seed, EXTENDED_FLOOR)
    del K
    A = op.product(Z, X_s, xp.ascontiguousarray(e * (lam**-1.5 / (n * s**0.5))))
    ids = np.arange(n)
    KA = op.product(Z, Z, A, same=(ids, ids))
    G, B = (_symmetric(op, left, KA) for left in (A, KA))
    try:
        ritz, U = on_demand("scipy.linalg").eigh(B / n, G)
    except (np.linalg.LinAlgError, ValueError) as error:  # of numbers near overflow
        raise ConfigError(NO_OVERLAP.format(op.kernel, error)) from error
    ritz, U = ritz[::-1], U[:, ::-1]
    E = xp.empty((n, len(lam) - 1), op.dtype)
    op.backend.matmul(A, op.backend.asarray(U[:, :-1], op.dtype), E)
    D = op.backend.asarray(1 - tau * ritz[-1] / ritz[:-1], op.dtype)
    plain = LowRankPreconditioner(Z, E, D, StepRule(1.0, 1.0))
    return LowRankPreconditioner(Z, E, D, measure_low_rank(op, plain, probe, seed, root))


def _symmetric(op: KernelOperator, A: Array, B: Array) -> npt.NDArray[np.float64]:
    """Return A^T B on the host, made symmetric: (q, q), float64."""
    backend = op.backend
    product = backend.matmul_t(A, B, backend.xp.empty((A.shape[1], B.shape[1]), op.dtype))
    host = np.asarray(backend.to_host(product), np.float64)
    return (host + host.T) / 2


DENSE_ROWS = 4000
"""Size up to which LAPACK is as fast: 0.5 s for 150 pairs of 3000 rows, against 0.4 s."""

# DEPTH blocks of (k + EXTRA) / NARROW columns. 500 pairs of 10 000 rows of noisy 784-dimensional
# data, Laplace, a spectrum without gaps (two cores; the largest error of an eigenvalue):
# 1 x 4: 7.8 s, 8e-3; 4 x 12: 5.3 s, 3e-3; 4 x 16: 8.0 s, 1e-5; LAPACK: 31 s.
OVERSAMPLING, BLOCK_DIVISOR, KRYLOV_BLOCKS = 32, 4, 12
EIGEN_STAGE = 4

# FLOPs of LAPACK for size s, over s^3: 4/3 to tridiagonal form, twice that for the vectors, and the
# back-transform.
EIGH_FLOPS = 9


def top_eigenpairs(backend: Backend, A: Array, k: int, seed: int) -> tuple[Array, Array]:
    """Return the k largest eigenvalues (k,), descending, and orthonormal eigenvectors (s, k).

    By LAPACK if A is small, else by block Krylov:
    From a random block Q_0, orthonormal bases Q_0, Q_1, ... of the block Krylov space

        span [Q_0, A Q_0, ..., A^(t-1) Q_0],

    give the best approximations in it, by Rayleigh-Ritz: the eigenpairs of T = Q^T A Q, Q = [Q_0
    ...]. Random block: Halko, Martinsson and Tropp (2011). Accuracy of the Krylov space, rather
    than the last block alone, without a gap behind the k-th eigenvalue: Musco and Musco (2015).
    Blocks narrower than k with more powers, for the same size of the space: Meyer, Musco and Musco
    (2024).

    A : (s, s), symmetric positive semi-definite; it may be overwritten.

    The component of largest modulus of every vector is positive. If the result is approximate, no
    eigenvalue is too large except by rounding, save the last: the norm of its residual is added, so
    that it is not too small as the level that the others are damped to.
    """
    xp = backend.xp
    lam, E = _krylov(backend, A, k, seed) if _is_large(len(A), k) else backend.top_eigh(A, k)
    return lam, E * xp.sign(E[abs(E).argmax(axis=0), xp.arange(k)])


def eigen_flops(s: int, k: int) -> int:
    """Return the leading terms of the FLOPs of `top_eigenpairs`."""
    if not _is_large(s, k):
        return EIGH_FLOPS * s**3
    size = KRYLOV_BLOCKS * _width(k)
    # Products with A; two projections of every block on those before it; the small problem.
    return 2 * s * s * size + 4 * s * size**2 + EIGH_FLOPS * size**3


def _width(k: int) -> int:
    return -(-(k + OVERSAMPLING) // BLOCK_DIVISOR)


def _is_large(s: int, k: int) -> bool:
    return s > DENSE_ROWS and 2 * KRYLOV_BLOCKS * _width(k) <= s


def _krylov(backend: Backend, A: Array, k: int, seed: int) -> tuple[Array, Array]:
    xp, s, width = backend.xp, len(A), _width(k)
    Q = xp.empty((s, KRYLOV_BLOCKS * width), A.dtype)
    T = xp.zeros((Q.shape[1], Q.shape[1]), np.float64)
    drawn = np.random.default_rng([seed, EIGEN_STAGE]).standard_normal((s, width))
    start = backend.asarray(drawn, A.dtype)
    block, _ = xp.linalg.qr(start)
    product, inside = (xp.empty((s, width), A.dtype) for _ in range(2))
    tiny = 0.0
    for first in range(0, Q.shape[1], width):
        end = first + width
        Q[:, first:end], basis = block, Q[:, :end]
        backend.matmul(A, block, product)
        shares = backend.matmul_t(basis, product, xp.empty((end, width), A.dtype))
        T[:end, first:end] = shares
        tiny = max(tiny, 10 * float(np.finfo(A.dtype).eps) * float(abs(product).max()))
        if end == Q.shape[1]:
            break
        product -= backend.matmul(basis, shares, inside)
        # If only rounding is left, which may be zero or equal in all columns, this adds new random
        # directions.
        product += tiny * xp.roll(start, first + 1, axis=0)
        block, _ = xp.linalg.qr(product)
        # Again: a small remainder may not be quite orthogonal to the basis.
        backend.matmul_t(basis, block, shares)
        block, _ = xp.linalg.qr(block - backend.matmul(basis, shares, inside))
    T = xp.triu(T) + xp.triu(T, 1).T
    lam, V = backend.top_eigh(T, k)
    E = backend.matmul(Q, xp.ascontiguousarray(V.astype(A.dtype)), xp.empty((s, k), A.dtype))
    residual = A @ E[:, -1] - E[:, -1] * float(lam[-1])
    lam[-1] += math.sqrt(float((residual * residual).sum()))
    return lam.astype(A.dtype), E
