"""What precision a run takes, and that the integer mode trains the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.basics.errors import ConfigError
from streamkern.kernels.points import Grid
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.transforms import GaussianNoise, Scale
from streamkern.train.model import load_model
from streamkern.train.precision import resolve_precision
from tests.runs import finished, settings

U8, F4 = np.dtype(np.uint8), np.dtype(np.float32)
SCALED = Scale("global", np.asarray(100.0), np.asarray(50.0))


class TensorCores(Backend):
    """Stands for a GPU: nothing else about it matters here."""

    tensor_cores = True


@pytest.mark.parametrize(
    ("wish", "dtype", "transforms", "on_cpu", "on_gpu"),
    [
        ("auto", U8, [], "exact", "integer"),
        ("auto", U8, [SCALED], "exact", "integer"),
        ("auto", U8, [Scale("none")], "exact", "integer"),
        ("auto", U8, [SCALED, GaussianNoise(0.1)], "exact", "high"),
        ("auto", F4, [], "exact", "high"),
        ("integer", U8, [SCALED], "integer", "integer"),
        ("fast", F4, [], "fast", "fast"),
        ("float64", U8, [], "float64", "float64"),
    ],
)
def test_auto_is_the_fastest_that_is_as_good_as_float32(
    wish: str, dtype: np.dtype[Any], transforms: list[Any], on_cpu: str, on_gpu: str
) -> None:
    for kind, expected in ((Backend, on_cpu), (TensorCores, on_gpu)):
        with kind(1) as backend:
            precision, grid = resolve_precision(wish, dtype, transforms, backend)
        assert precision == expected
        assert (grid is not None) == (expected == "integer")


def test_the_grid_follows_the_scaling() -> None:
    with Backend(1) as backend:
        again = Scale("global", np.asarray(-2.0), np.asarray(4.0))
        precision, grid = resolve_precision("integer", U8, [SCALED, again], backend)
    assert precision == "integer"
    assert grid == Grid(((0 - 100) / 50 + 2) / 4, 1 / 200)


@pytest.mark.parametrize(
    ("dtype", "transforms", "reason"),
    [
        (F4, [], "they are float32"),
        (U8, [GaussianNoise(0.1)], "they go through 'GaussianNoise'"),
        (U8, [Scale("feature", np.zeros(3), np.ones(3))], "they go through 'Scale'"),
    ],
)
def test_integer_says_why_the_features_are_none(
    dtype: np.dtype[Any], transforms: list[Any], reason: str
) -> None:
    with Backend(1) as backend, pytest.raises(ConfigError, match=reason):
        resolve_precision("integer", dtype, transforms, backend)


def test_a_run_in_integers_trains_the_model_that_float64_trains(tmp_path: Path) -> None:
    """Also on float rows afterwards, which lie between the pixels."""
    rng = np.random.default_rng(0)
    X = rng.integers(0, 256, (300, 6), dtype=np.uint8)
    y = (X[:, 0] > 127).astype(np.int64)
    between = rng.uniform(0, 255, (40, 6)).astype(np.float32)
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
            values.append((model.values(X), model.values(between)))
    for integer, double in zip(*values, strict=True):
        np.testing.assert_allclose(integer, double, rtol=0, atol=5e-3)
