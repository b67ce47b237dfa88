"""Solution of positive definite equations in float64 with an approximate factor in float32.

Conjugate gradient with the factor L as preconditioner M = (L L^T)^-1. Because M is applied in
float32 it is not quite a fixed matrix, and the directions are those of the flexible method (Notay
2000, eq. 2.1 with one direction kept): for the residual r and the step before it,

    p <- M r + beta p,      beta = (M r)^T (r - r_before) / (M r_before)^T r_before.

If L L^T differs from the matrix A by an error E, the condition number is about 1 + |E| |A^-1|: one
step suffices if the rounding of the factor is small against the least eigenvalue of A.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamkern.backend.base import Array

REFINED = 1e-6
"""Norm of the residual, relative to the right side, with which a solution is accepted.

Predictions of the fitted rows are off by no more than that, those of other rows by up to 1e-4 (2500
rows, noise of a tenth), and by 1e-2 with ridges of 1e-9, which float32 values hardly resolve."""
MAX_REFINEMENTS = 200
"""Steps after which there is no solution. Each reads the matrix, a factor costs n / 6 as much. 6000
rows of bike, without noise, took 43."""


def conjugate_gradient(
    xp: Any, times: Callable[[Array], Array], precondition: Callable[[Array], Array], B: Array
) -> Array | None:
    """Return A^-1 B for each column of B (p, c), float64; None if A is not positive definite.

    None is also returned if the residuals are not small after `MAX_REFINEMENTS` steps.

    times : returns A v, float64, for v (p, c).
    precondition : returns about A^-1 v. It is called with columns of norm 1.
    """

    def preconditioned(R: Array) -> Array:
        size = xp.sqrt((R**2).sum(axis=0))
        size[size == 0] = 1.0
        return precondition(R / size) * size

    X, R = xp.zeros_like(B), B.copy()
    least = REFINED * xp.sqrt((B**2).sum(axis=0))
    P = Z = preconditioned(R)
    product = (R * Z).sum(axis=0)
    for _ in range(MAX_REFINEMENTS):
        active = xp.sqrt((R**2).sum(axis=0)) > least
        if not bool(active.any()):
            return X if bool(xp.isfinite(X).all()) else None
        AP = times(P)
        curvature = (P * AP).sum(axis=0)
        if not bool(((curvature > 0) | ~active).all()):
            return None
        step = xp.where(active, product / xp.where(active, curvature, 1.0), 0.0)
        X += step * P
        before = R
        R = R - step * AP
        Z = preconditioned(R)
        beta = xp.where(active, (Z * (R - before)).sum(axis=0) / xp.where(active, product, 1), 0)
        P = Z + beta * P
        product = (R * Z).sum(axis=0)
    return None
