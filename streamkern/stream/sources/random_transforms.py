"""Random transforms of rows: noise, crops and flips of images, and mix-up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.optional import on_demand
from streamkern.basics.randomness import AnyArray, RowRandom
from streamkern.basics.values import is_finite_number, is_whole_number


class RowLayout(Protocol):
    """The attributes of a source that noise, crops and flips use."""

    @property
    def row_shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


@dataclass(frozen=True)
class GaussianNoise:
    """Add sigma z to X, with z standard normal.

    For sigma >= 0.5 the variance of rounded noise is sigma**2 + 1/12, within 3 %. Smaller noise
    changes only a share 2 Phi(-1 / (2 sigma)) of the numbers (Phi is the CDF of z): 10 % for sigma
    = 0.3, and one in two million for sigma = 0.1. At both ends of the range clipping removes half
    of the noise: the mean moves inwards by sigma / sqrt(2 pi) = 0.40 sigma, and the standard
    deviation is 0.58 sigma.

    Parameters
    ----------
    sigma : standard deviation, 0 or above, in the units of X at this position of the transforms
    round : round X to integers, half to even, and clip it to the range of the stored dtype, uint8
        or uint16, so that a store of this dtype can hold it (`keeps_integers`). All transforms
        before it must keep integers.
    """

    sigma: float
    round: bool = False
    # Largest number of the stored dtype, set by `bind`.
    most: int | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not (is_finite_number(self.sigma) and self.sigma >= 0):
            raise ConfigError(
                f"noise sigma={self.sigma!r} must be a finite number, 0 or above",
                "give the standard deviation of the noise, such as 0.1",
            )
        if not isinstance(self.round, bool):
            raise ConfigError(
                f"noise round={self.round!r} must be True or False",
                "leave it out, or set it to True for rows of integers",
            )

    @property
    def keeps_integers(self) -> bool:
        """True if stored integers stay integers of their dtype."""
        return self.round or self.sigma == 0

    @property
    def needs_integers(self) -> bool:
        """True if the transform accepts only stored integers."""
        return self.round

    def bind(self, data: RowLayout) -> GaussianNoise:
        """Return this noise; with `round`, `most` is set from the stored dtype."""
        if not self.round:
            return self
        dtype = np.dtype(data.dtype)
        if dtype.kind != "u":
            raise ConfigError(
                f"noise with round=true needs rows of uint8 or uint16, but these are {dtype}",
                "leave round out",
            )
        return GaussianNoise(self.sigma, True, int(np.iinfo(dtype).max))

    def __call__(self, X: AnyArray, Y: AnyArray, rng: RowRandom) -> tuple[AnyArray, AnyArray]:
        if self.sigma == 0:
            return X, Y
        noisy = rng.noisy(X, self.sigma)
        if self.round:
            assert self.most is not None
            rng.xp.rint(noisy, out=noisy)
            rng.xp.clip(noisy, 0, self.most, out=noisy)
        return noisy, Y

    def describe(self) -> dict[str, object]:
        optional = {"round": True} if self.round else {}
        return {"kind": "noise", "sigma": self.sigma, **optional}


@dataclass(frozen=True)
class RandomCrop:
    """Shift each image by up to `padding` pixels in both directions; fill the border with 0."""

    padding: int
    keeps_dtype = keeps_integers = True

    def __post_init__(self) -> None:
        if not is_whole_number(self.padding) or self.padding < 0:
            raise ConfigError(
                f"crop padding={self.padding!r} must be a whole number, 0 or above",
                "give the number of pixels, such as 2",
            )

    def bind(self, data: RowLayout) -> RandomCrop:
        _check_images("crop", data.row_shape)
        return self

    def __call__(self, X: AnyArray, Y: AnyArray, rng: RowRandom) -> tuple[AnyArray, AnyArray]:
        offset = rng.integers(0, 2 * self.padding + 1, (2,))
        cropped = rng.xp.empty_like(X)
        # In eight parts: padding all images at once would need the memory of two more copies.
        part_rows = max(1, len(X) // 8)
        for start in range(0, len(X), part_rows):
            part = slice(start, start + part_rows)
            cropped[part] = self._crop(rng.xp, X[part], offset[part])
        return cropped, Y

    def _crop(self, xp: Any, X: AnyArray, offset: AnyArray) -> AnyArray:
        """Return the windows of the zero-padded images that start at `offset` (m, 2)."""
        p = self.padding
        m, h, w, ch = X.shape
        padded = xp.pad(X, ((0, 0), (p, p), (p, p), (0, 0)))
        s_m, s_h, s_w, s_ch = padded.strides
        # A view of all (2 p + 1)^2 crops of all images; one gather takes a crop of each image.
        windows = xp.lib.stride_tricks.as_strided(
            padded, (m, 2 * p + 1, 2 * p + 1, h, w, ch), (s_m, s_h, s_w, s_h, s_w, s_ch)
        )
        return windows[xp.arange(m), offset[:, 0], offset[:, 1]]

    def describe(self) -> dict[str, object]:
        return {"kind": "crop", "padding": self.padding}


@dataclass(frozen=True)
class RandomFlip:
    """Mirror each image left to right with probability one half."""

    keeps_dtype = keeps_integers = True

    def bind(self, data: RowLayout) -> RandomFlip:
        _check_images("flip", data.row_shape)
        return self

    def __call__(self, X: AnyArray, Y: AnyArray, rng: RowRandom) -> tuple[AnyArray, AnyArray]:
        is_mirrored = rng.integers(0, 2)[:, None, None, None] == 1
        return rng.xp.where(is_mirrored, X[:, :, ::-1], X), Y

    def describe(self) -> dict[str, object]:
        return {"kind": "flip"}


class MixUp:
    """Replace x_i by λ x_i + (1 - λ) x_j and the target alike, with λ ~ Beta(alpha, alpha).

    The partners j are a random permutation of the batch (Zhang, Cisse, Dauphin and Lopez-Paz,
    "mixup", ICLR 2018). λ is the inverse CDF of one uniform draw per row, interpolated between
    4097 exact quantiles, so that the error of the CDF is at most 1/4096. Sample weights are mixed
    like the targets.

    alpha : parameter of the beta distribution, above 0
    """

    keeps_integers = False

    def __init__(self, alpha: float = 1.0) -> None:
        if not (is_finite_number(alpha) and alpha > 0):
            raise ConfigError(
                f"mixup alpha={alpha!r} must be a finite number above 0", "give for example 0.4"
            )
        self.alpha = alpha
        self._levels = np.linspace(0, 1, 4097)
        self._quantiles = on_demand("scipy.special").betaincinv(alpha, alpha, self._levels)

    def __call__(self, X: AnyArray, Y: AnyArray, rng: RowRandom) -> tuple[AnyArray, AnyArray]:
        mixed_X, mixed_Y = self._mix_arrays((X, Y), rng)
        return mixed_X, mixed_Y

    def weighted(
        self, X: AnyArray, Y: AnyArray, w: AnyArray, rng: RowRandom
    ) -> tuple[AnyArray, AnyArray, AnyArray]:
        """Return X, Y and the sample weights w (m,), mixed with the same λ and partners."""
        mixed_X, mixed_Y, mixed_w = self._mix_arrays((X, Y, w), rng)
        return mixed_X, mixed_Y, mixed_w

    def _mix_arrays(self, arrays: tuple[AnyArray, ...], rng: RowRandom) -> list[AnyArray]:
        """Return the mixed arrays, (m, ...) each; the first one is X."""
        xp, X = rng.xp, arrays[0]
        levels, quantiles = xp.asarray(self._levels), xp.asarray(self._quantiles)
        lam = xp.interp(rng.uniform().astype(np.float64), levels, quantiles).astype(X.dtype)
        partner = rng.permutation()
        return [_mix(a, a[partner], lam, rng.empty(a.shape, a.dtype)) for a in arrays]

    def describe(self) -> dict[str, object]:
        return {"kind": "mixup", "alpha": self.alpha}


def _check_images(transform: str, row_shape: tuple[int, ...]) -> None:
    """Raise ConfigError unless rows are images. transform : name for the message"""
    if len(row_shape) != 3:
        raise ConfigError(
            f"{transform} needs images (height, width, channels), but rows have shape {row_shape}",
            "store the data as images, (n, h, w, ch)",
        )


def _mix(a: AnyArray, b: AnyArray, lam: AnyArray, mixed: AnyArray) -> AnyArray:
    """Write b + lam (a - b) to `mixed`, and return it. lam : (m,), one factor for each row"""
    mixed[...] = a
    mixed -= b
    mixed *= lam.reshape(-1, *(1,) * (a.ndim - 1))
    mixed += b
    return mixed
