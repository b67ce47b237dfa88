"""Random transforms of rows: noise, crops and flips of images."""

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
                f"are {dtype}",
                "leave round out",
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


class Shaped(Protocol):
    """The part of a source that these transforms use."""

    @property
    def row_shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class RandomCrop:
    """Images shifted by up to `padding` pixels each way, and filled with 0."""

    padding: int
    keeps_dtype = keeps_integers = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ConfigError(f"crop padding={self.padding} must be at least 0")

    def bind(self, data: Shaped) -> RandomCrop:
        _need_images("crop", data.row_shape)
        return self

    def __call__(self, X: AnyArray, Y: AnyArray, rng: RowRandom) -> tuple[AnyArray, AnyArray]:
        offset = rng.integers(0, 2 * self.padding + 1, (2,))
        cropped = rng.xp.empty_like(X)
        step = max(1, len(X) // 8)  # padding all at once would take two more copies
        for start in range(0, len(X), step):
            part = slice(start, start + step)
            cropped[part] = self._crop(rng.xp, X[part], offset[part])
        return cropped, Y

    def _crop(self, xp: Any, X: AnyArray, offset: AnyArray) -> AnyArray:
        """Return the windows of the zero-padded images that start at `offset` (m, 2)."""
        p = self.padding
        m, h, w, ch = X.shape
        padded = xp.pad(X, ((0, 0), (p, p), (p, p), (0, 0)))
        s_m, s_h, s_w, s_ch = padded.strides
        # Every crop of every image as a view, then one gather picks a crop for each.
        windows = xp.lib.stride_tricks.as_strided(
            padded, (m, 2 * p + 1, 2 * p + 1, h, w, ch), (s_m, s_h, s_w, s_h, s_w, s_ch)
        )
        return windows[xp.arange(m), offset[:, 0], offset[:, 1]]

    def describe(self) -> dict[str, object]:
        return {"kind": "crop", "padding": self.padding}


@dataclass(frozen=True)
class RandomFlip:
    """Images mirrored left to right with probability one half."""

    keeps_dtype = keeps_integers = True

    def bind(self, data: Shaped) -> RandomFlip:
        _need_images("flip", data.row_shape)
        return self

    def __call__(self, X: AnyArray, Y: AnyArray, rng: RowRandom) -> tuple[AnyArray, AnyArray]:
        mirrored = rng.integers(0, 2)[:, None, None, None] == 1
        return rng.xp.where(mirrored, X[:, :, ::-1], X), Y

    def describe(self) -> dict[str, object]:
        return {"kind": "flip"}


def _need_images(kind: str, row_shape: tuple[int, ...]) -> None:
    if len(row_shape) != 3:
        raise ConfigError(
            f"{kind} needs images (height, width, channels)",
            f"rows have shape {row_shape}: store the data as images, (n, h, w, ch)",
        )
