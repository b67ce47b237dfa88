"""The check of a user-defined loss, before a run, by evaluating it at some errors.

A loss l is convex, and its gradient g is continuous. For two points a and b, with the unit vector
u from a to b,

    g(a).u <= (l(b) - l(a)) / |b - a| <= g(b).u,        0 <= (g(b) - g(a)).u <= L |b - a|.

These hold exactly, even if the gradient has a kink. The left inequalities test whether `values` and
`gradient` belong together. The right ones test whether the loss is convex, and whether `curvature`
is an upper bound.
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

MAX_ERROR_RATIO: Final = 1e3
"""Largest error that is tried, in units of the errors' spread; the smallest is its inverse."""
MAX_SIZES, MIN_SIZES, MAX_NUMBERS = 400, 20, 40_000
"""Bounds of the number of sizes of errors that are tried, and of sizes times outputs."""
STEP: Final = 1e-3
"""Step from an error, relative to its size, over which gradients and values are compared."""
LINE_POINTS: Final = 17
"""Number of points, on a line through an error, at which values are computed."""
N_LARGER_ERRORS: Final = 40
"""Number of next larger errors from which the rounding error at an error is estimated as well."""
MAX_ROUNDING: Final = 1e-8
"""Largest rounding error of values that is accepted, divided by the largest value."""
ROUNDING_FACTOR: Final = 30
"""Accepted error of differences of values, as a multiple of the rounding error of the values."""
_OTHER_FIGURES: Final = (
    "mse", "mae", "r2", "accuracy", "coverage", "width", "score", "normalised_coverage",
    "normalised_width", "set_size", "brier", "ece", "log_loss",
)  # fmt: skip
"""Names of figures that a loss may not use for its own."""

_Floats = npt.NDArray[np.float64]


def check_user_loss(loss: Loss, n_outputs: int, spread: float = 1.0) -> None:
    """Raise ConfigError with the first rule that a user-defined loss breaks.

    spread : standard deviation of the errors, in units of the targets.
    """
    _LossCheck(loss, n_outputs, spread).check()


