"""Checks of the parameters of kernels."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import numpy as np

from streamkern.basics.errors import ConfigError

_P = ParamSpec("_P")
_FOREIGN_NAMES = {
    **dict.fromkeys(("sigma", "length_scale", "lengthscale", "width", "scale", "bw"),
                    ("bandwidth", "use bandwidth=")),
    "gamma": ("bandwidth", "use bandwidth=: 1 / sqrt(2 * gamma) for the Gaussian "
              "exp(-gamma |x - z|^2), and 1 / gamma for exp(-gamma |x - z|)"),
    "nu": (None, "use Laplace, Matern32 or Matern52 for nu of 0.5, 1.5 or 2.5"),
    "coef0": ("c0", "use c0="),
}  # fmt: skip
"""Name of a kernel parameter in another library -> the parameter that a kernel must have for the
advice, or None, and the advice for an error message."""


def positive_parameter(name: str, value: Any, *, zero: bool = False) -> float:
    """Return a finite number above 0 (or 0 with `zero`) as a float; otherwise raise ConfigError."""
    is_real = isinstance(value, int | float | np.integer | np.floating)
    try:
        is_number = is_real and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        is_number = False
    if not is_number or value < 0 or (value == 0 and not zero):
        rule = "a finite number, 0 or above" if zero else "a finite number above 0"
        raise ConfigError(f"{name}={value!r} must be {rule}", f"correct {name}")
    return float(value)


def count_parameter(name: str, value: Any, maximum: int) -> int:
    """Return a whole number from 1 to `maximum`; otherwise raise ConfigError."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not 1 <= value <= maximum:
        raise ConfigError(
            f"{name}={value!r} must be a whole number between 1 and {maximum}", f"correct {name}"
        )
    return int(value)


def sample_values(kernel: Any) -> list[float]:
    """Return a few values of a kernel, to 6 digits, by which a changed class is recognised.

    The list is empty if they cannot be computed.
    """
    squares = np.array([0.0, 0.1, 1.0, 5.0])
    try:
        with np.errstate(all="ignore"):
            if kernel.geometry == "inner":
                x, z = np.ones((1, 1)), np.maximum(squares, 1.0)
                values = kernel.of_products(np.sqrt(squares)[None] / 3, x, z, np)
            else:
                values = kernel.profile(squares, np)
        return [float(f"{value:.6g}") for value in np.ravel(values)]
    except Exception:  # a user's function may raise anything; training will show the error
        return []


def check_names(
    init: Callable[Concatenate[Any, _P], None],
) -> Callable[Concatenate[Any, _P], None]:
    """Make a kernel's constructor raise a TypeError with advice for unknown parameter names."""
    allowed = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: Any, /, *args: _P.args, **values: _P.kwargs) -> None:
        for name in values:
            if name not in allowed:
                needed, remedy = _FOREIGN_NAMES.get(name, (None, None))
                if remedy is None or (needed is not None and needed not in allowed):
                    remedy = f"it takes {', '.join(allowed)}"
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}; {remedy}")
        init(self, *args, **values)

    return checked
