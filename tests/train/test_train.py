"""Test the training loop: its results, its log, and its state after failures."""

from __future__ import annotations

import json
import signal
import threading
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
from streamkern.basics.errors import (
    CheckpointError,
    CorruptChunkError,
    DataError,
    ResumeMismatchError,
    StreamkernError,
)
from streamkern.ingest.ingest import ingest
from streamkern.rundir import checkpoint_format
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_log import read_log
from streamkern.solver.block_step import BlockSolver
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
    STEPS,
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
    latest_step,
    newest,
    settings,
    stopped,
    stream,
)
from tests.store_damage import flip_bit

# -- results ---------------------------------------------------------------------------------------


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


# -- settings that do not change the model ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["blocks", "eigenpro4"])
def test_monitoring_does_not_change_weights(method: str, tmp_path: Path) -> None:
    """Check evaluations, checkpoints, the log, the progress line, reading threads and a run
    directory."""

    def weights(run_dir: Path | None, progress: bool = False, **overrides: Any) -> Array:
        config = settings(run_dir, **METHODS[method], **overrides)
        result = finished(
            config, source=stream(method), test=array_source(20, 5), progress=progress
        )
        return np.array(result.model.weights)

    plain = weights(None).tobytes()
    assert weights(None, **{"run.evaluate_every": 1}).tobytes() == plain
    often = {"run.checkpoint_every": 5, "run.evaluate_every": 3, "run.log": False}
    assert weights(tmp_path / "often", **often).tobytes() == plain
    timed = {"run.checkpoint_every": "0.01 s", "data.prefetch_threads": 3, "run.threads": 2}
    assert weights(tmp_path / "timed", True, **timed).tobytes() == plain


# -- evaluations and the log -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "at", "steps"),
    [
        (0, [], [14]),
        (5, [], [5, 10, 14]),
        (7, [], [7, 14]),
        ("auto", [], [7, 14]),
        (0, [30, 40, 200, 9999], [2, 11, 14]),  # 20 rows a step, 15 in step 7
        (5, [135], [5, 7, 10, 14]),
    ],
)
def test_evaluations_follow_their_schedule(
    every: Any, at: list[int], steps: list[int], tmp_path: Path
) -> None:
    """Check that each step is evaluated at most once and the end always, in the history, the log
    and the callback."""
    for run_dir in (None, tmp_path):
        evaluations: list[dict[str, Any]] = []
        config = settings(run_dir, **{"run.evaluate_every": every, "run.evaluate_at": at})
        result = finished(
            config, source=stream(), test=array_source(20, 5), on_evaluation=evaluations.append
        )
        assert [record["step"] for record in evaluations] == steps
        assert [record["step"] for record in result.history] == steps
        assert [record["test_mse"] for record in result.history] == [
            record["test_mse"] for record in evaluations
        ]
        assert result.metrics["test_accuracy"] == evaluations[-1]["test_accuracy"]
    assert finished(settings(), source=stream()).history == []


def test_log_records_all_events_in_order(tmp_path: Path) -> None:
    finished(settings(tmp_path), source=stream(), test=array_source(20, 5))
    records = read_log(tmp_path / "log.jsonl")
    events = [record["event"] for record in records]
    assert events.index("block") < events.index("start") < events.index("evaluation")
    setup = next(r for r in records if r["event"] == "start")["setup"]
    assert {"leverage", "lambda_1", "mu", "jitter", "batch_size", "bandwidth"} <= set(setup)
    assert records[-1]["samples"] == 2 * N
    run = json.loads((tmp_path / "run.json").read_text())
    assert {"identity", "sizes", "versions"} <= set(run)
    assert "train" not in run["identity"]["settings"]["data"]


# -- sources ---------------------------------------------------------------------------------------


def generated(seed: int, epoch: int, start: int, stop: int) -> tuple[Array, Array]:
    X, y = arrays()
    return X[start:stop], y[start:stop]


