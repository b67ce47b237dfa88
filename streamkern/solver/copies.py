"""Correlation of the noise of copies of a row, and the effective sample size of copies.

Rows that random transforms make from one stored row carry less information than as many new rows:
all copies have the noise of the same target, and only the variation of the transforms is averaged
out. If the noise of two copies has the correlation rho, the mean of R copies of each of m rows has
the variance

    variance * (rho / m + (1 - rho) / (R m)).

The effective sample size n is defined by variance / n being equal to this. rho follows from the
best ridge for one copy of each row and the best ridge for R copies: their ratio is
rho + (1 - rho) / R. Both are found on held-out rows, with all their copies, from normal equations
of few centers; no center is made from one of these rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.basics.errors import DivergenceError
from streamkern.kernels.products import KernelOperator
from streamkern.solver.direct_step import DirectSolver
from streamkern.solver.precondition.held_out import FOLDS

COPIES = 4
"""Largest number of copies of each row that are used."""
ROWS_PER_CENTER = 4
"""Number of rows per center."""
MIN_ROWS_OF_COPIES = 64
"""Smallest number of rows for an estimate."""
MIN_CORRELATION = 0.1
"""Smallest estimate of rho that is distinguishable from 0.

With a rho of this size, the effective sample size is at most ten times the number of stored rows.
"""


def intraclass_correlation(
    op: KernelOperator, copies: Iterable[tuple[Array, Array, Array | None]]
) -> float:
    """Return rho, between 0 and 1; 0 if there are too few rows.

    copies : two or more tuples of X (n, d), Y (n, c) and sample weights (n,) or None, of the same n
        rows.
    """
    later_copies = iter(copies)
    X, Y, w = next(later_copies)
    n, p, c = len(X), len(X) // ROWS_PER_CENTER, Y.shape[1]
    if n < MIN_ROWS_OF_COPIES:
        return 0.0
    solver = DirectSolver(
        op, op.points(X[:p], right=True), max_batch=n - p, ridge=None,
        n_sums=1 + FOLDS, n_stored=n, n_outputs=c,
    )  # fmt: skip
    state = solver.init()

    def add(X: Array, Y: Array, w: Array | None) -> None:
        solver.step(state, Batch(X[p:], Y[p:], np.arange(p, n), None if w is None else w[p:]))

    try:
        add(X, Y, w)
        del X, Y, w
        solver.weights(state)  # finds the ridge
        ridge_of_one = state.ridge
        n_copies = 1
        for copy in later_copies:
            add(*copy)
            n_copies += 1
        solver.weights(state)
    except DivergenceError:
        return 0.0
    if solver.rounding_dominates:  # all kernel values are too small for an estimate
        return 0.0
    rho = (state.ridge / ridge_of_one - 1 / n_copies) / (1 - 1 / n_copies)
    return min(rho, 1.0) if rho >= MIN_CORRELATION else 0.0


def effective_sample_size(n_stored: int, n_samples: int, rho: float) -> float:
    """Return the number of independent rows with the same variance of the mean as the copies.

    n_stored : number of stored rows; some of them may have no copy.
    n_samples : number of copies.
    """
    return 1 / (rho / min(n_stored, n_samples) + (1 - rho) / n_samples)
