"""A loss of z = mean + gain f, as a solver of f sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend
from streamkern.losses.base import Loss


class ScaledLoss:
    """A loss of the outputs z = mean + gain f, whose target for f is never formed.

    mean, gain : (c,) and a number; see `stream.target_scale`
    """

    def __init__(
        self, loss: Loss, backend: Backend, dtype: Any, mean: npt.NDArray[np.float64], gain: float
    ) -> None:
        self.loss, self.gain, self._xp = loss, gain, backend.xp
        self._mean = backend.asarray(mean, dtype)
        self.of_zero = loss.predict(backend.xp, backend.asarray(mean[None], dtype))[0]
        self._step = 1 / (loss.curvature * gain)

    def errors(self, F: Array, Y: Array) -> Array:
        """Return dl/dz (m, c) in place of F: for a class, its probability less its target."""
        F *= self.gain
        F += self._mean
        return self.loss.gradient(self._xp, F, Y)

    def residual(self, errors: Array) -> Array:
        """Return the residual of the square that majorises the loss in f, in place of `errors`.

        The gradient in f is gain dl/dz, and its curvature at most gain^2 L.
        """
        errors *= self._step
        return errors


def scaled_loss(
    loss: Loss | None, backend: Backend, dtype: Any, arrays: Mapping[str, npt.NDArray[Any]]
) -> ScaledLoss | None:
    """Return the loss of a setup's arrays; None for squares."""
    if loss is None:
        return None
    mean, gain = (np.asarray(arrays[name]) for name in ("target_mean", "target_scale"))
    return ScaledLoss(loss, backend, dtype, mean, float(gain[0]))
