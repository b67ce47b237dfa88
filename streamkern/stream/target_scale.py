"""The mean and the scale of the targets: y = mean + scale f(x).

A kernel model has no constant term, and float32 holds neither a small change of a large number nor
a number above 3e38. So a solver receives (y - mean) / scale, formed in float64 from y as stored,
and the model restores both. `scale` is the power of two next to the standard deviation: dividing by
it rounds nothing, and since every output has its own, weights and ridge keep their meaning. With
`model.fit_intercept = false`, the convention of papers, the mean is 0.

The mean is a part of the model, as the centers are. It is the mean of the weighted rows of an epoch
if it follows from counts, statistics or the targets alone, and the mean of a sample if rows are
made by functions: f learns the error of such a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.store.statistics import ColumnMoments

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONSTANT_TARGET = 1e-10
"""Fraction of the mean; a standard deviation below it may be the rounding of a constant."""


@dataclass(frozen=True, eq=False)
class TargetScale:
    """Mean and scale of each output.

    mean, scale : (c,) float64
    """

    mean: NDArray[np.float64]
    scale: NDArray[np.float64]

    @classmethod
    def from_moments(cls, moments: ColumnMoments, fit_intercept: bool) -> TargetScale:
        """Return the mean and the power of two above the standard deviation of the targets.

        Without `fit_intercept` the mean is 0, and the root mean square replaces the standard
        deviation. Raises DataError if the variance exceeds float64, or if all weights are 0.
        """
        if not moments.weight > 0:
            raise DataError("all sample weights are zero", "give some rows a weight above 0")
        with np.errstate(over="ignore", invalid="ignore"):
            squares = moments.variance()
            squares = squares if fit_intercept else squares + moments.mean**2
        wrong = ~(np.isfinite(moments.mean) & np.isfinite(squares))
        if wrong.any():
            raise DataError(
                f"the variance of target {int(np.argmax(wrong))} overflows float64",
                "give the targets in a larger unit",
            )
        mean = moments.mean if fit_intercept else np.zeros_like(moments.mean)
        spread = np.maximum(np.sqrt(squares), CONSTANT_TARGET * np.abs(mean))
        exponent = np.where(spread > 0, np.frexp(spread)[1], 0)
        return cls(mean, np.ldexp(1.0, exponent))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> TargetScale:
        """Return the scale whose `arrays` are given."""
        return cls(*(np.asarray(arrays[name]) for name in ("target_mean", "target_scale")))

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return the arrays by their names in a setup."""
        return {"target_mean": self.mean, "target_scale": self.scale}

    def outside(self, xp: Any, F: Any, dtype: Any) -> Any:
        """Return mean + scale F in `dtype`, predictions in the unit of the targets.

        F : (m, c) on the device, values of the model in its internal unit
        """
        values = F.astype(dtype)
        values *= xp.asarray(self.scale, dtype)
        values += xp.asarray(self.mean, dtype)
        return values
