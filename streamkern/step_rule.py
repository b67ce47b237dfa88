"""The step size that a preconditioner allows, from what is measured on fresh rows.

A step with m fresh rows moves the error e, written in coordinates
in which the preconditioner is symmetric, by

    e <- e - (eta / m) sum_i phi_i (phi_i . e),        E phi phi^T = S,

phi the preconditioned feature of a row. With |phi|^2 <= ell and lambda_1 the top eigenvalue of S,

    E[((1/m) sum phi phi^T)^2] <= (ell / m) S + ((m - 1) / m) S^2 <= ((ell + (m-1) lambda_1) / m) S,

so E|e|^2 <= |e|^2 - eta (2 - eta (ell + (m-1) lambda_1) / m) e.S e: at

    eta(m) = m / (ell + (m - 1) lambda_1)

the bracket is 1 and no error grows in the mean square; it is also the eta that maximises the
guaranteed decrease. ell (the preconditioned leverage) and lambda_1 are measured on rows that did
not build the preconditioner: on the rows that did, the preconditioner has already flattened their
own noise, both come out too small and the run diverges.

A ridge adds R = ridge H K_bb H^T <= (ridge / mu) I to the preconditioned Hessian, without noise:

    E[(G + R)^2] <= (ell / m) S + (S + R)^2 <= (ell / m + lambda_1') (S + R),

lambda_1' = lambda_1 + ridge / mu, which the same rule covers with lambda_1' for lambda_1 and
ell + lambda_1' for ell. Of n blocks one a step has its ridge part evaluated, and uses it n times:
as one step n times as long, hence n ridge / mu. With mu at least n ridge that is lambda_1 + 1 at
most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from streamkern.backend import Array

EIGENVALUE_STEPS = 32
Operator = Callable[[Array], Array]
CLOSE = 0.03
"""Residual over Ritz value, where only the directions matter."""


@dataclass(frozen=True)
class StepRule:
    """Largest safe step for any batch size, from what was measured on fresh rows.

    leverage : ell, the largest preconditioned leverage seen.
    lambda_1 : top eigenvalue of the preconditioned Hessian, an upper estimate.
    scale : factor on eta in force, below 1 after a back-off.
    """

    leverage: float
    lambda_1: float
    scale: float = 1.0

    def eta(self, m: int) -> float:
        """Step size for a batch of m rows."""
        return self.scale * m / (self.leverage + (m - 1) * self.lambda_1)

    @property
    def critical_batch(self) -> float:
        """Batch size past which a larger batch no longer buys a proportionally larger step."""
        return self.leverage / self.lambda_1 + 1


def largest(rules: list[dict[str, float]]) -> dict[str, float]:
    """The largest leverage and lambda_1 of recorded rules; nothing where there are none."""
    return {key: max(rule[key] for rule in rules) for key in ("leverage", "lambda_1") if rules}


def top_eigenvalue(apply: Operator, start: Array, steps: int) -> float:
    """Upper estimate of the top eigenvalue of a symmetric positive semi-definite operator.

    The largest Ritz value plus the norm of its residual. A Ritz value alone never exceeds the
    eigenvalue, which is the wrong side to err on for a step size; there is an eigenvalue within one
    residual norm of it. Cost at most `steps` applications and n * steps elements, start : (n,).
    """
    return _lanczos(apply, start, steps, 0.0)[0]


def top_eigenvalue_on(fresh: Operator, apply: Operator, start: Array, steps: int) -> float:
    """Top eigenvalue of one operator in the Krylov space of another, (n, at most `steps`).

    Of the covariance of a few rows the top eigenvalue is that of its noise: with h rows of white
    features of dimension b it is about (1 + sqrt(b / h))^2, not 1 (Marchenko and Pastur). Other
    rows do not share the noise, but do share the directions in which there is more than that. So
    the directions are taken from one half of the rows, and measured on the other. A direction just
    above the noise is seen in part: the eigenvalue may be found a third too small, which the factor
    2 that the step stays below its limit has room for.
    """
    basis = _lanczos(apply, start, steps, CLOSE)[1]
    images = [fresh(v) for v in basis]
    M = np.array([[float((v * w).sum()) for w in images] for v in basis])
    return float(np.linalg.eigvalsh(0.5 * (M + M.T))[-1])


def _lanczos(apply: Operator, start: Array, steps: int, close: float) -> tuple[float, list[Array]]:
    """With full reorthogonalisation, until the residual is below `close` of the Ritz value."""
    rounding = 8 * float(np.spacing(start.dtype.type(1)))
    basis = [start / _norm(start)]
    alphas: list[float] = []
    betas: list[float] = []
    while True:
        w = apply(basis[-1])
        alphas.append(float((w * basis[-1]).sum()))
        for _twice in range(2):
            for v in basis:
                w = w - v * float((w * v).sum())
        betas.append(_norm(w))
        T = np.diag(alphas) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1)
        values, vectors = np.linalg.eigh(T)
        value, residual = float(values[-1]), betas[-1] * abs(float(vectors[-1, -1]))
        ended = betas[-1] <= rounding * max([*alphas, 1e-30])
        if ended or residual <= close * value or len(basis) == min(steps, len(start)):
            return value + residual, basis
        basis.append(w / betas[-1])


def _norm(v: Array) -> float:
    return math.sqrt(float((v * v).sum()))
