"""The step size that a preconditioner allows, by measurements on fresh rows.

A step with m fresh rows moves the error e, written in coordinates in which the preconditioner is
symmetric, by

    e <- e - (eta / m) sum_i phi_i (phi_i . e),        E phi phi^T = S,

phi the preconditioned features of a row. With |phi|^2 <= ell and lambda_1 the top eigenvalue of S,

    E[((1/m) sum phi phi^T)^2] <= (ell / m) S + ((m - 1) / m) S^2 <= ((ell + (m-1) lambda_1) / m) S,

so E|e|^2 <= |e|^2 - eta (2 - eta (ell + (m-1) lambda_1) / m) e.S e: at

    eta(m) = m / (ell + (m - 1) lambda_1)

the bracket is 1 and no error grows in the mean square; it is also the eta that maximises the
guaranteed decrease. ell (the leverage) and lambda_1 are measured on rows that did not build the
preconditioner: on the rows that did, the preconditioner has already flattened their own noise, both
come out too small and the run diverges.

A ridge adds R = ridge H K_bb H^T <= (ridge / mu) I to the preconditioned Hessian, without noise:

    E[(G + R)^2] <= (ell / m) S + (S + R)^2 <= (ell / m + lambda_1') (S + R),

lambda_1' = lambda_1 + ridge / mu, which the same rule covers with lambda_1' for lambda_1 and
ell + lambda_1' for ell. Each of n blocks uses a ridge part that is up to a round of n steps old, or
more if the ridge is weak (`solver.block_step`), as if one step were n times as long: hence
n ridge / mu. With mu at least n ridge that is lambda_1 + 1 at most.

Rows unlike all others have the largest leverage, and tables have rows whose leverage is a
hundred times the usual one. So that these do not limit every step, a row of a batch has the weight

    w_i = 1 / (1 + eta ell_i / m),

ell_i its leverage (ours; the diagonal form of an implicit step, and normalised LMS if m = 1).
With S_w = E w phi phi^T and w_i eta ell_i / m = 1 - w_i the second moment of a step is

    eta E[((1/m) sum w phi phi^T)^2] <= E[w (1 - w) phi phi^T] + eta S_w^2
                                      = S_w - E[w^2 phi phi^T] + eta S_w^2.

S_w S^-1 S_w <= E[w^2 phi phi^T], as the covariance of the pair (phi, w phi) has no negative
eigenvalue, and S <= lambda_1. So at eta = 1 / lambda_1 the last two terms are at most zero, and

    E|e|^2 <= |e|^2 - eta e.S_w e:

the guarantee of the rule above, whatever the leverages are. If these are equal, the step is the
same, too: eta w = m / (ell + m lambda_1). With a ridge lambda_1' takes the place of lambda_1, as
(S_w + R)^2 / lambda_1' <= S_w^2 / lambda_1 + R^2 / |R|.

Rows that are weighted down need not shorten eta either. With v_i = 1 / (1 + eta ell_i / (2 m)) and
eta <= 1 / lambda_1(S_v), the pair (v^1/2 phi, w v^-1/2 phi) gives eta S_w^2 <= E w^2/v phi phi^T,
and the sum of all terms, row by row,

    -2 w + w (1 - w) + w^2 / v = -w^2 (1 + eta ell / (2 m)) <= 0:

no error grows. The half leaves room for leverages that are sketched, a quarter too small, or by 16
columns on average. So lambda_1 is that of S_v (`PART`), at the step of the unweighted one, which is
shorter, with a larger v. Loss over the exact model's with lambda_1(S) and lambda_1(S_v), one epoch,
b = p, p/4, p/16: bike 1.015 1.086 1.175, 1.005 1.083 1.173; diamonds .999 1.040 1.084, .997 1.038
1.081; parkinsons 1.001 1.042 1.168, .997 1.040 1.168; noisy digits 1.014 1.056 1.138, 1.016 1.056
1.138; rough 1.026 1.097 1.301, 1.027 1.096 1.300; smooth 1.114 1.194 1.340, 1.119 1.196 1.341. All
of ten tables gained; twice as much with v = w, for which the proof has no room.

Steps converge to least squares with the weights w_i, which are 1 if eta ell_i is small relative to
m. Where noise dominates, half of that step is taken: eta = 1 / (lambda_1 + ell / m), ell the mean
leverage. Loss over the exact model's with 1 / lambda_1 and with this eta, one epoch, b = p, p/4,
p/16: smooth 1.128 1.295 1.418, 1.090 1.195 1.337; rough 1.057 1.103 1.256, 1.040 1.098 1.286; noisy
digits 1.020 1.057 1.132, 1.014 1.056 1.138; bike 1.008 1.081 1.168, 1.015 1.086 1.175; parkinsons
.994 1.032 1.164, 1.002 1.043 1.168.
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
RIDGE_DELAY = 4
"""Largest product of a round's steps and the ridge's rate along a direction of all blocks. It is
below the stability limit pi^2 / 2, and half of it is taken for long rounds."""


def blocks_due(n: int, share: float) -> float:
    """Return the number of n blocks whose K(Z, Z) alpha has to be evaluated at each step.

    share : largest fraction of the ridge's effect in a block that a step takes, eta ridge / mu.
    """
    return n**2 * share / RIDGE_DELAY


@dataclass(frozen=True)
class StepRule:
    """Largest safe step for any batch size, by measurements on fresh rows.

    leverage : ell, the largest leverage of a row.
    lambda_1 : top eigenvalue of the preconditioned Hessian; for blocks by `fresh_eigenvalue`,
        elsewhere an upper estimate.
    scale : factor on eta in force, below 1 after a back-off.
    damped : whether rows of a batch are damped by their leverage (`solver.block_step`), so that the
        largest one does not limit eta.
    mean : mean leverage of a row, if they are damped.
    """

    leverage: float
    lambda_1: float
    scale: float = 1.0
    damped: bool = False
    mean: float = 0.0

    def eta(self, m: float, variance_ratio: float = 1.0) -> float:
        """Return the step size for m rows.

        variance_ratio : variance of their mean, relative to that of m independent rows.
        """
        if self.damped:
            return self.scale / max(1.0, self.lambda_1 + variance_ratio * self.mean / m)
        return self.scale * m / (self.leverage + (m - 1) * self.lambda_1)

    @property
    def critical_batch(self) -> float:
        """Batch size past which a larger batch no longer allows a proportionally larger step.

        With it the step is half of the step of an infinite batch.
        """
        if self.damped:
            return self.mean / (2 * max(1.0, self.lambda_1) - self.lambda_1)
        return self.leverage / self.lambda_1 + 1


def saved_rules(rules: list[dict[str, Any]], scale: float) -> list[StepRule]:
    """Return the rules that were recorded, with steps `scale` times as long."""
    return [replace(StepRule(**rule), scale=scale) for rule in rules]


def max_over_blocks(rules: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest leverage and lambda_1 of recorded rules; empty if there are none."""
    return {key: max(rule[key] for rule in rules) for key in ("leverage", "lambda_1") if rules}


