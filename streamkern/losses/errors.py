"""Losses of the error e = z - y: absolute error, Huber, quantiles, expectiles, squared hinge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from streamkern.losses.base import Loss

HUBER_WIDTH: Final = 1.345
"""Huber's delta, divided by the standard deviation of the errors. For normal errors its efficiency
is 95 % of that of least squares (Huber 1981, Robust Statistics, section 4.4)."""
MAD_FACTOR: Final = 1.4826
"""Standard deviation of normal errors, divided by their median absolute deviation."""
MIN_SPREAD: Final = 1e-4
"""Smallest spread of the errors, divided by the scale of the targets. With a smaller one, ramps
would be so narrow that steps make no progress."""
FIRST_WIDTH, LAST_WIDTH = 0.5, 0.05
"""Half width h of the ramp of a quantile's gradient at the start and at the end of a run, divided
by the spread of the errors."""


def spread(
    errors: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return a robust standard deviation of the errors of each output, (c,).

    It is the scaled median absolute deviation, and at least `MIN_SPREAD` times the scale.

    errors : (n, c).
    scale : (c,) scale of the targets.
    """
    deviation = MAD_FACTOR * np.median(np.abs(errors - np.median(errors, axis=0)), axis=0)
    return np.maximum(deviation, MIN_SPREAD * scale)


