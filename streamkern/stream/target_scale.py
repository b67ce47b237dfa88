"""The mean and the scale of the targets: y = mean + scale f(x), perhaps on a log scale.

A kernel model has no constant term, and float32 loses small changes of large numbers and overflows
above 3e38. So a least squares solver gets (y - mean) / scale, computed in float64 from the stored
y, and the model maps its outputs back. Every output has its own `scale`, the power of two above its
standard deviation, so that the division is exact. The scale does not change the fit at a given
ridge, which is linear in the targets of each output. For classes the scale is 1; with the log loss
it is the gain of the logits (`train.setup.loss_start`). With `model.fit_intercept = false`, the
convention of papers, the mean is 0.

The mean is a part of the model. It is the weighted mean over an epoch if that is known from class
counts, from statistics or from the targets without the features. If a function of the user makes or
changes the targets, it is the mean of a sample, and f learns the difference.

On a log scale, mean and scale refer to z = log(1 + y / unit). The inverse y = unit (exp(z) - 1)
maps the mean of z to about the median of y; the factor `gain` turns predictions into means again.
Both maps are continued as odd functions, so that negative targets and predictions stay finite; the
log scale is chosen only if a sample of the targets has none below 0. Far from the training rows,
exp(z) may be arbitrarily large. So if all targets are in memory, |z| is limited to `most`, which is
a little above the |z| of the largest target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.log_scale import symmetric_exp, symmetric_log
from streamkern.store.statistics import ColumnMoments

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONSTANT_TARGET = 1e-10
"""Standard deviation, relative to the mean, below which a target may be a rounded constant."""
MAX_UNITS_IN_TEXT = 3
"""Largest number of units that `transform_text` lists."""


@dataclass(frozen=True, eq=False)
class TargetScale:
    """Mean and scale of each output.

    mean, scale : (c,) float64
    unit : (c,) unit of the log scale, None without a log scale. The setup for a loss with a log
        link has one for its start by least squares.
    gain : (c,) factor of predictions on a log scale; None without a unit, and for a log link
    most : (c,) largest |z| of a prediction; None without a unit, or if the largest target is not
        known
    """

    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    unit: NDArray[np.float64] | None = None
    gain: NDArray[np.float64] | None = None
    most: NDArray[np.float64] | None = None

    @classmethod
    def from_moments(cls, moments: ColumnMoments, fit_intercept: bool) -> TargetScale:
        """Return the mean of the targets, and the power of two above their standard deviation.

        Without `fit_intercept` the mean is 0, and the root mean square replaces the standard
        deviation.

        Raises DataError if the variance overflows or underflows float64, or if all weights are 0.
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
        underflows = moments.underflows()
        if not fit_intercept:
            underflows |= (moments.mean != 0) & (mean_square < np.finfo(np.float64).tiny)
        if underflows.any():
            raise DataError(
                f"the variance of target {int(np.argmax(underflows))} underflows float64",
                "give the targets in a smaller unit",
            )
        mean = moments.mean if fit_intercept else np.zeros_like(moments.mean)
        bounded_scale = np.maximum(np.sqrt(mean_square), CONSTANT_TARGET * np.abs(mean))
        # The scale of an output that is always 0 is 2^0 = 1.
        exponent = np.where(bounded_scale > 0, np.frexp(bounded_scale)[1], 0)
        return cls(mean, np.ldexp(1.0, exponent))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> TargetScale:
        """Return the scale from the result of `arrays`; before log scales it had fewer arrays."""
        log_arrays = (arrays.get(f"target_{name}") for name in ("unit", "gain", "most"))
        mean, scale = (np.asarray(arrays[f"target_{name}"]) for name in ("mean", "scale"))
        return cls(mean, scale, *(None if a is None else np.asarray(a) for a in log_arrays))

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return the arrays that are not None, by their names in a setup."""
        return {f"target_{name}": a for name, a in vars(self).items() if a is not None}

    def in_target_units(self, xp: Any, F: Any, dtype: Any) -> Any:
        """Return mean + scale * F in `dtype`, predictions in the units of the targets.

        F : (m, c) on the device, outputs of the kernel model for scaled targets
        """
        values = F.astype(dtype)
        values *= xp.asarray(self.scale, dtype)
        values += xp.asarray(self.mean, dtype)
        if self.unit is None:
            return values
        if self.most is not None:
            most = xp.asarray(self.most, dtype)
            values = xp.maximum(xp.minimum(values, most), -most)
        values = symmetric_exp(xp, values, xp.asarray(self.unit, dtype))
        return values if self.gain is None else values * xp.asarray(self.gain, dtype)

    def squared_errors(
        self, predictions: NDArray[np.float64], Y: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the squared errors (m, c) on the scale on which the targets are learned."""
        if self.unit is not None:
            medians = predictions if self.gain is None else predictions / self.gain
            predictions, Y = (symmetric_log(np, a, self.unit) for a in (medians, Y))
        return (predictions - Y) ** 2

    def slopes(self, predictions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the derivatives of predictions (m, c) with respect to the outputs of the model.

        By the delta method, the standard deviation of a prediction is about its derivative times
        the standard deviation of the output.
        """
        if self.unit is None:
            return self.scale
        unit = self.unit if self.gain is None else self.unit * self.gain
        return self.scale * (unit + np.abs(predictions))


def transform_text(facts: Mapping[str, Any]) -> str:
    """Return the log scale of the targets as text.

    facts : facts of a setup: `unit`, a list, and perhaps `error_ratio`, the ratio of the errors
        with and without the log scale
    """
    units = [f"{unit:.4g}" for unit in facts["unit"][:MAX_UNITS_IN_TEXT]]
    ellipsis = ", ..." if len(facts["unit"]) > MAX_UNITS_IN_TEXT else ""
    text = f"log scale ({'unit' if len(units) == 1 else 'units'} {', '.join(units)}{ellipsis})"
    change = facts.get("error_ratio", 1.0) - 1
    if round(change, 2) == 0:
        return text
    change_text = f"{abs(change):.0%} {'lower' if change < 0 else 'higher'}"
    return f"{text}: squared error of left-out rows, the largest capped, {change_text}"