def top_eigenvalue(backend: Backend, apply: Operator, start: Array, steps: int) -> float:
    """Return an upper estimate of the top eigenvalue of a positive semi-definite operator.

    It is the largest Ritz value plus the norm of its residual. A Ritz value alone never exceeds the
    eigenvalue, which is the wrong side to err on for a step size; there is an eigenvalue within one
    residual norm of it. Cost at most `steps` applications and n * steps elements.

    apply : the symmetric operator.
    start : (n,).
    """
    return _lanczos(backend, apply, start, steps)[0]


def fresh_eigenvalue(backend: Backend, phi: Array, leverage: float, start: Array) -> float:
    """Return the top eigenvalue of the covariance of a stream, estimated from few of its rows.

    phi : (b, h), features of h rows in random order.
    leverage : the largest |phi|^2.
    start : (b,).

    The top eigenvalue of the covariance of h rows is that of its noise: for white features it is
    about (1 + sqrt(b / h))^2, not 1 (Marchenko and Pastur). Other rows do not share the noise, but
    do share the directions of larger variance. So the directions, a Krylov space, are computed from
    one half of the rows, and measured on the other. The result may be too small: for normal
    features by 1.3 at most if the spectrum falls off gently, by 2.2 at worst if one direction has 4
    times the variance of all others (halves of b / 4). The step, at half of its limit and with the
    leverage in its denominator, has room for that.

    If the halves differ by more than that noise, features have heavy tails (of narrow kernels), and
    the value of the first half cannot be ignored. Nor can the largest row's own share.
    """
    b, h = int(phi.shape[0]), int(phi.shape[1])
    half = h // 2
    if half == 0:
        return leverage
    one, other = phi[:, :half], phi[:, half:]
    seen, basis = _lanczos(backend, lambda v: one @ (one.T @ v) / half, start, EIGENVALUE_STEPS)
    W = basis @ other
    M = backend.to_host(W @ W.T / (h - half))
    on_other_half = float(np.linalg.eigvalsh(M)[-1])
    noise = (1 + math.sqrt(b / half)) ** 2
    shared = on_other_half if seen <= noise * on_other_half else seen
    return max(shared, leverage / h)


def _lanczos(backend: Backend, apply: Operator, start: Array, steps: int) -> tuple[float, Array]:
    """Return an upper estimate, and the basis (k, n), with full reorthogonalisation."""
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
