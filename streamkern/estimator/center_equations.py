"""The least-squares problem that gives chosen centers their weights; see `compress`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from streamkern.basics.array_types import Floats
from streamkern.basics.optional import on_demand

PENALTIES = tuple(10.0**k for k in range(-13, -2, 2))
"""Penalties tried, relative to the mean of the diagonal of the equations."""


class CenterSums:
    """Sums over rows with outputs F (n, c) and kernel values k (n, q) of the candidates."""

    def __init__(self, q: int, c: int) -> None:
        self.A, self.B = np.zeros((q, q)), np.zeros((q, c))
        self.squares, self.n = 0.0, 0

    def add(self, k: Floats, F: Floats) -> None:
        """Add some rows."""
        self.A += k.T @ k
        self.B += k.T @ F
        self.squares += float(np.vdot(F, F))
        self.n += len(F)


@dataclass(frozen=True)
class CenterEquations:
    """The least-squares problem of all candidates.

    fit, held : of the rows that fit, and of those that judge
    spread : standard deviation of the outputs
    """

    fit: CenterSums
    held: CenterSums
    spread: float

    def weights(self, n: int, penalty: float) -> Floats | None:
        """Return the weights (n, c) of the first n candidates; None if the factor breaks down."""
        linalg = on_demand("scipy.linalg")
        A, B = self.fit.A[:n, :n].copy(), self.fit.B[:n]
        A.flat[:: n + 1] += penalty * np.trace(A) / n
        try:
            # Transposed, it is in the order of LAPACK, and is overwritten without a copy.
            factor = linalg.cho_factor(A.T, lower=True, overwrite_a=True)
            found: Floats = linalg.cho_solve(factor, B)
        except linalg.LinAlgError:
            return None
        return found

    def difference(self, w: Floats | None) -> float:
        """Return the root mean squared difference on the held-out rows, in spreads."""
        if w is None:
            return math.inf
        n, held = len(w), self.held
        total = np.vdot(w, held.A[:n, :n] @ w) - 2 * np.vdot(w, held.B[:n]) + held.squares
        return math.sqrt(max(float(total), 0.0) / (held.n * w.shape[1])) / self.spread
