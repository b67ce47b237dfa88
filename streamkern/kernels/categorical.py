"""Features that are also compared for equality: numbers of shops, codes, years, ages.

The squared distance of a kernel with categorical features j, whose weights are w_j, is

    |A^T (x - z)|^2 + sum_j w_j [x_j != z_j],

where M = A A^T is the metric. Each term of the sum is the squared Euclidean distance between the
one-hot codes of the two values, times w_j / 2. The whole is therefore a squared distance in a
Euclidean space, and the kernel stays positive definite. One-hot codes are never formed: the first
columns of a prepared row hold the values of these features, which are compared.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from streamkern.basics.errors import ConfigError

CategoricalFeatures = tuple[tuple[int, float], ...]
"""Pairs of a feature, counted from 0, and its weight, in squared units of the features."""
MAX_CATEGORICAL = 4
"""Largest number of categorical features that a run chooses: each adds a pass over every tile."""


def parse_categorical(
    categorical: Any, kernel: object, *, of_distance: bool
) -> CategoricalFeatures:
    """Return the pairs (feature, weight) of `categorical` as a tuple of int and float.

    kernel : named in an error.
    of_distance : whether the kernel is a function of the Euclidean distance.

    Raises
    ------
    ConfigError
        An entry is not such a pair, a feature is negative or occurs twice, a weight is not finite
        and above 0, or the kernel is not one of the Euclidean distance.
    """
    entries = list(categorical) if isinstance(categorical, Iterable) else [categorical]
    try:
        pairs = tuple((operator.index(feature), float(weight)) for feature, weight in entries)
    except (TypeError, ValueError):
        raise ConfigError(
            f"categorical={entries} must be pairs of a feature and its weight",
            "count the features from 0: [(3, 0.5)]",
        ) from None
    features = [feature for feature, _ in pairs]
    if len(set(features)) < len(features) or any(feature < 0 for feature in features):
        raise ConfigError(
            f"categorical={pairs} must name each feature once, by its number",
            "count the features from 0, and leave repetitions out",
        )
    if not all(0 < weight < math.inf for _, weight in pairs):
        raise ConfigError(
            f"categorical={pairs} must have finite weights above 0",
            "leave out features of weight 0",
        )
    if pairs and not of_distance:
        raise ConfigError(
            f"{kernel} cannot have categorical features: it is not a function of the Euclidean "
            "distance",
            "use a kernel of the Euclidean distance, such as 'laplace'",
        )
    return pairs


def check_categorical(categorical: CategoricalFeatures, d: int) -> None:
    """Raise ConfigError unless every categorical feature is one of 0, ..., d - 1."""
    if any(feature >= d for feature, _ in categorical):
        raise ConfigError(
            f"categorical={categorical} must name features from 0 to {d - 1}, because the points "
            f"have {d} features",
            "name features of the points, counted from 0",
        )
