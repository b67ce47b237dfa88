"""The mean and the scale of the targets: y = mean + scale f(x).

A kernel model has no constant term, and in float32 small changes of a large number are lost and
numbers above 3e38 overflow. So a least squares solver is given (y - mean) / scale, computed in
float64 from the stored y, and the model maps its outputs back. Every output has its own `scale`,
the power of two above its standard deviation, by which division is exact. It does not change the
fit at a given ridge, which is linear in the targets of each output. For classes the scale is 1;
with the log loss it is the gain of the logits (`train.setup.loss_start`). With
`model.fit_intercept = false`, the convention of papers, the mean is 0.

The mean is a part of the model. It is the weighted mean over an epoch if that is known from class
counts, from statistics or from the targets without the features. If a function of the user makes or
changes the targets, it is the mean of a sample, and f learns the difference.
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
"""Standard deviation, relative to the mean, below which a target may be a rounded constant."""


@dataclass(frozen=True, eq=False)
class TargetScale:
    """Mean and scale of each output.

    mean, scale : (c,) float64
    unit : (c,); then mean and scale are those of log(1 + y / unit), for which a setup has squares
        if the loss has a log link; else None
    """

    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    unit: NDArray[np.float64] | None = None

    @classmethod
    def from_moments(cls, moments: ColumnMoments, fit_intercept: bool) -> TargetScale:
        """Return the mean of the targets, and the power of two above their standard deviation.

        Without `fit_intercept` the mean is 0, and the root mean square replaces the standard
        deviation. Raises DataError if the variance overflows float64, or if all weights are 0.
        """
        if not moments.weight > 0:
            raise DataError("all sample weights are zero", "give some rows a weight above 0")
        with np.errstate(over="ignore", invalid="ignore"):
            variance = moments.variance()
            mean_square = variance if fit_intercept else variance + moments.mean**2
        overflows = ~(np.isfinite(moments.mean) & np.isfinite(mean_square))
        if overflows.any():
            raise DataError(
                f"the variance of target {int(np.argmax(overflows))} overflows float64",
                "give the targets in a larger unit",
            )
        mean = moments.mean if fit_intercept else np.zeros_like(moments.mean)
        spread = np.maximum(np.sqrt(mean_square), CONSTANT_TARGET * np.abs(mean))
        exponent = np.where(spread > 0, np.frexp(spread)[1], 0)
        return cls(mean, np.ldexp(1.0, exponent))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> TargetScale:
        """Return the mean and scale that `arrays` returned."""
        return cls(*(np.asarray(arrays[name]) for name in ("target_mean", "target_scale")))

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return mean and scale under the names that they have in a setup."""
        return {"target_mean": self.mean, "target_scale": self.scale}

    def outside(self, xp: Any, F: Any, dtype: Any) -> Any:
        """Return mean + scale * F in `dtype`, predictions in the units of the targets.

        F : (m, c) on the device, outputs of the kernel model for scaled targets
        """
        values = F.astype(dtype)
        values *= xp.asarray(self.scale, dtype)
        values += xp.asarray(self.mean, dtype)
        return values
