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

from streamkern.basics.errors import DataError
from streamkern.store.statistics import ColumnMoments

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONSTANT_TARGET = 1e-10
"""Of the mean; a standard deviation below it may be rounding of a constant."""


@dataclass(frozen=True, eq=False)
class TargetScale:
    """mean, scale : (c,) float64, one of each per output."""

    mean: NDArray[np.float64]
    scale: NDArray[np.float64]

    @classmethod
    def of(cls, moments: ColumnMoments, fit_intercept: bool) -> TargetScale:
        """Mean, and the power of two above the standard deviation, or above the root mean square.

        Raises DataError where the variance is beyond float64, or all weights are 0.
        """
        if not moments.weight > 0:
            raise DataError("all sample weights are zero; give some rows a weight above 0")
        with np.errstate(over="ignore", invalid="ignore"):
            squares = moments.variance()
            squares = squares if fit_intercept else squares + moments.mean**2
        wrong = ~(np.isfinite(moments.mean) & np.isfinite(squares))
        if wrong.any():
            raise DataError(
                f"the variance of target {int(np.argmax(wrong))} overflows float64; give the "
                "targets in a larger unit"
            )
        mean = moments.mean if fit_intercept else np.zeros_like(moments.mean)
        spread = np.maximum(np.sqrt(squares), CONSTANT_TARGET * np.abs(mean))
        exponent = np.where(spread > 0, np.frexp(spread)[1], 0)
        return cls(mean, np.ldexp(1.0, exponent))

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