SOURCES: dict[str, Callable[[], Source]] = {
    "numpy": array_source,
    "dask": lambda: ArraySource(
        *(dask.array.from_array(a, chunks=(16, *a.shape[1:])) for a in arrays()),
        classes=CLASSES, unit_rows=16,
    ),
    "generator": lambda: GeneratorSource(
        generated, N, (D,), np.float32, C, classes=CLASSES, block_rows=16
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
def squared(X: Array, Y: Array, rng: Any) -> tuple[Array, Array]:
    return X * X, Y


def jittered(X: Array, Y: Array, rng: Any) -> tuple[Array, Array]:
    return X + X.dtype.type(0.01) * rng.normal(X.shape[1:]), Y


def test_functions_are_accepted_as_transforms() -> None:
    """Check that a deterministic function becomes a part of the model, and a random one of the
    stream only."""
    X, y = arrays(40, 5)
    source = AugmentedSource(array_source(), 2, [squared, jittered])
    result = finished(settings(), source=source, test=array_source(40, 5))
    assert (result.Z >= 0).all()
    rows = {row.tobytes() for row in np.square(arrays()[0])}
    assert {row.tobytes() for row in result.Z} <= rows  # squared, and not jittered
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


# -- failures --------------------------------------------------------------------------------------


def test_corrupt_chunk_during_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the error names the chunk, and that earlier work is kept.

    The store counts as too large to be kept decoded, so that it is read in each epoch.
    """
    monkeypatch.setattr("streamkern.planning.memory.KEPT_STORE_BUDGET_RATIO", 10**12)
    X, y = arrays()
    ingest(X, tmp_path / "train.zarr", y=y, chunk_mb=0.0005)
    train_url, damaged_urls = tmp_path / "train.zarr", []
    plain = settings(tmp_path / "plain", **{"data.train": str(train_url), "data.epochs": 3})
    finished(plain)
    test = ArraySource(*arrays(10, 5), classes="012")
    config = plain.with_overrides({"run.run_dir": str(tmp_path / "run"), "run.evaluate_every": 1})

    def damage_store(record: dict[str, Any]) -> None:
        if not damaged_urls:  # at step 1; the third epoch cannot have been read yet
            damaged_urls.append(record["step"])
            flip_bit(train_url, "X/c/2/0")

    with pytest.raises(CorruptChunkError, match="X/c/2/0") as caught:
        finished(config, test=test, on_evaluation=damage_store)
    assert caught.value.exit_code == 3
    saved_step = latest_step(tmp_path / "run")
    assert saved_step in (7, 14)
    assert newest(tmp_path / "run").skipped == ()
    with pytest.raises(CorruptChunkError, match="X/c/2/0"):  # still there
        finished(config)
    assert latest_step(tmp_path / "run") == saved_step
    flip_bit(train_url, "X/c/2/0")
    finished(config)
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "plain"))


class Faulty(ArraySource):
    """Source that raises `fault` in the second epoch."""

    fault: Exception | None = None

    def _read(self, u: int, seed: int, epoch: int) -> tuple[Array, Array]:
        if epoch == 1 and u == 3 and self.fault is not None:
            raise self.fault
        return super()._read(u, seed, epoch)


@pytest.mark.parametrize(
    "fault",
    [PermissionError("token expired"), DataError("bad row"), ZeroDivisionError("in a generator")],
    ids=lambda fault: type(fault).__name__,
)
def test_failed_read_keeps_previous_work(fault: Exception, tmp_path: Path) -> None:
    def source() -> Faulty:
        return Faulty(*arrays(), classes=CLASSES, unit_rows=16)

    failing = source()
    failing.fault = fault
    with pytest.raises(type(fault), match=str(fault)) as caught:
        finished(settings(tmp_path / "run"), source=failing)
    if isinstance(fault, StreamkernError):
        assert caught.value.exit_code == 3  # type: ignore[attr-defined]
    assert latest_step(tmp_path / "run") == 7
    finished(settings(tmp_path / "run"), source=source())
    finished(settings(tmp_path / "plain"), source=source())
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "plain"))


def test_failed_step_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a step that fails, such as for lack of memory, when only some blocks have changed."""
    block_step, calls = BlockSolver._block_step, []

    def fail(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 17:  # block 2 of 3 in step 6
            raise MemoryError("out of memory")
        return block_step(self, *arguments)

    config = settings(tmp_path / "run", **METHODS["blocks"], **{"run.checkpoint_every": 2})
    monkeypatch.setattr(BlockSolver, "_block_step", fail)
    with pytest.raises(MemoryError):
        finished(config, source=stream())
    assert latest_step(tmp_path / "run") == 4
    finished(config, source=stream())
    finished(settings(tmp_path / "plain", **METHODS["blocks"]), source=stream())
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "plain"))


def test_full_disk_keeps_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint_format._write_arrays

    def full(folder: Any, group: str, checked: dict[str, Array]) -> Any:
        if group.startswith("checkpoints/000000000006"):
            raise OSError(28, "No space left on device")
        return write(folder, group, checked)

    config = settings(tmp_path / "run", **{"run.checkpoint_every": 3})
    monkeypatch.setattr(checkpoint_format, "_write_arrays", full)
    with pytest.raises(CheckpointError, match="the disk is full") as caught:
        finished(config, source=stream())
    assert caught.value.exit_code == 3
    assert latest_step(tmp_path / "run") == 3
    monkeypatch.undo()
    finished(config, source=stream())
    finished(settings(tmp_path / "plain"), source=stream())
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "plain"))


def test_callback_error_is_raised(tmp_path: Path) -> None:
    def on_evaluation(record: dict[str, Any]) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        finished(
            settings(tmp_path, **{"run.evaluate_every": 3}),
            source=stream(), test=array_source(10, 5), on_evaluation=on_evaluation,
        )  # fmt: skip
    assert latest_step(tmp_path) == 3


def test_signals_without_run_directory_keep_their_effect() -> None:
    before = signal.getsignal(signal.SIGTERM)
    handlers = []

    def on_evaluation(record: dict[str, Any]) -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))

    finished(settings(), source=stream(), test=array_source(10, 5), on_evaluation=on_evaluation)
    assert handlers == [before]


def test_training_runs_on_another_thread(tmp_path: Path) -> None:
    """Check a run on a thread that cannot handle signals."""
    results: list[Any] = []

    def work() -> None:
        results.append(finished(settings(tmp_path), source=stream()))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert results[0].samples == 2 * N
    assert latest_step(tmp_path) == STEPS


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


# -- branches of icechunk repositories -------------------------------------------------------------

BRANCH_STOP = 5


def create_repository(path: Path) -> Any:
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
