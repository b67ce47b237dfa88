"""Kernels of the inner product of two points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from streamkern.kernels.base import Kernel
from streamkern.kernels.parameters import checking_names

if TYPE_CHECKING:
    from streamkern.backend.base import Array


class InnerKernel(Kernel):
    """A kernel of the inner product and the norms, k(x, z) = of_products(x.z, |x|^2, |z|^2).

    Subclasses define `of_products` and, if they can, its `expression` in `p`, `x` and `z`. Features
    are used as they are: such a kernel is not translation invariant, so nothing is shifted.
    """

    geometry = "inner"

    @checking_names
    def __init__(self, *, metric: npt.ArrayLike | None = None) -> None:
        self._set_metric(metric)

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Return kernel values."""
        raise NotImplementedError(f"{type(self).__name__} must define of_products(p, x, z, xp)")