class _LossCheck:
    """The check of one loss at errors (n, c), of all sizes and both signs in every output."""

    def __init__(self, loss: Loss, n_outputs: int, spread: float) -> None:
        self.user_loss = loss
        self.loss = loss  # fitted, and with the parameters of an epoch
        self.spread = spread
        n_sizes = max(MIN_SIZES, min(MAX_SIZES, MAX_NUMBERS // n_outputs))
        sizes = spread * np.logspace(
            -math.log10(MAX_ERROR_RATIO), math.log10(MAX_ERROR_RATIO), n_sizes
        )
        errors = np.concatenate([-sizes[::-1], [0.0], sizes])
        self.rng = np.random.default_rng(0)
        columns = [errors, *(self.rng.permutation(errors) for _ in range(n_outputs - 1))]
        self.errors: _Floats = np.column_stack(columns)

    def check(self) -> None:
        """Raise ConfigError with the first rule that is broken."""
        self._check_class()
        self._check_parameters(self.user_loss)
        scale = np.full(self.errors.shape[1], self.spread)
        fitted = self._call("fitted", self.user_loss, self.errors.copy(), scale)
        if type(fitted) is not type(self.user_loss):
            self._refuse(
                "fitted must return a loss of the same class", "return self, or a changed copy"
            )
        self._check_parameters(fitted)
        for rows_per_center in (0.0, math.inf):
            self.loss = self._call("at", fitted, rows_per_center)
            self._check_gradient()
            self._check_curvature()
        self._check_values()

    def _refuse(self, rule: str, remedy: str) -> NoReturn:
        """Raise ConfigError for the loss that the user gave."""
        raise ConfigError(f"{mention('model.loss', self.user_loss)}: {rule}", remedy)

    def _call(self, name: str, loss: Loss, *arguments: Any) -> Any:
        """Return the value of an attribute of the loss, or the result of a method.

        Raises ConfigError if it raises an error.
        """
        try:
            with np.errstate(all="ignore"):
                member = getattr(loss, name)
                return member(*arguments) if callable(member) else member
        except Exception as error:  # a user's class may raise anything
            self._refuse(f"{name} raises {type(error).__name__}: {error}", f"correct {name}")

    def _check_class(self) -> None:
        """Check the members that a user-defined class must define, and those that it must not."""
        loss_class = type(self.user_loss)
        for name in ("gradient", "values"):
            if getattr(loss_class, name) is getattr(Loss, name):
                self._refuse(f"its class has no {name}", f"define {name}, see streamkern.Loss")
        if (
            loss_class.for_classes
            or not loss_class.identity_link
            or loss_class.predict is not Loss.predict
        ):
            self._refuse(
                "the outputs of a user-defined loss must be its predictions, which are values",
                "do not define for_classes, identity_link or predict",
            )
        figure = loss_class.figure
        if not figure.isidentifier() or figure in _OTHER_FIGURES:
            self._refuse(
                f"its figure {figure!r} must be an identifier that no other figure has",
                'do not define figure, or give another name, such as "my_loss"',
            )

    def _check_parameters(self, loss: Loss) -> None:
        """Check that the parameters are JSON values from which the class makes an equal loss."""
        parameters = self._call("parameters", loss)
        try:
            is_json = json.loads(json.dumps(parameters, allow_nan=False)) == parameters
        except (TypeError, ValueError):
            is_json = False
        if not is_json or not {*RESERVED}.isdisjoint(parameters):
            self._refuse(
                f"its parameters {parameters!r} must be finite JSON values, and none may be called "
                "kind or values",
                "use numbers, text and lists of them",
            )
        try:
            arguments = {name: value for name, value in parameters.items() if value is not None}
            is_equal = type(loss)(**arguments).parameters() == parameters
        except Exception:  # a user's constructor may raise anything
            is_equal = False
        if not is_equal:
            self._refuse(
                "its class must make an equal loss from its parameters",
                "store each argument of __init__ in an attribute of the same name",
            )

    # -- numbers ---------------------------------------------------------------------------------

    def _gradient(self, errors: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the gradient at the errors, after checks of its shape, dtype and finiteness."""
        gradient = self._call("gradient", self.loss, np, errors.copy(), None)
        shape, dtype = _shape_and_dtype(gradient)
        if (shape, dtype) != (errors.shape, errors.dtype):
            self._refuse(
                f"gradient returns shape {shape} and dtype {dtype} for errors of shape "
                f"{errors.shape} and dtype {errors.dtype}",
                "return an array like the errors; make parameters Python numbers, or arrays of "
                "errors.dtype",
            )
        self._check_finite("gradient", np.abs(gradient).max(axis=1), errors)
        return np.asarray(gradient)

    def _values(self, F: npt.NDArray[Any], Y: npt.NDArray[Any]) -> _Floats:
        """Return the values, after checks of their shape, dtype and finiteness."""
        copies = F.copy(), Y.copy()
        values = self._call("values", self.loss, np, F, Y)
        shape, dtype = _shape_and_dtype(values)
        if (shape, dtype) != ((len(F),), np.float64):
            self._refuse(
                f"values returns shape {shape} and dtype {dtype} for {len(F)} rows",
                "return the sum over the outputs of each row, in float64",
            )
        if not all(map(np.array_equal, copies, (F, Y))):
            self._refuse("values changes its arguments", "work on a copy of F")
        self._check_finite("values", values, F - Y)
        return np.asarray(values)

    def _check_finite(self, name: str, results: npt.NDArray[Any], errors: npt.NDArray[Any]) -> None:
        """Check that a method's results (n,) for errors (n, c) are finite."""
        rows = np.flatnonzero(~np.isfinite(results))
        if len(rows):
            size = np.abs(errors[rows]).max(axis=1).min()
            self._refuse(
                f"{name} is not finite at an error of {size:.3g} in {errors.dtype}",
                "write it so that large errors do not overflow",
            )

    def _check_gradient(self) -> None:
        """Check the gradient and the curvatures in both precisions, and that there is a minimum."""
        exact, single = self._gradient(self.errors), self._gradient(self.errors.astype(np.float32))
        tolerance = 1e-3 * np.abs(exact) + 1e-5 * np.abs(exact).max()
        if (np.abs(single - exact) > tolerance).any():
            self._refuse(
                "gradient differs between float32 and float64",
                "write it without differences of large numbers",
            )
        self._check_curvatures()
        extreme_rows = self.errors.argmin(axis=0), self.errors.argmax(axis=0)
        outputs = np.arange(self.errors.shape[1])
        lowest, highest = (exact[rows, outputs] for rows in extreme_rows)
        if (lowest >= 0).any() or (highest <= 0).any():
            largest = MAX_ERROR_RATIO * self.spread
            self._refuse(
                f"it has no minimum, as gradient is {lowest.max():.3g} at an error of "
                f"{-largest:.3g} and {highest.min():.3g} at {largest:.3g}",
                "return the derivative with respect to the prediction, which rises with the error",
            )

    def _check_curvatures(self) -> None:
        """Check shape, dtype and range of the curvatures of a Newton step in both precisions."""
        for errors in (self.errors, self.errors.astype(np.float32)):
            copy = errors.copy()
            h = self._call("curvatures", self.loss, np, errors, None)
            shape, dtype = _shape_and_dtype(h)
            if (shape, dtype) != (errors.shape, errors.dtype) or not np.array_equal(errors, copy):
                self._refuse(
                    f"curvatures returns shape {shape} and dtype {dtype} for errors of shape "
                    f"{errors.shape} and dtype {errors.dtype}, or changes the errors",
                    "return a new array like the errors, or do not define curvatures",
                )
            if not ((h >= 0) & (h <= 1 + 1e-6)).all():
                self._refuse(
                    f"curvatures are between {np.min(h):.4g} and {np.max(h):.4g}",
                    "return second derivatives divided by curvature, which are from 0 to 1, or do "
                    "not define curvatures",
                )

    def _check_curvature(self) -> None:
        """Check that the loss is convex and its curvature a bound, on lines in all directions."""
        # The curvature L: a positive number, or one for each output.
        c = self.errors.shape[1]
        curvature = self._call("curvature", self.loss)
        try:
            L = np.broadcast_to(np.asarray(curvature, np.float64), (c,))
        except (TypeError, ValueError):
            L = np.full(c, np.nan)
        if not (np.isfinite(L) & (L > 0)).all():
            self._refuse(
                f"curvature is {curvature!r}",
                "return a finite number above 0, or one for each output",
            )
        # Lines from the errors a to points b: other errors, and points in random directions from a.
        a = self.errors
        size = np.abs(a) + self.spread / MAX_ERROR_RATIO
        second_points = [self.rng.permutation(a), np.roll(a, 1, axis=0)]
        second_points += [a + h * size * self.rng.uniform(-1, 1, a.shape) for h in (STEP, 0.1, 1.0)]
        gradient_a = self._gradient(a)
        for b in second_points:
            gradient_b = self._gradient(b)
            d = b - a
            # The right inequalities of the module docstring, times |b - a|.
            rise = ((gradient_b - gradient_a) * d).sum(axis=1)
            bound = (L * d * d).sum(axis=1)
            slack = 1e-9 * ((np.abs(gradient_a) + np.abs(gradient_b)) * np.abs(d)).sum(axis=1)
            if (rise < -slack).any():
                row = int(np.argmin(rise + slack))
                self._refuse(
                    "it is not convex, as gradient falls from an error of "
                    f"{_text(a[row])} to {_text(b[row])}",
                    "give a convex loss",
                )
            if (rise > 1.000001 * bound + slack).any():
                slopes = np.divide(L.max() * rise, bound, out=np.zeros(len(d)), where=bound > 0)
                row = int(np.argmax(slopes))
                self._refuse(
                    f"curvature={_text(L)} is not a bound, as gradient has the slope "
                    f"{slopes[row]:.4g} between errors of {_text(a[row])} and {_text(b[row])}",
                    "return the largest second derivative as curvature",
                )

    def _check_values(self) -> None:
        """Check that slopes of the values are between the gradients at the ends of a line.

        Each line changes one output of an error, from -2 h to 2 h. The slope is that of the values
        between -h and h.
        """
        E, (n, c) = self.errors, self.errors.shape
        Y = self.spread * self.rng.standard_normal(E.shape)
        self._values((E + Y).astype(np.float32), Y.astype(np.float32))
        rows = np.arange(n)
        output: npt.NDArray[np.int64] = self.rng.integers(0, c, size=(n,))
        size = np.abs(E[rows, output])
        h = STEP * (size + self.spread / MAX_ERROR_RATIO)
        step = h[:, None] * (np.arange(c) == output[:, None])
        values = np.array(
            [self._values(Y + E + t * step, Y) for t in np.linspace(-2, 2, LINE_POINTS)]
        )
        rounding = _rounding(values, size)
        low, high = (self._gradient(E + t * step)[rows, output] for t in (-1, 1))
        slope = (values[-1 - LINE_POINTS // 4] - values[LINE_POINTS // 4]) / (2 * h)
        slack = 1e-6 * (np.abs(low) + np.abs(high)) + ROUNDING_FACTOR * rounding / h
        is_wrong = (slope < low - slack) | (slope > high + slack)
        if is_wrong.any():
            row = int(np.argmax(np.abs(slope - (low + high) / 2) * is_wrong))
            self._refuse(
                f"gradient is {(low[row] + high[row]) / 2:.4g} at an error of "
                f"{E[row, output[row]]:.4g}, where differences of values give {slope[row]:.4g}",
                "return as gradient the derivative of values with respect to the prediction, and "
                "compute values without differences of large numbers",
            )


def _rounding(values: _Floats, size: _Floats) -> _Floats:
    """Return an estimate of the rounding errors of the values on each line, (n,).

    It is the largest violation of convexity by the values of a line. Values that are equal on a
    line do not show their rounding error, so the violations of smaller errors and of the next
    larger ones count as well. Violations above `MAX_ROUNDING` are no rounding errors, and are
    cut off.

    values : (LINE_POINTS, n), each column on a line.
    size : (n,) sizes of the errors.
    """
    order = np.argsort(size)
    violations = np.maximum(-np.diff(values, n=2, axis=0), 0).max(axis=0)[order]
    violations = np.minimum(violations, MAX_ROUNDING * np.abs(values).max())
    padded = np.pad(violations, (0, N_LARGER_ERRORS), "edge")
    with_larger = sliding_window_view(padded, N_LARGER_ERRORS + 1).max(axis=1)
    rounding: _Floats = np.empty(len(violations))
    rounding[order] = np.maximum.accumulate(with_larger)
    return rounding


def _shape_and_dtype(result: object) -> tuple[Any, Any]:
    """Return the shape and the dtype of an array, and None for those that an object lacks."""
    return getattr(result, "shape", None), getattr(result, "dtype", None)


def _text(numbers: _Floats) -> str:
    """Format equal numbers as one number, and others as the first four in parentheses."""
    numbers = np.unique(numbers) if np.ptp(numbers) == 0 else numbers
    text = ", ".join(f"{number:.4g}" for number in numbers[:4])
    return text if len(numbers) == 1 else f"({text})"
