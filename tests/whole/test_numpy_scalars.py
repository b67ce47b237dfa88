"""Check that functions accept NumPy scalars and paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern
from streamkern import (
    ArraySource,
    AugmentedSource,
    Cache,
    GaussianNoise,
    GeneratorSource,
    KernelRegressor,
    Laplace,
    Loader,
    MixtureSource,
    MixUp,
    Prometheus,
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
    """Train in a run directory, which records all settings as JSON."""
    tables = {
        "run": {"run_dir": place, "threads": np.int64(1)},
        "data": {"epochs": np.int8(1)},
        "model": {"kernel": "laplace", "bandwidth": half, "n_centers": np.uint8(20)},
    }
    result = train_model(RunConfig.from_tables(tables), source=source)
    result.model.backend.close()
    return result


def test_store_functions_accept_numpy_scalars(tmp_path: Path) -> None:
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
    # A repeated call finds the files that the first one has written.
    assert materialise_store(source, d, seed=3, memory=2**29).n_rows == 1200


def test_sources_and_transforms_accept_numpy_scalars(tmp_path: Path) -> None:
    def generate(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return X[start:stop], X[start:stop, :1]

    rows = ArraySource(X, X[:, 0], unit_rows=np.uint8(70))
    sources = [
        GeneratorSource(
            generate, np.uint8(200), (np.int8(4),), np.float32, three - 2, block_rows=three
        ),
        AugmentedSource(rows, np.uint8(3), [GaussianNoise(half), MixUp(half)]),
        AugmentedSource(rows, 1, [Scale("global", half, half)]),
        MixtureSource([rows, rows], weights=[half, three], n_rows=np.int16(300)),
    ]
    for k, source in enumerate(sources):
        assert trained(source, tmp_path / str(k)).samples == source.n_rows
    images = ArraySource(X.reshape(200, 2, 2, 1), LABELS, [RandomCrop(np.int64(1))])
    assert trained(images, tmp_path / "images").samples == 200


def test_search_resumes_with_numpy_scalars(tmp_path: Path) -> None:
    counts = {"rows": 100, "centers": 20, "epochs": 1, "folds": 1, "refine": 0}
    plain = tune(X, LABELS, bandwidths=[1.0, 2.0], ridges=[0.5], out=tmp_path, **counts)
    twins: dict[str, Any] = {name: np.int64(n) for name, n in counts.items()}
    repeated = tune(
        X, LABELS, bandwidths=np.array([1, 2]), ridges=[half], out=str(tmp_path), **twins
    )
    assert repeated.best == plain.best


def test_model_functions_accept_numpy_scalars(tmp_path: Path) -> None:
    trained(ArraySource(X, X[:, 0]), tmp_path / "run")
    model = streamkern.load(tmp_path / "run")
    model.save(tmp_path / "saved")
    model.predict(X, out=tmp_path / "p.zarr", overwrite=np.bool_(True))
    assert streamkern.load(str(tmp_path / "saved")).predict(X).shape == (200,)


def generator(n_rows: Any) -> GeneratorSource:
    """Return a source of a function that is never called."""
    return GeneratorSource(lambda *_: (X, LABELS), n_rows, (4,), "f4", 1)


def importances(**given: Any) -> Any:
    """Measure permutation importances of a small model."""
    model = KernelRegressor(n_centers=9, metric="none", bandwidth=2.0).fit(X, X[:, 0])
    return model.permutation_importances(X, X[:, 0], **given)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "batch_size of a loader": lambda flag: Loader(ArraySource(X, LABELS), flag),
    "threads": lambda flag: list(Loader(ArraySource(X, LABELS), 50, threads=flag)),
    "retry_s": lambda flag: Loader(ArraySource(X, LABELS), 50, retry_s=flag),
    "keep_bytes": lambda flag: Loader(ArraySource(X, LABELS), 50, keep_bytes=flag),
    "unit_rows": lambda flag: ArraySource(X, LABELS, unit_rows=flag),
    "copies": lambda flag: AugmentedSource(ArraySource(X, LABELS), flag),
    "weights": lambda flag: MixtureSource([ArraySource(X, LABELS)] * 2, [flag, 2.0]),
    "n_rows of a mixture": lambda flag: MixtureSource(
        [ArraySource(X, LABELS)] * 2, [1.0, 2.0], n_rows=flag
    ),
    "n_rows of a generator": generator,
    "sigma": GaussianNoise,
    "padding": RandomCrop,
    "alpha": MixUp,
    "port": Prometheus,
    "cache_size": lambda flag: Cache("cache", flag),
    "idle_s": lambda flag: Cache("cache", idle_s=flag),
    "chunk_mb": lambda flag: ingest_store(X, "a.zarr", y=LABELS, chunk_mb=flag),
    "seed": lambda flag: ingest_store(X, "a.zarr", y=LABELS, seed=flag),
    "a column by position": lambda flag: ingest_store("a.csv", "a.zarr", y=flag),
    "batch_size": lambda flag: KernelRegressor(batch_size=flag).fit(X, X[:, 0]),
    "random_state": lambda flag: KernelRegressor(random_state=flag).fit(X, X[:, 0]),
    "epochs of a run": lambda flag: RunConfig.from_tables({"data": {"epochs": flag}}),
    "n_rows of importances": lambda flag: importances(n_rows=flag),
    "n_repeats": lambda flag: importances(n_repeats=flag),
    "seed of importances": lambda flag: importances(random_state=flag),
    "factor of a kernel": lambda flag: Laplace(1.0) * flag,
}


@pytest.mark.parametrize("flag", [True, np.bool_(True)], ids=["bool", "np.bool_"])
@pytest.mark.parametrize("argument", REFUSED)
def test_boolean_is_refused_as_a_number(
    argument: str, flag: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that True, which Python counts as 1, is refused as a number."""
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("a,b\n1,2\n3,4\n5,6\n")
    with pytest.raises(
        (streamkern.ConfigError, streamkern.DataError, TypeError, ValueError)
    ) as error:
        REFUSED[argument](flag)
    assert "True" in str(error.value) or argument == "factor of a kernel"
    assert not Path("a.zarr").exists()


