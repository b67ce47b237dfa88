"""Check transforms of rows: formulas, draws of each row, settings and refusals."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view
from scipy import stats

from streamkern.basics.errors import ConfigError, DataError, NonFiniteError
from streamkern.basics.randomness import RowRandom
from streamkern.stream.sources import transforms
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.transforms import (
    SETUP_EPOCH,
    GaussianNoise,
    MixUp,
    RandomCrop,
    RandomFlip,
    Scale,
    apply_transforms,
    bind_transforms,
    describe_transform,
    from_config,
    host_transform,
)
from tests.strategies import seeds, splits


class Data:
    """A source as transforms see it."""

    def __init__(self, X: np.ndarray, has_statistics: bool = True) -> None:
        self.row_shape = X.shape[1:]
        flat = X.reshape(len(X), -1).astype(np.float64)
        self._moments = (
            (flat.mean(), flat.std(), flat.mean(0), flat.std(0)) if has_statistics else None
        )

    def statistics(self) -> Any:
        return self._moments or (None, None, None, None)


def run(
    transform: Any, X: np.ndarray, Y: np.ndarray, rows: np.ndarray, seed: int = 3, epoch: int = 1
) -> Any:
    """Return X and Y after a transform."""
    dtype = X.dtype if X.dtype.kind == "f" else np.float32
    X, Y, _ = apply_transforms(
        [transform], X, Y, epoch=epoch,
        random=lambda number: RowRandom(np, seed, epoch, (9, number), rows, dtype),
    )  # fmt: skip
    return X, Y


def same_random(rows: np.ndarray, dtype: Any = np.float32, seed: int = 3) -> RowRandom:
    """Return the draws that the transform in `run` gets."""
    return RowRandom(np, seed, 1, (9, 0), rows, dtype)


@pytest.fixture
def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(5, 3, (40, 6)).astype(np.float32)
    X[:, 2] = 4  # a constant feature
    return X, np.eye(40, dtype=np.float32), rng.permutation(1000)[:40]


@pytest.mark.parametrize("mode", ["global", "feature", "none"])
def test_scale_equals_float64_reference(batch: Any, mode: str) -> None:
    X, Y, rows = batch
    exact = X.astype(np.float64)
    if mode == "global":
        exact = (exact - exact.mean()) / exact.std()
    if mode == "feature":
        deviation = exact.std(0)
        deviation[2] = 1
        exact = (exact - exact.mean(0)) / deviation
    X_before = X.copy()
    scaled, unchanged_Y = run(Scale(mode).bind(Data(X)), X, Y, rows)
    assert scaled.dtype == np.float32
    # float32 subtraction and division round once each, at values up to 15.
    np.testing.assert_allclose(scaled, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(X, X_before)
    assert unchanged_Y is Y


@pytest.mark.parametrize("mode", ["global", "feature"])
def test_scaling_is_equal_for_float32_and_float64(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check equal bits for any offset, in parts and at once."""
    X = (np.random.default_rng(0).normal(size=(50, 3)) * [1, 100, 1e-2] + [1e3, 0, 5]).astype("f4")
    scale, Y, rows = Scale(mode).bind(Data(X)), np.zeros((50, 1)), np.arange(50)
    wide = run(scale, X.astype(np.float64), Y, rows)[0].astype(np.float32)
    np.testing.assert_array_equal(run(scale, X, Y, rows)[0], wide)
    monkeypatch.setattr(transforms, "SCALE_SLAB_ENTRIES", 7)
    np.testing.assert_array_equal(run(scale, X, Y, rows)[0], wide)


