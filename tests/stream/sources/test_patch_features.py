"""Compare patch features with correlations of single images in float64, and their definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.signal import correlate2d

from streamkern.basics.randomness import RowRandom
from streamkern.stream.sources import patch_features
from streamkern.stream.sources.patch_features import (
    PatchFeatures,
    patch_names,
    patch_size,
    restore_patches,
)
from streamkern.stream.sources.quantile_scores import shape_after
from tests.traced_memory import traced_memory

Images = npt.NDArray[np.float64]
RNG = np.random.default_rng(0)
N, H, W, C, FILTERS = 80, 9, 12, 2, 7


def smooth_images(n: int, shape: tuple[int, int, int] = (H, W, C), seed: int = 0) -> Images:
    """Return images with similar neighbouring pixels, and a contrast and a brightness for each."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, *shape)).cumsum(axis=1).cumsum(axis=2)
    X /= X.std(axis=(1, 2, 3), keepdims=True)
    return X * rng.uniform(0.5, 2, (n, 1, 1, 1)) + rng.normal(size=(n, 1, 1, 1))


X = smooth_images(N)


def draw_features(
    grid: int = 2, size: int = 3, n_filters: int = FILTERS, **changes: Any
) -> PatchFeatures:
    """Return features whose filters are drawn from X, with `changes` of their fields."""
    return replace(PatchFeatures.of_sample(X, n_filters, size, grid, 0), **changes)


def features(patches: PatchFeatures, images: npt.NDArray[Any], **options: Any) -> npt.NDArray[Any]:
    """Return the features of images."""
    rng = RowRandom(np, 0, 0, 0, np.arange(len(images)), images.dtype, **options)
    out, Y = patches(images, np.zeros(len(images)), rng)
    assert len(Y) == len(out)
    assert out.shape[1:] == shape_after([patches], images.shape[1:])
    return np.asarray(out)


def reference_features(patches: PatchFeatures, image: Images) -> Images:
    """Return the features of an image (h, w, c), by correlations and a mean over each region."""
    s, c = patches.size, image.shape[2]
    area, ones = s * s * c, np.ones((s, s))
    mean = sum(correlate2d(image[..., k], ones, "valid") for k in range(c)) / area
    square = sum(correlate2d(image[..., k] ** 2, ones, "valid") for k in range(c)) / area
    spread = np.sqrt(square - mean**2 + patches.floor)
    rows, columns = mean.shape
    positive, negative = np.empty((2, patches.grid, patches.grid, patches.n_filters))
    for f in range(patches.n_filters):
        kernel = patches.filters[:, f].reshape(s, s, c)
        r = sum(correlate2d(image[..., k], kernel[..., k], "valid") for k in range(c))
        r = (r - mean * kernel.sum()) / spread - patches.offsets[f]
        for i in range(patches.grid):
            for j in range(patches.grid):
                part = r[
                    rows * i // patches.grid : rows * (i + 1) // patches.grid,
                    columns * j // patches.grid : columns * (j + 1) // patches.grid,
                ]
                positive[i, j, f] = np.maximum(part - patches.threshold, 0).mean()
                negative[i, j, f] = np.maximum(-part - patches.threshold, 0).mean()
    by_sign = np.stack([positive, negative]).reshape(-1)
    return np.asarray((by_sign - patches.mean) / patches.scale)


