"""The mean of the targets, and the unit they have inside: y = mean + scale f(x).

A kernel model knows no constant, and float32 neither a small change of a large number nor one
above 3e38. So a solver is given (y - mean) / scale, formed in float64 from y as it is stored, and
the model puts both back. `scale` is the power of two next to the standard deviation: dividing by it
rounds nothing, and as every output has its own, weights and ridge mean what they mean without it.
With `model.fit_intercept = false`, the convention of papers, the mean is 0.

The mean is a part of the model, as centers are. It is that of the weighted rows of an epoch where
it can be had from counts, statistics or the targets alone, and that of a sample where rows are made
by functions: f learns what such a constant is off by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONSTANT = 1e-10
"""Of the mean; a standard deviation below it may be rounding of a constant."""


@dataclass(frozen=True, eq=False)
class TargetScale:
    """mean, scale : (c,) float64, one of each per output."""

    mean: NDArray[np.float64]
    scale: NDArray[np.float64]

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> TargetScale:
        """What `arrays` gave."""
        return cls(*(np.asarray(arrays[name]) for name in ("target_mean", "target_scale")))

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """By the names under which setup keeps them."""
        return {"target_mean": self.mean, "target_scale": self.scale}

    def outside(self, xp: Any, F: Any, dtype: Any) -> Any:
        """mean + scale F in `dtype`. F : (m, c) on the device, values of the model inside."""
        values = F.astype(dtype)
        values *= xp.asarray(self.scale, dtype)
        values += xp.asarray(self.mean, dtype)
        return values


class TargetMoments:
    """Weighted mean and variance of targets, merged as in `statistics`.

    weight : sum of the sample weights, or number of rows. mean, m2 : (c,) float64, m2 the weighted
    sum of squared deviations.
    """

    def __init__(self, weight: float, mean: NDArray[np.float64], m2: NDArray[np.float64]) -> None:
        self.weight, self.mean, self.m2 = weight, mean, m2

    @classmethod
    def empty(cls, n_outputs: int) -> TargetMoments:
        """Of no rows."""
        return cls(0.0, np.zeros(n_outputs), np.zeros(n_outputs))

    def add(self, y: NDArray[Any], w: NDArray[Any] | None = None) -> None:
        """Take in rows. y : (k, c) values; w : (k,) sample weights."""
        rows = y.astype(np.float64)
        weights = np.ones(len(rows)) if w is None else w.astype(np.float64)
        total = float(weights.sum())
        if not total > 0:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            mean = (weights / total) @ rows
            rows -= mean
            self.merge(TargetMoments(total, mean, weights @ np.square(rows, out=rows)))

    def merge(self, other: TargetMoments) -> None:
        """Take in the rows of `other`."""
        if not other.weight > 0:
            return
        share = other.weight / (self.weight + other.weight)
        with np.errstate(over="ignore", invalid="ignore"):
            delta = other.mean - self.mean
            self.m2 = self.m2 + other.m2 + delta**2 * (self.weight * share)
            self.mean = self.mean + delta * share
        self.weight += other.weight

    def times(self, n: float) -> TargetMoments:
        """Of every row n times."""
        return TargetMoments(n * self.weight, self.mean, n * self.m2)

    def scale(self, fit_intercept: bool) -> TargetScale:
        """Mean, and the power of two above the standard deviation, or what there is about 0.

        Raises DataError where the variance is beyond float64, or all weights are 0.
        """
        if not self.weight > 0:
            raise DataError("all sample weights are 0; give some rows a weight above 0")
        variance = self.m2 / self.weight
        with np.errstate(over="ignore", invalid="ignore"):
            squares = variance if fit_intercept else variance + self.mean**2
        wrong = ~(np.isfinite(self.mean) & np.isfinite(squares))
        if wrong.any():
            raise DataError(
                f"the variance of target {int(np.argmax(wrong))} overflows float64; give the "
                "targets in a larger unit"
            )
        mean = self.mean if fit_intercept else np.zeros_like(self.mean)
        spread = np.maximum(np.sqrt(squares), CONSTANT * np.abs(mean))
        exponent = np.where(spread > 0, np.frexp(spread)[1], 0)
        return TargetScale(mean, np.ldexp(1.0, exponent))
