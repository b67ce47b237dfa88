"""Check rounded noise: its draws, its distribution, and where it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from streamkern.basics.errors import ConfigError
from streamkern.basics.randomness import RowRandom
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.random_transforms import GaussianNoise
from streamkern.stream.sources.transforms import (
    MixUp,
    RandomCrop,
    RandomFlip,
    Scale,
    apply_transforms,
    describe_transform,
    from_config,
    integers_stay,
    keeps_integers,
)

Y = np.zeros((4000, 1), np.float32)
ROWS = np.arange(4000) * 3


def add_noise(X: np.ndarray, noise: GaussianNoise, stored_dtype: Any = np.uint8) -> np.ndarray:
    """Return X with noise that is bound to rows of `stored_dtype`."""
    source = ArraySource(X.astype(stored_dtype), transforms=[noise])
    transformed, _, _ = apply_transforms(
        source.feed_transforms, X, Y[: len(X)], epoch=2,
        random=lambda number: RowRandom(np, 1, 2, (9, number), ROWS[: len(X)]),
    )  # fmt: skip
    return np.asarray(transformed)


@pytest.mark.parametrize(("stored_dtype", "largest"), [(np.uint8, 255), (np.uint16, 65535)])
def test_rounded_noise_equals_rounded_clipped_normals(stored_dtype: Any, largest: int) -> None:
    X = (
        np.random.default_rng(0)
        .choice([0, 3, 128, largest - 2, largest], (500, 12))
        .astype(np.float32)
    )
    rounded = add_noise(X, GaussianNoise(5.0, round=True), stored_dtype)
    normal = RowRandom(np, 1, 2, (9, 0), ROWS[:500]).normal((12,)).astype(np.float64)
    # Of a number that is this near to a half float32 may decide.
    clear = np.abs((5 * normal) % 1 - 0.5) > 2 * largest * np.finfo(np.float32).eps
    expected = np.clip(np.rint(X + 5 * normal), 0, largest)
    assert clear.mean() > 0.95
    np.testing.assert_array_equal(rounded[clear], expected[clear])
    np.testing.assert_array_equal(rounded, rounded.astype(stored_dtype))
    np.testing.assert_array_equal(
        add_noise(X[7:9], GaussianNoise(0.0, round=True), stored_dtype), X[7:9]
    )


@pytest.mark.parametrize("sigma", [0.3, 0.5, 1.0, 8.0])
def test_rounding_adds_a_twelfth_to_variance(sigma: float) -> None:
    """Check noise far from the limits, which follows the rounded normal distribution."""
    noise = (
        add_noise(np.full((4000, 40), 128.0, np.float32), GaussianNoise(sigma, round=True)) - 128
    )
    steps = np.arange(-40, 41)
    law = np.diff(stats.norm.cdf(np.r_[steps - 0.5, 40.5] / sigma))
    counts = np.histogram(noise, np.r_[steps - 0.5, 40.5])[0]
    is_frequent = law * noise.size > 5
    expected = law[is_frequent] / law[is_frequent].sum() * counts[is_frequent].sum()
    assert stats.chisquare(counts[is_frequent], expected).pvalue > 1e-3
    variance, error = noise.var(dtype=np.float64), np.sqrt(2 / noise.size)
    assert variance == pytest.approx((law * steps**2).sum(), rel=5 * max(error, 0.005 / sigma))
    if sigma >= 0.5:
        assert variance == pytest.approx(sigma**2 + 1 / 12, rel=0.03)


@pytest.mark.parametrize(("pixel", "inwards"), [(0, 1), (255, -1)])
def test_clipping_halves_noise_at_the_limits(pixel: int, inwards: int) -> None:
    noisy_pixels = add_noise(
        np.full((4000, 40), pixel, np.float32), GaussianNoise(16.0, round=True)
    )
    shifts = (noisy_pixels.astype(np.float64) - pixel) * inwards
    assert shifts.mean() == pytest.approx(16 / np.sqrt(2 * np.pi), rel=0.01)
    assert shifts.std() == pytest.approx(16 * np.sqrt(0.5 - 0.5 / np.pi), rel=0.01)
    assert (shifts == 0).mean() == pytest.approx(stats.norm.cdf(0.5 / 16), abs=0.01)


def test_noise_settings_record_rounding() -> None:
    rounded, plain = GaussianNoise(2.0, round=True), GaussianNoise(2.0)
    assert describe_transform(rounded) == {"kind": "noise", "sigma": 2.0, "round": True}
    assert describe_transform(plain) == {"kind": "noise", "sigma": 2.0}
    for noise in (rounded, plain):
        assert from_config([describe_transform(noise)]) == (noise,)


def test_every_transform_reports_if_integers_stay() -> None:
    @keeps_integers
    def invert(X: Any, Y: Any, rng: RowRandom) -> Any:
        return 255 - X, Y

    stay = [GaussianNoise(1.0, round=True), GaussianNoise(0.0), RandomCrop(1), RandomFlip()]
    assert integers_stay([*stay, Scale("none"), invert])
    for transform in (GaussianNoise(1.0), MixUp(1.0), Scale("global"), lambda X, Y, rng: (X, Y)):
        assert not integers_stay([transform])
        assert not integers_stay([*stay, transform])


@pytest.mark.parametrize(
    ("earlier_transform", "name"),
    [(Scale("global"), "Scale"), (MixUp(1.0), "MixUp"), (GaussianNoise(1.0), "GaussianNoise")],
)
def test_rounded_noise_after_non_integer_transform_is_refused(
    earlier_transform: Any, name: str
) -> None:
    X, rounded = np.zeros((5, 3), np.uint8), GaussianNoise(1.0, round=True)
    with pytest.raises(ConfigError, match=f"follows '{name}', which returns other numbers"):
        ArraySource(X, transforms=[RandomRows(), earlier_transform, rounded])
    with pytest.raises(ConfigError, match=f"follows '{name}'"):
        AugmentedSource(ArraySource(X, transforms=[earlier_transform]), 2, [rounded])
    source = AugmentedSource(ArraySource(X, transforms=[rounded]), 2, [rounded, earlier_transform])
    assert source.feed_transforms[:2] == (rounded, rounded)


class RandomRows:
    """Keeps the dtype, and runs with the read."""

    keeps_dtype = True

    def __call__(self, X: Any, Y: Any, rng: RowRandom) -> Any:
        return X.copy(), Y
