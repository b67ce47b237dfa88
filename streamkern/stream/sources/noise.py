"""Gaussian noise, unrounded or in steps of the stored values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.randomness import AnyArray, RowRandom


class Stored(Protocol):
    """The part of a source that noise uses."""

    @property
    def dtype(self) -> np.dtype[Any]: ...


@dataclass(frozen=True)
class GaussianNoise:
    """X + sigma z, z standard normal, in the units that X has at this place of the list.

    round : round to whole steps of the stored values, clipped to the range of their dtype, uint8 or
        uint16, so that such a store can hold X (`keeps_integers`). No transform before it in the
        list may have made other numbers of integers. Rounds half to even, as everywhere.

    Rounding adds 1/12 to the variance of noise of half a step or more, within 3 %, and suppresses
    smaller noise altogether: 2 Phi(-1 / (2 sigma)) of the numbers change, for sigma = 0.1 one in
    two million. Clipping halves the noise at either end of the range: the mean moves inwards by
    sigma / sqrt(2 pi) = 0.40 sigma, and the standard deviation is 0.58 sigma.
    """

    sigma: float
    round: bool = False
    most: int | None = field(default=None, compare=False, repr=False)  # of the dtype, if bound

    def __post_init__(self) -> None:
        if not (np.isfinite(self.sigma) and self.sigma >= 0):
            raise ConfigError(f"noise sigma={self.sigma} must be finite and at least 0")
        if not isinstance(self.round, bool):
            raise ConfigError(f"noise round={self.round!r} must be True or False")

    @property
    def keeps_integers(self) -> bool:
        """True if stored integers stay integers of their dtype."""
        return self.round or self.sigma == 0

    @property
    def needs_integers(self) -> bool:
        """True if it accepts stored integers only."""
        return self.round

    def bind(self, data: Stored) -> GaussianNoise:
        """Return the same noise, with the range of the dtype if `round` needs it."""
        if not self.round:
            return self
        dtype = np.dtype(data.dtype)
        if dtype.kind != "u":
            raise ConfigError(
                f"noise with round=true is for rows that are stored as uint8 or uint16, and these "
                f"are {dtype}; leave round out"
            )
        return GaussianNoise(self.sigma, True, int(np.iinfo(dtype).max))

    def __call__(self, X: AnyArray, Y: AnyArray, rng: RowRandom) -> tuple[AnyArray, AnyArray]:
        if self.sigma == 0:
            return X, Y
        noisy = rng.normal(X.shape[1:])
        noisy *= noisy.dtype.type(self.sigma)
        noisy += X
        if self.round:
            assert self.most is not None
            rng.xp.rint(noisy, out=noisy)
            rng.xp.clip(noisy, 0, self.most, out=noisy)
        return noisy, Y

    def describe(self) -> dict[str, object]:
        rounded = {"round": True} if self.round else {}
        return {"kind": "noise", "sigma": self.sigma, **rounded}
