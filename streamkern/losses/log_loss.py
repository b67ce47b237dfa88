"""The log loss of classes: -log softmax(z)_y, for one-hot targets."""

from __future__ import annotations

from typing import Any, Final

import numpy as np


class LogLoss:
    """The log loss of the softmax of the outputs.

    Its Hessian diag(p) - p p^T is at most 1/2 (Böhning 1992, Ann. Inst. Stat. Math. 44, 197-200).
    """

    curvature: Final = 0.5

    def predict(self, xp: Any, z: Any) -> Any:
        """Return the probabilities of the classes (m, c), in place of z."""
        z -= z.max(axis=1, keepdims=True)
        xp.exp(z, out=z)
        z /= z.sum(axis=1, keepdims=True)
        return z

    def gradient(self, xp: Any, z: Any, Y: Any) -> Any:
        """Return softmax(z) - Y (m, c), in place of z."""
        z = self.predict(xp, z)
        z -= Y
        return z

    def values(self, xp: Any, z: Any, Y: Any) -> Any:
        """Return the losses of the rows, (m,) float64."""
        z = z.astype(np.float64)
        z -= z.max(axis=1, keepdims=True)
        return xp.log(xp.exp(z).sum(axis=1)) - (z * Y).sum(axis=1)
