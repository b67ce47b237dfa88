"""The distance of a kernel: its metric, and the features and leaves that it compares."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.kernels.categorical import (
    CategoricalFeatures,
    check_categorical,
    parse_categorical,
)
from streamkern.kernels.tree_partitions import TreePartitions, no_trees_error

Geometry = Literal["distance", "inner", "l1"]


class Distance:
    """Base of `Kernel`, with the attributes that define the distance of two points.

    metric : (d,) scales of the features, or a (d, r) matrix; None for the features as they are
    """

    geometry: Geometry = "distance"
    """The numbers from which the kernel is computed: squared Euclidean distances over bandwidth^2,
    inner products, or L1 distances over the bandwidth."""
    metric: npt.NDArray[np.float64] | None = None
    categorical: CategoricalFeatures = ()
    """Features that are also compared for equality, see `kernels.categorical`."""
    trees: TreePartitions | None = None
    """Trees whose leaves are compared, see `kernels.tree_partitions`."""
    sparse: bool = False
    """Whether points are packed sparse rows, see `kernels.sparse`."""
    explicit: bool = False
    """Whether the columns are explicit features, so that the norm of f is the Euclidean norm of the
    weights, rather than functions k(., z) of the RKHS."""

    def with_metric(self, metric: npt.ArrayLike | None) -> Self:
        """Return the same kernel with another metric, or without one."""
        kernel = copy.copy(self)
        kernel._set_metric(metric)
        return kernel

    def with_categorical(self, categorical: Iterable[Any]) -> Self:
        """Return the same kernel with categorical features, pairs (feature, weight)."""
        kernel = copy.copy(self)
        of_distance = self.geometry == "distance" and not self.explicit
        kernel.categorical = parse_categorical(categorical, self, of_distance=of_distance)
        return kernel

    def with_trees(self, trees: TreePartitions | None) -> Self:
        """Return the same kernel with trees whose leaves it compares, or without trees."""
        kernel = copy.copy(self)
        kernel.trees = trees
        if trees is not None and (self.geometry != "distance" or self.explicit or self.sparse):
            raise no_trees_error(self)
        return kernel

    @property
    def n_compared(self) -> int:
        """Number of values of a row that are compared for equality: features, and leaves."""
        return len(self.categorical) + (0 if self.trees is None else len(self.trees))

    def _set_metric(self, metric: npt.ArrayLike | None) -> None:
        self.metric = None
        if metric is None:
            return
        A = np.array(metric)
        if A.dtype.kind not in "fiu" or A.ndim not in (1, 2) or A.size == 0:
            raise ConfigError(
                f"metric of shape {A.shape} and dtype {A.dtype} is no metric; give one number "
                "for each feature, (d,), or a matrix, (d, r)"
            )
        if not np.isfinite(A).all():
            raise ConfigError("metric holds NaN or infinity", "give finite numbers")
        self.metric = A.astype(np.float64)
        self.metric.flags.writeable = False

    def features(self, d: int) -> int:
        """Return the number of coordinates of a point of d features, or raise ConfigError."""
        check_categorical(self.categorical, d)
        if self.trees is not None:
            self.trees.check(d)
        if self.metric is None:
            return d
        if len(self.metric) != d:
            raise ConfigError(
                f"metric of shape {self.metric.shape} is for {len(self.metric)} features, but "
                f"the points have {d}",
                "give one row for each feature",
            )
        return int(self.metric.shape[-1])
