"""Test the precision of a run, and that the integer mode trains the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.basics.errors import ConfigError
from streamkern.kernels.points import Grid
from streamkern.stream.feed import prepare
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.transforms import (
    GaussianNoise,
    MixUp,
    RandomCrop,
    RandomFlip,
    Scale,
    from_config,
)
from streamkern.train.resolve.problem_shape import resolve_precision
from streamkern.train.saved_model import load_model
from tests import reference as ref
from tests.images import IMAGES, augmented, base
from tests.runs import finished, settings, stopped

U8, F4 = np.dtype(np.uint8), np.dtype(np.float32)
SCALED = Scale("global", np.asarray(100.0), np.asarray(50.0))


class TensorCores(Backend):
    """Backend of a GPU, of which only this property is read here."""

    tensor_cores = True


@pytest.mark.parametrize(
    ("requested", "dtype", "transforms", "on_cpu", "on_gpu"),
    [
        ("auto", U8, [], "exact", "integer"),
        ("auto", U8, [SCALED], "exact", "integer"),
        ("auto", U8, [Scale("none")], "exact", "integer"),
        ("auto", U8, [SCALED, GaussianNoise(0.1)], "exact", "high"),
        ("auto", U8, [GaussianNoise(3.0, round=True), RandomFlip(), SCALED], "exact", "integer"),
        ("auto", U8, [SCALED, RandomCrop(1)], "exact", "high"),
        ("auto", F4, [], "exact", "high"),
        ("integer", U8, [SCALED], "integer", "integer"),
        ("fast", F4, [], "fast", "fast"),
        ("float64", U8, [], "float64", "float64"),
    ],
)
def test_auto_is_fastest_precision_as_accurate_as_float32(
    requested: str, dtype: np.dtype[Any], transforms: list[Any], on_cpu: str, on_gpu: str
) -> None:
    for kind, expected in ((Backend, on_cpu), (TensorCores, on_gpu)):
        with kind(1) as backend:
            precision, grid = resolve_precision(requested, dtype, transforms, backend)
        assert precision == expected
        assert (grid is not None) == (expected == "integer")


def test_integer_grid_follows_scaling() -> None:
    with Backend(1) as backend:
        same_scale = Scale("global", np.asarray(-2.0), np.asarray(4.0))
        precision, grid = resolve_precision("integer", U8, [SCALED, same_scale], backend)
    assert precision == "integer"
    assert grid == Grid(((0 - 100) / 50 + 2) / 4, 1 / 200)


@pytest.mark.parametrize(
    ("dtype", "transforms", "reason"),
    [
        (F4, [], "they are float32"),
        (U8, [GaussianNoise(0.1)], r"'GaussianNoise', which .* such \(round=true would keep them"),
        (U8, [MixUp(1.0)], "they go through 'MixUp', which does not keep them such; give"),
        (U8, [SCALED, RandomCrop(1)], "'RandomCrop' after they were scaled; put it before"),
        (U8, [lambda X, Y, rng: (X, Y)], "which does not keep them such"),
        (U8, [Scale("feature", np.zeros(3), np.ones(3))], "they go through 'Scale'"),
    ],
)
def test_integer_precision_explains_refusal(
    dtype: np.dtype[Any], transforms: list[Any], reason: str
) -> None:
    with Backend(1) as backend, pytest.raises(ConfigError, match=reason):
        resolve_precision("integer", dtype, transforms, backend)


def test_integer_run_equals_float64_run(tmp_path: Path) -> None:
    """Check also later predictions of float rows, which lie between the pixels."""
    rng = np.random.default_rng(0)
    X = rng.integers(0, 256, (300, 6), dtype=np.uint8)
    y = (X[:, 0] > 127).astype(np.int64)
    fractions = rng.uniform(0, 255, (40, 6)).astype(np.float32)
    values = []
    for precision in ("integer", "float64"):
        folder = tmp_path / precision
        config = settings(
            folder,
            **{"run.precision": precision, "model.n_centers": 40, "data.epochs": 4},
            **{"data.scale": "auto"},
        )
        source = ArraySource(X, y, classes=("low", "high"), unit_rows=50)
        finished(config, source=AugmentedSource(source, 1, [Scale("global", 127.5, 73.0)]))
        model = load_model(folder)
        with model.backend:
            assert model.op.precision == precision
            values.append((model.values(X), model.values(fractions)))
    for integer, double in zip(*values, strict=True):
        np.testing.assert_allclose(integer, double, rtol=0, atol=5e-3)


ROUNDED = (RandomCrop(1), RandomFlip(), GaussianNoise(9.0, round=True))


def test_augmented_integer_run_equals_float64_least_squares() -> None:
    """Compute distances and solution in float64 from the results of the transforms."""
    source = augmented(*ROUNDED)
    with Backend(1) as backend:
        blocks = [source.read_unit(u, 0, 0) for u in range(source.n_units)]
        made = [
            prepare(
                backend, block, transforms=source.feed_transforms, dtype=np.float32, seed=0,
                epoch=0, n_classes=3,
            )
            for block in blocks
        ]  # fmt: skip
    X, Y = (np.concatenate([part[k] for part in made]).astype(np.float64) for k in (0, 1))
    np.testing.assert_array_equal(X, X.astype(np.uint8))
    assert len(np.unique(X, axis=0)) == len(X)
    assert min((X == 0).mean(), (X == 255).mean()) > 0.005
    config = settings(
        **{"run.precision": "integer", "run.random_state": 0, "data.scale": "global"},
        **{"data.epochs": 1, "model.n_centers": 50, "model.bandwidth": 4.0},
        **{"solver.name": "direct", "solver.ridge": 1e-3},
    )
    result = finished(config, source=source)
    assert result.model.op.precision == "integer"
    mean, scale = IMAGES.mean(dtype=np.float64), IMAGES.std(dtype=np.float64)
    Z = np.float64(result.Z) * scale + mean
    np.testing.assert_allclose(Z, np.rint(Z), atol=1e-4)
    laplace = ref.make_kernel("laplace", 4.0 * scale)
    K, K_zz = laplace(X, np.rint(Z)), laplace(np.rint(Z), np.rint(Z))
    centred = Y - result.model.targets.mean
    truth = K @ ref.ridge(K, centred, K_zz, 1e-3) + result.model.targets.mean
    scaled = ((X - mean) / scale).reshape(-1, *IMAGES.shape[1:]).astype(np.float32)
    with result.model.backend:
        op = result.model.op
        x = op.points(scaled.reshape(len(X), -1), left=True)
        z = op.points(result.Z.reshape(50, -1), left=True, right=True)
        entries, center_values = op.matrix(x, z), op.matrix(z, z)
        actual = entries @ result.model.weights + result.model.targets.mean
    np.testing.assert_allclose(entries, K, rtol=0, atol=5e-7)
    # The operator does not know that the left and the right points are the same.
    np.testing.assert_array_equal(np.diag(center_values), 1.0)
    np.testing.assert_allclose(actual, truth, rtol=0, atol=2e-5)


def test_run_with_rounded_noise_resumes_to_same_bits(tmp_path: Path) -> None:
    """Check a stopped run, and noise from a table."""
    table = {"kind": "noise", "sigma": 9.0, "round": True}
    options = {"run.precision": "integer", "data.scale": "global", "model.n_centers": 30}
    weights = []
    for folder, transforms in (("a", [ROUNDED[-1]]), ("b", from_config([table]))):
        config = settings(tmp_path / folder, **options)
        source = augmented(*transforms)
        if folder == "a":
            stopped(config, 5, source=source, test=base())
        weights.append(finished(config, source=source, test=base()).model.weights)
    np.testing.assert_array_equal(*weights)
