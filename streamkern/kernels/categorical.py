"""Features that are also compared for equality: numbers of shops, codes, years, ages.

The squared distance of a kernel with categorical features j, whose weights are w_j, is

    |A^T (x - z)|^2 + sum_j w_j [x_j != z_j],

A being the metric. Each term is the squared distance of one-hot codes of the values, times w_j / 2:
the distance stays one of a Euclidean space, and the kernel positive definite. No code is made: a
prepared row has the values of these features in its first columns, and they are compared.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from streamkern.basics.errors import ConfigError

CategoricalFeatures = tuple[tuple[int, float], ...]
"""Pairs of a feature and its weight, in squared units of the features."""
MAX_CATEGORICAL = 4
"""Largest number of categorical features that a run chooses. Each is compared in every tile."""


def checked_categorical(
    categorical: Any, kernel: object, *, of_distance: bool
) -> CategoricalFeatures:
    """Return the categorical features of a kernel.

    Raises ConfigError if a pair is wrong, or if the kernel is none `of_distance`.
    """
    given = list(categorical) if isinstance(categorical, Iterable) else [categorical]
    try:
        found = tuple((operator.index(column), float(weight)) for column, weight in given)
    except (TypeError, ValueError):
        raise ConfigError(
            f"categorical={given} must be pairs of a feature and its weight",
            "count the features from 0: [(3, 0.5)]",
        ) from None
    columns = [column for column, _ in found]
    if len(set(columns)) < len(columns) or any(column < 0 for column in columns):
        raise ConfigError(
            f"categorical={found} name a feature twice, or a negative one",
            "name each feature once, counted from 0",
        )
    if not all(0 < weight < math.inf for _, weight in found):
        raise ConfigError(
            f"categorical={found} must have finite weights above 0",
            "leave out features of weight 0",
        )
    if found and not of_distance:
        raise ConfigError(
            f"{kernel} is not a function of the Euclidean distance, and has no categorical "
            "features",
            "use a kernel that is one",
        )
    return found


def check_categorical(categorical: CategoricalFeatures, d: int) -> None:
    """Raise ConfigError unless the categorical features are among d features."""
    if any(column >= d for column, _ in categorical):
        raise ConfigError(
            f"categorical={categorical} are for more than the {d} features of the points",
            "name features of the points, counted from 0",
        )
