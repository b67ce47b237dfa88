"""The check of a user-defined loss on some numbers, before a run.

A loss is convex, and its gradient g is continuous. So between a and b on a line of direction u,

    g(a).u <= (l(b) - l(a)) / |b - a| <= g(b).u,        0 <= (g(b) - g(a)).u <= L |b - a|,

exactly, also where the gradient has a bend. The left tells whether the values belong to the
gradient, the right whether the loss is convex and its curvature is a bound.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.losses.base import Loss
from streamkern.losses.own import RESERVED

LARGEST: Final = 1e3
"""Largest error that is tried, over the spread of the errors; the smallest is its inverse."""
SIZES_TRIED, FEWEST_SIZES, NUMBERS_TRIED = 400, 20, 40_000
"""Number of sizes of errors, of each sign: fewer for many outputs, so that there are not many more
numbers than that."""
STEP: Final = 1e-3
"""Difference of two errors over their size, for the values."""
LINE_POINTS: Final = 17
"""Number of points on each line on which values are compared with the gradient."""
NEIGHBOURS: Final = 40
"""Number of next larger errors whose rounding counts as that of an error."""
LARGEST_ROUNDING: Final = 1e-8
"""Largest rounding of values over the largest of them."""
NOISES: Final = 30
"""Multiple of the rounding of the values by which their differences may be wrong."""
_TAKEN: Final = (
    "mse", "mae", "r2", "accuracy", "coverage", "width", "score", "normalised_coverage",
    "normalised_width", "set_size", "brier", "ece", "log_loss",
)  # fmt: skip
"""Names of other figures."""

_Floats = npt.NDArray[np.float64]


def check_own_loss(loss: Loss, n_outputs: int, spread: float = 1.0) -> None:
    """Raise ConfigError with the first rule that a user-defined loss breaks.

    spread : standard deviation of the errors, in units of the targets
    """
    _LossCheck(loss, n_outputs, spread).check()


class _LossCheck:
    """The check of one loss, on errors (n, c) of all sizes and both signs in every output."""

    def __init__(self, loss: Loss, n_outputs: int, spread: float) -> None:
        self.given = self.loss = loss
        self.spread = spread
        tried = max(FEWEST_SIZES, min(SIZES_TRIED, NUMBERS_TRIED // n_outputs))
        sizes = spread * np.logspace(-math.log10(LARGEST), math.log10(LARGEST), tried)
        errors = np.concatenate([-sizes[::-1], [0.0], sizes])
        self.rng = np.random.default_rng(0)
        columns = [errors, *(self.rng.permutation(errors) for _ in range(n_outputs - 1))]
        self.errors: _Floats = np.column_stack(columns)

    def check(self) -> None:
        """Raise ConfigError with the first rule that is broken."""
        self._check_class()
        self._check_parameters(self.given)
        fitted = self._called("fitted", self.given, self.errors.copy(), self._scale())
        if type(fitted) is not type(self.given):
            self._refuse("fitted returns no loss of its class", "return self, or a changed copy")
        self._check_parameters(fitted)
        for rows in (0.0, math.inf):
            self.loss = self._called("at", fitted, rows)
            self._check_forms()
            self._check_curvature()
        self._check_values()

    def _scale(self) -> _Floats:
        return np.full(self.errors.shape[1], self.spread)

    def _refuse(self, rule: str, remedy: str) -> NoReturn:
        raise ConfigError(f"{mention('model.loss', self.given)}: {rule}", remedy)

    def _called(self, name: str, loss: Loss, *arguments: Any) -> Any:
        """Return what a method returns, or raise ConfigError with what it raises."""
        try:
            with np.errstate(all="ignore"):
                method = getattr(loss, name)
                return method(*arguments) if callable(method) else method
        except Exception as error:  # whatever a class of the user raises
            self._refuse(f"{name} raises {type(error).__name__}: {error}", f"correct {name}")

    def _check_class(self) -> None:
        kind = type(self.given)
        for name in ("gradient", "values"):
            if getattr(kind, name) is getattr(Loss, name):
                self._refuse(f"its class has no {name}", f"define {name}, see streamkern.Loss")
        if kind.for_classes or not kind.identity_link or kind.predict is not Loss.predict:
            self._refuse(
                "a loss of one's own is for values, which its outputs are",
                "leave for_classes, identity_link and predict out",
            )
        if not kind.figure.isidentifier() or kind.figure in _TAKEN:
            self._refuse(
                f"its figure {kind.figure!r} is not a name, or that of another figure",
                'leave figure out, or give another name, such as "my_loss"',
            )

    def _check_parameters(self, loss: Loss) -> None:
        """Check that the class makes an equal loss from its parameters, as JSON values."""
        parameters = self._called("parameters", loss)
        try:
            same = json.loads(json.dumps(parameters, allow_nan=False)) == parameters
        except (TypeError, ValueError):
            same = False
        if not same or not {*RESERVED}.isdisjoint(parameters):
            self._refuse(
                f"its parameters {parameters!r} are not finite JSON values, or one is called kind "
                "or values",
                "give numbers, text and lists of them",
            )
        try:
            given = {name: value for name, value in parameters.items() if value is not None}
            same = type(loss)(**given).parameters() == parameters
        except Exception:  # whatever a constructor of the user raises
            same = False
        if not same:
            self._refuse(
                "its class does not make it again from its parameters",
                "keep each argument of __init__ as an attribute of the same name",
            )

    # -- numbers ---------------------------------------------------------------------------------

    def _gradient(self, errors: npt.NDArray[Any]) -> npt.NDArray[Any]:
        shape, dtype = errors.shape, errors.dtype
        gradient = self._called("gradient", self.loss, np, errors.copy(), None)
        found = getattr(gradient, "shape", None), getattr(gradient, "dtype", None)
        if found != (shape, dtype):
            self._refuse(
                f"gradient returns shape {found[0]} and dtype {found[1]} for errors of shape "
                f"{shape} and dtype {dtype}",
                "return an array like the errors; make parameters Python numbers, or arrays of "
                "errors.dtype",
            )
        self._check_finite("gradient", np.abs(gradient).max(axis=1), errors)
        return np.asarray(gradient)

    def _values(self, F: npt.NDArray[Any], Y: npt.NDArray[Any]) -> _Floats:
        before = F.copy(), Y.copy()
        values = self._called("values", self.loss, np, F, Y)
        found = getattr(values, "shape", None), getattr(values, "dtype", None)
        if found != ((len(F),), np.float64):
            self._refuse(
                f"values returns shape {found[0]} and dtype {found[1]} for {len(F)} rows",
                "return the sum over the outputs of each row, in float64",
            )
        if not all(map(np.array_equal, before, (F, Y))):
            self._refuse("values changes its arguments", "work on a copy of F")
        self._check_finite("values", values, F - Y)
        return np.asarray(values)

    def _check_finite(self, name: str, row: npt.NDArray[Any], errors: npt.NDArray[Any]) -> None:
        bad = np.flatnonzero(~np.isfinite(row))
        if len(bad):
            size = np.abs(errors[bad]).max(axis=1).min()
            self._refuse(
                f"{name} is not finite at an error of {size:.3g} in {errors.dtype}",
                "write it so that large errors do not overflow",
            )

    def _check_forms(self) -> None:
        """Check shape, dtype and range of the gradient in both precisions."""
        exact, rough = self._gradient(self.errors), self._gradient(self.errors.astype(np.float32))
        allowed = 1e-3 * np.abs(exact) + 1e-5 * np.abs(exact).max()
        if (np.abs(rough - exact) > allowed).any():
            self._refuse(
                "gradient differs between float32 and float64",
                "write it without differences of large numbers",
            )
        self._check_curvatures()
        ends = self.errors.argmin(axis=0), self.errors.argmax(axis=0)
        outputs = np.arange(self.errors.shape[1])
        below, above = (exact[rows, outputs] for rows in ends)
        if (below >= 0).any() or (above <= 0).any():
            end = LARGEST * self.spread
            self._refuse(
                f"it has no minimum, as gradient is {below.max():.3g} at an error of {-end:.3g} "
                f"and {above.min():.3g} at {end:.3g}",
                "return the derivative by the prediction, which rises with the error",
            )

    def _check_curvatures(self) -> None:
        """Check shape, dtype and range of the curvatures of a Newton step in both precisions."""
        for errors in (self.errors, self.errors.astype(np.float32)):
            before = errors.copy()
            h = self._called("curvatures", self.loss, np, errors, None)
            found = getattr(h, "shape", None), getattr(h, "dtype", None)
            if found != (errors.shape, errors.dtype) or not np.array_equal(errors, before):
                self._refuse(
                    f"curvatures returns shape {found[0]} and dtype {found[1]} for errors of shape "
                    f"{errors.shape} and dtype {errors.dtype}, or changes them",
                    "return a new array like the errors, or leave curvatures out",
                )
            if not ((h >= 0) & (h <= 1 + 1e-6)).all():
                self._refuse(
                    f"curvatures are between {np.min(h):.4g} and {np.max(h):.4g}",
                    "return second derivatives over curvature, which are from 0 to 1, or leave "
                    "curvatures out",
                )

    def _check_curvature(self) -> None:
        """Check that the loss is convex and its curvature a bound, on lines in all directions."""
        c = self.errors.shape[1]
        curvature = self._called("curvature", self.loss)
        try:
            L = np.broadcast_to(np.asarray(curvature, np.float64), (c,))
        except (TypeError, ValueError):
            L = np.full(c, np.nan)
        if not (np.isfinite(L) & (L > 0)).all():
            self._refuse(
                f"curvature is {curvature!r}", "return a finite number above 0, or one by output"
            )
        size = np.abs(self.errors) + self.spread / LARGEST
        others = [self.rng.permutation(self.errors), np.roll(self.errors, 1, axis=0)]
        others += [self.errors + h * size * self._directions() for h in (STEP, 0.1, 1.0)]
        here = self._gradient(self.errors)
        for other in others:
            there, d = self._gradient(other), other - self.errors
            rise, bound = ((there - here) * d).sum(axis=1), (L * d * d).sum(axis=1)
            slack = 1e-9 * ((np.abs(here) + np.abs(there)) * np.abs(d)).sum(axis=1)
            if (rise < -slack).any():
                row = int(np.argmin(rise + slack))
                self._refuse(
                    "it is not convex, as gradient falls from an error of "
                    f"{_text(self.errors[row])} to {_text(other[row])}",
                    "give a convex loss",
                )
            if (rise > 1.000001 * bound + slack).any():
                slopes = np.divide(L.max() * rise, bound, out=np.zeros(len(d)), where=bound > 0)
                row = int(np.argmax(slopes))
                self._refuse(
                    f"curvature={_text(L)} is not a bound, as gradient has the slope "
                    f"{slopes[row]:.4g} between errors of "
                    f"{_text(self.errors[row])} and {_text(other[row])}",
                    "return the largest second derivative as curvature",
                )

    def _directions(self) -> _Floats:
        return self.rng.uniform(-1, 1, self.errors.shape)

    def _check_values(self) -> None:
        """Check that differences of the values lie between the gradients at their ends."""
        E, (n, c) = self.errors, self.errors.shape
        Y = self.spread * self.rng.standard_normal(E.shape)
        self._values((E + Y).astype(np.float32), Y.astype(np.float32))
        rows = np.arange(n)
        output: npt.NDArray[np.int64] = self.rng.integers(0, c, size=(n,))
        size = np.abs(E[rows, output])
        h = STEP * (size + self.spread / LARGEST)
        along = h[:, None] * (np.arange(c) == output[:, None])
        values = np.array(
            [self._values(Y + E + t * along, Y) for t in np.linspace(-2, 2, LINE_POINTS)]
        )
        noise = _rounding(values, size)
        low, high = (self._gradient(E + t * along)[rows, output] for t in (-1, 1))
        slope = (values[-1 - LINE_POINTS // 4] - values[LINE_POINTS // 4]) / (2 * h)
        slack = 1e-6 * (np.abs(low) + np.abs(high)) + NOISES * noise / h
        wrong = (slope < low - slack) | (slope > high + slack)
        if wrong.any():
            row = int(np.argmax(np.abs(slope - (low + high) / 2) * wrong))
            self._refuse(
                f"gradient is {(low[row] + high[row]) / 2:.4g} at an error of "
                f"{E[row, output[row]]:.4g}, where differences of values give {slope[row]:.4g}",
                "return the derivative of values by the prediction as gradient, and values without "
                "differences of large numbers",
            )


def _rounding(values: _Floats, size: _Floats) -> _Floats:
    """Return the rounding of values (LINE_POINTS, n), each column on a line, by size of the error.

    It is by how much the points do not look convex. Values that are equal on a line do not show it,
    so that of smaller errors counts as well, and that of the next larger ones. Values that jump are
    not rounded.
    """
    order = np.argsort(size)
    bent = np.maximum(-np.diff(values, n=2, axis=0), 0).max(axis=0)[order]
    bent = np.minimum(bent, LARGEST_ROUNDING * np.abs(values).max())
    ahead = sliding_window_view(np.pad(bent, (0, NEIGHBOURS), "edge"), NEIGHBOURS + 1).max(axis=1)
    rounding: _Floats = np.empty(len(bent))
    rounding[order] = np.maximum.accumulate(ahead)
    return rounding


def _text(numbers: _Floats) -> str:
    """Return one number, or a few in brackets."""
    numbers = np.unique(numbers) if np.ptp(numbers) == 0 else numbers
    shown = ", ".join(f"{number:.4g}" for number in numbers[:4])
    return shown if len(numbers) == 1 else f"({shown})"