@dataclass(frozen=True)
class Huber(Loss):
    """Huber's loss: e^2 / 2 up to |e| = delta, delta |e| - delta^2 / 2 beyond.

    delta : (c,) in units of the targets; None before it is estimated from the data.
    """

    name, figure, robust = "huber", "huber_loss", True
    delta: Sequence[float] | None = None

    def fitted(self, errors: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]) -> Self:
        """Return the loss with delta of `HUBER_WIDTH` robust standard deviations of the errors."""
        return replace(self, delta=(HUBER_WIDTH * spread(errors, scale)).tolist())

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the errors, clipped to [-delta, delta]."""
        delta = xp.asarray(self.delta, errors.dtype)
        return xp.clip(errors, -delta, delta, out=errors)

    def curvatures(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the curvatures of the sharpest majorising squares: min(1, delta / |e|)."""
        delta = xp.asarray(self.delta, errors.dtype)
        return delta / xp.maximum(xp.abs(errors), delta)

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows, (m,) float64."""
        size = xp.abs(F.astype(np.float64) - Y)
        clipped = xp.minimum(size, xp.asarray(self.delta, np.float64))
        return (clipped * (size - clipped / 2)).sum(axis=1)


@dataclass(frozen=True)
class _Levels(Loss):
    """A loss whose minimum is a quantile or an expectile of the targets.

    quantile : q in (0, 1); or an ascending list of c of them for the c outputs of a single target.
    """

    takes_quantile = True
    quantile: float | Sequence[float] = 0.5

    @property
    def levels(self) -> Sequence[float] | None:
        """The quantiles if there are several, None for one."""
        return None if isinstance(self.quantile, float) else self.quantile

    def output_names(self, names: Sequence[Any] | None) -> tuple[Any, ...] | None:
        """Return names such as "price_q0.9" if there are several quantiles of one target.

        A target without a name is called "value".
        """
        if self.levels is None:
            return super().output_names(names)
        return tuple(f"{names[0] if names else 'value'}_q{q!r}" for q in self.levels)

    def ordered(self, xp: Any, F: Any) -> Any:
        """Sort the quantiles of each row of F (m, c), in place, and return F.

        Sorting does not raise the pinball loss (Chernozhukov, Fernandez-Val and Galichon 2010,
        Econometrica 78, 1093-1125).
        """
        if self.levels is not None:
            F.sort(axis=1)
        return F

    def parameters(self) -> dict[str, Any]:
        """Return the quantiles."""
        return {"quantile": self.quantile if self.levels is None else list(self.levels)}


@dataclass(frozen=True)
class Quantile(_Levels):
    """The pinball loss, whose minimum is a quantile: (1 - q) e for e > 0, and -q e for e < 0.

    Its gradient jumps at e = 0. Steps replace the jump by a ramp of half width h, whose slope
    1 / (2 h) bounds the curvature. The ramp becomes narrower during a run, see `at`: early
    steps are large, and late ones approach the quantile.

    width : (c,) half width h in units of the targets; None before it is estimated from the data.
    """

    name, figure, robust = "quantile", "pinball_loss", True
    width: Sequence[float] | None = None

    @property
    def quantiles(self) -> Sequence[float] | None:
        """The quantiles."""
        return [self.quantile] if isinstance(self.quantile, float) else self.quantile

    @property
    def curvature(self) -> npt.NDArray[np.float64]:
        """The slope of the ramp, (c,)."""
        return 0.5 / np.asarray(self.width, np.float64)

    def at(self, rows_per_center: float) -> Self:
        """Return the loss with h divided by 1 + rows_per_center.

        It is divided by at most `FIRST_WIDTH` / `LAST_WIDTH`.
        """
        assert self.width is not None
        factor = max(LAST_WIDTH / FIRST_WIDTH, 1 / (1 + rows_per_center))
        return replace(self, width=[factor * h for h in self.width])

    def fitted(self, errors: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]) -> Self:
        """Return the loss with a ramp of `FIRST_WIDTH` robust standard deviations of the errors.

        It is narrower for quantiles below 1/4 and above 3/4, where the distribution has fewer rows.
        """
        q = np.asarray(self.quantile)
        tail_factor = np.minimum(1.0, 4 * np.minimum(q, 1 - q))
        return replace(self, width=(FIRST_WIDTH * tail_factor * spread(errors, scale)).tolist())

    def parameters(self) -> dict[str, Any]:
        """Return the quantiles and the first h."""
        return super().parameters() | {"width": self.width}

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the gradient with a ramp, which is between -q and 1 - q."""
        errors *= xp.asarray(self.curvature, errors.dtype)
        xp.clip(errors, -0.5, 0.5, out=errors)
        errors += 0.5 - xp.asarray(self.quantile, errors.dtype)
        return errors

    def curvatures(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the curvatures of the sharpest majorising squares, as for Huber's loss."""
        h = xp.asarray(self.width, errors.dtype)
        return h / xp.maximum(xp.abs(errors), h)

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows, without the ramp: (m,) float64."""
        e, q = F.astype(np.float64) - Y, xp.asarray(self.quantile, np.float64)
        return xp.maximum((1 - q) * e, -q * e).sum(axis=1)


@dataclass(frozen=True)
class AbsoluteError(Quantile):
    """The absolute error, which is twice the pinball loss of the median."""

    name, figure = "absolute_error", "mae"
    takes_quantile = False

    @property
    def quantiles(self) -> None:
        """None, so that predictions are treated as values instead of quantiles."""

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the absolute errors of the rows, (m,) float64."""
        return xp.abs(F.astype(np.float64) - Y).sum(axis=1)


@dataclass(frozen=True)
class Expectile(_Levels):
    """Asymmetric squares (Newey and Powell 1987): (1 - q) e^2 for e > 0, and q e^2 for e < 0.

    With q = 0.5 it is half the squared error.
    """

    name, figure = "expectile", "expectile_loss"

    @property
    def curvature(self) -> npt.NDArray[np.float64]:
        """The second derivative on the steeper side of 0, (c,) or a number."""
        q: npt.NDArray[np.float64] = np.asarray(self.quantile)
        return np.maximum(2 * q, 2 * (1 - q))

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the errors, times 2 (1 - q) above 0 and 2 q below."""
        q = xp.asarray(self.quantile, errors.dtype)
        errors *= xp.where(errors > 0, 2 * (1 - q), 2 * q)
        return errors

    def curvatures(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the second derivatives divided by L."""
        q = xp.asarray(self.quantile, errors.dtype)
        steeper = xp.maximum(q, 1 - q)
        return xp.where(errors > 0, (1 - q) / steeper, q / steeper)

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows, (m,) float64."""
        e, q = F.astype(np.float64) - Y, xp.asarray(self.quantile, np.float64)
        return (xp.where(e > 0, 1 - q, q) * e * e).sum(axis=1)


class SquaredHinge(Loss):
    """The squared hinge max(0, 1 - s v)^2 of each class against the others.

    v is the margin of a class, and s is 1 if it is the class of the row, else -1. The outputs are
    z = (v + 1) / 2, so that v = s corresponds to z = y for one-hot targets y. With e = z - y, the
    loss is 4 e^2 if e < 0 for the class of the row, or e > 0 for another one, and 0 otherwise.
    Solvers minimise e^2 / 2 in place of 4 e^2, which has the same minimum.
    """

    name, figure = "squared_hinge", "squared_hinge"
    for_classes, identity_link = True, False

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the errors where the loss is not 0, and 0 elsewhere."""
        errors *= (errors > 0) != (Y > 0.5)
        return errors

    def curvatures(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return 1 where the loss is not 0, and 0 elsewhere."""
        has_loss = ((errors > 0) != (Y > 0.5)) & (errors != 0)
        return has_loss.astype(errors.dtype)

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows, max(0, 1 - s v)^2 summed over classes: (m,) float64."""
        e = F.astype(np.float64) - Y
        return 4 * (e * e * ((e > 0) != (Y > 0.5))).sum(axis=1)
