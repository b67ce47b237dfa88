"""The step size that a preconditioner allows, measured on fresh rows.

A step with m fresh rows moves the error e, in coordinates in which the preconditioner is symmetric,
by

    e <- e - (eta / m) sum_i phi_i (phi_i . e),        E phi phi^T = S,

where phi are the preconditioned features of a row. If |phi|^2 <= ell, and lambda_1 is the top
eigenvalue of S,

    E[((1/m) sum phi phi^T)^2] <= (ell / m) S + ((m - 1) / m) S^2 <= ((ell + (m-1) lambda_1) / m) S,

so E|e|^2 <= |e|^2 - eta (2 - eta (ell + (m-1) lambda_1) / m) e.S e. At

    eta(m) = m / (ell + (m - 1) lambda_1)

the bracket is 1, and no error grows in the mean square. This eta also maximises the guaranteed
decrease. ell (the leverage) and lambda_1 are measured on rows that did not build the
preconditioner. On the rows that did, both would be too small, because the preconditioner has
whitened the sampling noise of these rows as well, and the run would diverge.

**A ridge** adds R = ridge H K_bb H^T <= (ridge / mu) I to the preconditioned Hessian. R has no
noise, so with G = (1/m) sum phi phi^T and lambda_1' = lambda_1 + ridge / mu,

    E[(G + R)^2] <= (ell / m) S + (S + R)^2 <= (ell / m + lambda_1') (S + R).

The same rule holds with lambda_1' for lambda_1 and ell + lambda_1' for ell. Each of n blocks uses
values of the ridge term that are up to a round of n steps old, or older if the ridge is weak
(`solver.block_ridge`). For stability, this is equivalent to a step that is n times as long: hence
n ridge / mu in place of ridge / mu. If mu is at least n ridge, lambda_1' is at most lambda_1 + 1.

**Weights.** Rows unlike all others have the largest leverage; in tables it can be a hundred times
the mean. So that these rows do not limit every step, a row of a batch has the weight

    w_i = 1 / (1 + eta ell_i / m),

where ell_i is its leverage (ours; the diagonal form of an implicit step, and normalised LMS if
m = 1). Let S_w = E w phi phi^T. As w_i eta ell_i / m = 1 - w_i, eta times the second moment of a
step's matrix is

    eta E[((1/m) sum w phi phi^T)^2] <= E[w (1 - w) phi phi^T] + eta S_w^2
                                      = S_w - E[w^2 phi phi^T] + eta S_w^2.

The covariance of the pair (phi, w phi) has no negative eigenvalue, so that
S_w S^-1 S_w <= E[w^2 phi phi^T]; and S <= lambda_1. At eta = 1 / lambda_1 the last two terms are
therefore at most zero together, and

    E|e|^2 <= |e|^2 - eta e.S_w e:

the guarantee of the first rule, for any leverages. If all leverages are equal, the step is also the
same: eta w = m / (ell + m lambda_1). With a ridge, lambda_1' replaces lambda_1, as
(S_w + R)^2 / lambda_1' <= S_w^2 / lambda_1 + R^2 / |R|.

**lambda_1 of weighted rows.** Rows of small weight need not shorten eta either. Let
v_i = 1 / (1 + eta ell_i / (2 m)) and eta <= 1 / lambda_1(S_v). The pair
(v^1/2 phi, w v^-1/2 phi) gives eta S_w^2 <= E w^2/v phi phi^T, and the sum of all terms is, for
each row,

    -2 w + w (1 - w) + w^2 / v = -w^2 (1 + eta ell / (2 m)) <= 0,

so no error grows. With exact leverages, any factor up to 1 would be valid in place of the 1/2 in v
(`block_factor.LEVERAGE_FRACTION`). The leverages are estimated from sketches, and 1/2 allows for
the error of a sketch. So the rule uses lambda_1(S_v). v is computed with the step for the
unweighted lambda_1, which is shorter: v and lambda_1 are then larger than necessary, which is safe.

**Noise.** Steps converge to least squares with the weights w_i, which are close to 1 if
eta ell_i / m is small. The solver therefore uses eta = min(1, 1 / (lambda_1 + ell / m)), where ell
is here the mean leverage: about half of 1 / lambda_1 if noise dominates. A step with eta = 1 is a
Newton step with the penalty mu.

Measured in docs/explanation/block-measured.md, "The step size".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from streamkern.backend.base import Array, Backend

    Operator = Callable[[Array], Array]

EIGENVALUE_STEPS = 32
"""Largest number of Lanczos steps for lambda_1."""
RIDGE_DELAY = 4
"""Largest product of the steps per round and the rate of the ridge in a direction of all blocks.

