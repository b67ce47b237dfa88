"""Kernels of packed sparse rows."""

from __future__ import annotations

import copy

from streamkern.basics.errors import ConfigError
from streamkern.kernels.base import Kernel


def for_sparse_rows(kernel: Kernel) -> Kernel:
    """Return a copy of a kernel that takes packed sparse rows, see `store.sparse_rows`.

    Raises
    ------
    ConfigError
        The kernel is not a function of inner products and norms, or has a metric or categorical
        features.
    """
    if kernel.geometry == "l1" or type(kernel).columns is not Kernel.columns:
        raise ConfigError(
            f"{kernel!r} cannot be used for sparse rows: it is not a function of inner products",
            "use a kernel of the Euclidean distance or of the inner product",
        )
    if kernel.metric is not None or kernel.n_compared:
        raise ConfigError(
            f"{kernel!r} cannot be used for sparse rows: it has a metric, categorical "
            "features or trees",
            "leave them out, or make the rows dense before they are stored",
        )
    sparse_kernel = copy.copy(kernel)
    sparse_kernel.sparse = True
    return sparse_kernel
