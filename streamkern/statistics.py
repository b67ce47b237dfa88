"""Mean and standard deviation of features, accumulated over chunks in float64.

Each slab of rows gives a count, a mean and a sum of squared deviations from that mean, and two
such triples merge by the update of Chan, Golub and LeVeque (1979):

    delta = mean_b - mean_a
    mean  = mean_a + delta * n_b / n
    M2    = M2_a + M2_b + delta^2 * n_a n_b / n

which does not cancel as sum(x^2) - sum(x)^2 / n would. All of it is of differences to the first
row, so that a constant feature has no deviation at all, and one far from 0 loses none. The slab
size depends on the row size only, so that the same chunks in the same order give the same bits,
interrupted or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.errors import DataError
from streamkern.weights import add_totals

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SLAB_BYTES = 1 << 20  # float64 working copy: stays in L2, and bounds memory for wide rows


@dataclass(frozen=True, eq=False)
class Statistics:
    """Per-feature and global mean and standard deviation (over n), and rows per class.

    weight_totals : sums of the sample weights, as in `StoreSpec`; features are not weighted.
    """

    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    global_mean: float
    global_scale: float
    class_counts: tuple[int, ...] | None
    weight_totals: tuple[float, ...] | None = None


class RunningStatistics:
    """Accumulates `Statistics` over blocks of rows; the order of the blocks is part of the bits.

    Parameters
    ----------
    n_features : int
        d, or h * w * ch.
    n_classes : int or None
        Count class ids below this; None for float targets.
    """

    def __init__(self, n_features: int, n_classes: int | None = None) -> None:
        self.n_rows = 0
        self._first = np.zeros(n_features)
        self._mean = np.zeros(n_features)  # less the first row
        self._m2 = np.zeros(n_features)
        self._counts = None if n_classes is None else np.zeros(n_classes, np.int64)
        self._totals: NDArray[np.float64] | None = None
        self._slab = max(1, _SLAB_BYTES // (8 * n_features))

    def add(self, X: NDArray[Any], y: NDArray[Any], w: NDArray[Any] | None = None) -> None:
        """Take in a block: X (k, ...) of any dtype, y (k,) class ids or (k, c) values, w (k,)."""
        rows = X.reshape(len(X), -1)
        if self.n_rows == 0 and len(rows):
            self._first[...] = rows[0]
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(rows), self._slab):
                self._add_slab(rows[start : start + self._slab] - self._first)
        if self._counts is not None:
            self._counts += np.bincount(y.astype(np.int64), minlength=len(self._counts))
        if w is not None:
            if self._totals is None:
                self._totals = np.zeros(1 if self._counts is None else len(self._counts))
            add_totals(self._totals, y, w, self._counts is not None)

    def _add_slab(self, block: NDArray[np.float64]) -> None:
        k = len(block)
        mean = block.sum(axis=0) / k
        block -= mean
        np.square(block, out=block)
        delta = mean - self._mean
        n = self.n_rows + k
        self._mean += delta * (k / n)
        self._m2 += block.sum(axis=0) + delta**2 * (self.n_rows * k / n)
        self.n_rows = n

    def result(self) -> Statistics:
        """Statistics of the rows so far; at least one row must have been added."""
        if self.n_rows == 0:
            raise DataError("there are no rows to take statistics of")
        variance = self._m2 / self.n_rows
        with np.errstate(over="ignore", invalid="ignore"):
            mean = self._first + self._mean
            # Every feature has the same count: total variance is the mean of the variances
            # plus the variance of the means.
            total = float(variance.mean() + mean.var())
        if not (np.isfinite(mean).all() and np.isfinite(total)):
            raise DataError("the variance of X overflows float64; scale X down before storing it")
        counts = None if self._counts is None else tuple(int(c) for c in self._counts)
        return Statistics(
            mean=mean,
            scale=np.sqrt(variance),
            global_mean=float(mean.mean()),
            global_scale=float(np.sqrt(total)),
            class_counts=counts,
            weight_totals=None if self._totals is None else tuple(self._totals.tolist()),
        )
