"""Test what is resolved before a run starts: data, centers and sizes, and refused settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from streamkern.backend.base import Backend
from streamkern.basics.errors import (
    ConfigError,
    DataError,
    StorageError,
    StoreNotFoundError,
    StreamkernError,
)
from streamkern.filesystem.urls import zarr_store
from streamkern.ingest.ingest import ingest
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.transforms import (
    GaussianNoise,
    RandomCrop,
    Scale,
    deterministic,
    host_transform,
)
from streamkern.stream.sources.user import GeneratorSource
from streamkern.train.resolve.given_arrays import count_centers, may_take_all_rows, open_centers
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.resolve.training_data import open_data
from streamkern.train.train import train
from tests.runs import CLASSES, Array, D, N, P, array_source, arrays, opened, settings, stream
from tests.s3_server import S3Server

# -- data -----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return the path of a store of training rows."""
    X, y = arrays()
    ingest(X, tmp_path / "train.zarr", y=y, chunk_mb=0.001)
    return tmp_path / "train.zarr"


def test_store_data_has_documented_properties(store: Path) -> None:
    transforms = [{"kind": "noise", "sigma": 0.1}, {"kind": "scale", "mode": "feature"}]
    config = settings(
        **{"data.train": str(store), "data.copies": 3, "data.transforms": transforms,
           "data.scale": "auto"}
    )  # fmt: skip
    data = open_data(config)
    assert (data.source.n_rows, data.base.n_rows, data.d) == (3 * N, N, D)
    assert [type(t) for t in data.fixed_transforms] == [Scale]
    assert data.is_augmented


@pytest.mark.parametrize(
    ("make", "augmented"),
    [
        (array_source, False),
        (lambda: array_source(transforms=[Scale("feature")]), False),
        (lambda: AugmentedSource(array_source(), 1, [Scale("global")]), False),
        (lambda: array_source(transforms=[GaussianNoise(0.1)]), True),
        (lambda: AugmentedSource(array_source(), 1, [GaussianNoise(0.1)]), True),
        (lambda: AugmentedSource(array_source(), 2), True),
        (lambda: AugmentedSource(images(), 1, [RandomCrop(1)]), True),
        (lambda: images(transforms=[RandomCrop(1)]), True),
    ],
)
def test_sources_with_varying_rows_are_augmented(make: Any, augmented: bool) -> None:
    """Check rows that change from read to read, by transforms before or after the copies."""
    auto = settings(**{"data.scale": "auto"})
    assert open_data(auto, make()).is_augmented is augmented


def images(**options: Any) -> ArraySource:
    """Return a source of 40 images of three classes."""
    X = np.random.default_rng(0).integers(0, 255, (40, 3, 3, 1), np.uint8)
    return ArraySource(X, np.arange(40) % 3, classes=CLASSES, unit_rows=10, **options)


# -- sizes ----------------------------------------------------------------------------------------


def test_default_number_of_centers_depends_on_effort(tmp_path: Path) -> None:
    big = GeneratorSource(lambda *a: a, 50_000, (D,), np.float32, 1)  # type: ignore[arg-type,return-value]
    auto = settings(**{"model.n_centers": "auto"})
    assert count_centers(auto, open_data(auto, big)) == 10_000
    for effort, p in (("quick", 2000), ("best", 10_000)):
        config = settings(**{"model.n_centers": "auto", "model.effort": effort})
        assert count_centers(config, open_data(config, big)) == p
    assert count_centers(auto, open_data(auto, stream())) == N
    assert count_centers(settings(), open_data(settings(), stream())) == P
    too_many = settings(**{"model.n_centers": N + 1})
    with pytest.warns(UserWarning, match=rf"n_centers={N + 1} is more than the {N} training rows"):
        assert count_centers(too_many, open_data(too_many, stream())) == N
    with pytest.raises(ConfigError, match="at least this many rows, lower n_centers"):
        count_centers(too_many, open_data(too_many, stream()), complete=False)
    every = settings(**{"model.n_centers": "auto", "model.centers": "all"})
    assert count_centers(every, open_data(every, AugmentedSource(array_source(), 4))) == N
    np.save(tmp_path / "Z.npy", np.zeros((17, D)))
    file = settings(**{"model.n_centers": "auto", "model.centers": str(tmp_path / "Z.npy")})
    assert count_centers(file, open_data(file, stream())) == 17


