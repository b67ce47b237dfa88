"""A loss of z = mean + gain f, as a solver of f sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend
from streamkern.losses.base import Loss
from streamkern.losses.log_link import LARGEST_EXPONENT, LONGEST_MOVE, LogLink
from streamkern.losses.losses import saved_loss

LARGEST_STEP: Final = 2.0
"""Largest change of an output of a log link in a row of the batch by a step."""
MOST_DOUBLINGS: Final = 2
"""Number of passes in which the longest move of a row in a Newton step of a log link doubles.

With 1 Newton's method took up to twice the steps; with 4 it did not leave means that were e^10
times too large for targets of the gamma loss (tests/train/test_counts.py).
"""


class ScaledLoss:
    """A loss of the outputs z = mean + gain f, whose target for f is never formed.

    For a loss of an identity link the targets are scaled, as for squares: (y - mean) / gain, with
    the error f - (y - mean) / gain; else they are as stored, with the error predict(z) - y. With a
    log link both are divided by the unit of the targets, which z contains.

    mean, gain : (c,); see `stream.target_scale`
    age : rows per center that the weights were trained with by this loss before the run
    unit : (c,), by which the targets are divided; None: they are scaled, or as stored
    limits : whether a step has to be short enough, see `limit`
    """

    def __init__(
        self, loss: Loss, backend: Backend, dtype: Any,
        mean: npt.NDArray[np.float64], gain: npt.NDArray[np.float64], age: float = 0.0,
    ) -> None:  # fmt: skip
        self.loss, self._xp, self._age = loss, backend.xp, age
        self.scales_targets, self.unit = loss.identity_link, None
        self.limits = isinstance(loss, LogLink)
        self._F: Array = None
        if isinstance(loss, LogLink):
            self.unit = np.asarray(loss.unit, np.float64)
            mean = mean - np.log(self.unit)
        self._backend, self._dtype = backend, dtype
        self._mean, self._gain, self._host_gain = self._asarray(mean), self._asarray(gain), gain
        self.of_zero = self._asarray(np.zeros_like(mean))
        if not self.scales_targets:
            of_zero = self._mean[None].copy()  # `predict` takes its place
            self.of_zero = loss.predict(backend.xp, of_zero)[0]

    def _asarray(self, values: npt.NDArray[np.float64]) -> Array:
        return self._backend.asarray(values, self._dtype)

    def errors(self, F: Array, Y: Array) -> Array:
        """Return the errors of the predictions (m, c), in place of F: 0 where a hinge has none."""
        if not self.scales_targets:
            F *= self._gain
            F += self._mean
            F = self.loss.predict(self._xp, F)
        if self.limits:  # from the errors it could not be had without cancellation
            self._F = F.copy()
        F -= Y
        if self.loss.for_classes:  # of such a loss the gradient is the part of the errors to mend
            F = self.loss.gradient(self._xp, F, Y)
        return F

    def curvatures(self, errors: Array, Y: Array, passes: int) -> Array:
        """Return the curvatures (m, c) that a Newton step takes, in units of gain^2 L.

        passes : number of passes before this one. For a log link, the longest move of a row alone
            doubles with the first ones: a long one helps near the minimum, and overshoots far
            from it.
        """
        if isinstance(self.loss, LogLink):
            longest = LONGEST_MOVE * 2.0 ** min(passes, MOST_DOUBLINGS)
            return self.loss.newton_curvatures(self._xp, self._F, Y, longest)
        loss = self.loss.at(self._age + passes)
        return loss.curvatures(self._xp, errors * self._gain if self.scales_targets else errors, Y)

    def residual(
        self, errors: Array, Y: Array, rows_per_center: float
    ) -> tuple[Array, Array | None]:
        """Return the residual of the square that stands for the loss in f, in place of `errors`,
        and its weights (m,); None: all are 1.

        rows_per_center : of this run, so far

        The gradient in f is gain dl/dz, and its curvature at most gain^2 L, or for a log link
        gain^2 times the weight. Weight times residual are the gradient, over gain^2 L.
        """
        loss = self.loss.at(self._age + rows_per_center)
        if isinstance(loss, LogLink):
            weights = loss.row_curvature(self._xp, self._F, Y)
            errors[...] = loss.slope(self._xp, self._F, Y)
            errors /= weights[:, None]
            errors *= self._asarray(1 / self._host_gain)
            return errors, weights
        if self.scales_targets:
            errors *= self._gain
        gradient = loss.gradient(self._xp, errors, Y)
        gradient *= self._asarray(1 / (loss.curvature * self._host_gain))
        return gradient, None

    def largest_curvatures(self, moves: Array, Y: Array) -> Array:
        """Return the largest curvatures (m, c) float64 of a log link, in units of gain^2 L, between
        the last outputs f and f - moves.

        moves : (m, c), overwritten

        The second derivative is monotonic in f, so it is largest at one of the ends.
        """
        moves *= self._gain
        xp, z = self._xp, self._F.astype(np.float64)
        xp.log(z, out=z)
        before = self._second_derivative(z - moves, Y)
        after = self._second_derivative(z, Y)
        return xp.maximum(after, before, out=after)

    def _second_derivative(self, z: Array, Y: Array) -> Array:
        """Return the second derivative of a log link at z, (m, c) float64, which is overwritten."""
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
        """Return the factor, at most 1, that keeps changes of z within the region where the loss is
        near to its square.

        largest : result of `largest_move`, or the largest of several ranks
        """
        return LARGEST_STEP / self._xp.maximum(largest, LARGEST_STEP)


def scaled_loss(
    backend: Backend, dtype: Any, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
) -> ScaledLoss | None:
    """Return the loss of a setup's metadata and arrays; None for squares."""
    loss = saved_loss(meta)
    if loss is None:
        return None
    mean, gain = (np.asarray(arrays[name]) for name in ("target_mean", "target_scale"))
    age = meta["setup"].get("loss_age", 0.0)
    return ScaledLoss(loss, backend, dtype, mean, gain, age)
