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
preconditioner. The preconditioner has already flattened the noise of the rows that built it: on
these, both come out too small, and the run diverges.

**A ridge** adds R = ridge H K_bb H^T <= (ridge / mu) I to the preconditioned Hessian. R has no
noise, so with G = (1/m) sum phi phi^T and lambda_1' = lambda_1 + ridge / mu,

    E[(G + R)^2] <= (ell / m) S + (S + R)^2 <= (ell / m + lambda_1') (S + R).

The same rule holds with lambda_1' for lambda_1 and ell + lambda_1' for ell. Each of n blocks uses a
ridge term that is up to a round of n steps old, or older if the ridge is weak
(`solver.block_step`). It acts as if one step were n times as long: hence n ridge / mu. If mu is at
least n ridge, lambda_1' is at most lambda_1 + 1.

**Weights.** Rows unlike all others have the largest leverage; in tables it can be a hundred times
the usual one. So that these rows do not limit every step, a row of a batch has the weight

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

the guarantee of the first rule, whatever the leverages are. If all leverages are equal, the step is
the same, too: eta w = m / (ell + m lambda_1). With a ridge, lambda_1' takes the place of lambda_1,
as (S_w + R)^2 / lambda_1' <= S_w^2 / lambda_1 + R^2 / |R|.

**lambda_1 of weighted rows.** Rows of small weight need not shorten eta either. Let
v_i = 1 / (1 + eta ell_i / (2 m)) and eta <= 1 / lambda_1(S_v). The pair
(v^1/2 phi, w v^-1/2 phi) gives eta S_w^2 <= E w^2/v phi phi^T, and the sum of all terms is, for
each row,

    -2 w + w (1 - w) + w^2 / v = -w^2 (1 + eta ell / (2 m)) <= 0,

so no error grows. Any factor up to 1 in place of the 1/2 in v (`block_factor.LEVERAGE_FRACTION`)
would do if leverages were exact. They are sketched, and 1/2 leaves room for a leverage that is a
quarter too small, and for the mean error of a sketch of 16 columns. So lambda_1 in use is
lambda_1(S_v). v is computed with the step of the unweighted lambda_1, which is shorter: v and
lambda_1 are then larger than necessary, which is safe.

**Noise.** Steps converge to least squares with the weights w_i, which are close to 1 if
eta ell_i / m is small. The step in use is eta = min(1, 1 / (lambda_1 + ell / m)), where ell is the
mean leverage: about half of 1 / lambda_1 where noise dominates. At eta = 1 the step is a Newton
step with the damping mu.

The measurements are under "The step size" in docs/explanation/block-measured.md.
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
"""Largest allowed (steps per round) x (ridge decay per step), along a direction of all blocks.

The stability limit is pi^2 / 2 (`block_ridge`). Half of this constant is used for long rounds.
"""


def blocks_due(n: int, share: float) -> float:
    """Return in how many of n blocks K(Z, Z) alpha has to be evaluated at each step.

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
        the largest leverage does not limit eta.
    mean : mean leverage of a row, if `damped`.
    """

    leverage: float
    lambda_1: float
    scale: float = 1.0
    damped: bool = False
    mean: float = 0.0

    def eta(self, m: float, variance_ratio: float = 1.0) -> float:
        """Return the step size for m rows.

        variance_ratio : variance of their mean, divided by the variance for m independent rows.
        """
        if self.damped:
            # A step is at most a Newton step (eta = 1), also where lambda_1 is below 1.
            return self.scale / max(1.0, self.lambda_1 + variance_ratio * self.mean / m)
        return self.scale * m / (self.leverage + (m - 1) * self.lambda_1)

    @property
    def critical_batch(self) -> float:
        """Batch size beyond which the step no longer grows in proportion to the batch.

        At this size the step is half of the step for an infinite batch.
        """
        if self.damped:
            return self.mean / (2 * max(1.0, self.lambda_1) - self.lambda_1)
        return self.leverage / self.lambda_1 + 1


def saved_rules(rules: list[dict[str, Any]], scale: float) -> list[StepRule]:
    """Return recorded rules with steps `scale` times as long."""
    return [replace(StepRule(**rule), scale=scale) for rule in rules]


def max_over_blocks(rules: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest leverage and lambda_1 of recorded rules; empty if there are none."""
    return {key: max(rule[key] for rule in rules) for key in ("leverage", "lambda_1") if rules}


def top_eigenvalue(backend: Backend, apply: Operator, start: Array, steps: int) -> float:
    """Return an upper estimate of the top eigenvalue of a positive semi-definite operator.

    It is the largest Ritz value plus the norm of its residual: there is an eigenvalue within one
    residual norm of a Ritz value. A Ritz value alone is never above the top eigenvalue, so that
    steps could be too long. Cost at most `steps` applications and n * steps elements.

    apply : symmetric operator on vectors (n,).
    start : (n,) start vector of the Krylov space.
    """
    return _lanczos(backend, apply, start, steps)[0]


def fresh_eigenvalue(backend: Backend, phi: Array, leverage: float, start: Array) -> float:
    """Return the top eigenvalue of the covariance of a stream, estimated from few of its rows.

    phi : (b, h), features of h rows in random order.
    leverage : the largest |phi|^2.
    start : (b,) start vector of the Krylov space.

    The sampling noise of h rows raises the top eigenvalue of their covariance: for white features
    it is about (1 + sqrt(b / h))^2, not 1 (Marchenko and Pastur). Other rows have other noise, but
    the same directions of large variance. So the directions, a Krylov space, are computed from one
    half of the rows, and measured on the other. The result may be too small: for normal features
    by a factor of 1.3 at most if the spectrum falls off gently, and of 2.2 at worst if one
    direction has 4 times the variance of all others (halves of b / 4). The step has room for this,
    as it is half of its limit, with the leverage in its denominator.

    If the halves differ by more than that noise, features have heavy tails (of narrow kernels), and
    the larger value, of the first half, is used. The result is at least the share of the largest
    row alone, leverage / h.
    """
    b, h = int(phi.shape[0]), int(phi.shape[1])
    half = h // 2
    if half == 0:
        return leverage
    one, other = phi[:, :half], phi[:, half:]
    on_first_half, basis = _lanczos(
        backend, lambda v: one @ (one.T @ v) / half, start, EIGENVALUE_STEPS
    )
    W = basis @ other
    M = backend.to_host(W @ W.T / (h - half))
    on_other_half = float(np.linalg.eigvalsh(M)[-1])
    noise = (1 + math.sqrt(b / half)) ** 2
    only_noise = on_first_half <= noise * on_other_half
    return max(on_other_half if only_noise else on_first_half, leverage / h)


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
        w, so_far = apply(basis[k]), basis[: k + 1]
        alphas.append(float((w * basis[k]).sum()))
        for _twice in range(2):
            w = w - (so_far @ w) @ so_far
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