@pytest.mark.parametrize(
    ("effort", "n", "all_of_them"),
    [
        ("quick", 2000, False), ("quick", 2001, True), ("quick", 4096, True),
        ("quick", 4097, False), ("default", 10_000, False), ("default", 16_384, True),
        ("default", 16_385, False), ("best", 100_000, True), ("best", 100_001, False),
    ],
)  # fmt: skip
def test_few_rows_all_become_centers(effort: str, n: int, all_of_them: bool) -> None:
    """Check that all rows become centers between the limits `n_centers` and `all_rows` of the
    effort."""
    source = GeneratorSource(lambda *a: a, n, (D,), np.float32, 1)  # type: ignore[arg-type,return-value]
    auto = {"model.n_centers": "auto", "model.effort": effort, "solver.name": "auto"}
    for changes, may in (
        ({}, all_of_them), ({"solver.name": "direct"}, all_of_them),
        ({"solver.name": "block"}, False), ({"model.n_centers": 20}, False),
        ({"model.centers": "kmeans"}, False), ({"model.features": "nystrom"}, False),
    ):  # fmt: skip
        config = settings(**(auto | changes))
        assert may_take_all_rows(config, open_data(config, source)) == may


def test_fixed_sizes_are_kept() -> None:
    fixed = {"data.batch_size": 13, "solver.block_size": 17, "solver.name": "block"}
    sizes = opened(**fixed).sizes
    assert (sizes.batch_size, sizes.block_size) == (13, 17)
    other = {"solver.name": "eigenpro4", "solver.n_nystrom": 50, "solver.level": 9,
             "solver.period": 4, "solver.projection": "inexact"}  # fmt: skip
    sizes = opened(**other).sizes
    assert (sizes.n_sample, sizes.level, sizes.period) == (50, 9, 4)
    assert sizes.projection == "inexact"


def test_given_sizes_are_not_resolved_again() -> None:
    first = opened()
    reopened = open_run(
        settings(**{"run.memory": "1 MiB"}), RunInputs(stream()), fixed_sizes=first.sizes
    )
    reopened.backend.close()
    assert reopened.sizes == first.sizes
    assert reopened.buffers == first.buffers


def test_auto_memory_is_four_fifths_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "memory_available", lambda self: 10**9)
    assert opened(**{"run.memory": "auto"}).budget_bytes == 8 * 10**8


def test_opening_a_run_reads_no_rows() -> None:
    def read(*arguments: Any) -> Any:
        raise AssertionError("a row was read")

    big = GeneratorSource(read, 10**9, (D,), np.float32, 3, classes=CLASSES)
    run = opened(big, **{"data.batch_size": "auto", "model.n_centers": 1000})
    assert run.problem.n_rows == 10**9
    assert run.buffers.peak <= 1 << 30


def test_budget_is_respected_for_any_n() -> None:
    peaks = []
    for n in (10**6, 10**8):
        big = GeneratorSource(lambda *a: a, n, (100,), np.float32, 3, classes=CLASSES)  # type: ignore[arg-type,return-value]
        overrides = {"data.batch_size": "auto", "model.n_centers": 2000, "run.memory": "300 MiB"}
        peaks.append(opened(big, **overrides).buffers.peak)
    assert peaks[0] == peaks[1] <= 300 << 20


# -- settings that are refused before anything is written -----------------------------------------


@deterministic
@host_transform
def invert(X: Array, Y: Array, rng: Any) -> tuple[Array, Array]:
    """Transform images by inverting them; marked in two ways that exclude each other."""
    return 255 - X, Y


def wide_source() -> Source:
    """Return a source with twice as many features."""
    X, y = arrays()
    return ArraySource(np.c_[X, X], y, classes=CLASSES)


