"""Patch features: responses of an image to filters from training images, averaged over regions.

A kernel that depends on the distance ignores which pixels are neighbours. These features describe
an image by its responses to N small filters in each region (Coates, Lee and Ng 2011; Coates and Ng
2011):

1. Every patch p of `size` x `size` pixels, at every position, is standardised to mean 0 and
   standard deviation about 1: p <- (p - mean(p)) / sqrt(var(p) + floor).
2. It is whitened, W (p - m), where m is the mean of a sample of patches and W = (C + e I)^(-1/2)
   with their covariance C. The response r = D W (p - m) multiplies it with the N rows of D, which
   are whitened patches of the sample, scaled to length 1.
3. max(r - t, 0) and max(-r - t, 0), with the threshold t, are averaged over each of `grid` x `grid`
   regions of the positions. These 2 grid^2 N numbers are standardised by their mean and standard
   deviation over a sample of rows.

Subtracting the mean of a patch is linear, like D and W, so one product computes all three.
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
MAX_SAMPLED_PATCHES, MAX_SAMPLED_ENTRIES = 20_000, 2 << 20
"""Largest number of patches from which the whitening is estimated, and of their entries; more are
drawn only if the requested filters need them."""
PATCH_ROWS, SCALE_ROWS = 1024, 256
"""Rows from which patches are drawn, and rows on which the standard deviations are measured."""
AUTO_PATCH_SIZE, SMALL_IMAGE_SIDE, SMALL_PATCH_SIZE = 6, 16, 3
"""Default size of a patch; smallest side of an image with this size; size in smaller images."""
THRESHOLD = 0.25
"""The constant t."""
CONTRAST_FLOOR, WHITENING_FLOOR = 0.1, 0.1
"""The constants `floor`, divided by the mean variance of a patch, and e, divided by the mean
variance of a pixel of a patch."""
MIN_FILTER_LENGTH = 0.1
"""Length below which a whitened patch is not used as a filter, divided by the median length."""
FEATURE_SCALE_FLOOR = 0.01
"""Constant added to the standard deviation by which a feature is divided, relative to the mean of
all standard deviations."""
TILE_BYTES, DEVICE_TILE_BYTES = 1 << 20, 256 << 20
"""Bytes of the patches and responses that a thread, or a device, holds at once, unless one image
needs more."""
PATCH_ARRAYS = ("filters", "offsets", "mean", "scale")
"""The fields of `PatchFeatures` that are arrays; the others are numbers."""


class _Tables(NamedTuple):
    """The arrays of the transform, converted to the array library and dtype of a batch.

    filters : (size^2 channels + 1, N); the last row is minus the offsets, see `_patches`
    regions : (grid^2, positions) the matrix that averages over the regions
    mean, scale : as in `PatchFeatures`
    """

    filters: AnyArray
    regions: AnyArray
    mean: AnyArray
    scale: AnyArray


@dataclass(frozen=True, eq=False, repr=False)
class PatchFeatures:
    """The transform from images (m, h, w, channels) to patch features (m, 2 grid^2 N).

    filters : (size^2 channels, N) float64, the transposed D W minus the mean of each filter, which
        subtracts the mean of a patch. Rows are in the order (row, column, channel) of a patch.
    offsets : (N,) the constants D W m that are subtracted from the products
    mean, scale : (2 grid^2 N,) means and scales of the features, ordered by sign (positive parts
        first), then by region (row by row), then by filter
    size : pixels along a side of a patch
    floor : constant added to the variance of a patch
    grid : number of regions along a side
    threshold : the constant t

    On the CPU the features of a row have the same bits in every batch. The cost of a row is about
    2 q s N FLOPs, with q positions and s = size^2 channels, and `row_bytes` of scratch memory.
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

        Raises ConfigError if the images have fewer than `n_filters` patches with contrast.
        """
        # A sample of patches, standardised.
        rng = np.random.default_rng([seed, PATCH_STAGE])
        n_candidates = 1000 + 4 * n_filters  # at least half of them are long enough
        max_patches = min(MAX_SAMPLED_PATCHES, MAX_SAMPLED_ENTRIES // (size * size * X.shape[3]))
        patches = _random_patches(X, size, max(max_patches, n_candidates), rng)
        variance = patches.var(axis=1)
        floor = CONTRAST_FLOOR * float(variance.mean())
        if not floor > 0:
            raise ConfigError(
                f"{mention('model.patch_features', n_filters)} needs images with contrast, but all "
                "patches of a sample are flat",
                "leave it out",
            )
        patches -= patches.mean(axis=1, keepdims=True)
        patches /= np.sqrt(variance + floor)[:, None]
        # The whitening: m, and the symmetric matrix W.
        mean = patches.mean(axis=0)
        patches -= mean
        values, axes = np.linalg.eigh(patches.T @ patches / len(patches))
        W = axes / np.sqrt(values.clip(min=0) + WHITENING_FLOOR * values.mean()) @ axes.T
        # The filters: the first whitened patches that are long enough.
        whitened = patches[:n_candidates] @ W
        lengths = np.linalg.norm(whitened, axis=1)
        chosen = np.flatnonzero(lengths > MIN_FILTER_LENGTH * np.median(lengths))[:n_filters]
        if len(chosen) < n_filters:
            raise ConfigError(
                f"{mention('model.patch_features', n_filters)} needs as many different patches "
                f"of {size} x {size} pixels, but a sample of the rows has {len(chosen)}",
                f"lower {mention('model.patch_features')}",
            )
        filters = W @ (whitened[chosen] / lengths[chosen, None]).T
        offsets = mean @ filters
        filters -= filters.mean(axis=0)
        # Mean and scale of the features.
        unscaled = cls(filters, offsets, np.zeros(1), np.ones(1), size, floor, grid)
        sample = X[:SCALE_ROWS].astype(np.float32)
        features, _ = unscaled(
            sample, sample, RowRandom(np, seed, 0, PATCH_STAGE, np.arange(len(sample)))
        )
        scale = features.std(axis=0, dtype=np.float64)
        scale += FEATURE_SCALE_FLOOR * scale.mean()
        scale[scale == 0] = 1.0
        return replace(unscaled, mean=features.mean(axis=0, dtype=np.float64), scale=scale)

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
        columns = 2 * (len(self.filters) + 1) + 2 * self.n_filters  # of a position
        return self._positions(row_shape) * columns * itemsize

    def tile_bytes(self, row_shape: tuple[int, ...], itemsize: int, *, on_host: bool) -> int:
        """Return the bytes of scratch memory of a thread, or of a device."""
        return max(
            TILE_BYTES if on_host else DEVICE_TILE_BYTES, self.row_bytes(row_shape, itemsize)
        )

    def _positions(self, row_shape: tuple[int, ...]) -> int:
        """Return the number of positions of a patch in an image of this shape."""
        return math.prod(side - self.size + 1 for side in row_shape[:2])

    def __call__(self, X: AnyArray, Y: AnyArray, rng: RowRandom) -> tuple[AnyArray, AnyArray]:
        xp, shape = rng.xp, X.shape[1:]
        features = rng.empty((len(X), *self.shape_after(shape)), X.dtype)
        tables = self._tables(xp, shape, X.dtype)
        max_bytes = self.tile_bytes(shape, X.dtype.itemsize, on_host=xp is np)
        step = max_bytes // self.row_bytes(shape, X.dtype.itemsize)
        tiles = [slice(i, min(i + step, len(X))) for i in range(0, len(X), step)]
        rng.run(lambda rows: self._compute(xp, X[rows], tables, features[rows]), tiles)
        return features, Y

    def _tables(self, xp: Any, shape: tuple[int, ...], dtype: Any) -> _Tables:
        """Return the arrays of the transform for images of this shape, in `dtype`."""
        filters = np.vstack([self.filters, -self.offsets])
        regions = _regions(shape[0] - self.size + 1, shape[1] - self.size + 1, self.grid)
        return _Tables(
            *(xp.asarray(a, dtype) for a in (filters, regions, self.mean, self.scale))
        )  # fmt: skip

    def _compute(self, xp: Any, X: AnyArray, tables: _Tables, out: AnyArray) -> None:
        """Write the features of a tile of images to `out` (k, 2 grid^2 N).

        Each product is of one image, so that its bits do not depend on the other images.
        """
        patches = _patches(xp, X, self.size)
        pixels = patches[..., :-1]
        pixels /= xp.sqrt(pixels.var(axis=2, keepdims=True) + X.dtype.type(self.floor))
        responses = xp.matmul(patches, tables.filters)
        # By sign and region; `parts` is a view of `out`.
        parts, t = out.reshape(len(X), 2, self.grid**2, -1), X.dtype.type(self.threshold)
        # The mean of max(r - t, 0) is the mean of max(r, t) minus t. For -r, mean(max(-r - t, 0))
        # is -t minus mean(min(r, -t)).
        parts[:, 0] = xp.matmul(tables.regions, xp.maximum(responses, t))
        parts[:, 0] -= t
        xp.minimum(responses, -t, out=responses)
        xp.subtract(-t, xp.matmul(tables.regions, responses), out=parts[:, 1])
        out -= tables.mean
        out /= tables.scale

    def __repr__(self) -> str:
        size = f"size={self.size}, grid={self.grid}"
        return f"PatchFeatures(n_filters={self.n_filters}, {size})"

    # -- storage -------------------------------------------------------------------------------

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
        identity = {"n_filters": self.n_filters, "sha256": digest.hexdigest()[:16]}
        return {"kind": "patches", **self.numbers(), **identity}


def patches_among(transforms: Sequence[Any]) -> PatchFeatures | None:
    """Return the patch features among the transforms; None if there are none."""
    return next((t for t in transforms if isinstance(t, PatchFeatures)), None)


def patch_names(features: PatchFeatures) -> list[str]:
    """Return the names of the features: sign, region and number of the filter."""
    grid, n = features.grid, features.n_filters
    return [
        f"{sign}patch {k} at {i},{j}"
        for sign in "+-" for i in range(grid) for j in range(grid) for k in range(n)
    ]  # fmt: skip


def patch_size(requested: int | str, row_shape: Sequence[int]) -> int:
    """Return the number of pixels along a side of a patch. requested : this number, or "auto".

    Raises ConfigError if the rows are not images, or smaller than a patch.
    """
    if len(row_shape) != 3:
        raise ConfigError(
            f"{mention('model.patch_features')} needs images (height, width, channels), but rows "
            f"have the shape {tuple(row_shape)}",
            "store the data as images, (n, h, w, ch), or leave it out",
        )
    side = min(row_shape[:2])
    if isinstance(requested, str):
        return min(AUTO_PATCH_SIZE if side >= SMALL_IMAGE_SIDE else SMALL_PATCH_SIZE, side)
    if requested > side:
        raise ConfigError(
            f"{mention('model.patch_size', requested)} is larger than the images of "
            f"{row_shape[0]} x {row_shape[1]} pixels",
            f"lower it, or leave it at {mention('auto')}",
        )
    return requested


def _random_patches(
    X: npt.NDArray[Any], size: int, n: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return at most n patches at distinct random positions of images X, (n, size^2 channels)."""
    windows = np.lib.stride_tricks.sliding_window_view(X, (size, size), axis=(1, 2))
    total = math.prod(windows.shape[:3])
    indices = rng.choice(total, size=min(n, total), replace=False)
    patches = windows[np.unravel_index(indices, windows.shape[:3])]
    return patches.transpose(0, 2, 3, 1).reshape(len(indices), -1).astype(np.float64)