@pytest.mark.parametrize("invalid", [-1, "a", None, float("nan")])
def test_invalid_seconds_and_mebibytes_are_refused(invalid: Any) -> None:
    for call in (
        lambda: Loader(ArraySource(X, LABELS), 50, retry_s=invalid),
        lambda: Cache("cache", idle_s=invalid),
        lambda: ingest_store(X, "a.zarr", y=LABELS, chunk_mb=invalid),
    ):
        with pytest.raises(streamkern.ConfigError, match=r"=.* must be a number"):
            call()


def test_boolean_is_refused_as_sample_weight(tmp_path: Path) -> None:
    with pytest.raises(streamkern.DataError, match=r"have shape \(\)"):
        ingest_store(X, tmp_path / "a.zarr", y=LABELS, sample_weight=np.True_)


@pytest.mark.parametrize("y", [np.int64(1), [np.int64(1)], np.array([1])], ids=repr)
def test_numpy_integer_names_a_column_position(y: Any, tmp_path: Path) -> None:
    """Check positions of NumPy, such as from `np.flatnonzero`."""
    table = tmp_path / "a.csv"
    table.write_text("a,b,c\n1,2,0.5\n3,4,1.5\n5,7,2.5\n")
    ingest_store(table, tmp_path / "a.zarr", x=np.int64(0), y=y, shuffle=False,
                 targets="values", sample_weight=np.int8(2))  # fmt: skip
    chunk = open_store(tmp_path / "a.zarr").read_weighted_chunk(0)[:3]
    assert np.column_stack(chunk).tolist() == [[1, 2, 0.5], [3, 4, 1.5], [5, 7, 2.5]]
