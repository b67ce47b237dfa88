"""Patch features: each image compared with patches of training images, everywhere, and averaged.

A kernel of a distance does not know which pixels are neighbours. Here an image is described by how
much of each of N small filters it has, roughly where (Coates, Lee and Ng 2011; Coates and Ng 2011):

1. Every patch of `size` x `size` pixels, at every position, is brought to mean 0 and standard
   deviation about 1: p <- (p - mean(p)) / sqrt(var(p) + floor).
2. It is whitened, W (p - m), with m and W = (C + e I)^(-1/2) of a sample of patches, and multiplied
   with N whitened patches of the sample, of length 1: r = D W (p - m).
3. max(r - t, 0) and max(-r - t, 0) are averaged over each of `grid` x `grid` regions of the
   positions: 2 grid^2 N numbers, which are brought to mean 0 and standard deviation 1 over a sample
   of rows.

Subtracting the mean of a patch is linear, as are D and W: one product does all of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.randomness import AnyArray, RowRandom

PATCH_STAGE = 44
SAMPLED_PATCHES, SAMPLED_PIXELS = 20_000, 2 << 20
"""Largest number of patches from which the whitening is estimated, and of their entries; more are
drawn only if more filters are requested."""
PATCH_ROWS, MEASURED_ROWS = 1024, 256
"""Rows from which patches are drawn, and rows on which the standard deviations are measured."""
AUTO_SIZE, SMALL_SIDE, SMALL_SIZE = 6, 16, 3
"""Size of a patch, and the size in images with fewer than `SMALL_SIDE` pixels along a side."""
THRESHOLD = 0.25
CONTRAST_FLOOR, WHITENING_FLOOR, SHORTEST = 0.1, 0.1, 0.1
"""The constants `floor`, divided by the mean variance of a patch, and e, divided by the mean
variance of a pixel of a patch; and the length below which a whitened patch is not used as a filter,
divided by the median length."""
SPREAD_FLOOR = 0.01
"""Constant added to the standard deviation by which a feature is divided, relative to the mean of
all standard deviations."""
TILE_BYTES, DEVICE_TILE_BYTES = 1 << 20, 256 << 20
"""Bytes of the patches and responses that a thread, or a device, holds at once, unless one image
needs more."""
PATCH_ARRAYS = ("filters", "offsets", "mean", "scale")
"""The fields of `PatchFeatures` that are arrays; the others are numbers."""


class _Tables(NamedTuple):
    """Arrays of the library and dtype of a batch: filters, averages over regions, mean, scale."""

    filters: AnyArray
    regions: AnyArray
    mean: AnyArray
    scale: AnyArray


@dataclass(frozen=True, eq=False, repr=False)
class PatchFeatures:
    """The transform from images (m, h, w, channels) to patch features (m, 2 grid^2 N).

    filters : (size^2 channels, N) float64, including the whitening and the subtraction of the mean
        of a patch, so that each sums to 0. Rows are in the order (row, column, channel) of a patch
    offsets : (N,) constants subtracted from the products, D W m
    mean, scale : (2 grid^2 N,) of the features, ordered by sign (positive parts first), then by
        region (row by row), then by filter
    size : pixels along a side of a patch
    floor : constant added to the variance of a patch
    grid : number of regions along a side
    threshold : the constant t

    On the CPU the features of a row have the same bits in every batch. Cost of a row: 2 q s N FLOPs
    with q positions and s = size^2 channels, and `row_bytes` of scratch memory.
    """

    filters: Floats
    offsets: Floats
    mean: Floats
    scale: Floats
    size: int
    floor: float
    grid: int
    threshold: float = THRESHOLD
    deterministic = True

    @classmethod
    def of_sample(
        cls, X: npt.NDArray[Any], n_filters: int, size: int, grid: int, seed: int
    ) -> PatchFeatures:  # fmt: skip
        """Return the features whose filters are drawn from images X (n, h, w, channels).

        Raises ConfigError if the images have fewer patches than `n_filters`, other than flat ones.
        """
        rng = np.random.default_rng([seed, PATCH_STAGE])
        candidates = 1000 + 4 * n_filters  # at least half of them are long enough
        most = min(SAMPLED_PATCHES, SAMPLED_PIXELS // (size * size * X.shape[3]))
        patches = _drawn(X, size, max(most, candidates), rng)
        variance = patches.var(axis=1)
        floor = CONTRAST_FLOOR * float(variance.mean())
        if not floor > 0:
            raise ConfigError(
                f"{mention('model.patch_features', n_filters)} compares patches of images, and "
                "those of a sample have no contrast",
                "leave it out",
            )
        patches -= patches.mean(axis=1, keepdims=True)
        patches /= np.sqrt(variance + floor)[:, None]
        mean = patches.mean(axis=0)
        patches -= mean
        values, axes = np.linalg.eigh(patches.T @ patches / len(patches))
        whiten = axes / np.sqrt(values.clip(min=0) + WHITENING_FLOOR * values.mean()) @ axes.T
        white = patches[:candidates] @ whiten
        lengths = np.linalg.norm(white, axis=1)
        chosen = np.flatnonzero(lengths > SHORTEST * np.median(lengths))[:n_filters]
        if len(chosen) < n_filters:
            raise ConfigError(
                f"{mention('model.patch_features', n_filters)} asks for as many different patches "
                f"of {size} x {size} pixels, and a sample of the rows has {len(chosen)}",
                f"lower {mention('model.patch_features')}",
            )
        filters = whiten @ (white[chosen] / lengths[chosen, None]).T
        offsets = mean @ filters
        filters -= filters.mean(axis=0)
        plain = cls(filters, offsets, np.zeros(1), np.ones(1), size, floor, grid)
        few = X[:MEASURED_ROWS].astype(np.float32)
        found, _ = plain(few, few, RowRandom(np, seed, 0, PATCH_STAGE, np.arange(len(few))))
        spread = found.std(axis=0, dtype=np.float64)
        spread += SPREAD_FLOOR * spread.mean()
        spread[spread == 0] = 1.0
        return replace(plain, mean=found.mean(axis=0, dtype=np.float64), scale=spread)

    @property
    def n_filters(self) -> int:
        """Number of filters N."""
        return int(self.filters.shape[1])

    def shape_after(self, row_shape: tuple[int, ...]) -> tuple[int]:
        """Return the shape of a row of features."""
        return (2 * self.grid**2 * self.n_filters,)

    def row_flops(self, row_shape: tuple[int, ...]) -> int:
        """Return the FLOPs of the products for an image of this shape."""
        return 2 * self._positions(row_shape) * self.n_filters * (len(self.filters) + self.grid**2)

    def row_bytes(self, row_shape: tuple[int, ...], itemsize: int) -> int:
        """Return the bytes of scratch memory for an image: two copies of patches and responses."""
        columns = 2 * (len(self.filters) + 1) + 2 * self.n_filters
        return self._positions(row_shape) * columns * itemsize

    def tile_bytes(self, row_shape: tuple[int, ...], itemsize: int, *, on_host: bool) -> int:
        """Return the bytes of scratch memory of a thread, or of a device."""
        return max(
            TILE_BYTES if on_host else DEVICE_TILE_BYTES, self.row_bytes(row_shape, itemsize)
        )

    def _positions(self, row_shape: tuple[int, ...]) -> int:
        return math.prod(side - self.size + 1 for side in row_shape[:2])

    def __call__(self, X: AnyArray, Y: AnyArray, rng: RowRandom) -> tuple[AnyArray, AnyArray]:
        xp, shape = rng.xp, X.shape[1:]
        found = rng.empty((len(X), *self.shape_after(shape)), X.dtype)
        tables = self._tables(xp, shape, X.dtype)
        tile = self.tile_bytes(shape, X.dtype.itemsize, on_host=xp is np)
        step = tile // self.row_bytes(shape, X.dtype.itemsize)
        tiles = [slice(i, min(i + step, len(X))) for i in range(0, len(X), step)]
        rng.run(lambda rows: self._compute(xp, X[rows], tables, found[rows]), tiles)
        return found, Y

    def _tables(self, xp: Any, shape: tuple[int, ...], dtype: Any) -> _Tables:
        filters = np.vstack([self.filters, -self.offsets])
        regions = _regions(shape[0] - self.size + 1, shape[1] - self.size + 1, self.grid)
        return _Tables(
            *(xp.asarray(a, dtype) for a in (filters, regions, self.mean, self.scale))
        )  # fmt: skip

    def _compute(self, xp: Any, X: AnyArray, tables: _Tables, out: AnyArray) -> None:
        """Write the features of a tile of images to `out` (k, 2 grid^2 N).

        Products are of one image each: their bits do not depend on the others.
        """
        patches = _patches(xp, X, self.size)
        own = patches[..., :-1]
        own /= xp.sqrt(own.var(axis=2, keepdims=True) + X.dtype.type(self.floor))
        responses = xp.matmul(patches, tables.filters)
        parts, t = out.reshape(len(X), 2, self.grid**2, -1), X.dtype.type(self.threshold)
        # mean max(r - t, 0) = mean max(r, t) - t, and the same of -r.
        parts[:, 0] = xp.matmul(tables.regions, xp.maximum(responses, t))
        parts[:, 0] -= t
        xp.minimum(responses, -t, out=responses)
        xp.subtract(-t, xp.matmul(tables.regions, responses), out=parts[:, 1])
        out -= tables.mean
        out /= tables.scale

    def __repr__(self) -> str:
        size = f"size={self.size}, grid={self.grid}"
        return f"PatchFeatures(n_filters={self.n_filters}, {size})"

    # -- stored --------------------------------------------------------------------------------

    def arrays(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return the arrays to store, by name."""
        return {name: getattr(self, name) for name in PATCH_ARRAYS}

    def numbers(self) -> dict[str, Any]:
        """Return the other fields, JSON; `PatchFeatures(**arrays, **numbers)` restores them."""
        return {
            "size": self.size, "floor": self.floor, "grid": self.grid, "threshold": self.threshold,
        }  # fmt: skip

    def describe(self) -> dict[str, object]:
        """Return the numbers, and a digest of the arrays, JSON."""
        digest = hashlib.sha256()
        for array in self.arrays().values():
            digest.update(np.ascontiguousarray(array).tobytes())
        made = {"n_filters": self.n_filters, "sha256": digest.hexdigest()[:16]}
        return {"kind": "patches", **self.numbers(), **made}


