"""The least-squares problem for the weights of a smaller model's centers; see `compress`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from streamkern.basics.array_types import Floats
from streamkern.basics.optional import on_demand

PENALTIES = tuple(10.0**k for k in range(-13, -2, 2))
"""Penalties tried, relative to the mean of the diagonal of the equations."""


class CenterSums:
    """Sums over n rows: A = k^T k (q, q), B = k^T F (q, c), and the sum of the squares of F.

    k (n, q) : kernel values between the rows and the q candidates for centers
    F (n, c) : outputs of the original model
    """

    def __init__(self, q: int, c: int) -> None:
        self.A, self.B = np.zeros((q, q)), np.zeros((q, c))
        self.squares, self.n = 0.0, 0

    def add(self, k: Floats, F: Floats) -> None:
        """Add rows to the sums. k, F : (m, q), (m, c) float64, of m rows"""
        self.A += k.T @ k
        self.B += k.T @ F
        self.squares += float(np.vdot(F, F))
        self.n += len(F)


@dataclass(frozen=True)
class CenterEquations:
    """The least-squares problem of all candidates.

    fit, held : sums over the rows to which weights are fitted, and over the held-out rows
    spread : standard deviation of the outputs
    """

    fit: CenterSums
    held: CenterSums
    spread: float

    def weights(self, n: int, penalty: float) -> Floats | None:
        """Return the weights (n, c) of the first n candidates; None if Cholesky's method fails.

        penalty : ridge, relative to the mean of the diagonal of the equations
        """
        linalg = on_demand("scipy.linalg")
        A, B = self.fit.A[:n, :n].copy(), self.fit.B[:n]
        A.flat[:: n + 1] += penalty * np.trace(A) / n
        try:
            # A.T has the memory order of LAPACK, which then overwrites it without a copy.
            factor = linalg.cho_factor(A.T, lower=True, overwrite_a=True)
            found: Floats = linalg.cho_solve(factor, B)
        except linalg.LinAlgError:
            return None
        return found

    def difference(self, w: Floats | None) -> float:
        """Return the root mean squared difference from F on the held-out rows, over the spread.

        w : (n, c) weights of the first n candidates; None gives infinity
        """
        if w is None:
            return math.inf
        n, held = len(w), self.held
        total = np.vdot(w, held.A[:n, :n] @ w) - 2 * np.vdot(w, held.B[:n]) + held.squares
        return math.sqrt(max(float(total), 0.0) / (held.n * w.shape[1])) / self.spread
