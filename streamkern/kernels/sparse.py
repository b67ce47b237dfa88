"""Kernels of packed sparse rows."""

from __future__ import annotations

import copy

from streamkern.basics.errors import ConfigError
from streamkern.kernels.base import Kernel


def of_sparse_rows(kernel: Kernel) -> Kernel:
    """Return the same kernel of packed sparse rows, see `store.sparse_rows`.

    Raises ConfigError for a kernel that is not a function of inner products and norms, or that has
    a metric or categorical features.
    """
    if kernel.geometry == "l1" or type(kernel).columns is not Kernel.columns:
        raise ConfigError(
            f"{kernel!r} is not a function of inner products, which is what sparse rows have",
            "use a kernel of the Euclidean distance or of the inner product",
        )
    if kernel.metric is not None or kernel.categorical:
        raise ConfigError(
            f"{kernel!r} has a metric or categorical features, which are for dense rows",
            "leave them out, or make the rows dense before they are stored",
        )
    other = copy.copy(kernel)
    other.sparse = True
    return other
