"""Intervals and sets with guaranteed coverage: split conformal prediction.

For m rows not used in training, the score s is |y - f| for values and 1 - f_y for classes. It is
computed from f, and from nothing fitted to these rows. For one more row like them, every rank of
its s among theirs is equally likely. So s is at most the k-th smallest score,
k = ceil((m + 1) level), with probability at least `level`. A row with a weight counts that many
times, and the new row is assumed to be as heavy as the heaviest (Tibshirani, Barber, Candes and
Ramdas 2019, corollary 1, for a row of any weight up to that).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.basics.errors import ConfigError

_ROUNDING = 1e-9


def without_prefix(
    arrays: Mapping[str, npt.NDArray[Any]], front: str
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays whose names begin with `front`, by the rest of their names."""
    return {k.removeprefix(front): np.asarray(a) for k, a in arrays.items() if k.startswith(front)}


@dataclass(frozen=True, eq=False)
class Intervals:
    """Sorted scores of calibration rows.

    missed : (m, c) of each output, ascending; (m, 1) for classes
    weights : (m, c) of the same rows, with mean 1; None if all are equal
    """

    missed: Floats
    weights: Floats | None = None

    @classmethod
    def of(cls, missed: Floats, w: Floats | None) -> Intervals:
        """Sort scores (m, c) of rows, with weights (m,); rows of weight 0 are ignored."""
        if w is None:
            return cls(np.sort(missed, axis=0))
        missed, w = missed[w > 0], w[w > 0] / w[w > 0].mean()
        order = np.argsort(missed, axis=0, kind="stable")
        if not np.ptp(w):
            return cls(np.take_along_axis(missed, order, axis=0))
        return cls(np.take_along_axis(missed, order, axis=0), w[order])

    @classmethod
    def kept(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Intervals:
        """Return the intervals stored in `arrays`."""
        weights = arrays.get("weights")
        return cls(np.asarray(arrays["missed"]), None if weights is None else np.asarray(weights))

    def arrays(self) -> dict[str, Floats]:
        """Return the arrays to store."""
        own = {} if self.weights is None else {"weights": self.weights}
        return {"missed": self.missed} | own

    def reach(self, level: float) -> Floats:
        """Return the largest distance (c,) of the truth from f that holds with probability `level`.

        Raises ConfigError if there are too few rows for the level.
        """
        m = len(self.missed)
        one = 1.0 if self.weights is None else float(self.weights.max())  # weight of the new row
        check_level(level)
        if self.weights is None:
            k = max(math.ceil((m + 1) * level - _ROUNDING), 1)
            places = np.full(self.missed.shape[1], k - 1)
        else:
            wanted = (m + one) * level - _ROUNDING
            places = (self.weights.cumsum(axis=0) < wanted).sum(axis=0)
        if (places >= m).any():
            raise ConfigError(
                f"interval={level:g} takes more than the {m} rows that were set aside for it, "
                f"which tell no more than {m / (m + one):.4g}; give a smaller one, or more rows"
            )
        reach: Floats = self.missed[places, np.arange(len(places))]
        return reach

    def around(self, F: npt.NDArray[Any], level: float) -> Floats:
        """Return the ends (n, c, 2) of intervals around values (n, c)."""
        reach = self.reach(level)
        return np.stack((F - reach, F + reach), axis=2)

    def sets(self, F: npt.NDArray[Any], level: float) -> npt.NDArray[np.bool_]:
        """Return the classes (n, c) in each row's set; the class of the largest value always is."""
        inside: npt.NDArray[np.bool_] = 1 - F.astype(np.float64) <= self.reach(level)
        inside |= F.max(axis=1, keepdims=True, initial=-np.inf) == F
        return inside


def check_level(level: Any) -> None:
    """Raise ConfigError unless the level is a number between 0 and 1."""
    number = isinstance(level, numbers.Real) and not isinstance(level, bool)
    if not (number and 0 < level < 1):
        raise ConfigError(
            f"interval={level!r} must be a number between 0 and 1, such as 0.9: how often the "
            "truth is to be inside"
        )