def test_scale_accepts_given_statistics() -> None:
    X = np.zeros((2, 3, 2, 1))
    scale = Scale("feature", mean=np.arange(6.0), scale=np.full(6, 2.0)).bind(
        Data(X, has_statistics=False)
    )
    assert scale.mean.shape == (3, 2, 1)
    Y = np.zeros((2, 1))
    np.testing.assert_array_equal(run(scale, X, Y, np.arange(2))[0][0].ravel(), -np.arange(6.0) / 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: Scale("feature", mean=np.ones(4), scale=np.ones(4)).bind(d), r"\(4,\)"),
        (lambda d: GaussianNoise(float("nan")), "sigma=nan"),
        (lambda d: RandomCrop(1).bind(d), "needs images"),
    ],
)
def test_invalid_transform_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(Data(np.ones((2, 3))))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_noise_adds_normals_of_each_row(batch: Any, dtype: Any) -> None:
    X, Y, rows = batch
    X = X.astype(dtype)
    X_before = X.copy()
    noisy, _ = run(GaussianNoise(0.5), X, Y, rows)
    assert noisy.dtype == dtype
    expected = X_before + 0.5 * same_random(rows, dtype).normal((6,)).astype(np.float64)
    np.testing.assert_allclose(noisy, expected, rtol=2 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(X, X_before)
    assert run(GaussianNoise(0.0), X, Y, rows)[0] is X


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_mixup_mixes_features_and_targets_equally(alpha: float) -> None:
    n = 600
    rows = np.arange(n) * 7
    X = np.random.default_rng(1).normal(size=(n, 3))
    # One-hot targets show both weights of a row: w at its own place, 1 - w at its partner's.
    mixed, targets = run(MixUp(alpha), X, np.eye(n), rows)
    np.testing.assert_allclose(targets.sum(1), 1, atol=1e-15)
    assert ((targets > 0).sum(1) <= 2).all()
    np.testing.assert_allclose(mixed, targets @ X, atol=1e-14)
    off_diagonal = targets - np.diag(np.diag(targets))
    partners = off_diagonal.argmax(1)[off_diagonal.max(1) > 0]
    assert len(partners) > n - 20
    assert len(np.unique(partners)) == len(partners)
    # The weights are draws by the inverse CDF, and such draws follow the beta distribution.
    weights = np.interp(same_random(rows, np.float64).uniform(), *quantiles(alpha))
    has_partner = off_diagonal.max(1) > 0
    np.testing.assert_allclose(np.diag(targets)[has_partner], weights[has_partner], atol=1e-12)
    samples = np.interp(same_random(np.arange(4000), np.float64).uniform(), *quantiles(alpha))
    assert stats.kstest(samples, stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def quantiles(alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return 4097 levels, and the quantiles of the beta distribution at them."""
    levels = np.linspace(0, 1, 4097)
    return levels, stats.beta(alpha, alpha).ppf(levels)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_crop_picks_a_window_of_the_padded_image(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(1, 255, (300, 5, 4, 2)).astype(dtype)
    rows = np.arange(300) + 11
    cropped, _ = run(RandomCrop(2), images, np.zeros(300), rows)
    assert cropped.dtype == dtype
    draws_seen = set()
    for image, crop in zip(images, cropped, strict=True):
        padded = np.zeros((9, 8, 2), dtype)
        padded[2:7, 2:6] = image
        windows = sliding_window_view(padded, (5, 4), axis=(0, 1))  # (5, 5, ch, h, w)
        hits = (windows == np.moveaxis(crop, -1, 0)).all(axis=(2, 3, 4))
        assert hits.sum() == 1
        draws_seen.add(tuple(np.argwhere(hits)[0].tolist()))
    assert len(draws_seen) == 25
    np.testing.assert_array_equal(run(RandomCrop(0), images, np.zeros(300), rows)[0], images)


def test_flip_mirrors_about_half_of_the_images() -> None:
    images = np.random.default_rng(0).integers(0, 255, (400, 3, 4, 1)).astype(np.uint8)
    flipped, _ = run(RandomFlip(), images, np.zeros(400), np.arange(400))
    mirrored = (flipped == images[:, :, ::-1]).all(axis=(1, 2, 3))
    assert ((flipped == images).all(axis=(1, 2, 3)) | mirrored).all()
    assert 150 < mirrored.sum() < 250  # 5 standard deviations
    assert flipped.dtype == np.uint8


@given(st.data(), seeds)
def test_transform_of_a_row_does_not_depend_on_batch(data: Any, seed: int) -> None:
    n = data.draw(st.integers(1, 30))
    rng = np.random.default_rng(n)
    rows = rng.permutation(10_000)[:n]
    images, Y = rng.integers(0, 255, (n, 4, 3, 2)).astype(np.uint8), rng.normal(size=(n, 2))
    for transform in (RandomCrop(2), RandomFlip(), GaussianNoise(2.0)):
        X = images.astype(np.float32) if isinstance(transform, GaussianNoise) else images
        full, _ = run(transform, X, Y, rows, seed)
        for part in data.draw(splits(n)):
            np.testing.assert_array_equal(
                run(transform, X[part], Y[part], rows[part], seed)[0], full[part]
            )


def test_equal_transforms_draw_differently(batch: Any) -> None:
    X, Y, rows = batch
    noise = GaussianNoise(1.0)
    twice, *_ = apply_transforms(
        [noise, noise], X, Y, random=lambda number: RowRandom(np, 3, 1, (9, number), rows), epoch=1
    )
    whole, _ = run(noise, X, Y, rows)
    assert np.abs((twice - whole) - (whole - X)).max() > 0.1


@host_transform
def invert(X: Any, Y: Any, rng: RowRandom) -> Any:
    """Invert the pixels of 8 bits."""
    return 255 - X, Y


def test_host_transforms_end_at_the_first_float_transform() -> None:
    data = Data(np.zeros((4, 3, 3, 1)))
    crop, flip, noise = RandomCrop(1), RandomFlip(), GaussianNoise(1.0)
    assert bind_transforms([crop, invert, noise, flip], data) == ((crop, invert), (noise, flip))
    assert bind_transforms([noise, crop], data) == ((), (noise, crop))
    assert bind_transforms([crop, noise], data, before=[noise]) == ((), (crop, noise))


def test_failure_of_user_function_names_the_function(batch: Any) -> None:
    X, Y, rows = batch

    def raise_error(X: Any, Y: Any, rng: RowRandom) -> Any:
        return X + undefined, Y  # type: ignore[name-defined]  # noqa: F821

    def to_float64(X: Any, Y: Any, rng: RowRandom) -> Any:
        return X.astype(np.float64), Y

    def drop_rows(X: Any, Y: Any, rng: RowRandom) -> Any:
        return X[1:], Y[1:]

    with pytest.raises(
        DataError, match=r'"test_failure_.*raise_error" failed in epoch 1: NameError'
    ):
        run(raise_error, X, Y, rows)
    with pytest.raises(DataError, match=r'raise_error" failed in the setup sample: NameError'):
        run(raise_error, X, Y, rows, epoch=SETUP_EPOCH)
    with pytest.raises(DataError, match=r'to_float64" turned X \(40, 6\) float32 .*float64'):
        run(to_float64, X, Y, rows)
    with pytest.raises(DataError, match=r"drop_rows.*\(39, 6\)"):
        run(drop_rows, X, Y, rows)


def test_transforms_roundtrip_through_descriptions() -> None:
    settings = [
        {"kind": "crop", "padding": 2},
        {"kind": "flip"},
        {"kind": "noise", "sigma": 0.5},
        {"kind": "mixup", "alpha": 0.4},
    ]
    assert [describe_transform(t) for t in from_config(settings)] == settings
    scale = Scale("feature").bind(Data(np.arange(6.0).reshape(2, 3)))
    text = json.dumps([describe_transform(t) for t in (scale, invert)])
    assert "invert" in text
    assert "sha256:" in text
    other_scale = Scale("feature").bind(Data(np.arange(6.0).reshape(2, 3) + 1))
    assert describe_transform(other_scale) != describe_transform(scale)


@pytest.mark.parametrize(
    ("returned", "case"),
    [
        (lambda X, Y: X, "ndarray"), (lambda X, Y: None, "NoneType"),
        (lambda X, Y: (X, Y, Y), "tuple of 3"), (lambda X, Y: [X.tolist(), Y], "list of 2"),
    ],
)  # fmt: skip
def test_transform_must_return_two_arrays(returned: Any, case: str) -> None:
    rows = np.ones((20, 3), np.float32)

    def own(X: Any, Y: Any, rng: Any) -> Any:
        return returned(X, Y)

    own.keeps_dtype = True  # type: ignore[attr-defined]
    source = AugmentedSource(ArraySource(rows, rows[:, 0]), 1, (own,))
    with pytest.raises(DataError, match=rf"own\" must return \(X, Y\).*, not {case};"):
        source.read_unit(0, 0, 0)


def test_values_that_are_not_finite_name_transform_epoch_and_row() -> None:
    X, Y = np.ones((4, 2), np.float32), np.ones((4, 1))

    def spoil(X: np.ndarray, Y: np.ndarray, rng: RowRandom) -> tuple[np.ndarray, np.ndarray]:
        bad = np.arange(len(X)) == 2
        return np.where(bad[:, None], np.nan, X).astype(X.dtype), Y

    def apply(transforms: list[Any], epoch: int) -> None:
        rows = np.arange(10, 14)
        apply_transforms(
            transforms, X, Y, epoch=epoch,
            random=lambda number: RowRandom(np, 0, epoch, (number,), rows),
        )  # fmt: skip

    with pytest.raises(NonFiniteError, match=r"nan in X .*spoil in epoch 3, row 12, column 0"):
        apply([spoil], 3)
    with pytest.raises(NonFiniteError, match="spoil in the setup sample, row 12"):
        apply([Scale("global", 0.0, 1.0), spoil], SETUP_EPOCH)
    # A later transform may replace such values.
    apply([spoil, lambda X, Y, rng: (np.nan_to_num(X), Y)], 0)
