"""Define user losses in a module that settings name: valid and invalid ones."""

from __future__ import annotations

from typing import Any

import numpy as np

import streamkern


class LogCosh(streamkern.Loss):
    """width^2 log cosh(e / width)."""

    figure = "log_cosh"

    def __init__(self, width: float = 1.0) -> None:
        self.width = width

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the derivative, in place."""
        errors /= self.width
        xp.tanh(errors, out=errors)
        errors *= self.width
        return errors

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows."""
        size = xp.abs(F.astype(np.float64) - Y) / self.width
        return self.width**2 * (size + xp.log1p(xp.exp(-2 * size)) - np.log(2)).sum(axis=1)


class Distance(streamkern.Loss):
    """sqrt(1 + |e|^2) - 1, whose outputs depend on each other, in units that the data give."""

    def __init__(self, unit: float | None = None) -> None:
        self.unit = unit

    def fitted(self, errors: Any, scale: Any) -> Distance:
        """Return the loss in units of the errors."""
        return Distance(float(np.sqrt(np.mean(errors**2))))

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the derivative, as a new array."""
        assert self.unit is not None
        size = xp.sqrt(1 + xp.square(errors / self.unit).sum(axis=1, keepdims=True))
        return errors / size

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows."""
        assert self.unit is not None
        e = (F.astype(np.float64) - Y) / self.unit
        return self.unit**2 * (xp.sqrt(1 + (e * e).sum(axis=1)) - 1)


class Renamed(LogCosh):
    """A loss that cannot be made from its parameters."""

    def __init__(self, w: float = 1.0) -> None:
        super().__init__(w)


class NeedsWidth(LogCosh):
    """A loss whose parameter has no default."""

    def __init__(self, width: float) -> None:
        super().__init__(width)


NOT_A_LOSS = 3
