"""Compare the mean and the scale of the targets of every source with sums over one epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from streamkern.backend.base import Backend
from streamkern.store.sample_weights import weight_factors
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import GaussianNoise, MixUp
from streamkern.stream.sources.user import GeneratorSource
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.target_moments import target_scale
from tests.solver_problems import Array


def data(n: int) -> tuple[Array, Array]:
    """Return X (n, 5) and two targets (n, 2) with means of about 40 and -7."""
    rng = np.random.default_rng(23)
    X = rng.standard_normal((n, 5))
    y = np.stack([np.sin(X[:, 0]), X[:, 1] * X[:, 2]], axis=1) + 0.1 * rng.normal(size=(n, 2))
    return X, y + np.array([40.0, -7.0])


def find_target_scale(source: Source, class_weight: Any = None, **options: Any) -> TargetScale:
    """Return the mean and the scale of the targets that a run on `source` uses."""
    defaults = {"fit_intercept": True, "seed": 0, "dtype": np.dtype(np.float32)}
    defaults["n_outputs"] = source.n_outputs
    factors = weight_factors(source, class_weight)
    return target_scale(Backend(threads=1), source, factors, **defaults | options)


def targets_and_weights(source: Source, epoch: int = 0) -> tuple[Array, Array]:
    """Return the targets and the sample weights (or ones) of an epoch, read block by block."""
    blocks = [source.read_unit(u, 0, epoch) for u in range(source.n_units)]
    y = np.concatenate([np.float64(b.y) for b in blocks])
    return y, np.concatenate([np.ones(len(b.y)) if b.w is None else b.w for b in blocks])


def two_sources(weighted: bool) -> list[ArraySource]:
    """Return two sources whose targets differ in mean and standard deviation."""
    X, y = data(300)
    w = np.random.default_rng(5).integers(0, 5, 300) if weighted else None
    return [
        ArraySource(
            X[rows], y[rows] * (k + 1) + 100 * k, unit_rows=17,
            sample_weight=None if w is None else w[rows],
        )
        for k, rows in enumerate((slice(0, 90), slice(90, 300)))
    ]  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["array", "mixture", "shares", "augmented", "copies in a mixture"])
def test_mean_equals_mean_over_an_epoch(kind: str, weighted: bool) -> None:
    a, b = two_sources(weighted)
    source: Source = {
        "array": lambda: a,
        "mixture": lambda: MixtureSource([a, b]),
        # 90 and 210 rows, in 6 and 13 units of 17 rows, of which each is read several times.
        "shares": lambda: MixtureSource([a, b], [1, 3], n_rows=4 * 90 * 210),
        "augmented": lambda: AugmentedSource(a, 3, [GaussianNoise(0.1), MixUp()]),
        "copies in a mixture": lambda: MixtureSource([AugmentedSource(a, 5), b]),
    }[kind]()
    y, w = targets_and_weights(source)
    mean = w @ y / w.sum()
    spread = np.sqrt(w @ (y - mean) ** 2 / w.sum())
    scale = find_target_scale(source)
    # The shares hold for whole passes, and an epoch may end within a pass.
    np.testing.assert_allclose(scale.mean, mean, rtol=1e-3 if kind == "shares" else 1e-12)
    # The scale is the next power of two above the deviation; a mixture's may differ by 1 %.
    assert np.all((scale.scale > spread * 0.99) & (scale.scale < 2.02 * spread))
    np.testing.assert_array_equal(np.frexp(scale.scale)[0], 0.5)


@pytest.mark.filterwarnings("ignore:the array 'w' of")
def test_mean_of_a_foreign_store_is_computed(tmp_path: Path) -> None:
    X, y = data(500)
    w = np.float32(np.random.default_rng(6).integers(0, 3, 500))
    group = zarr.create_group(tmp_path / "theirs.zarr")
    for name, values in (("X", np.float32(X)), ("y", y), ("w", w)):
        group.create_array(name, data=values, chunks=(64, *values.shape[1:]))
    source = ZarrSource(str(tmp_path / "theirs.zarr"), w="w")
    np.testing.assert_allclose(
        find_target_scale(source).mean, np.float64(w) @ y / w.sum(), rtol=1e-12
    )
    plain = ZarrSource(str(tmp_path / "theirs.zarr"))
    np.testing.assert_allclose(find_target_scale(plain).mean, y.mean(axis=0), rtol=1e-12)


def test_mean_of_generated_rows_is_a_fixed_sample() -> None:
    def make(seed: int, epoch: int, start: int, stop: int) -> tuple[Array, Array]:
        ids = np.arange(start, stop)
        return np.float32(ids[:, None] % [7, 11]), np.float32(1e4 + np.sin(ids * 0.7)[:, None])

    source = GeneratorSource(make, 100_000, (2,), np.float32, 1, block_rows=500)
    first, other = find_target_scale(source), find_target_scale(source, seed=1)
    np.testing.assert_array_equal(first.mean, find_target_scale(source).mean)
    assert first.mean[0] != other.mean[0]
    # sin has the mean 0 and the variance 1/2: over 8000 rows, 0.1 is 12 standard errors.
    assert abs(first.mean[0] - 1e4) < 0.1


def test_mean_is_computed_after_target_transforms() -> None:
    def log(X: Array, Y: Array, rng: Any) -> tuple[Array, Array]:
        return X, rng.xp.log(Y)

    X, _ = data(200)
    y = np.exp(np.linspace(50, 60, len(X)))
    source = AugmentedSource(ArraySource(X, y), 1, [log])
    np.testing.assert_allclose(find_target_scale(source).mean, [55.0], rtol=1e-12)


def test_classes_have_a_mean_and_unit_scale() -> None:
    X, _ = data(200)
    labels = np.repeat([0, 1, 1, 1, 2], 40)
    source = ArraySource(X, labels)
    scale = find_target_scale(source)
    np.testing.assert_allclose(scale.mean, [0.2, 0.6, 0.2], rtol=1e-15)
    np.testing.assert_array_equal(scale.scale, 1)
    np.testing.assert_allclose(find_target_scale(source, "balanced").mean, [1 / 3] * 3, rtol=1e-15)
    assert not find_target_scale(source, fit_intercept=False).mean.any()