The limit of stability is pi^2 / 2 (`block_ridge`). For long rounds, half of this constant is used.
"""


def blocks_due(n: int, share: float) -> float:
    """Return for how many of n blocks a step has to evaluate K(Z, Z) alpha, on average.

    share : largest rate at which the ridge shrinks weights of a block, per step: eta ridge / mu.
    """
    return n**2 * share / RIDGE_DELAY


@dataclass(frozen=True)
class StepRule:
    """Largest safe step for any batch size, measured on fresh rows.

    leverage : ell, the largest leverage of a row.
    lambda_1 : top eigenvalue of the preconditioned Hessian; `fresh_eigenvalue` estimates it for
        blocks, and elsewhere it is an upper estimate.
    scale : factor on eta, below 1 after a back-off.
    damped : whether rows of a batch are weighted by their leverage (`solver.block_step`), so that
        the largest leverage does not limit eta. Setups record it by this name.
    mean : mean leverage of a row, if `damped`.
    """

    leverage: float
    lambda_1: float
    scale: float = 1.0
    damped: bool = False
    mean: float = 0.0

    def eta(self, m: float, variance_ratio: float = 1.0) -> float:
        """Return the step size for m rows.

        variance_ratio : variance of the mean of the m rows, relative to m independent rows.
        """
        if self.damped:
            # A step is at most a Newton step (eta = 1), also where lambda_1 is below 1.
            return self.scale / max(1.0, self.lambda_1 + variance_ratio * self.mean / m)
        return self.scale * m / (self.leverage + (m - 1) * self.lambda_1)

    def with_ridge(self, ridge: float) -> StepRule:
        """Return the rule of a step without row weights whose penalty is `ridge` times |f|^2.

        As the preconditioner is at most the identity, the ridge adds at most itself to the Hessian:
        lambda_1' = lambda_1 + ridge, and leverage + lambda_1' replaces the leverage.
        """
        lambda_1 = self.lambda_1 + ridge
        return replace(self, leverage=self.leverage + lambda_1, lambda_1=lambda_1)

    @property
    def critical_batch(self) -> float:
        """Critical batch: beyond it the step no longer grows in proportion to the batch.

        At this batch size the step is half of the step for an infinite batch.
        """
        if self.damped:
            return self.mean / (2 * max(1.0, self.lambda_1) - self.lambda_1)
        return self.leverage / self.lambda_1 + 1


def rules_from_meta(rules: list[dict[str, Any]], scale: float) -> list[StepRule]:
    """Return the step rules of a setup's `meta`, with steps `scale` times as long."""
    return [replace(StepRule(**rule), scale=scale) for rule in rules]


def max_over_blocks(rules: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest leverage and lambda_1 of recorded rules; empty if there are none."""
    return {key: max(rule[key] for rule in rules) for key in ("leverage", "lambda_1") if rules}


def random_start(backend: Backend, seed: list[int], n: int, dtype: Any) -> Array:
    """Return a standard normal start vector (n,) of a Krylov space, on the device."""
    return backend.asarray(np.random.default_rng(seed).standard_normal(n), dtype)


def top_eigenvalue(backend: Backend, apply: Operator, start: Array, steps: int) -> float:
    """Return an upper estimate of the top eigenvalue of a positive semi-definite operator.

    The estimate is the largest Ritz value plus the norm of its residual; there is an eigenvalue
    within this norm of the Ritz value. A Ritz value alone never exceeds the top eigenvalue, and
    would allow too long steps. Cost at most `steps` applications; memory n * steps elements.

    apply : symmetric operator on vectors (n,).
    start : (n,) start vector of the Krylov space.
    steps : largest number of Lanczos steps.
    """
    return _lanczos(backend, apply, start, steps)[0]


def fresh_eigenvalue(backend: Backend, phi: Array, leverage: float, start: Array) -> float:
    """Return the top eigenvalue of the covariance of a stream, estimated from few of its rows.

    The sampling noise of h rows raises the top eigenvalue of their covariance: for white features
    it is about (1 + sqrt(b / h))^2, not 1 (Marchenko and Pastur). Other rows have other noise, but
    the same directions of large variance. So the directions, a Krylov space, are computed from the
    first half of the rows, and their variance is measured on the second half. The result may be too
    small (docs/explanation/block-measured.md, "The error of lambda_1"). The step size allows for
    this, as it is about half of its limit.

    If the halves differ by more than sampling noise, the features have heavy tails, as with narrow
    kernels, and the larger value of the first half is used. The result is at least leverage / h,
    the term of the row with the largest leverage alone.

    phi : (b, h) features of h rows in random order.
    leverage : the largest |phi|^2.
    start : (b,) start vector of the Krylov space.
    """
    b, h = int(phi.shape[0]), int(phi.shape[1])
    n_half = h // 2
    if n_half == 0:
        return leverage
    first_half, second_half = phi[:, :n_half], phi[:, n_half:]
    first_value, basis = _lanczos(
        backend, lambda v: first_half @ (first_half.T @ v) / n_half, start, EIGENVALUE_STEPS
    )
    W = basis @ second_half
    M = backend.to_host(W @ W.T / (h - n_half))
    second_value = float(np.linalg.eigvalsh(M)[-1])
    max_noise_ratio = (1 + math.sqrt(b / n_half)) ** 2
    differs_by_noise_only = first_value <= max_noise_ratio * second_value
    return max(second_value if differs_by_noise_only else first_value, leverage / h)


def _lanczos(backend: Backend, apply: Operator, start: Array, steps: int) -> tuple[float, Array]:
    """Return an upper estimate of the top eigenvalue, and the basis (k, n) of the Krylov space.

    Each vector is orthogonalised twice against all earlier ones.
    """
    rounding = 8 * float(np.spacing(start.dtype.type(1)))
    basis = backend.xp.empty((min(steps, len(start)), len(start)), start.dtype)
    basis[0] = start / _norm(start)
    alphas: list[float] = []
    betas: list[float] = []
    for k in range(len(basis)):
        w = apply(basis[k])
        previous = basis[: k + 1]
        alphas.append(float((w * basis[k]).sum()))
        for _ in range(2):
            w = w - (previous @ w) @ previous
        beta = _norm(w)
        betas.append(beta)
        if beta <= rounding * max([*alphas, 1e-30]):
            break
        basis[k + 1 : k + 2] = w / beta
    T = np.diag(alphas) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1)
    values, vectors = np.linalg.eigh(T)
    return float(values[-1] + betas[-1] * abs(vectors[-1, -1])), basis[: len(alphas)]


def _norm(v: Array) -> float:
    return math.sqrt(float((v * v).sum()))
