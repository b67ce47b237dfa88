"""A loss of z = mean + gain f, as a solver of f sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend
from streamkern.losses.base import Loss
from streamkern.losses.losses import saved_loss


class ScaledLoss:
    """A loss of the outputs z = mean + gain f, whose target for f is never formed.

    For a loss of an identity link the targets are scaled, as for squares: (y - mean) / gain, with
    the error f - (y - mean) / gain; else they are as stored, with the error predict(z) - y.

    mean, gain : (c,); see `stream.target_scale`
    age : rows per center that the weights were trained with by this loss before the run
    """

    def __init__(
        self, loss: Loss, backend: Backend, dtype: Any,
        mean: npt.NDArray[np.float64], gain: npt.NDArray[np.float64], age: float = 0.0,
    ) -> None:  # fmt: skip
        self.loss, self._xp, self._age = loss, backend.xp, age
        self.scales_targets = loss.identity_link
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
        F -= Y
        if not self.scales_targets:  # of such a loss the gradient is the part of the errors to mend
            F = self.loss.gradient(self._xp, F, Y)
        return F

    def residual(self, errors: Array, Y: Array, rows_per_center: float) -> Array:
        """Return the residual of the square that majorises the loss in f, in place of `errors`.

        rows_per_center : of this run, so far

        The gradient in f is gain dl/dz, and its curvature at most gain^2 L.
        """
        loss = self.loss.at(self._age + rows_per_center)
        if self.scales_targets:
            errors *= self._gain
        gradient = loss.gradient(self._xp, errors, Y)
        gradient *= self._asarray(1 / (loss.curvature * self._host_gain))
        return gradient


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
