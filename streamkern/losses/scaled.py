"""A loss as a function of f, where z = mean + gain f are the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend
from streamkern.losses.base import Loss
from streamkern.losses.log_link import LARGEST_EXPONENT, MAX_ROW_MOVE, LogLink
from streamkern.losses.losses import saved_loss

MAX_STEP_MOVE: Final = 2.0
"""Largest change of an output z of a log link by a step, in any row that the step has measured.

The step of a block measures the rows of its batch, and that of FALKON all rows.
"""
MAX_DOUBLINGS: Final = 2
"""Number of epochs of Newton's method in which the longest move of a row, for a log link, doubles.

With fewer doublings it takes more steps. With many, it may not converge from means that are much
too large for targets of the gamma loss (tests/train/test_counts.py).
"""


class ScaledLoss:
    """A loss of the outputs z = mean + gain f, as a function of the model f.

    The stream provides targets that depend on the link, and the errors of this class refer to them:

        identity link   scaled targets y' = (y - mean) / gain    errors f - y'
        log link        targets over their means, y' = y / unit  errors exp(z - log(unit)) - y'
        softmax         targets as stored, y' = y                errors softmax(z) - y'

    The squared hinge has targets as stored, and errors that are 0 where the loss is 0.

    Parameters
    ----------
    loss : the loss, after `Loss.fitted`.
    backend, dtype : of the arrays (m, c).
    mean, gain : (c,), see `stream.target_scale`.
    age : rows per center on which this loss trained the weights before the run.

    Attributes
    ----------
    scales_targets : whether targets are scaled.
    unit : (c,) divisor of the targets for a log link; else None.
    limits : whether steps must be limited, see `limit`.
    of_zero : (c,) predictions of f = 0, in the units of the targets y'.
    """

    def __init__(
        self, loss: Loss, backend: Backend, dtype: Any,
        mean: npt.NDArray[np.float64], gain: npt.NDArray[np.float64], age: float = 0.0,
    ) -> None:  # fmt: skip
        self.loss, self._xp, self._age = loss, backend.xp, age
        self.scales_targets, self.unit = loss.identity_link, None
        self.limits = isinstance(loss, LogLink)
        self._predictions: Array = None
        if isinstance(loss, LogLink):
            self.unit = np.asarray(loss.unit, np.float64)
            mean = mean - np.log(self.unit)
        self._backend, self._dtype = backend, dtype
        self._mean, self._gain, self._host_gain = self._asarray(mean), self._asarray(gain), gain
        self.of_zero = self._asarray(np.zeros_like(mean))
        if not self.scales_targets:
            z = self._mean[None].copy()  # a copy, because `predict` overwrites it
            self.of_zero = loss.predict(backend.xp, z)[0]

    def _asarray(self, values: npt.NDArray[np.float64]) -> Array:
        return self._backend.asarray(values, self._dtype)

    def errors(self, F: Array, Y: Array) -> Array:
        """Return the errors (m, c) of f for the targets Y (m, c) of the stream.

        F : (m, c) values of f, overwritten by the errors.
        """
        if not self.scales_targets:
            F *= self._gain
            F += self._mean
            F = self.loss.predict(self._xp, F)
        if self.limits:  # errors + Y would lose digits of small predictions
            self._predictions = F.copy()
        F -= Y
        if self.loss.for_classes:  # their gradients are the errors, or 0 where the hinge is 0
            F = self.loss.gradient(self._xp, F, Y)
        return F

    def curvatures(self, errors: Array, Y: Array, epochs: int) -> Array:
        """Return the curvatures (m, c) for a Newton step, in units of gain^2 L.

        errors : the result of `errors` for the targets Y; for a log link, the last call of it.
        epochs : number of epochs before this one. For a log link, the longest move of a row alone
            doubles in the first epochs: long moves overshoot far from the minimum, and save steps
            near it.
        """
        if isinstance(self.loss, LogLink):
            longest_move = MAX_ROW_MOVE * 2.0 ** min(epochs, MAX_DOUBLINGS)
            return self.loss.newton_curvatures(self._xp, self._predictions, Y, longest_move)
        loss = self.loss.at(self._age + epochs)
        return loss.curvatures(self._xp, errors * self._gain if self.scales_targets else errors, Y)

    def residual(
        self, errors: Array, Y: Array, rows_per_center: float
    ) -> tuple[Array, Array | None]:
        """Return the residual (m, c) of the squared error that majorises the loss, and its weights.

        The weights are (m,), or None if all are 1. The gradient with respect to f is gain dl/dz,
        and its curvature is at most gain^2 L times the weight, with L = 1 for a log link. So weight
        times residual is the gradient divided by gain^2 L.

        errors : the result of `errors` for the targets Y, overwritten by the residual; for a log
            link, the last call of it.
        rows_per_center : rows per center that this run has trained with so far.
        """
        loss = self.loss.at(self._age + rows_per_center)
        if isinstance(loss, LogLink):
            weights = loss.row_curvature(self._xp, self._predictions, Y)
            errors[...] = loss.slope(self._xp, self._predictions, Y)
            errors /= weights[:, None]
            errors *= self._asarray(1 / self._host_gain)
            return errors, weights
        if self.scales_targets:
            errors *= self._gain
        gradient = loss.gradient(self._xp, errors, Y)
        gradient *= self._asarray(1 / (loss.curvature * self._host_gain))
        return gradient, None

    def curvatures_at(self, Y: Array) -> Array:
        """Return the second derivatives of a log link (m, c) float64, in units of gain^2 L.

        Y : (m, c) targets of the last call of `errors`, whose f is used.
        """
        z = self._predictions.astype(np.float64)
        return self._second_derivative(self._xp.log(z, out=z), Y)

    def largest_curvatures(self, moves: Array, Y: Array) -> Array:
        """Return the largest curvatures of a log link on the path from f to f - moves.

        They are (m, c) float64, in units of gain^2 L. f are the values of the last call of
        `errors`, for the targets Y. The second derivative is monotonic in f, so it is largest at
        one of the ends.

        moves : (m, c), overwritten.
        """
        moves *= self._gain
        xp, z = self._xp, self._predictions.astype(np.float64)
        xp.log(z, out=z)
        at_end = self._second_derivative(z - moves, Y)
        at_start = self._second_derivative(z, Y)
        return xp.maximum(at_start, at_end, out=at_start)

    def _second_derivative(self, z: Array, Y: Array) -> Array:
        """Return the second derivative of a log link's loss in z (m, c) float64, overwriting z."""
        assert isinstance(self.loss, LogLink)
        largest = LARGEST_EXPONENT[8] / 2
        self._xp.clip(z, -largest, largest, out=z)
        return self.loss.second_derivative(self._xp, self._xp.exp(z, out=z), Y)

    def largest_move(self, moves: Array) -> Array:
        """Return the largest change of an output z by changes of f (m, c), which are overwritten.

        The result has shape (), and is 0 if there are no rows.
        """
        if not len(moves):
            return self._xp.zeros((), moves.dtype)
        moves *= self._gain
        return self._xp.abs(moves, out=moves).max()

    def limit(self, largest: Array) -> Array:
        """Return the factor, at most 1, of a step, such that no z changes by over `MAX_STEP_MOVE`.

        Beyond that, the loss of a log link may be far from its quadratic approximation.

        largest : result of `largest_move`, or the largest of several ranks
        """
        return MAX_STEP_MOVE / self._xp.maximum(largest, MAX_STEP_MOVE)


def scaled_loss(
    backend: Backend, dtype: Any, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
) -> ScaledLoss | None:
    """Return the loss of a setup's metadata and arrays; None for the squared error."""
    loss = saved_loss(meta)
    if loss is None:
        return None
    mean, gain = (np.asarray(arrays[name]) for name in ("target_mean", "target_scale"))
    age = meta["setup"].get("loss_age", 0.0)
    return ScaledLoss(loss, backend, dtype, mean, gain, age)