EIGENPRO2 = {"solver.name": "eigenpro2", "model.n_centers": "auto"}
INVALID: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "batch": ({"data.batch_size": N + 1}, {}, r"batch_size=136 must lie between 1 and n_rows=135"),
    "block": ({"solver.block_size": P + 1}, {}, r"block_size=61 must lie between .* n_centers=60"),
    "nystrom": (
        {"solver.name": "eigenpro3", "solver.n_nystrom": N + 1}, {}, "n_nystrom=136 must lie"
    ),
    "level": (
        {"solver.name": "eigenpro3", "solver.level": N}, {}, r"level=135 must lie between 1 and n_"
    ),
    "memory": ({"run.memory": "1 MiB"}, {}, r"smallest plan needs \d+ MiB; raise memory"),
    "ridge": ({"solver.name": "eigenpro3", "solver.ridge": 0.1}, {}, "ridge=0.1 is not defined"),
    "eigenpro2 with noise": (EIGENPRO2, {"source": stream()}, "random transforms"),
    "eigenpro2 with crops": (
        EIGENPRO2, {"source": AugmentedSource(images(), 1, [RandomCrop(1)])}, "random transforms"
    ),
    "eigenpro2 with copies": (
        EIGENPRO2, {"source": AugmentedSource(array_source(), 2)}, "every training row"
    ),
    "eigenpro2 with fewer centers": (
        {"solver.name": "eigenpro2", "model.n_centers": 50}, {"source": array_source()},
        "takes all 135 training rows as centers",
    ),
    "eigenpro2 with given centers": (
        EIGENPRO2, {"source": array_source(), "centers": arrays()[0][::-1]},
        "takes all 135 training rows as centers",
    ),
    "eigenpro1 with given centers": (
        EIGENPRO2 | {"solver.name": "eigenpro1"},
        {"source": array_source(), "centers": arrays()[0]},
        "takes all 135 training rows as centers",
    ),
    "no targets": ({}, {"source": ArraySource(arrays()[0])}, "no targets y"),
    "host and deterministic": (
        {}, {"source": AugmentedSource(images(), 2, [invert])}, "'invert' is marked both"
    ),
    "host and deterministic, below": (
        {}, {"source": AugmentedSource(images(transforms=[invert]), 2)}, "leave host_transform"
    ),
    "other test features": ({}, {"test": wide_source()}, r"data.test has rows of shape \(10,\)"),
    "other test classes": (
        {}, {"test": ArraySource(*arrays(9, 1))},
        r"data.test has rows of the unknown classes '0', '1', '2'"
    ),
    "test of values": (
        {}, {"test": ArraySource(arrays(9)[0], np.zeros((9, 3)))}, "data.test has 3 values"
    ),
    "no store": ({"data.train": "/nowhere/a.zarr"}, {"source": None}, "nowhere"),
    "no test store": ({"data.test": "/nowhere/a.zarr"}, {}, "nowhere"),
    "no centers": (
        {"model.centers": "/nowhere/Z.npy", "model.n_centers": "auto"}, {}, "no array of centers"
    ),
    "device": ({"run.device": "gpu:99"}, {}, "gpu|GPU|CuPy|cupy"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_invalid_settings_leave_no_files(name: str, tmp_path: Path) -> None:
    overrides, options, message = INVALID[name]
    options = {"source": stream()} | options
    with pytest.raises(StreamkernError, match=message) as caught:
        train(settings(tmp_path / "run", **overrides), **options)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("shape", "n_centers", "message"),
    [
        ((7, D + 1), "auto", r"rows of shape \(6,\), the data has rows of shape \(5,\)"),
        ((7, D), 8, "n_centers=8 differs from the 7 rows in model.centers"),
    ],
)
@pytest.mark.parametrize("kind", ["npy", "zarr"])
def test_centers_of_invalid_shape_are_refused(
    kind: str, shape: tuple[int, int], n_centers: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / f"Z.{kind}"
    if kind == "npy":
        np.save(path, np.zeros(shape))
    else:
        zarr.create_array(str(path), data=np.zeros(shape))
    with pytest.raises(ConfigError, match=message):
        opened(**{"model.centers": str(path), "model.n_centers": n_centers})


@pytest.mark.parametrize("kind", ["npy", "zarr"])
def test_centers_are_read_from_object_store(
    kind: str, s3: S3Server, bucket: str, store: Path, tmp_path: Path
) -> None:
    Z, url = np.random.default_rng(1).random((7, D)), f"s3://{bucket}/deep/Z.{kind}"
    options = s3.options()
    if kind == "npy":
        np.save(tmp_path / "Z.npy", Z)
        body = (tmp_path / "Z.npy").read_bytes()
        s3.client().put_object(Bucket=bucket, Key="deep/Z.npy", Body=body)
    else:
        zarr.create_array(zarr_store(url, storage_options=options, read_only=False), data=Z)
    given = {"model.centers": url, "model.n_centers": "auto", "data.storage_options": options}
    assert opened(**given).problem.p == 7
    config = settings(**given, **{"data.train": str(store)})
    assert count_centers(config, open_data(config)) == 7  # although the data is local
    np.testing.assert_array_equal(np.asarray(open_centers(config, None)), Z)
    with pytest.raises(StoreNotFoundError, match=rf"no array of centers at s3://.*/none\.{kind}"):
        opened(**{**given, "model.centers": f"s3://{bucket}/none.{kind}"})
    proxied = {**s3.options("http://127.0.0.1:9"), "deadline_s": 0}
    with pytest.raises(StorageError, match=rf"Z\.{kind}"):
        opened(**{**given, "data.storage_options": proxied})


def test_file_without_an_array_is_named(tmp_path: Path) -> None:
    (tmp_path / "Z.npy").write_bytes(b"not an array")
    zarr.create_group(str(tmp_path / "Z.zarr"))
    for name in ("Z.npy", "Z.zarr"):
        message = rf"{name}' is no .npy file, zarr array or|{name} has no array 'X'"
        with pytest.raises((ConfigError, StoreNotFoundError), match=message):
            opened(**{"model.centers": str(tmp_path / name), "model.n_centers": "auto"})


def test_non_finite_row_found_in_setup_is_named(tmp_path: Path) -> None:
    X, y = arrays()
    X[50, 2] = np.nan
    with pytest.raises(DataError, match="row 50, column 2"):
        train(settings(tmp_path), source=ArraySource(X, y, classes=CLASSES, unit_rows=16))
