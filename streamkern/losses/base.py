"""The protocol of a loss.

A loss l(z, y) is a convex function of the outputs z of a row. A solver minimises the mean of l over
rows; it needs no more of l than

    gradient    dl/dz
    curvature   L, so that the Hessian of l in z is at most L

By the second, l is at most a square with another target:

    l(z', y) <= const + L / 2 |z' - (z - dl/dz / L)|^2,    with equality at z' = z.

So a step that is right for squares, with the residual dl/dz / L in place of z - y, does not raise
the mean loss of a full batch either (majorisation).
"""

from __future__ import annotations

from typing import Any, Protocol


class Loss(Protocol):
    """A loss of outputs z (m, c) for targets Y (m, c), arrays of the module `xp`."""

    @property
    def curvature(self) -> float:
        """The bound L of the Hessian in z."""

    def predict(self, xp: Any, z: Any) -> Any:
        """Return the prediction in the unit of the targets (m, c), in place of z."""

    def gradient(self, xp: Any, z: Any, Y: Any) -> Any:
        """Return dl/dz (m, c), in place of z."""

    def values(self, xp: Any, z: Any, Y: Any) -> Any:
        """Return the losses of the rows, (m,) float64."""
