"""The log loss of classes: -log softmax(z)_y, for one-hot targets."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamkern.losses.base import Loss

MIN_CLASS_SHARE: Final = 1e-6
"""Smallest share of a class for which `output` returns the logarithm. A class whose rows all have
weight 0 has a share of 0."""


class LogLoss(Loss):
    """The log loss of probabilities p = softmax(z).

    Its Hessian diag(p) - p p^T is at most 1/2 (Böhning 1992, Ann. Inst. Stat. Math. 44, 197-200).
    """

    name, figure = "log_loss", "log_loss"
    for_classes, identity_link, shift_invariant = True, False, True

    @property
    def curvature(self) -> float:
        """The bound 1/2 of the Hessian."""
        return 0.5

    def predict(self, xp: Any, z: Any) -> Any:
        """Return the probabilities of the classes (m, c), in place of z."""
        z -= z.max(axis=1, keepdims=True)
        xp.exp(z, out=z)
        z /= z.sum(axis=1, keepdims=True)
        return z

    def output(self, means: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the logarithms of the shares of the classes, (c,)."""
        return np.log(np.maximum(means, MIN_CLASS_SHARE))

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return softmax(z) - Y (m, c), which is the errors."""
        return errors

    def curvatures(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return 2 p (1 - p) / L: twice the diagonal of the Hessian is at least the Hessian."""
        p = errors + Y
        return 4 * p * (1 - p)

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows, (m,) float64."""
        z = F.astype(np.float64)
        z -= z.max(axis=1, keepdims=True)
        return xp.log(xp.exp(z).sum(axis=1)) - (z * Y).sum(axis=1)
