"""Random crops and flips of images, which move pixels and make no new values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from streamkern.basics.errors import ConfigError
from streamkern.basics.randomness import AnyArray, RowRandom


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
            f"{kind} needs images (height, width, channels); rows have shape {row_shape}: store "
            "the data as images, (n, h, w, ch)"
        )