def patches_among(transforms: Sequence[Any]) -> PatchFeatures | None:
    """Return the patch features among the transforms; None if there are none."""
    return next((t for t in transforms if isinstance(t, PatchFeatures)), None)


def patch_names(features: PatchFeatures) -> list[str]:
    """Return the names of the features: sign, region and number of the filter."""
    g, n = features.grid, features.n_filters
    return [
        f"{sign}patch {k} at {i},{j}"
        for sign in "+-" for i in range(g) for j in range(g) for k in range(n)
    ]  # fmt: skip


def patch_size(wanted: int | str, row_shape: Sequence[int]) -> int:
    """Return the size of a patch. wanted : a number, or "auto".

    Raises ConfigError if the rows are not images, or smaller than a patch.
    """
    if len(row_shape) != 3:
        raise ConfigError(
            f"{mention('model.patch_features')} needs images (height, width, channels), and rows "
            f"have the shape {tuple(row_shape)}",
            "store the data as images, (n, h, w, ch), or leave it out",
        )
    side = min(row_shape[:2])
    if isinstance(wanted, str):
        return min(AUTO_SIZE if side >= SMALL_SIDE else SMALL_SIZE, side)
    if wanted > side:
        raise ConfigError(
            f"{mention('model.patch_size', wanted)} is larger than the images of {row_shape[0]} x "
            f"{row_shape[1]} pixels",
            f"lower it, or leave it at {mention('auto')}",
        )
    return wanted


