"""Check the results of trainings: from any source, with any method, and from pinned data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array
import icechunk
import numpy as np
import pytest
import zarr
from scipy.spatial.distance import cdist
from scipy.special import softmax
from sklearn.datasets import load_digits

import streamkern as sk
from streamkern.basics.errors import ResumeMismatchError, StreamkernError
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.store.store import open_store
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.transforms import GaussianNoise, Scale, deterministic
from streamkern.stream.sources.user import GeneratorSource
from streamkern.train.train import pin_branches
from tests.runs import (
    CLASSES,
    METHODS,
    Array,
    C,
    D,
    N,
    array_source,
    arrays,
    assert_same_bits,
    brute_force,
    final,
    finished,
    settings,
    stopped,
    stream,
)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [200, 70])
def test_training_reaches_least_squares(block_size: int) -> None:
    """Compare the training loss with that of the exact solution in float64."""
    n, p = 1000, 200
    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = (X[order] / 16).astype(np.float32), y[order]
    source = ArraySource(X[:n], y[:n], unit_rows=200)
    overrides = {
        "data.batch_size": 25,
        "data.epochs": 24,
        "model.n_centers": p,
        "solver.block_size": block_size,
        "solver.damping": 1e-2,  # converges faster in 24 epochs
        "solver.ridge": 0.0,
    }
    result = finished(settings(**overrides), source=source, test=source)
    K, Y = np.exp(-cdist(np.float64(X), np.float64(result.Z)) / 3.0), np.eye(10)[y]
    mean = Y[:n].mean(axis=0)
    best = np.linalg.lstsq(K[:n], Y[:n] - mean, rcond=None)[0]
    exact = ((mean + K[:n] @ best - Y[:n]) ** 2).mean()
    assert result.metrics["test_mse"] <= 1.05 * exact
    F = mean + K @ np.float64(result.model.weights)
    np.testing.assert_allclose(result.metrics["test_mse"], ((F - Y)[:n] ** 2).mean(), rtol=1e-3)
    assert result.metrics["test_accuracy"] == (F[:n].argmax(axis=1) == y[:n]).mean()
    # The accuracy on other rows.
    accuracy, reachable_accuracy = (
        (f[n:].argmax(axis=1) == y[n:]).mean() for f in (F, mean + K @ best)
    )
    assert accuracy >= reachable_accuracy - 0.02


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_and_evaluates_correctly(method: str) -> None:
    X, y = arrays(50, 5)
    test = array_source(50, 5)
    result = finished(
        settings(**METHODS[method], **{"data.epochs": 4}), source=stream(method), test=test
    )
    F, Y = brute_force(result, X), np.eye(C)[y]
    P = softmax(F, axis=1) if "model.loss" in METHODS[method] else F
    np.testing.assert_allclose(result.metrics["test_mse"], ((P - Y) ** 2).mean(), rtol=1e-4)
    assert result.metrics["test_accuracy"] == pytest.approx(
        (F.argmax(axis=1) == y).mean(), abs=1e-12
    )
    # Plain SGD on features is slow: it only has to be better than a constant.
    slow = method in ("nystrom", "sgd, fourier", "sgd, log loss")
    assert result.metrics["test_mse"] < (Y.var(axis=0).mean() if slow else 0.5 * (Y**2).mean())
    assert result.samples == 4 * N


def test_float64_agrees_with_float32() -> None:
    plain = finished(settings(), source=array_source())
    double = finished(settings(**{"run.precision": "float64"}), source=array_source())
    assert double.model.weights.dtype == np.float64
    X = arrays(30, 5)[0]
    np.testing.assert_allclose(plain.model.values(X), double.model.values(X), atol=2e-3)
    np.testing.assert_allclose(double.model.values(X), brute_force(double, X), atol=1e-9)


def test_given_centers_are_stored_in_order() -> None:
    """Check that stored center i is center order[i] of those given."""
    given = arrays(20, 3)[0]
    result = finished(settings(**{"model.n_centers": "auto"}), source=stream(), centers=given)
    np.testing.assert_array_equal(result.Z, given[result.order])
    assert sorted(result.order) == list(range(20))
    assert (result.order != np.arange(20)).any()


def generate_rows(seed: int, epoch: int, start: int, stop: int) -> tuple[Array, Array]:
    """Return the rows from start to stop, for a `GeneratorSource`."""
    X, y = arrays()
    return X[start:stop], y[start:stop]


SOURCES: dict[str, Callable[[], Source]] = {
    "numpy": array_source,
    "dask": lambda: ArraySource(
        *(dask.array.from_array(a, chunks=(16, *a.shape[1:])) for a in arrays()),
        classes=CLASSES, unit_rows=16,
    ),
    "generator": lambda: GeneratorSource(
        generate_rows, N, (D,), np.float32, C, classes=CLASSES, block_rows=16
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["dask", "generator"])
def test_any_source_of_same_rows_gives_same_bits(name: str, tmp_path: Path) -> None:
    damped = {"solver.damping": 1e-4}  # "auto" counts repeated rows, which a generator hides
    for item in ("numpy", name):
        source = SOURCES[item]()
        source.repeats = True  # steps on repeated rows differ
        finished(settings(tmp_path / item, **damped), source=source)
    assert_same_bits(final(tmp_path / name), final(tmp_path / "numpy"))


def test_store_gives_same_bits_as_arrays(tmp_path: Path) -> None:
    X, y = arrays(600)
    ingest(X, tmp_path / "train.zarr", y=y, chunk_mb=1, shuffle=False)
    source = ArraySource(X, y, unit_rows=600)
    scaled = AugmentedSource(source, 2, [Scale("feature"), GaussianNoise(0.1)])
    auto = {"data.scale": "auto", "run.calibrate": False}
    finished(settings(tmp_path / "array", **auto), source=scaled)
    transforms = [{"kind": "scale", "mode": "feature"}, {"kind": "noise", "sigma": 0.1}]
    overrides = {
        "data.train": str(tmp_path / "train.zarr"),
        "data.copies": 2,
        "data.transforms": transforms,
    }
    finished(settings(tmp_path / "store", **overrides, **auto))
    assert_same_bits(final(tmp_path / "store"), final(tmp_path / "array"))


@deterministic
def square_features(X: Array, Y: Array, rng: Any) -> tuple[Array, Array]:
    """Transform rows by squaring their features."""
    return X * X, Y


def add_jitter(X: Array, Y: Array, rng: Any) -> tuple[Array, Array]:
    """Transform rows by adding small random numbers."""
    return X + X.dtype.type(0.01) * rng.normal(X.shape[1:]), Y


def test_functions_are_accepted_as_transforms() -> None:
    """Check that a deterministic function becomes a part of the model, and a random one of the
    stream only."""
    X, y = arrays(40, 5)
    source = AugmentedSource(array_source(), 2, [square_features, add_jitter])
    result = finished(settings(), source=source, test=array_source(40, 5))
    assert (result.Z >= 0).all()
    rows = {row.tobytes() for row in np.square(arrays()[0])}
    assert {row.tobytes() for row in result.Z} <= rows  # squared, and not add_jitter
    F = brute_force(result, np.square(X))
    np.testing.assert_allclose(result.model.values(X), F, atol=1e-4)
    assert result.metrics["test_accuracy"] == (F.argmax(axis=1) == y).mean()


def test_uint8_images_and_targets_are_trained() -> None:
    X = np.random.default_rng(0).integers(0, 255, (90, 4, 4, 1), np.uint8)
    y = X.reshape(90, -1).astype(float).mean(axis=1) > 127
    source = AugmentedSource(ArraySource(X, y, unit_rows=30), 1, [Scale("global")])
    result = finished(settings(**{"model.n_centers": 30, "data.scale": "auto"}), source=source)
    # Rows that are not centers: the float32 distance of a row to itself is not quite zero.
    mean, scale, X = X.mean(), X.std(dtype=np.float64), X[::-1, ::-1]
    flat = (X.reshape(90, -1) - mean) / scale
    np.testing.assert_allclose(result.model.values(X), brute_force(result, flat), atol=1e-4)


@pytest.mark.parametrize("block_size", [400, 100])
def test_ridge_bounds_weights_of_singular_kernel(block_size: int) -> None:
    """Check 400 centers of a smooth kernel in the plane, for which most directions are rounding
    errors.

    Without a jitter above the rounding of K(Z, Z) alpha the weights grew from epoch to epoch.
    """
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 1, (1000, 2)).astype(np.float32)
    truth = np.sin(5 * X[:, :1]) * np.cos(4 * X[:, 1:])
    y = (truth + 0.3 * rng.standard_normal(truth.shape)).astype(np.float32)
    ridge, Z = 1e-4, X[:400]
    config = sk.RunConfig.from_tables(
        {
            "data": {"epochs": 40, "scale": "none"},
            "model": {"kernel": "gaussian", "bandwidth": 0.3},
            "solver": {"name": "block", "block_size": block_size, "ridge": ridge},
            "run": {"device": "cpu"},
        }
    )
    result = sk.train_model(config, source=sk.ArraySource(X[:800], y[:800]), centers=Z)
    values = result.model.values(X[800:])
    result.model.backend.close()
    K, K_ZZ, K_test = (
        np.exp(-((A[:, None].astype(float) - Z) ** 2).sum(axis=2) / (2 * 0.3**2))
        for A in (X[:800], Z, X[800:])
    )
    alpha = np.linalg.lstsq(K.T @ K / 800 + ridge * K_ZZ, K.T @ y[:800] / 800, rcond=1e-14)[0]
    exact = K_test @ alpha
    assert np.abs(values - exact).max() < 0.05 * np.abs(exact).max()
    assert np.abs(result.model.weights).max() < 1000


BRANCH_STOP = 5


def create_repository(path: Path) -> Any:
    """Create an icechunk repository without its warnings."""
    icechunk.set_logs_filter("error")  # it warns of commits by several processes
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)))
    icechunk.set_logs_filter(None)
    return repository


def commit_rows(repository: Any, shift: float) -> str:
    """Commit rows whose features are shifted, and return the ID of the snapshot."""
    X, _ = arrays()
    session = repository.writable_session("main")
    group = zarr.create_group(session.store, overwrite=True)
    group.create_array("X", data=X + np.float32(shift), chunks=(16, X.shape[1]))
    group.create_array("y", data=X[:, :1], chunks=(16, 1))
    return str(session.commit("rows"))


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_resumed_run_reads_its_original_snapshot(tmp_path: Path, several: bool) -> None:
    """Check that the bits are equal, with several threads and several repositories."""
    names = ("a", "b") if several else ("a",)
    repositories = [create_repository(tmp_path / name) for name in names]
    first = [commit_rows(repository, k) for k, repository in enumerate(repositories)]
    urls = [f"icechunk+file://{tmp_path}/{name}@branch=main" for name in names]
    train = {"data.train": urls if several else urls[0], "data.prefetch_threads": 3}
    uninterrupted = settings(tmp_path / "once", **train)
    finished(uninterrupted)
    config = settings(tmp_path / "run", **train)
    stopped(config, BRANCH_STOP, test=ArraySource(*(arrays()[0][:10, :k] for k in (None, 1))))
    for repository in repositories:
        commit_rows(repository, 3.0)
    with RunDirectory(tmp_path / "run", writable=False) as run:
        pinned = pin_branches(config, run).data.train_urls
        recorded = run.read_record()
    assert pinned == tuple(
        url.replace("@branch=main", f"@snapshot={k}") for url, k in zip(urls, first, strict=True)
    )
    assert all(f"icechunk:{k}:X+y" in str(recorded) for k in first)
    finished(config)
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "once"))
    moved = [open_store(url).url for url in urls]
    config = config.with_overrides({"data.train": moved if several else moved[0]})
    with pytest.raises(ResumeMismatchError, match="data: other rows or targets"):
        finished(config)


def test_run_of_deleted_branch_resumes(tmp_path: Path) -> None:
    repository = create_repository(tmp_path / "a")
    repository.create_branch("dev", commit_rows(repository, 0.0))
    config = settings(
        tmp_path / "run", **{"data.train": f"icechunk+file://{tmp_path}/a@branch=dev"}
    )
    stopped(config, BRANCH_STOP, test=ArraySource(*(arrays()[0][:10, :k] for k in (None, 1))))
    repository.delete_branch("dev")
    finished(config)
    with pytest.raises(StreamkernError, match="there is no branch 'dev'"):
        finished(settings(tmp_path / "other", **{"data.train": config.data.train}))


def test_settings_without_branches_are_unchanged(tmp_path: Path) -> None:
    config = settings(None, **{"data.train": [f"icechunk+file://{tmp_path}@tag=v1", "x.zarr"]})
    assert pin_branches(config, None) is config


def test_secrets_are_not_written_to_run_directory(tmp_path: Path) -> None:
    secret = "hunter2"
    config = settings(tmp_path, **{"data.storage_options": {"secret": secret}})
    finished(config, source=stream())
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert files
    assert not [p for p in files if secret.encode() in p.read_bytes()]


def test_single_row_is_trained() -> None:
    """Check a single row, fewer than any limit."""
    X = np.array([[1.0, 2.0]], np.float32)
    config = settings(**{"data.batch_size": "auto", "model.n_centers": "auto"})
    result = finished(config, source=ArraySource(X, np.array([[3.0]], np.float32)))
    np.testing.assert_allclose(result.model.values(X), [[3.0]], rtol=1e-5)
