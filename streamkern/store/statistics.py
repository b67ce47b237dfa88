"""Mean and standard deviation of features and targets, accumulated over chunks in float64.

Each slab of rows gives a count, a mean and a sum of squared deviations from that mean, and two such
triples merge by the update of Chan, Golub and LeVeque (1979):

    delta = mean_b - mean_a
    mean  = mean_a + delta * n_b / n
    M2    = M2_a + M2_b + delta^2 * n_a n_b / n

which does not cancel as sum(x^2) - sum(x)^2 / n would. A shift is subtracted from all rows: the
first row, or the mean of earlier rows. So a constant column has no deviation at all, and a column
far from 0 loses no precision. For targets, n is the sum of the sample weights if rows have some.
The slab size depends on the number of columns only, so the same chunks in the same order give the
same bits, interrupted or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.store.layout import StoreSpec
from streamkern.store.sample_weights import add_totals, has_weight

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Bytes of the float64 working copy of rows, which fits into an L2 cache.
_STATISTICS_SLAB_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Statistics:
    """Per-feature and global mean and standard deviation, and rows per class.

    Variances are divided by n, not by n - 1.

    mean, scale : (d,) float64, of the counted rows; 0 if there are none. All rows count without
        sample weights; otherwise a row counts unless its weight is negligible beside the largest of
        its block, see `has_weight`.
    global_mean, global_scale : the same over all entries of these rows
    class_counts : rows of each class; None if targets are values
    weight_totals : sums of the sample weights, as in `StoreSpec`
    target_mean, target_scale : (c,) float64, weighted by the sample weights; None if all are 0
    n_counted : number of counted rows; None if all rows count
    """

    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    global_mean: float
    global_scale: float
    class_counts: tuple[int, ...] | None
    weight_totals: tuple[float, ...] | None = None
    target_mean: NDArray[np.float64] | None = None
    target_scale: NDArray[np.float64] | None = None
    n_counted: int | None = None


class ColumnMoments:
    """Weight, mean and sum of squared deviations of columns; float64, merged slab by slab."""

    def __init__(self, n_columns: int) -> None:
        self.weight = 0.0
        self._shift: NDArray[np.float64] | None = None  # subtracted from all rows
        self._mean = np.zeros(n_columns)  # minus the shift
        self._m2 = np.zeros(n_columns)  # sum of squared deviations from the mean
        self._varies = np.zeros(n_columns, bool)  # whether two values of the column differ
        self._slab_rows = max(1, _STATISTICS_SLAB_BYTES // (8 * max(1, n_columns)))

    @classmethod
    def from_statistics(
        cls, weight: float, mean: NDArray[np.float64], scale: NDArray[np.float64]
    ) -> ColumnMoments:
        """Return the moments of rows with this total weight, mean and standard deviation.

        mean, scale : (n_columns,)
        """
        moments = cls(len(mean))
        moments.weight, moments._shift, moments._m2 = weight, mean.copy(), weight * scale**2
        return moments

    def take(self, columns: Any) -> ColumnMoments:
        """Return the moments of the columns at `columns`, a slice or an array, in that order."""
        moments = ColumnMoments(len(self._mean[columns]))
        moments.weight = self.weight
        moments._mean, moments._m2 = self._mean[columns], self._m2[columns]
        moments._shift = None if self._shift is None else self._shift[columns]
        moments._varies = self._varies[columns]
        return moments

    def add(self, rows: NDArray[Any], w: NDArray[Any] | None = None) -> None:
        """Add rows (k, n_columns) of any dtype, with the weights w (k,), by default 1 each.

        Rows of weight 0 are ignored.
        """
        if w is not None and not w.all():
            rows, w = rows[w > 0], w[w > 0]
        if self._shift is None and len(rows):
            self._shift = rows[0].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(rows), self._slab_rows):
                slab = slice(start, start + self._slab_rows)
                self._add_slab(
                    rows[slab] - self._shift,
                    None if w is None else w[slab].astype(np.float64)[:, None],
                )

    def _add_slab(self, slab: NDArray[np.float64], w: NDArray[np.float64] | None) -> None:
        """Add rows (k, d), minus the shift, with weights (k, 1) or None; they are overwritten."""
        weight = float(len(slab) if w is None else w.sum())
        mean = (slab if w is None else w * slab).sum(axis=0) / weight
        slab -= mean
        np.square(slab, out=slab)
        if w is not None:
            slab *= w
        self._merge(weight, mean, slab.sum(axis=0))

    def merge(self, moments: ColumnMoments, factor: float = 1.0) -> None:
        """Add the rows of other moments, with their weights multiplied by `factor`."""
        if not moments.weight:
            return
        if self._shift is None:
            self._shift = moments.mean
        with np.errstate(over="ignore", invalid="ignore"):
            self._merge(factor * moments.weight, moments.mean - self._shift, factor * moments._m2)
        self._varies |= moments._varies

    def _merge(self, weight: float, mean: NDArray[np.float64], m2: NDArray[np.float64]) -> None:
        """Add rows by the update of the module docstring. mean : minus the shift"""
        delta = mean - self._mean
        self._varies |= delta != 0
        total = self.weight + weight
        self._mean += delta * (weight / total)
        self._m2 += m2 + delta**2 * (self.weight * weight / total)
        self.weight = total

    @property
    def mean(self) -> NDArray[np.float64]:
        """Means of the columns, (n_columns,); not finite if they overflow."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self._mean if self._shift is None else self._shift + self._mean

    def variance(self) -> NDArray[np.float64]:
        """Return the variances of the columns, (n_columns,); infinite if they overflow."""
        return self._m2 / (self.weight or 1.0)

    def underflows(self) -> NDArray[np.bool_]:
        """Return (n_columns,) bool: the column varies, but its squares underflow float64."""
        return np.asarray(self._varies & (self._m2 < np.finfo(np.float64).tiny))


