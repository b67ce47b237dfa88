"""Preconditioners of explicit features: plain SGD and linear EigenPro on f(x) = phi(x)^T w.

phi is either random Fourier features, which the operator evaluates in place of a kernel, or
Nystrom's, phi(x) = L^-1 k(Z, x) with K(Z, Z) = L L^T, for which |w| is the RKHS norm of f. Weights
are kept as alpha = L^-T w, so that f = K(., Z) alpha is evaluated like any other model; a step
w -= u becomes alpha -= L^-T u, and the gradient in w is L^-1 times that in alpha. So all methods on
features are one, the step of `solver.block_step` with a single block,

    alpha -= eta H^T P H (K(Z, X) r / m),      H = L^-1 (Nystrom), I (Fourier),

where P = I for SGD, and for linear EigenPro (EP1 eq. 7, which has no ridge)

    P = I - sum_i (1 - tau (lam_{q+1} + ridge) / (lam_i + ridge)) e_i e_i^T

in the top eigendirections of the covariance of the features of a sample, Phi^T Phi / s. They come
from Phi Phi^T / s, (s, s), which has the same eigenvalues: e_i = Phi^T v_i / sqrt(s lam_i). The
paper takes tau = 1/4 with features. The ridge is in P because P has to level it as well: with
nearly equal centers lam_{q+1} is far below it, and directions damped that far never move.

`solver.block_step` itself is the third method: H from the whole covariance.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.block import BlockPreconditioner
from streamkern.solver.precondition.low_rank import sample_eigenpairs
from streamkern.solver.precondition.norm import WeightNorm, check_overlap, noise_floor, weight_norm
from streamkern.solver.precondition.step_rule import EIGENVALUE_STEPS, StepRule, top_eigenvalue

TAU = 0.25
FEATURE_COLUMNS = 4096
"""Number of features that are evaluated at once, if they are independent of each other."""


def build_linear(
    op: KernelOperator, Z: Points, S: Points | None, probe: Points, *, level: int = 0,
    tau: float = TAU, ridge: float = 0.0, seed: int = 0, root: Array | None = None,
) -> BlockPreconditioner:  # fmt: skip
    """Return one block with the map H^T P H, and its step rule, measured on `probe`.

    Z : points of the features, p, both sides.
    S, probe : left points, s and h of them, without a row in common; S only for level >= 1.
    level : number of directions that EigenPro damps.
    root : (h,) square roots of the sample weights of the probe.

    Cost 4 s p (d + s) + 2 h p (d + h) FLOPs, for Nystrom's features p^3 + 2 (s + h) p^2 more;
    memory besides the result 3 s^2 + h^2 + 2 s FEATURE_COLUMNS elements; 2 (p + s) p for Nystrom's.
    """
    norm = weight_norm(op, Z, noise_floor(op, len(Z)) if ridge else 0.0)
    damped = None if S is None else _directions(op, norm, Z, S, level, tau, ridge, seed)
    rule = _measure(op, norm, Z, probe, damped, seed, root)
    if ridge:  # P <= I, so that a ridge of unit metric adds no more than itself
        lambda_1 = rule.lambda_1 + ridge
        rule = StepRule(rule.leverage + lambda_1, lambda_1)
    H = None if norm.L is None else norm.inverse(op.backend, len(Z), op.dtype)
    return BlockPreconditioner([slice(0, len(Z))], [H], [rule], 0.0, [norm.jitter], damped=damped)


def _slabs(
    op: KernelOperator, norm: WeightNorm, X: Points, Z: Points
) -> Iterator[tuple[slice, Array]]:
    """Yield columns of Phi, (n, width) at a time; all at once if L couples them."""
    for columns in tiles(len(Z), FEATURE_COLUMNS) if norm.L is None else [slice(0, len(Z))]:
        yield columns, norm.features(op.backend, op.matrix(X, Z[columns]))


def _directions(
    op: KernelOperator, norm: WeightNorm, Z: Points, S: Points, level: int, tau: float,
    ridge: float, seed: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Return E (p, q), and D = 1 - tau (lam_{q+1} + ridge) / (lam_i + ridge)."""
    xp, s = op.backend.xp, len(S)
    G = xp.zeros((s, s), op.dtype)
    for _, Phi in _slabs(op, norm, S, Z):
        op.backend.add_gram(G, xp.ascontiguousarray(Phi.T), 1 / s)
    op.backend.mirror_lower(G)
    check_overlap(op, float(G.diagonal().sum()), "covariance")
    lam, V = sample_eigenpairs(op, G, level, seed)
    del G
    tail, lam = lam[-1], lam[:-1]
    V = xp.ascontiguousarray(V[:, :-1] / xp.sqrt(s * lam))
    E = xp.empty((len(Z), len(lam)), op.dtype)
    for columns, Phi in _slabs(op, norm, S, Z):
        op.backend.matmul_t(Phi, V, E[columns])
    # The tail is an upper estimate, so the last of the others may seem to be below it.
    return E, xp.maximum(1 - tau * (tail + ridge) / (lam + ridge), 0)


def _measure(
    op: KernelOperator, norm: WeightNorm, Z: Points, probe: Points,
    damped: tuple[Array, Array] | None, seed: int, root: Array | None,
) -> StepRule:  # fmt: skip
    """Return ell = max phi^T P phi and lambda_1 of Phi P Phi^T / h on the probe."""
    xp, h = op.backend.xp, len(probe)
    G = xp.zeros((h, h), op.dtype)
    E, D = (xp.zeros((len(Z), 0), op.dtype), xp.zeros(0, op.dtype)) if damped is None else damped
    Q = xp.zeros((h, len(D)), op.dtype)
    for columns, Phi in _slabs(op, norm, probe, Z):
        op.backend.add_gram(G, xp.ascontiguousarray(Phi.T), 1.0)
        if len(D):
            Q += op.backend.matmul(Phi, E[columns], xp.empty_like(Q))
    op.backend.mirror_lower(G)
    for rows in tiles(h, 512) if len(D) else ():
        G[rows] -= (Q[rows] * D) @ Q.T
    if root is not None:
        G *= root[:, None]
        G *= root
    leverage = float(G.diagonal().max())
    check_overlap(op, leverage, "leverage")
    start = op.backend.asarray(np.random.default_rng([seed, 5]).standard_normal(h), op.dtype)
    lambda_1 = top_eigenvalue(op.backend, lambda v: G @ v / h, start, EIGENVALUE_STEPS)
    return StepRule(leverage, lambda_1)
