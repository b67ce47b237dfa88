"""Features whose values are levels of a factor: numbers of shops, codes, years, ages.

Two rows have the same level or different ones, however far apart the numbers are. With weights w_j
of some features j, the squared distance of the kernel is

    |A^T (x - z)|^2 + sum_j w_j [x_j != z_j],

A being the metric. The sum is half the squared distance of the one-hot codes of the levels, times
w_j: the distance stays one of a Euclidean space, and the kernel positive definite. No code is made:
a prepared row has the values of these features in its first columns, and they are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamkern.basics.errors import ConfigError

Levels = tuple[tuple[int, float], ...]
"""Pairs of a feature and its weight, in squared units of the features."""


def checked_levels(levels: Iterable[Any], kernel: object, *, of_distance: bool) -> Levels:
    """Return the levels of a kernel.

    Raises ConfigError if they are no levels, or if it is no kernel `of_distance`.
    """
    found = tuple((int(column), float(weight)) for column, weight in levels)
    columns = [column for column, _ in found]
    if len(set(columns)) < len(columns) or any(column < 0 for column in columns):
        raise ConfigError(f"levels={found} name a feature twice, or a negative one")
    if not all(0 < weight < float("inf") for _, weight in found):
        raise ConfigError(f"levels={found} must have weights above 0, and finite")
    if found and not of_distance:
        raise ConfigError(
            f"{kernel} is no function of the Euclidean distance, and has no levels",
            "use a kernel that is one",
        )
    return found


def check_levels(levels: Levels, d: int) -> None:
    """Raise ConfigError unless the levels are among d features."""
    if any(column >= d for column, _ in levels):
        raise ConfigError(
            f"levels={levels} are for more than the {d} features of the points",
            "name features of the points, counted from 0",
        )