class RunningStatistics:
    """Accumulates `Statistics` over blocks of rows; the last bits depend on their order.

    Parameters
    ----------
    n_features : int
        d, or h * w * ch.
    n_classes : int or None
        Count class ids below this; None for float targets.
    """

    def __init__(self, n_features: int, n_classes: int | None = None) -> None:
        self.n_rows = 0
        self._features = ColumnMoments(n_features)
        self._targets: ColumnMoments | None = None
        self._counts = None if n_classes is None else np.zeros(n_classes, np.int64)
        self._totals: NDArray[np.float64] | None = None

    @classmethod
    def from_spec(cls, spec: StoreSpec) -> RunningStatistics:
        """Return the statistics of the rows of a store, to which rows can be added.

        spec : spec of a store with statistics
        """
        statistics = cls(spec.n_features, None if spec.classes is None else len(spec.classes))
        assert spec.mean is not None
        assert spec.scale is not None
        statistics.n_rows = spec.n_rows
        n_counted = spec.n_rows if spec.n_counted is None else spec.n_counted
        statistics._features = ColumnMoments.from_statistics(n_counted, spec.mean, spec.scale)
        if spec.class_counts is not None:
            statistics._counts = np.array(spec.class_counts, np.int64)
        if spec.weight_totals is not None:
            statistics._totals = np.array(spec.weight_totals)
        if spec.classes is None and spec.target_mean is not None and spec.target_scale is not None:
            weight = spec.n_rows if spec.weight_totals is None else spec.weight_totals[0]
            statistics._targets = ColumnMoments.from_statistics(
                weight, spec.target_mean, spec.target_scale
            )
        return statistics

    def add(self, X: NDArray[Any], y: NDArray[Any], w: NDArray[Any] | None = None) -> None:
        """Add a block: X (k, ...) of any dtype, y (k,) class ids or (k, c) values, w (k,)."""
        self.n_rows += len(X)
        # Column sums have other bits if the rows of a frame are stored by columns.
        rows = np.ascontiguousarray(X).reshape(len(X), -1)
        # The scaling of features does not depend on weights, but leaves out negligible ones.
        self._features.add(rows if w is None else rows[has_weight(w)])
        if self._counts is not None:
            self._counts += np.bincount(y.astype(np.int64), minlength=len(self._counts))
        else:
            values = y.reshape(len(y), -1)
            if self._targets is None:
                self._targets = ColumnMoments(values.shape[1])
            self._targets.add(values, w)
        if w is not None:
            if self._totals is None:
                self._totals = np.zeros(1 if self._counts is None else len(self._counts))
            add_totals(self._totals, y, w, self._counts is not None)

    def empty(self) -> RunningStatistics:
        """Return statistics of the same kind without rows."""
        n_classes = None if self._counts is None else len(self._counts)
        return RunningStatistics(len(self._features.mean), n_classes)

    def merge(self, stats: RunningStatistics) -> None:
        """Add all rows of other statistics."""
        self.n_rows += stats.n_rows
        self._features.merge(stats._features)
        if self._counts is not None and stats._counts is not None:
            self._counts += stats._counts
        if stats._targets is not None:
            self._targets = self._targets or ColumnMoments(len(stats._targets.mean))
            self._targets.merge(stats._targets)
        if stats._totals is not None:
            self._totals = stats._totals + (0.0 if self._totals is None else self._totals)

    def result(self) -> Statistics:
        """Return the statistics of the rows so far.

        Raises
        ------
        DataError
            If there are no rows; if a mean or variance overflows float64; or if the squares of
            every feature, or of a column of targets, underflow it although the values differ.
        """
        if self.n_rows == 0:
            raise DataError(
                "there are no rows, so the statistics cannot be computed", "give at least one row"
            )
        mean, variance = self._features.mean, self._features.variance()
        with np.errstate(over="ignore", invalid="ignore"):
            # Every feature has the same count: total variance is the mean of the variances
            # plus the variance of the means.
            total = float(variance.mean() + mean.var())
        if not (np.isfinite(mean).all() and np.isfinite(total)):
            raise DataError("the variance of X overflows float64", "give X in a larger unit")
        # A feature that underflows counts as constant, which is an error only if all features do.
        if self._features.underflows().all():
            raise DataError("the variance of X underflows float64", "give X in a smaller unit")
        class_counts = None if self._counts is None else tuple(self._counts.tolist())
        target_mean, target_scale = self._target_moments()
        return Statistics(
            mean=mean,
            scale=np.sqrt(variance),
            global_mean=float(mean.mean()),
            global_scale=float(np.sqrt(total)),
            class_counts=class_counts,
            weight_totals=None if self._totals is None else tuple(self._totals.tolist()),
            target_mean=target_mean,
            target_scale=target_scale,
            n_counted=None if self._features.weight == self.n_rows else int(self._features.weight),
        )

    def _target_moments(
        self,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]] | tuple[None, None]:
        """Return mean and standard deviation (c,) of the targets, or None if all weights are 0.

        For the one-hot column of a class with the share p they are p and sqrt(p (1 - p)).
        """
        if self._counts is not None:
            totals = self._counts.astype(np.float64) if self._totals is None else self._totals
            weight = totals.sum()
            if not weight:
                return None, None
            shares = totals / weight
            return shares, np.sqrt(shares * (1 - shares))
        targets = self._targets
        if targets is None or not targets.weight:
            return None, None
        variance = targets.variance()
        if not (np.isfinite(targets.mean).all() and np.isfinite(variance).all()):
            raise DataError("the variance of y overflows float64", "give y in a larger unit")
        if targets.underflows().any():
            raise DataError("the variance of y underflows float64", "give y in a smaller unit")
        return targets.mean, np.sqrt(variance)
