"""The least-squares fit of a smaller model to the outputs of a larger one; see `compress`.

The smaller model has q centers, and weights w (q, c). It is fitted to the outputs F (n, c) of the
larger model on n rows, whose kernel values with the centers are k (n, q):

    (k^T k + ridge I) w = k^T F,    ridge = penalty tr(k^T k) / q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from streamkern.basics.array_types import Floats
from streamkern.basics.optional import on_demand

PENALTIES = tuple(10.0**k for k in range(-13, -2, 2))
"""Penalties to try, relative to the mean of the diagonal of k^T k."""


class CenterSums:
    """Sums over n rows, in float64.

    A : (q, q) k^T k, with the kernel values k (n, q) between the rows and q candidate centers
    B : (q, c) k^T F, with the outputs F (n, c) of the original model
    squares : sum of the squares of F
    n : number of rows
    """

    def __init__(self, q: int, c: int) -> None:
        self.A, self.B = np.zeros((q, q)), np.zeros((q, c))
        self.squares, self.n = 0.0, 0

    def add(self, k: Floats, F: Floats) -> None:
        """Add m rows to the sums.

        k : (m, q) float64, kernel values
        F : (m, c) float64, outputs of the original model
        """
        self.A += k.T @ k
        self.B += k.T @ F
        self.squares += float(np.vdot(F, F))
        self.n += len(F)


@dataclass(frozen=True)
class CenterEquations:
    """The least-squares problem of all candidate centers.

    fit_sums : sums over the rows to which the weights are fitted
    held_out_sums : sums over the held-out rows, on which fits are compared
    output_std : standard deviation of the outputs F
    """

    fit_sums: CenterSums
    held_out_sums: CenterSums
    output_std: float

    def solve(self, q: int, penalty: float) -> Floats | None:
        """Return the weights (q, c) of the first q candidates; None if the factorisation fails.

        penalty : factor of |w|^2, relative to the mean of the diagonal of k^T k
        """
        linalg = on_demand("scipy.linalg")
        A, B = self.fit_sums.A[:q, :q].copy(), self.fit_sums.B[:q]
        A.flat[:: q + 1] += penalty * np.trace(A) / q
        try:
            # A.T has the memory order of LAPACK, which then overwrites it without a copy.
            factor = linalg.cho_factor(A.T, lower=True, overwrite_a=True)
            weights: Floats = linalg.cho_solve(factor, B)
        except linalg.LinAlgError:
            return None
        return weights

    def difference(self, w: Floats | None) -> float:
        """Return the RMSE of k w against F on the held-out rows, divided by `output_std`.

        w : (q, c) weights of the first q candidates; None gives infinity
        """
        if w is None:
            return math.inf
        q, sums = len(w), self.held_out_sums
        # The sum of the squares of k w - F, expanded in terms of the sums.
        total = np.vdot(w, sums.A[:q, :q] @ w) - 2 * np.vdot(w, sums.B[:q]) + sums.squares
        return math.sqrt(max(float(total), 0.0) / (sums.n * w.shape[1])) / self.output_std