def _drawn(
    X: npt.NDArray[Any], size: int, n: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return n patches at different random positions of images X, fewer if there are no more."""
    windows = np.lib.stride_tricks.sliding_window_view(X, (size, size), axis=(1, 2))
    total = math.prod(windows.shape[:3])
    places = rng.choice(total, size=min(n, total), replace=False)
    found = windows[np.unravel_index(places, windows.shape[:3])]
    return found.transpose(0, 2, 3, 1).reshape(len(places), -1).astype(np.float64)


def _patches(xp: Any, X: AnyArray, size: int) -> AnyArray:
    """Return all patches of images (k, h, w, c), and a 1: (k, positions, size^2 c + 1)."""
    k, h, w, c = X.shape
    rows, columns, line = h - size + 1, w - size + 1, size * c
    patches = xp.empty((k, rows, columns, size * line + 1), X.dtype)
    patches[..., -1] = 1
    X, view = xp.ascontiguousarray(X), xp.lib.stride_tricks.as_strided
    s_k, s_h, s_w, s_c = X.strides
    shape = (k, rows, columns, size, line)  # the pixels of a row of a patch lie side by side
    windows = view(X, shape, (s_k, s_h, s_w, s_h, s_c))
    view(patches, shape, (*patches.strides[:3], line * s_c, s_c))[...] = windows
    return patches.reshape(k, rows * columns, -1)


def _regions(rows: int, columns: int, grid: int) -> npt.NDArray[np.float64]:
    """Return the averages over the regions of the positions, (grid^2, rows columns).

    A side shorter than the grid has regions that overlap.
    """
    averages = np.zeros((grid, grid, rows, columns))
    for i, own_rows in enumerate(_spans(rows, grid)):
        for j, own_columns in enumerate(_spans(columns, grid)):
            averages[i, j, own_rows, own_columns] = 1
    flat = averages.reshape(grid**2, -1)
    return np.asarray(flat / flat.sum(axis=1, keepdims=True))


def _spans(n: int, grid: int) -> list[slice]:
    return [slice(n * i // grid, max(n * (i + 1) // grid, n * i // grid + 1)) for i in range(grid)]


def restored_patches(
    arrays: Mapping[str, npt.NDArray[Any]], numbers: Mapping[str, Any]
) -> PatchFeatures:
    """Return patch features from their stored arrays and numbers."""
    filters, offsets, mean, scale = (np.asarray(arrays[k], np.float64) for k in PATCH_ARRAYS)
    return PatchFeatures(
        filters, offsets, mean, scale, int(numbers["size"]), float(numbers["floor"]),
        int(numbers["grid"]), float(numbers["threshold"]),
    )  # fmt: skip
