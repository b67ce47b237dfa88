"""Losses of the error e = z - y: Huber's, quantiles, expectiles, and hinges of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from streamkern.losses.base import Loss

HUBER_WIDTH: Final = 1.345
"""delta over the standard deviation of the errors: 95 % of the efficiency of squares for normal
errors (Huber 1981, Robust Statistics, section 4.4)."""
OF_NORMAL: Final = 1.4826
"""Standard deviation of normal errors over their median absolute value."""
MIN_SPREAD: Final = 1e-4
"""Smallest spread of the errors over the scale of the targets: steps of a narrower ramp lead
nowhere."""
FIRST_WIDTH, LAST_WIDTH = 0.5, 0.05
"""Half width of the ramp of a quantile's gradient over the spread of the errors, at first and in
the end."""


def spread(
    errors: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return a robust standard deviation of the errors (n, c) of each output, (c,).

    It is at least `MIN_SPREAD` of the scale of the targets (c,), which all errors may be below.
    """
    size = OF_NORMAL * np.median(np.abs(errors - np.median(errors, axis=0)), axis=0)
    return np.maximum(size, MIN_SPREAD * scale)


@dataclass(frozen=True)
class Huber(Loss):
    """Huber's loss: e^2 / 2 up to |e| = delta, delta |e| - delta^2 / 2 beyond.

    delta : (c,) by output, in units of the targets; found from the data
    """

    name, figure, robust = "huber", "huber_loss", True
    delta: Sequence[float] | None = None

    def fitted(self, errors: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]) -> Self:
        """Return the loss with `HUBER_WIDTH` robust standard deviations of the errors as delta."""
        return replace(self, delta=(HUBER_WIDTH * spread(errors, scale)).tolist())

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the errors, cut off at delta."""
        delta = xp.asarray(self.delta, errors.dtype)
        return xp.clip(errors, -delta, delta, out=errors)

    def curvatures(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return those of the sharpest squares that majorise the loss, delta / |e| beyond delta."""
        delta = xp.asarray(self.delta, errors.dtype)
        return delta / xp.maximum(xp.abs(errors), delta)

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows, (m,) float64."""
        size = xp.abs(F.astype(np.float64) - Y)
        within = xp.minimum(size, xp.asarray(self.delta, np.float64))
        return (within * (size - within / 2)).sum(axis=1)


@dataclass(frozen=True)
class _Levels(Loss):
    """A loss whose minimum is a quantile, or the like, of the targets.

    Of several outputs for one target the k-th has the k-th of several quantiles.

    quantile : q in (0, 1), or a rising list of them
    """

    takes_quantile = True
    quantile: float | Sequence[float] = 0.5

    @property
    def levels(self) -> Sequence[float] | None:
        """The quantiles if there are several, None for one."""
        return None if isinstance(self.quantile, float) else self.quantile

    def output_names(self, names: Sequence[Any] | None) -> tuple[Any, ...] | None:
        """Return the name of the target, or "value", with each of several quantiles."""
        if self.levels is None:
            return super().output_names(names)
        return tuple(f"{names[0] if names else 'value'}_q{q!r}" for q in self.levels)

    def ordered(self, xp: Any, F: Any) -> Any:
        """Return the predictions (m, c) with the quantiles of a row in order, in place of F.

        Sorting does not raise the pinball loss (Chernozhukov, Fernandez-Val and Galichon 2010,
        Econometrica 78, 1093-1125).
        """
        if self.levels is not None:
            F.sort(axis=1)
        return F

    def parameters(self) -> dict[str, Any]:
        """Return the quantiles."""
        return {"quantile": self.quantile if self.levels is None else list(self.levels)}

    def _of_outputs(self, xp: Any, dtype: Any) -> Any:
        """Return q of the outputs as an array that (m, c) broadcasts with."""
        return xp.asarray(self.quantile, dtype)


@dataclass(frozen=True)
class Quantile(_Levels):
    """The pinball loss, whose minimum is a quantile: (1 - q) e above 0, -q e below.

    Its gradient jumps at e = 0. Steps take a ramp of half width `width` there, whose slope bounds
    the curvature: 1 / (2 width). The ramp narrows as the run goes on (`at`), so that early steps
    are long and late ones end at the quantile.

    width : (c,) by output, in units of the targets; found from the data
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
        """Return the loss with a ramp that narrows like the inverse of the number of rows."""
        assert self.width is not None
        factor = max(LAST_WIDTH / FIRST_WIDTH, 1 / (1 + rows_per_center))
        return replace(self, width=[factor * width for width in self.width])

    def fitted(self, errors: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]) -> Self:
        """Return the loss with a ramp of `FIRST_WIDTH` robust standard deviations of the errors.

        At the ends of the distribution there are fewer rows, and the ramp is narrower.
        """
        q = np.asarray(self.quantile)
        ends = np.minimum(1.0, 4 * np.minimum(q, 1 - q))
        return replace(self, width=(FIRST_WIDTH * ends * spread(errors, scale)).tolist())

    def parameters(self) -> dict[str, Any]:
        """Return the quantiles and the first width."""
        return super().parameters() | {"width": self.width}

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the ramp from -q to 1 - q."""
        errors *= xp.asarray(self.curvature, errors.dtype)
        xp.clip(errors, -0.5, 0.5, out=errors)
        errors += 0.5 - self._of_outputs(xp, errors.dtype)
        return errors

    def curvatures(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return those of the sharpest squares that majorise the loss, as of Huber's."""
        width = xp.asarray(self.width, errors.dtype)
        return width / xp.maximum(xp.abs(errors), width)

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows without a ramp, (m,) float64."""
        e, q = F.astype(np.float64) - Y, self._of_outputs(xp, np.float64)
        return xp.maximum((1 - q) * e, -q * e).sum(axis=1)


@dataclass(frozen=True)
class AbsoluteError(Quantile):
    """The absolute error, twice the pinball loss of the median."""

    name, figure = "absolute_error", "mae"
    takes_quantile = False

    @property
    def quantiles(self) -> None:
        """None: its intervals are those of a value."""

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the absolute errors of the rows, (m,) float64."""
        return xp.abs(F.astype(np.float64) - Y).sum(axis=1)


