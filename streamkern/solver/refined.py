"""Solution of positive definite equations in float64 with an approximate factor in float32.

The method is conjugate gradient with the preconditioner M = (L L^T)^-1, where L is the factor.
Rounding in float32 makes M a slightly different matrix in every step. The method is therefore
flexible conjugate gradient (Notay 2000, eq. 2.1, with one previous direction): for the residual r
and the previous residual r_before, the direction is

    p <- M r + beta p,      beta = (M r)^T (r - r_before) / (M r_before)^T r_before.

If L L^T differs from the matrix A by an error E, the condition number is about 1 + |E| |A^-1|: one
step suffices if the rounding errors of the factor are small compared with the smallest eigenvalue
of A.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamkern.backend.base import Array

RESIDUAL_TOLERANCE = 1e-6
"""Largest norm of the residual, relative to the right-hand side, of an accepted solution.

The relative error of predictions is no larger at the fitted rows, but may be larger at other rows,
see docs/explanation/solver-measured.md."""
MAX_REFINEMENTS = 200
"""Largest number of steps. Each reads the matrix once; a factor costs n / 6 times as much."""


def conjugate_gradient(
    xp: Any, times: Callable[[Array], Array], precondition: Callable[[Array], Array], B: Array
) -> Array | None:
    """Return A^-1 B for each column of B (p, c), float64; None if A is not positive definite.

    None is also returned if a residual exceeds `RESIDUAL_TOLERANCE` after `MAX_REFINEMENTS` steps.

    times : function that returns A v, float64, for v (p, c).
    precondition : function that returns approximately A^-1 v; the columns of v have norm 1.
    """

    def apply_preconditioner(R: Array) -> Array:
        norms = xp.sqrt((R**2).sum(axis=0))
        norms[norms == 0] = 1.0
        return precondition(R / norms) * norms

    X, R = xp.zeros_like(B), B.copy()
    tolerances = RESIDUAL_TOLERANCE * xp.sqrt((B**2).sum(axis=0))
    P = Z = apply_preconditioner(R)
    product = (R * Z).sum(axis=0)
    for _ in range(MAX_REFINEMENTS):
        active = xp.sqrt((R**2).sum(axis=0)) > tolerances
        if not bool(active.any()):
            return X if bool(xp.isfinite(X).all()) else None
        AP = times(P)
        curvature = (P * AP).sum(axis=0)
        if not bool(((curvature > 0) | ~active).all()):
            return None
        step = xp.where(active, product / xp.where(active, curvature, 1.0), 0.0)
        X += step * P
        R_before = R
        R = R - step * AP
        Z = apply_preconditioner(R)
        change = (Z * (R - R_before)).sum(axis=0)
        beta = xp.where(active, change / xp.where(active, product, 1), 0)
        P = Z + beta * P
        product = (R * Z).sum(axis=0)
    return None