@pytest.mark.parametrize("grid", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_features_equal_correlations(grid: int, size: int) -> None:
    filters = 1 if size == 1 else FILTERS
    patches, new_images = draw_features(grid, size, filters), smooth_images(5, seed=1)
    expected = np.array([reference_features(patches, image) for image in new_images])
    np.testing.assert_allclose(features(patches, new_images), expected, rtol=1e-9, atol=1e-11)
    got = features(patches, new_images.astype(np.float32))
    assert got.dtype == np.float32
    # Rounding of a sum of size^2 C terms of order 1, divided by the spread of a feature.
    np.testing.assert_allclose(got, expected, atol=3e-5)


def test_filters_are_whitened_patches_of_sample() -> None:
    """Check that the filters are W (p - m) / |W (p - m)| with W W (C + e I) = I, times W again."""
    images = smooth_images(6, (5, 5, 1), seed=2)
    places = [(k, i, j) for k in range(6) for i in range(3) for j in range(3)]
    patches = np.array([images[k, i : i + 3, j : j + 3].ravel() for k, i, j in places])
    variance = patches.var(axis=1)
    floor = patch_features.CONTRAST_FLOOR * variance.mean()
    patches = (patches - patches.mean(axis=1)[:, None]) / np.sqrt(variance + floor)[:, None]
    mean = patches.mean(axis=0)
    covariance = (patches - mean).T @ (patches - mean) / len(patches)
    inverse = np.linalg.inv(
        covariance + patch_features.WHITENING_FLOOR * np.trace(covariance) / 9 * np.eye(9)
    )  # W W
    full = (patches - mean) @ inverse
    length = np.sqrt(np.einsum("ij,ij->i", full, patches - mean))  # |W (p - m)|
    is_long = length > patch_features.MIN_FILTER_LENGTH * np.median(length)
    expected = full[is_long] / length[is_long, None]
    offsets = expected @ mean
    expected -= expected.mean(axis=1)[:, None]
    transform = PatchFeatures.of_sample(images, int(is_long.sum()), 3, 2, 0)
    assert transform.floor == pytest.approx(floor)
    order = np.lexsort(transform.filters.round(6))
    row_order = np.lexsort(expected.T.round(6))
    np.testing.assert_allclose(transform.filters[:, order], expected[row_order].T, atol=1e-8)
    np.testing.assert_allclose(transform.offsets[order], offsets[row_order], atol=1e-8)


def test_features_are_centered_and_scaled() -> None:
    got = features(draw_features(), X)
    np.testing.assert_allclose(got.mean(axis=0), 0, atol=1e-5)
    assert (got.std(axis=0) < 1.0001).all()
    assert got.std() > 0.95


def test_features_ignore_brightness_and_accept_flat_images() -> None:
    patches = draw_features()
    np.testing.assert_allclose(features(patches, X + 3.0), features(patches, X), atol=1e-9)
    flat = features(patches, np.full((1, H, W, C), 5.0))
    assert np.isfinite(flat).all()
    np.testing.assert_allclose(flat, reference_features(patches, np.full((H, W, C), 5.0))[None])


def test_filters_depend_on_seed_and_rows_only() -> None:
    one, same_seed, other_seed = (PatchFeatures.of_sample(X, 5, 3, 2, seed) for seed in (1, 1, 2))
    assert one.describe() == same_seed.describe() != other_seed.describe()
    assert one.describe() != PatchFeatures.of_sample(X + RNG.normal(size=X.shape), 5, 3, 2, 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_row_has_same_bits_in_every_batch(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, new_images = draw_features(n_filters=40), smooth_images(37, seed=3).astype(dtype)
    full = features(patches, new_images)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 20)):
        np.testing.assert_array_equal(features(patches, new_images[rows]), full[rows])
    np.testing.assert_array_equal(features(patches, new_images[::3]), full[::3])
    monkeypatch.setattr(patch_features, "TILE_BYTES", 3 * patches.row_bytes((H, W, C), 4))

    def backwards(function: Any, parts: Any) -> None:
        for part in reversed(list(parts)):
            function(part)

    np.testing.assert_array_equal(features(patches, new_images, run=backwards), full)


def test_tile_uses_planned_memory(monkeypatch: pytest.MonkeyPatch) -> None:

    shape = (24, 24, 3)
    patches = PatchFeatures.of_sample(smooth_images(20, shape), 64, 5, 2, 0)
    new_images = smooth_images(60, shape).astype(np.float32)
    monkeypatch.setattr(patch_features, "TILE_BYTES", 8 << 20)
    with traced_memory() as traced:
        features(patches, new_images)
    peak = traced.peak
    result_bytes = (
        new_images.nbytes + 60 * 4 * shape_after([patches], shape)[0] + 8 * patches.filters.size * 4
    )
    assert peak < patches.tile_bytes(shape, 4, on_host=True) + result_bytes
    q, s = 20 * 20, 5 * 5 * 3
    assert patches.row_flops(shape) == 2 * q * 64 * (s + 4)


def test_regions_cover_all_positions() -> None:
    patches = draw_features(3, H)  # a single row of four positions
    got = features(patches, smooth_images(4, seed=4))
    np.testing.assert_array_equal(got[:, : 3 * FILTERS], got[:, 3 * FILTERS : 6 * FILTERS])
    assert np.isfinite(got).all()


def test_restored_filters_give_same_features() -> None:
    patches = draw_features()
    restored = restore_patches(patches.arrays(), patches.numbers())
    assert restored.describe() == patches.describe()
    np.testing.assert_array_equal(features(restored, X), features(patches, X))
    assert repr(patches) == "PatchFeatures(n_filters=7, size=3, grid=2)"


def test_patch_names_follow_feature_order() -> None:
    names = patch_names(draw_features(1, n_filters=2))
    assert names == ["+patch 0 at 0,0", "+patch 1 at 0,0", "-patch 0 at 0,0", "-patch 1 at 0,0"]


def test_patch_size_fits_images() -> None:
    sizes = [patch_size("auto", (side, 40, 3)) for side in (2, 8, 15, 16, 32, 224)]
    assert sizes == [2, 3, 3, 6, 6, 6]
    assert patch_size(5, (5, 9, 1)) == 5
