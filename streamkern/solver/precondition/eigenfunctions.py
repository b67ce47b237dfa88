"""EigenPro 1.0's preconditioner: eigenfunctions of a sample, extended to all rows.

The eigenpairs (lam_i, e_i) of K(X_s, X_s) / s give functions psi_i = K(., X_s) e_i / sqrt(s lam_i),
orthonormal in the RKHS. With T = (1/n) sum_j k(x_j, .) <k(x_j, .), .> the covariance of all n rows,

    T psi_i / lam_i = K(., X) a_i,     a_i = psi_i(X) / (n lam_i)

is Nystrom's extension in weights on all rows, and one step of subspace iteration: close to psi_i,
and closer to the eigenfunctions of T. These functions are nearly orthonormal but not quite, and
then I - sum_i (1 - tau lam_{q+1} / lam_i) psi_i psi_i^T may have a negative eigenvalue, with which
no step size converges. Orthonormal vectors a_i, as in the public code, do not prevent it;
orthonormal functions do. They are the best eigenpairs in the span (Rayleigh-Ritz): for
A = [a_1 ...],

    G = A^T K A  (inner products),     B = (K A)^T (K A) / n  (covariance),     B u = lam G u.

It takes one pass over K(X, X).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.basics.errors import ConfigError
from streamkern.basics.optional import on_demand
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.low_rank import (
    LowRankPreconditioner,
    measure_low_rank,
    sample_eigenpairs,
)
from streamkern.solver.precondition.norm import NO_OVERLAP
from streamkern.solver.precondition.step_rule import StepRule


def build_extended(
    op: KernelOperator, Z: Points, X_s: Points, probe: Points, *, level: int, tau: float = 1.0,
    seed: int = 0, root: Array | None = None,
) -> LowRankPreconditioner:  # fmt: skip
    """Return the preconditioner on all rows, with its step rule, measured on `probe`.

    Z : all n rows, both sides.
    X_s : s of them.
    probe : h of them, both sides.
    root : (h,) square roots of the sample weights of the probe.

    The points of the preconditioner are Z, its E is (n, q), its D = 1 - tau lam_{q+1} / lam_i. Cost
    as of K(X_s, X_s), its eigenpairs, and 2 n (n + s) (d + q) FLOPs; memory 3 n q elements.
    """
    xp, n, s = op.backend.xp, len(Z), len(X_s)
    K = op.gram(X_s)
    K *= 1 / s
    lam, e = sample_eigenpairs(op, K, level, seed)
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
