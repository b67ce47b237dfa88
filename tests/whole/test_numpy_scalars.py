"""Functions take NumPy's numbers where they take a number, and paths where they take a place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import streamkern
from streamkern import (
    ArraySource,
    AugmentedSource,
    Cache,
    GaussianNoise,
    GeneratorSource,
    MixtureSource,
    MixUp,
    RandomCrop,
    RunConfig,
    Scale,
    ZarrSource,
    append_store,
    augment_store,
    ingest_store,
    materialise_store,
    open_store,
    train_model,
    tune,
)

rng = np.random.default_rng(0)
X = rng.normal(size=(200, 4)).astype(np.float32)
LABELS = (X[:, 0] > 0).astype(np.int64)
three, half = np.int64(3), np.float32(0.5)


def trained(source: Any, place: Path) -> Any:
    """A run directory keeps all that decides it as JSON."""
    tables = {
        "run": {"run_dir": place, "threads": np.int64(1)},
        "data": {"epochs": np.int8(1)},
        "model": {"kernel": "laplace", "bandwidth": half, "n_centers": np.uint8(20)},
    }
    result = train_model(RunConfig.from_tables(tables), source=source)
    result.model.backend.close()
    return result


def test_stores(tmp_path: Path) -> None:
    a, b, c, d = (tmp_path / f"{name}.zarr" for name in "abcd")
    ingest_store(
        X, a, y=LABELS, chunk_mb=half, seed=three, shuffle=np.bool_(True), memory=np.int64(10**8),
        scratch=tmp_path / "scratch",
    )  # fmt: skip
    append_store(X, a, y=LABELS, seed=three, memory=np.int64(10**8))
    assert open_store(a).spec.n_rows == 400
    noise = [{"kind": "noise", "sigma": half}]
    spec = augment_store(a, b, copies=np.uint8(3), transforms=noise, seed=three, chunk_mb=half)
    assert spec.n_rows == 1200
    weights = np.array([0.5, 0.5])
    assert augment_store([a, a], c, weights=weights, epoch=three, threads=np.int8(1)).n_rows == 800
    source = AugmentedSource(ZarrSource(a, cache=Cache(tmp_path / "cache", np.int64(10**8))), three)
    assert materialise_store(source, d, seed=three, memory=np.int64(2**29)).n_rows == 1200
    # The same call again finds what it has made.
    assert materialise_store(source, d, seed=3, memory=2**29).n_rows == 1200


def test_sources_and_transforms(tmp_path: Path) -> None:
    def made(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return X[start:stop], X[start:stop, :1]

    rows = ArraySource(X, X[:, 0], unit_rows=np.uint8(70))
    sources = [
        GeneratorSource(
            made, np.uint8(200), (np.int8(4),), np.float32, three - 2, block_rows=three
        ),
        AugmentedSource(rows, np.uint8(3), [GaussianNoise(half), MixUp(half)]),
        AugmentedSource(rows, 1, [Scale("global", half, half)]),
        MixtureSource([rows, rows], weights=[half, three], n_rows=np.int16(300)),
    ]
    for k, source in enumerate(sources):
        assert trained(source, tmp_path / str(k)).samples == source.n_rows
    images = ArraySource(X.reshape(200, 2, 2, 1), LABELS, [RandomCrop(np.int64(1))])
    assert trained(images, tmp_path / "images").samples == 200


def test_a_search_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    counts = {"rows": 100, "centers": 20, "epochs": 1, "folds": 1, "refine": 0}
    plain = tune(X, LABELS, bandwidths=[1.0, 2.0], ridges=[0.5], out=tmp_path, **counts)
    twins: dict[str, Any] = {name: np.int64(n) for name, n in counts.items()}
    again = tune(X, LABELS, bandwidths=np.array([1, 2]), ridges=[half], out=str(tmp_path), **twins)
    assert again.best == plain.best


def test_models(tmp_path: Path) -> None:
    trained(ArraySource(X, X[:, 0]), tmp_path / "run")
    model = streamkern.load(tmp_path / "run")
    model.save(tmp_path / "saved")
    model.predict(X, out=tmp_path / "p.zarr", overwrite=np.bool_(True))
    assert streamkern.load(str(tmp_path / "saved")).predict(X).shape == (200,)
