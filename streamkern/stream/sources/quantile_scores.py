"""Quantile scores of features: piecewise linear functions from values to their ranks in a sample.

A feature with a heavy tail has most of its values within a small part of its standard deviation,
where a kernel that depends on the distance hardly distinguishes them. The score of a value is the
share of a sample below it, scaled to mean 0 and standard deviation 1; it spreads the values evenly.
The scores are appended to the features, which stay as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.basics.optional import on_demand
from streamkern.basics.randomness import AnyArray

MAX_KNOTS = 256
"""Largest number of knots of a score, between which it is linear."""
MIN_SCORED_VALUES = 16
"""Fewest distinct values in the sample for which a feature gets a score: a kernel distinguishes
fewer values by their distance."""
MAX_NORMAL_CORRELATION = 0.95
"""Largest correlation of the values with their normal scores for which a feature gets a score. The
correlation is 1 for normal, .98 for uniform, .9 for exponential and .76 for log-normal values."""


@dataclass(frozen=True, eq=False)
class QuantileScores:
    """Piecewise linear scores of some features.

    columns : (k,) indices of the features
    values : (k, q) values at the knots of each feature, ascending; the last value may repeat
    heights : (k, q) scores at the knots, with mean 0 and standard deviation 1 over the sample
    """

    columns: npt.NDArray[np.int64]
    values: Floats
    heights: Floats

    @classmethod
    def of_sample(
        cls, X: npt.NDArray[Any], max_correlation: float = MAX_NORMAL_CORRELATION
    ) -> QuantileScores | None:
        """Return scores for the features of X (n, d) that are far from normal; None without any.

        max_correlation : a feature whose correlation with its normal scores is lower gets a score
        """
        features = []  # index, and the values and heights of its knots
        for j in range(X.shape[1]):
            values, counts = np.unique(X[:, j].astype(np.float64), return_counts=True)
            if len(values) < MIN_SCORED_VALUES or not np.isfinite(values).all():
                continue
            shares = counts / len(X)
            levels = np.cumsum(shares) - shares / 2
            normal_scores = on_demand("scipy.special").ndtri(levels)
            if _correlation(values, normal_scores, shares) < max_correlation:
                features.append((j, *_knots(values, levels, shares)))
        if not features:
            return None
        columns, knot_values, heights = zip(*features, strict=True)
        return cls(np.array(columns, np.int64), np.stack(knot_values), np.stack(heights))

    def __len__(self) -> int:
        return len(self.columns)

    def write_scores(self, xp: Any, X: AnyArray, scores: AnyArray) -> None:
        """Write the scores of X (m, d) float64 to `scores` (m, k), of any dtype."""
        for j, column in enumerate(self.columns.tolist()):
            values, heights = xp.asarray(self.values[j]), xp.asarray(self.heights[j])
            scores[:, j] = xp.interp(X[:, column], values, heights)

    def names(self, features: Sequence[str]) -> list[str]:
        """Return the names of the features, followed by the names of the scores."""
        return [*features, *(f"quantile of {features[j]}" for j in self.columns)]

    def shares_with_scores(self, shares: Floats) -> Floats:
        """Return the share of each feature (d,), including the share of its score.

        shares : (d + k,) shares of the d features and of the k scores
        """
        d = len(shares) - len(self)
        sums: Floats = shares[:d] + np.bincount(self.columns, shares[d:], d)
        return sums

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store, by name; `QuantileScores(**arrays)` restores them."""
        return {"columns": self.columns, "values": self.values, "heights": self.heights}


def scores_among(transforms: Sequence[Any]) -> QuantileScores | None:
    """Return the quantile scores that one of the transforms appends; None if there are none."""
    candidates = (getattr(transform, "scores", None) for transform in transforms)
    return next((scores for scores in candidates if isinstance(scores, QuantileScores)), None)


def shape_after(transforms: Sequence[Any], row_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a row after the transforms.

    A transform that changes the shape has a method `shape_after`.
    """
    for transform in transforms:
        shape_of = getattr(transform, "shape_after", None)
        row_shape = row_shape if shape_of is None else shape_of(row_shape)
    return row_shape


def _correlation(a: Floats, b: Floats, shares: Floats) -> float:
    """Return the correlation of a and b, (q,) each, weighted by `shares` (q,)."""
    a, b = a - shares @ a, b - shares @ b
    return float((shares * a) @ b / np.sqrt(((shares * a) @ a) * ((shares * b) @ b)))


def _knots(values: Floats, levels: Floats, shares: Floats) -> tuple[Floats, Floats]:
    """Return the values and scores at `MAX_KNOTS` knots, evenly spaced in rank.

    values : (q,) distinct values of the sample, ascending
    levels : (q,) share of the sample below each value, counting half of the rows with that value
    shares : (q,) share of the sample with each value
    """
    mean = shares @ levels
    heights = (levels - mean) / np.sqrt(shares @ (levels - mean) ** 2)
    even_levels = np.linspace(levels[0], levels[-1], MAX_KNOTS)
    chosen = np.unique(np.searchsorted(levels, even_levels).clip(max=len(levels) - 1))
    # With fewer values, the last knot repeats, so that all features have as many knots.
    chosen = np.append(chosen, np.repeat(chosen[-1], MAX_KNOTS - len(chosen)))
    return values[chosen], heights[chosen]


def brief_numbers(values: Any) -> object:
    """Return a number unchanged and an array as a digest, so that descriptions stay short."""
    if values is None or np.ndim(values) == 0:
        return None if values is None else float(values)
    raw = np.ascontiguousarray(values, dtype=np.float64).tobytes()
    return "sha256:" + hashlib.sha256(raw).hexdigest()[:16]