def _patches(xp: Any, X: AnyArray, size: int) -> AnyArray:
    """Return all patches of images (k, h, w, c), each followed by a 1.

    The result is (k, positions, size^2 c + 1); the 1 multiplies the row of offsets in `_Tables`.
    """
    k, h, w, c = X.shape
    rows, columns, line = h - size + 1, w - size + 1, size * c  # line: a row of pixels of a patch
    patches = xp.empty((k, rows, columns, size * line + 1), X.dtype)
    patches[..., -1] = 1
    X, view = xp.ascontiguousarray(X), xp.lib.stride_tricks.as_strided
    s_k, s_h, s_w, s_c = X.strides
    # Views of both arrays by patch and line, without the 1; the pixels of a line are contiguous.
    shape = (k, rows, columns, size, line)
    windows = view(X, shape, (s_k, s_h, s_w, s_h, s_c))
    view(patches, shape, (*patches.strides[:3], line * s_c, s_c))[...] = windows
    return patches.reshape(k, rows * columns, -1)


def _regions(rows: int, columns: int, grid: int) -> npt.NDArray[np.float64]:
    """Return the matrix that averages over the regions of the positions, (grid^2, rows columns).

    A side shorter than the grid has regions that overlap.
    """
    averages = np.zeros((grid, grid, rows, columns))
    for i, region_rows in enumerate(_spans(rows, grid)):
        for j, region_columns in enumerate(_spans(columns, grid)):
            averages[i, j, region_rows, region_columns] = 1
    flat = averages.reshape(grid**2, -1)
    return np.asarray(flat / flat.sum(axis=1, keepdims=True))


def _spans(n: int, grid: int) -> list[slice]:
    """Return `grid` slices that cover n positions, each with at least one position."""
    return [slice(n * i // grid, max(n * (i + 1) // grid, n * i // grid + 1)) for i in range(grid)]


def restore_patches(
    arrays: Mapping[str, npt.NDArray[Any]], numbers: Mapping[str, Any]
) -> PatchFeatures:
    """Return patch features from their stored arrays and numbers."""
    filters, offsets, mean, scale = (np.asarray(arrays[name], np.float64) for name in PATCH_ARRAYS)
    return PatchFeatures(
        filters, offsets, mean, scale, int(numbers["size"]), float(numbers["floor"]),
        int(numbers["grid"]), float(numbers["threshold"]),
    )  # fmt: skip
