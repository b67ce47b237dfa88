"""Intervals and sets that hold the truth as often as asked: split conformal prediction.

Of m rows that the model has not learned from, s is what it missed them by: |y - f| of values, and
1 - f_y of classes, from f and nothing that was fitted to these rows. Of one more row like them,
any place of its s among theirs is as likely as another. So the k-th smallest,
k = ceil((m + 1) level), is not passed with a probability of `level` at least. Rows with weights
count as many times, beside one row as heavy as the heaviest of them (Tibshirani, Barber, Candes and
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
    """Those of `arrays` whose names begin with `front`, by what follows it."""
    return {k.removeprefix(front): np.asarray(a) for k, a in arrays.items() if k.startswith(front)}


@dataclass(frozen=True, eq=False)
class Intervals:
    """missed : (m, c) of each output ascending; (m, 1) of classes. weights : (m, c) beside them,
    whose mean is 1."""

    missed: Floats
    weights: Floats | None = None

    @classmethod
    def of(cls, missed: Floats, w: Floats | None) -> Intervals:
        """From rows in any order, (m, c), with weights (m,); those without weight do not count."""
        if w is None:
            return cls(np.sort(missed, axis=0))
        missed, w = missed[w > 0], w[w > 0] / w[w > 0].mean()
        order = np.argsort(missed, axis=0, kind="stable")
        if not np.ptp(w):
            return cls(np.take_along_axis(missed, order, axis=0))
        return cls(np.take_along_axis(missed, order, axis=0), w[order])

    @classmethod
    def kept(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Intervals:
        """What `arrays` gave."""
        weights = arrays.get("weights")
        return cls(np.asarray(arrays["missed"]), None if weights is None else np.asarray(weights))

    def arrays(self) -> dict[str, Floats]:
        """What it is made from."""
        own = {} if self.weights is None else {"weights": self.weights}
        return {"missed": self.missed} | own

    def reach(self, level: float) -> Floats:
        """(c,) how far from f the truth is at most, with a probability of `level`.

        Raises ConfigError where the rows are too few to say.
        """
        m = len(self.missed)
        one = (
            1.0 if self.weights is None else float(self.weights.max())
        )  # the row that is asked for
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
        """(n, c, 2) of values (n, c): from where to where."""
        reach = self.reach(level)
        return np.stack((F - reach, F + reach), axis=2)

    def sets(self, F: npt.NDArray[Any], level: float) -> npt.NDArray[np.bool_]:
        """(n, c) of values of classes: which of them it may be. The largest always is."""
        inside: npt.NDArray[np.bool_] = 1 - F.astype(np.float64) <= self.reach(level)
        inside |= F.max(axis=1, keepdims=True, initial=-np.inf) == F
        return inside


def check_level(level: Any) -> None:
    """Raise ConfigError unless it is a probability between 0 and 1."""
    number = isinstance(level, numbers.Real) and not isinstance(level, bool)
    if not (number and 0 < level < 1):
        raise ConfigError(
            f"interval={level!r} must be a number between 0 and 1, such as 0.9: how often the "
            "truth is to be inside"
        )
