"""EigenPro's preconditioner, which damps the top eigendirections of the setup sample.

`step_rule` gives the step size that it allows.

If rows have sample weights w, the features phi(x) are replaced by sqrt(w) phi(x), as for the block
preconditioner: the rows of the setup sample and of the probe are scaled by sqrt(w) in their kernel
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
from streamkern.solver.precondition.step_rule import (
    EIGENVALUE_STEPS,
    StepRule,
    random_start,
    top_eigenvalue,
)


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
        equal_pairs: tuple[Array, Array] | None = None, part: slice = slice(None),
    ) -> Array:  # fmt: skip
        """Write E D E^T K(X_s, X) g to `out`, (s, c): the weights on X_s for a gradient g on X.

        x : right points, m rows.
        g : (m, c).
        equal_pairs : (i, j), row i of X_s is row j of X.
        part : rows of X_s whose kernel values are used; the results of all parts are to be summed.

        Cost 2 s m (d + c) FLOPs, a tile of memory.
        """
        values = op.product(self.X_s[part], x, g, out=out[part], equal_pairs=equal_pairs)
        return damp(op.backend, self.E, self.D, values, out, part)


def damp(
    backend: Backend, E: Array, D: Array, values: Array, out: Array, part: slice = slice(None)
) -> Array:
    """Write E D E^T g to `out`, (s, c).

    values : the rows `part` of g, whose other rows are 0; `values` may be a view of `out`.
    """
    with backend.workspace((E.shape[1], values.shape[1]), out.dtype) as D_Et_g:
        backend.matmul_t(E[part], values, D_Et_g)
        D_Et_g *= D[:, None]
        return backend.matmul(E, D_Et_g, out)


def build_low_rank(
    op: KernelOperator, X_s: Points, probe: Points, *, level: int, seed: int = 0,
    sample_root: Array | None = None, root: Array | None = None,
) -> LowRankPreconditioner:  # fmt: skip
    """Return the preconditioner of a setup sample, with its step rule, measured on `probe`.

    With weights, the kernel is sqrt(w_i w_j) k(x_i, x_j); the factors sqrt(w) are applied to E.
    Public codes use lam_{q+1} for lambda_1, which can be considerably smaller than the top
    eigenvalue on fresh rows. Cost: K(X_s, X_s) and `top_eigenpairs`.

    level : number of damped directions.
    sample_root, root : (s,) and (h,) square roots of the sample weights of the sample and of the
        probe; None: all are 1.
    """
    s, xp = len(X_s), op.backend.xp
    K = weigh_gram(op.gram(X_s), sample_root)
    K *= 1 / s
    lam, E = sample_eigenpairs(op, K, level, seed)
    E, tail, lam = xp.ascontiguousarray(E[:, :-1]), lam[-1], lam[:-1]
    # The tail is an upper estimate, so it may exceed the last of the other eigenvalues.
    D = xp.maximum(1 - tail / lam, 0) / lam / s
    if sample_root is not None:
        E *= sample_root[:, None]
    return _with_rule(op, X_s, E, D, probe, seed, root)


MIN_DAMPED_EPS, MIN_EXTENDED_EPS = 100, 1000
"""Smallest eigenvalue that is damped, in units of eps times the largest one: for EigenPro 2 to 4,
and for eigenfunctions that are extended to all rows, which amplifies rounding errors. Measured in
docs/explanation/solver-measured.md."""


def sample_eigenpairs(
    op: KernelOperator, K: Array, level: int, seed: int, floor: int = MIN_DAMPED_EPS
) -> tuple[Array, Array]:
    """Return the top level + 1 eigenpairs of K (s, s) that are not dominated by rounding errors.

    The result is (q + 1,), descending, and (s, q + 1), with 1 <= q <= level.

    K : K(X_s, X_s) / s, overwritten.
    floor : smallest eigenvalue, in units of eps times the largest.

    Raises ConfigError if there are fewer than two eigenpairs, or K is not finite.
    """
    s = len(K)
    if not 1 <= level < s:
        raise ConfigError(
            f"{mention('level', level)} must lie between 1 and n_nystrom - 1 = {s - 1}",
            "lower level, or raise n_nystrom",
        )
    trace = float(K.diagonal().sum())
    check_overlap(op, trace, "trace of the sample")
    try:
        lam, E = top_eigenpairs(op.backend, K, level + 1, seed)
    except (np.linalg.LinAlgError, ValueError) as error:  # LAPACK's error for numbers near overflow
        raise ConfigError(NO_OVERLAP.format(op.kernel, f"trace {trace:g}")) from error
    # Smaller eigenvalues are dominated by rounding errors, so their directions are not damped.
    q = min(level, int((lam > floor * eps(op.dtype) * float(lam[0])).sum()) - 1)
    if q < 1:
        raise ConfigError(
            f"{mention('n_nystrom', s)}: K(X_s, X_s) has rank 1 to working precision",
            "check the data for outliers, or give a smaller bandwidth or another solver",
        )
    return lam[: q + 1], E[:, : q + 1]


def _with_rule(
    op: KernelOperator, X_s: Points, E: Array, D: Array, probe: Points, seed: int,
    root: Array | None,
) -> LowRankPreconditioner:  # fmt: skip
    """Return the preconditioner with its rule: ell = max k_P(x, x), lambda_1 of K_P(probe, probe).

    k_P is the preconditioned kernel.
    """
    K = op.gram(probe)
    rule = rule_of_gram(op, K, (op.product(probe, X_s, E), D), root, [seed, PROBE_STAGE])
    return LowRankPreconditioner(X_s, E, D, rule)


def rule_of_gram(
    op: KernelOperator, K: Array, removed: tuple[Array, Array] | None, root: Array | None,
    seed: list[int], *, check: bool = False,
) -> StepRule:  # fmt: skip
    """Return the step rule of K - Q D Q^T, scaled by the weights.

    Its leverage is the largest diagonal entry, its lambda_1 the top eigenvalue divided by h.

    K : (h, h), overwritten.
    removed : Q (h, q) and D (q,), or None for K itself.
    root : (h,) square roots of the sample weights, or None.
    check : whether ConfigError is raised unless the leverage is finite and above 0.
    """
    h = len(K)
    if removed is not None:
        Q, D = removed
        for rows in tiles(h, 512):
            K[rows] -= (Q[rows] * D) @ Q.T
    weigh_gram(K, root)
    leverage = float(K.diagonal().max())
    if check:
        check_overlap(op, leverage, "leverage")
    start = random_start(op.backend, seed, h, op.dtype)
    lambda_1 = top_eigenvalue(op.backend, lambda v: K @ v / h, start, EIGENVALUE_STEPS)
    return StepRule(leverage, lambda_1)


def build_extended_low_rank(
    op: KernelOperator, Z: Points, X_s: Points, probe: Points, *, level: int, tau: float = 1.0,
    seed: int = 0, root: Array | None = None,
) -> LowRankPreconditioner:  # fmt: skip
    """Return EigenPro 1.0's preconditioner: eigenfunctions of a sample, extended to all rows.

    The eigenpairs (lam_i, e_i) of K(X_s, X_s) / s give functions psi_i = K(., X_s) e_i / sqrt(s
    lam_i), orthonormal in the RKHS. With T = (1/n) sum_j k(x_j, .) <k(x_j, .), .> the covariance of
    all n rows,

        T psi_i / lam_i = K(., X) a_i,     a_i = psi_i(X) / (n lam_i)

    is Nystrom's extension, as weights on all rows. It is one step of subspace iteration: close to
    psi_i, and closer to the eigenfunctions of T. These functions are only nearly orthonormal.
    I - sum_i (1 - tau lam_{q+1} / lam_i) psi_i psi_i^T may then have a negative eigenvalue, with
    which no step size converges. Orthonormal vectors a_i, as in the public code, do not prevent
    this; orthonormal functions do. They are the best eigenpairs in the span (Rayleigh-Ritz), in one
    pass over K(X, X): for A = [a_1 ...],

        G = A^T K A  (inner products),     B = (K A)^T (K A) / n  (covariance),     B u = lam G u.

    The points of the preconditioner are Z, its E is (n, q), its D is 1 - tau lam_{q+1} / lam_i, and
    its step rule is measured on `probe`. Cost: K(X_s, X_s), its eigenpairs, and
    2 n (n + s) (d + q) FLOPs; memory 3 n q elements.

    Z : all n rows.
    X_s : s of these rows.
    probe : h of these rows.
    level : largest number of damped directions, q.
    root : (h,) square roots of the sample weights of the probe.

    Raises ConfigError if the kernel is zero or not finite.
    """
    xp, n, s = op.backend.xp, len(Z), len(X_s)
    K = op.gram(X_s)
    K *= 1 / s
    lam, e = sample_eigenpairs(op, K, level, seed, MIN_EXTENDED_EPS)
    del K
    A = op.product(Z, X_s, xp.ascontiguousarray(e * (lam**-1.5 / (n * s**0.5))))
    ids = np.arange(n)
    KA = op.product(Z, Z, A, equal_pairs=(ids, ids))
    G, B = _symmetric(op, A, KA), _symmetric(op, KA, KA)
    try:
        ritz, U = on_demand("scipy.linalg").eigh(B / n, G)
    except (np.linalg.LinAlgError, ValueError) as error:  # numbers near overflow
        raise ConfigError(NO_OVERLAP.format(op.kernel, error)) from error
    ritz, U = ritz[::-1], U[:, ::-1]
    E = xp.empty((n, len(lam) - 1), op.dtype)
    op.backend.matmul(A, op.backend.asarray(U[:, :-1], op.dtype), E)
    D = op.backend.asarray(1 - tau * ritz[-1] / ritz[:-1], op.dtype)
    return _with_rule(op, Z, E, D, probe, seed, root)


def _symmetric(op: KernelOperator, A: Array, B: Array) -> npt.NDArray[np.float64]:
    """Return the symmetric part of A^T B on the host: (q, q), float64."""
    backend = op.backend
    product = backend.matmul_t(A, B, backend.xp.empty((A.shape[1], B.shape[1]), op.dtype))
    host = np.asarray(backend.to_host(product), np.float64)
    return (host + host.T) / 2


DENSE_ROWS = 4000
"""Largest size of a matrix for which LAPACK is about as fast as block Krylov."""
OVERSAMPLING, BLOCK_DIVISOR, KRYLOV_BLOCKS = 32, 4, 12
"""`KRYLOV_BLOCKS` blocks of (k + `OVERSAMPLING`) / `BLOCK_DIVISOR` columns. Measured in
docs/explanation/solver-measured.md."""
PROBE_STAGE, EIGEN_STAGE = 3, 4
"""Numbers that separate the random starts of the power iteration on the probe, and of the
eigensolver, from other draws of the same seed."""
EIGH_FLOPS = 9
"""FLOPs of LAPACK's eigensolver for size s, relative to s^3: 4/3 to tridiagonal form, twice that
for the vectors, and the back-transform."""


def top_eigenpairs(backend: Backend, A: Array, k: int, seed: int) -> tuple[Array, Array]:
    """Return the k largest eigenvalues (k,), descending, and orthonormal eigenvectors (s, k).

    They are computed by LAPACK if A is small, else by block Krylov. From a random block Q_0,
    orthonormal bases Q = [Q_0, Q_1, ...] of the block Krylov space

        span [Q_0, A Q_0, ..., A^(t-1) Q_0]

    are computed. By Rayleigh-Ritz, the eigenpairs of T = Q^T A Q give the best approximations in
    this space. The random block is from Halko, Martinsson and Tropp (2011). Without a gap after the
    k-th eigenvalue, the whole Krylov space is more accurate than its last block alone (Musco and
    Musco 2015). Blocks narrower than k, with more powers, are better for the same size of the space
    (Meyer, Musco and Musco 2024).

    The component of largest modulus of every vector is positive. Approximate eigenvalues are never
    too large, except by rounding. Only to the last one is the norm of its residual added, because
    the others are damped to it, and it must not be too small.

    A : (s, s), symmetric positive semi-definite; it may be overwritten.
    """
    xp = backend.xp
    lam, E = _krylov(backend, A, k, seed) if _is_large(len(A), k) else backend.top_eigh(A, k)
    return lam, E * xp.sign(E[abs(E).argmax(axis=0), xp.arange(k)])


def eigen_flops(s: int, k: int) -> int:
    """Return the leading terms of the FLOPs of `top_eigenpairs`."""
    if not _is_large(s, k):
        return EIGH_FLOPS * s**3
    size = KRYLOV_BLOCKS * _width(k)
    # Products with A; two projections of every block on the earlier blocks; the eigenpairs of T.
    return 2 * s * s * size + 4 * s * size**2 + EIGH_FLOPS * size**3


def _width(k: int) -> int:
    """Return the number of columns of a block of the Krylov space."""
    return -(-(k + OVERSAMPLING) // BLOCK_DIVISOR)


def _is_large(s: int, k: int) -> bool:
    """Return whether block Krylov is used: the Krylov space has to be small compared with A."""
    return s > DENSE_ROWS and 2 * KRYLOV_BLOCKS * _width(k) <= s


def _krylov(backend: Backend, A: Array, k: int, seed: int) -> tuple[Array, Array]:
    """Return approximate eigenpairs by block Krylov, see `top_eigenpairs`."""
    xp, s, width = backend.xp, len(A), _width(k)
    Q = xp.empty((s, KRYLOV_BLOCKS * width), A.dtype)
    T = xp.zeros((Q.shape[1], Q.shape[1]), np.float64)
    normal = np.random.default_rng([seed, EIGEN_STAGE]).standard_normal((s, width))
    start = backend.asarray(normal, A.dtype)
    block, _ = xp.linalg.qr(start)
    product, projection = (xp.empty((s, width), A.dtype) for _ in range(2))
    rounding = 0.0  # above the rounding errors of the products so far
    for begin in range(0, Q.shape[1], width):
        end = begin + width
        Q[:, begin:end], basis = block, Q[:, :end]
        backend.matmul(A, block, product)
        coefficients = backend.matmul_t(basis, product, xp.empty((end, width), A.dtype))
        T[:end, begin:end] = coefficients
        rounding = max(rounding, 10 * float(np.finfo(A.dtype).eps) * float(abs(product).max()))
        if end == Q.shape[1]:
            break
        product -= backend.matmul(basis, coefficients, projection)
        # If the Krylov space is invariant, the remainder is only rounding errors, which may be zero
        # or equal in all columns. Tiny random numbers then give new directions.
        product += rounding * xp.roll(start, begin + 1, axis=0)
        block, _ = xp.linalg.qr(product)
        # A second projection, as a small remainder is not quite orthogonal to the basis.
        backend.matmul_t(basis, block, coefficients)
        block, _ = xp.linalg.qr(block - backend.matmul(basis, coefficients, projection))
    T = xp.triu(T) + xp.triu(T, 1).T
    lam, V = backend.top_eigh(T, k)
    E = backend.matmul(Q, xp.ascontiguousarray(V.astype(A.dtype)), xp.empty((s, k), A.dtype))
    residual = A @ E[:, -1] - E[:, -1] * float(lam[-1])
    lam[-1] += math.sqrt(float((residual * residual).sum()))
    return lam.astype(A.dtype), E