@dataclass(frozen=True)
class Expectile(_Levels):
    """Asymmetric squares: (1 - q) e^2 above 0, q e^2 below (Newey and Powell 1987).

    With q = 0.5 it is half of the squared error.
    """

    name, figure = "expectile", "expectile_loss"

    @property
    def curvature(self) -> npt.NDArray[np.float64]:
        """The curvature of the steeper side, (c,) or a number."""
        q: npt.NDArray[np.float64] = np.asarray(self.quantile)
        return np.maximum(2 * q, 2 * (1 - q))

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the errors, each by its side's weight."""
        q = self._of_outputs(xp, errors.dtype)
        errors *= xp.where(errors > 0, 2 * (1 - q), 2 * q)
        return errors

    def curvatures(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the second derivatives over L."""
        q = self._of_outputs(xp, errors.dtype)
        steeper = xp.maximum(q, 1 - q)
        return xp.where(errors > 0, (1 - q) / steeper, q / steeper)

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows, (m,) float64."""
        e, q = F.astype(np.float64) - Y, self._of_outputs(xp, np.float64)
        return (xp.where(e > 0, 1 - q, q) * e * e).sum(axis=1)


class SquaredHinge(Loss):
    """One class against the others: max(0, 1 - s v)^2, with s = 1 for the class of a row, else -1.

    The outputs are z = (v + 1) / 2, so that one-hot targets are their goals: v = s is z = y. Then
    the loss is 4 e^2 where e = z - y is on the wrong side of 0, and 0 elsewhere. Its half square
    is minimised, e^2 / 2, with the same minimum.
    """

    name, figure = "squared_hinge", "squared_hinge"
    for_classes, identity_link = True, False

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the errors on the wrong side, and 0 elsewhere."""
        errors *= (errors > 0) != (Y > 0.5)
        return errors

    def curvatures(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return 1 on the wrong side, and 0 elsewhere."""
        wrong = ((errors > 0) != (Y > 0.5)) & (errors != 0)
        return wrong.astype(errors.dtype)

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows, max(0, 1 - s v)^2 summed over classes: (m,) float64."""
        e = F.astype(np.float64) - Y
        return 4 * (e * e * ((e > 0) != (Y > 0.5))).sum(axis=1)
