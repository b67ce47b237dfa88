"""EigenPro's preconditioner, which damps the top eigendirections of a sample.

`step_rule` gives the step size that it allows.

If rows have sample weights w, the stream is that of sqrt(w) phi(x), as for the block
preconditioner: the rows of the sample and of the probe are scaled by sqrt(w) in their kernel
matrices, and nothing else changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamkern.backend.base import Array, Backend, tiles
from streamkern.basics.errors import ConfigError
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.eigen import top_eigenpairs
from streamkern.solver.precondition.norm import NO_OVERLAP, check_overlap, eps
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

    X_s : points with both sides, s rows.
    E : (s, q).
    D : (q,).
    rule : step rule, measured on fresh rows.
    """

    X_s: Points
    E: Array
    D: Array
    rule: StepRule

    def correction(
        self,
        op: KernelOperator,
        x: Points,
        g: Array,
        out: Array,
        *,
        same: tuple[Array, Array] | None = None,
        part: slice = slice(None),
    ) -> Array:
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
    op: KernelOperator,
    X_s: Points,
    probe: Points,
    *,
    level: int,
    seed: int = 0,
    roots: Roots | None = None,
) -> LowRankPreconditioner:
    """Return the preconditioner of a sample, with its step rule, measured on `probe` (both sides).

    With weights, the kernel is sqrt(w_i w_j) k(x_i, x_j); sqrt(w) goes into E.

    Public codes take lam_{q+1} for lambda_1; measured on fresh rows the top eigenvalue is up to 1.6
    times that. Cost as of K(X_s, X_s) and of `eigen.top_eigenpairs`.
    """
    s, xp = len(X_s), op.backend.xp
    sample_root, probe_root = roots or (None, None)
    K = op.gram(X_s)
    if sample_root is not None:
        K *= sample_root[:, None]
        K *= sample_root
    K *= 1 / s
    lam, E = sample_eigenpairs(op, K, level, seed)
    E, tail, lam = xp.ascontiguousarray(E[:, :-1]), lam[-1], lam[:-1]
    # The tail is an upper estimate, so the last of the others may seem to be below it.
    D = xp.maximum(1 - tail / lam, 0) / lam / s
    if sample_root is not None:
        E *= sample_root[:, None]
    plain = LowRankPreconditioner(X_s, E, D, StepRule(1.0, 1.0))
    return LowRankPreconditioner(X_s, E, D, measure_low_rank(op, plain, probe, seed, probe_root))


def sample_eigenpairs(op: KernelOperator, K: Array, level: int, seed: int) -> tuple[Array, Array]:
    """Return the top level + 1 eigenpairs of K (s, s), without those at the level of rounding.

    K : K(X_s, X_s) / s, overwritten. Returns (q + 1,) descending and (s, q + 1), 1 <= q <= level.
    """
    s = len(K)
    if not 1 <= level < s:
        raise ConfigError(f"level={level} must lie between 1 and n_nystrom - 1 = {s - 1}")
    trace = float(K.diagonal().sum())
    check_overlap(op, trace, "trace of the sample")
    try:
        lam, E = top_eigenpairs(op.backend, K, level + 1, seed)
    except (np.linalg.LinAlgError, ValueError) as error:  # LAPACK's error for numbers near overflow
        raise ConfigError(NO_OVERLAP.format(op.kernel, f"trace {trace:g}")) from error
    # Directions at the level of rounding have no meaningful eigenvalue: leave them alone. Measured
    # in float32, eigenvalues of K / s are off by 1 to 3 eps of the largest for s from 500 to 2000.
    floor = 100 * eps(op.dtype) * float(lam[0])
    usable = min(level, int((lam > floor).sum()) - 1)
    if usable < 1:
        raise ConfigError(
            f"n_nystrom={s}: K(X_s, X_s) has rank 1 to working precision; check the data for "
            "outliers, or give a smaller bandwidth or another solver"
        )
    return lam[: usable + 1], E[:, : usable + 1]


def measure_low_rank(
    op: KernelOperator,
    P: LowRankPreconditioner | None,
    probe: Points,
    seed: int,
    root: Array | None,
) -> StepRule:
    """Return ell = max k_P(x, x) and lambda_1 of K_P(probe, probe) / h.

    k_P is the preconditioned kernel.

    P : None for the kernel itself.
    root : (h,) square roots of the sample weights of the probe.
    """
    h = len(probe)
    K = op.gram(probe)
    if P is not None:
        Q = op.product(probe, P.X_s, P.E)  # (h, q)
        for rows in tiles(h, 512):
            K[rows] -= (Q[rows] * P.D) @ Q.T
    if root is not None:
        K *= root[:, None]
        K *= root
    leverage = float(K.diagonal().max())
    if P is None:
        check_overlap(op, leverage, "leverage")
    start = op.backend.asarray(np.random.default_rng([seed, 3]).standard_normal(h), op.dtype)
    lambda_1 = top_eigenvalue(op.backend, lambda v: K @ v / h, start, EIGENVALUE_STEPS)
    return StepRule(leverage, lambda_1)
