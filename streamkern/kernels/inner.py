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

    A subclass defines `of_products` and, optionally, the same function as its `expression` of `p`,
    `x` and `z`. Points are not shifted, because such a kernel is not translation invariant.
    """

    geometry = "inner"

    @checking_names
    def __init__(self, *, metric: npt.ArrayLike | None = None) -> None:
        self._set_metric(metric)

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Return the kernel values (r, t) for products p (r, t) and norms x (r, 1) and z (t,).

        p may be overwritten.
        """
        raise NotImplementedError(f"{type(self).__name__} must define of_products(p, x, z, xp)")
