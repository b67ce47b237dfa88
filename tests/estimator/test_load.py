"""Check estimators that are loaded from run directories and from saved models."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import zarr
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import streamkern
from streamkern import (
    ConfigError,
    GaussianNoise,
    KernelClassifier,
    KernelRegressor,
    Laplace,
    Scale,
    load,
)
from streamkern.basics.errors import CheckpointError, ResumeMismatchError, RunError
from streamkern.cli.run_info import run_overview
from streamkern.kernels.builtin import Gaussian, Kernel
from tests import runs
from tests.bit_flips import survey
from tests.runs import Run

pytestmark = pytest.mark.usefixtures("one_blas_thread")

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 4))
Y = np.stack([np.sin(X[:, 0]) + X[:, 1] ** 2, X[:, 2] * X[:, 3]], axis=1)
SIDE = np.digitize(X[:, 0] + X[:, 1], [-0.7, 0.7])
LABELS = np.array(["low", "mid", "high"])[SIDE]
SMALL: dict[str, Any] = {
    "threads": 1, "n_centers": 60, "epochs": 2,
    "kernel": "laplace", "bandwidth": 2.0, "ridge": 1e-3,
}  # fmt: skip
NO_KERNEL = {name: SMALL[name] for name in ("threads", "n_centers", "epochs")}
STOPS: dict[str, Any] = {**SMALL, "early_stopping": True, "solver": "block"}
METRIC = rng.normal(size=(4, 2))


def same(loaded: Any, fitted: Any, rows: Any = X) -> None:
    """Check that everything a user sees of two fitted estimators has equal bits."""
    assert type(loaded) is type(fitted)
    ours, theirs = loaded.predict(rows), fitted.predict(rows)
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert np.array_equal(ours, theirs)
    if isinstance(fitted, KernelClassifier):
        assert loaded.classes_.dtype == fitted.classes_.dtype
        assert np.array_equal(loaded.classes_, fitted.classes_)
        assert np.array_equal(loaded.decision_function(rows), fitted.decision_function(rows))
    assert np.array_equal(loaded.centers_, fitted.centers_)
    assert np.array_equal(loaded.dual_coef_, fitted.dual_coef_)
    assert np.array_equal(loaded.intercept_, fitted.intercept_)
    assert loaded.bandwidth_ == fitted.bandwidth_
    assert loaded.n_features_in_ == fitted.n_features_in_
    assert loaded.report_ == fitted.report_
    assert loaded.validation_scores_ == fitted.validation_scores_
    assert loaded.history_ == fitted.history_
    assert loaded.n_iter_ == fitted.n_iter_ > 0
    assert loaded.loss_curve_ == fitted.loss_curve_
    assert loaded.loss_curve_


WAYS: dict[str, Callable[[], Any]] = {
    "values": lambda: KernelRegressor(**SMALL).fit(X, Y),
    "flat values": lambda: KernelRegressor(**SMALL).fit(X, Y[:, 0]),
    "one column": lambda: KernelRegressor(**SMALL).fit(X, Y[:, :1]),
    "words": lambda: KernelClassifier(**SMALL).fit(X, LABELS),
    "objects": lambda: KernelClassifier(**SMALL).fit(X, LABELS.astype(object)),
    "numbers": lambda: KernelClassifier(**SMALL).fit(X, SIDE.astype(np.int16) - 1),
    "whole floats": lambda: KernelClassifier(**SMALL).fit(X, SIDE.astype(float)),
    "booleans": lambda: KernelClassifier(**SMALL).fit(X, SIDE > 1),
    "float64": lambda: KernelRegressor(**SMALL, precision="float64").fit(X, Y),
    "evaluated": lambda: KernelRegressor(**SMALL).fit(X, Y, test=(X[:50], Y[:50])),
    "stopped early": lambda: KernelRegressor(**STOPS).fit(X, Y),
    "direct": lambda: KernelRegressor(**SMALL, solver="direct").fit(X, Y),
    "blocks": lambda: KernelRegressor(**SMALL, solver="block", block_size=25).fit(X, Y),
    "eigenpro4": lambda: KernelRegressor(
        **SMALL | {"solver": "eigenpro4", "ridge": "auto"}
    ).fit(X, Y),
    "falkon": lambda: KernelRegressor(**SMALL, solver="falkon").fit(X, Y),
    "fourier": lambda: KernelRegressor(
        "gaussian", features="fourier", n_features=80, threads=1, epochs=2
    ).fit(X, Y),
    "nystrom": lambda: KernelRegressor(**SMALL, features="nystrom").fit(X, Y),
    "a kernel": lambda: KernelRegressor(
        0.5 * Laplace(3.0) + Gaussian(2.0) * Laplace(1.5), **NO_KERNEL
    ).fit(X, Y),
    "a table": lambda: KernelRegressor({"kind": "polynomial", "degree": 2}, **NO_KERNEL).fit(X, Y),
    "a kernel with a metric": lambda: KernelRegressor(
        Laplace(3.0, metric=METRIC), **NO_KERNEL
    ).fit(X, Y),
    "a metric": lambda: KernelRegressor(**SMALL, metric=METRIC).fit(X, Y),
    "centers": lambda: KernelRegressor(threads=1, epochs=2, centers=X[:40]).fit(X, Y),
    "no scale": lambda: KernelRegressor(**SMALL, scale="none").fit(X, Y),
    "a scale": lambda: KernelRegressor(**SMALL, transforms=[Scale("global")]).fit(X, Y),
    "noise": lambda: KernelRegressor(
        **SMALL, transforms=[{"kind": "scale"}, GaussianNoise(0.1)]
    ).fit(X, Y),
    "no intercept": lambda: KernelRegressor(**SMALL, fit_intercept=False).fit(X, Y),
    "class weights": lambda: KernelClassifier(**SMALL, class_weight="balanced").fit(X, LABELS),
    "images": lambda: KernelClassifier(**SMALL).fit(
        np.abs(40 * X).astype(np.uint8).reshape(-1, 2, 2, 1), LABELS
    ),
}  # fmt: skip


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("way", WAYS)
def test_saved_estimator_equals_loaded_estimator(way: str, tmp_path: Path) -> None:
    fitted = WAYS[way]()
    rows = np.abs(40 * X).astype(np.uint8).reshape(-1, 2, 2, 1) if way == "images" else X
    fitted.save(tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    same(loaded, fitted, rows)
    loaded.save(tmp_path / "again")
    reloaded = load(tmp_path / "again")
    same(reloaded, fitted, rows)
    assert repr(reloaded) == repr(loaded)


@pytest.mark.parametrize("way", ["values", "words", "direct", "a metric", "centers", "noise"])
def test_run_directory_loads_trained_estimator(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SMALL, "run_dir": tmp_path / "run"}
    monkeypatch.setattr(f"{__name__}.SMALL", settings)
    if way == "centers":
        fitted = KernelRegressor(
            threads=1, epochs=2, centers=X[:40], run_dir=tmp_path / "run"
        ).fit(X, Y)  # fmt: skip
    else:
        fitted = WAYS[way]()
    same(load(tmp_path / "run"), fitted)
    same(load(str(tmp_path / "run")), fitted)


@pytest.mark.slow
def test_array_parameters_are_not_restored_but_paths_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {
        "threads": 1, "epochs": 2, "kernel": "laplace", "bandwidth": 2.0, "ridge": 1e-3,
    }  # fmt: skip
    arrays: dict[str, Any] = {"centers": X[:40], "metric": METRIC}
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
        zarr.save_array(name, array)
        for path in (name, f"{name}.npy"):
            KernelRegressor(**settings, run_dir=f"run of {path}", **{name: path}).fit(X, Y)
            assert getattr(load(f"run of {path}"), name) == path
        KernelRegressor(**settings, run_dir=f"run-{name}", **{name: array}).fit(X, Y).save(
            f"fit-{name}"
        )
        parts = KernelRegressor(**settings, **{name: array}).partial_fit(X, Y).partial_fit(X, Y)
        parts.save(f"parts-{name}")
        for location in ("run", "fit", "parts"):
            with pytest.raises(
                ConfigError, match=f"{name} was an array, which is not kept on disk"
            ):
                load(f"{location}-{name}").fit(X, Y)


def test_refitted_loaded_estimator_equals_original(tmp_path: Path) -> None:
    fitted = KernelRegressor(**SMALL, transforms=[GaussianNoise(0.1)]).fit(X, Y)
    fitted.save(tmp_path / "saved")
    refitted = clone(load(tmp_path / "saved")).set_params(threads=1).fit(X, Y)
    assert np.array_equal(refitted.predict(X), fitted.predict(X))


def test_feature_names_are_restored(tmp_path: Path) -> None:
    frame = pd.DataFrame(X, columns=list("abcd"))
    fitted = KernelRegressor(**SMALL).fit(frame, Y)
    fitted.save(tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    same(loaded, fitted, frame)
    assert list(loaded.feature_names_in_) == list("abcd")
    with pytest.raises(ValueError, match="feature names"):
        loaded.predict(frame[list("dcba")])


def test_column_names_of_store_are_restored(tmp_path: Path) -> None:
    frame = pd.DataFrame(X, columns=list("abcd")).assign(target=Y[:, 0])
    frame.to_csv(tmp_path / "t.csv", index=False)
    streamkern.ingest_store(tmp_path / "t.csv", tmp_path / "t.zarr", y="target")
    fitted = KernelRegressor(**SMALL, run_dir=tmp_path / "run").fit(tmp_path / "t.zarr")
    loaded = load(tmp_path / "run")
    assert np.array_equal(loaded.predict(tmp_path / "t.zarr"), fitted.predict(tmp_path / "t.zarr"))
    assert loaded.score(tmp_path / "t.zarr") == fitted.score(tmp_path / "t.zarr")


# ---------------------------------------------------------------------------- training after load


def test_partial_fit_continues_after_load(tmp_path: Path) -> None:
    def started_model() -> KernelClassifier:
        return KernelClassifier(**SMALL).partial_fit(
            X[:150], LABELS[:150], classes=sorted(set(LABELS))
        )

    started_model().save(tmp_path / "saved")
    assert run_overview(str(tmp_path / "saved"), None)["state"] == "finished"  # by no command
    loaded = load(tmp_path / "saved").partial_fit(X[150:], LABELS[150:])
    straight = started_model().partial_fit(X[150:], LABELS[150:])
    assert np.array_equal(loaded.decision_function(X), straight.decision_function(X))
    loaded.save(tmp_path / "second")
    thrice = load(tmp_path / "second").partial_fit(X[:100], LABELS[:100])
    straight.partial_fit(X[:100], LABELS[:100])
    assert np.array_equal(thrice.decision_function(X), straight.decision_function(X))


@pytest.mark.parametrize("solver", ["block", "eigenpro3", "eigenpro4"])
def test_partial_fit_continues_from_run_directory(solver: str, tmp_path: Path) -> None:
    """Check that the loss on the same rows does not rise."""
    settings = SMALL | {"solver": solver, "ridge": "auto", "run_dir": tmp_path / "run"}
    fitted = KernelRegressor(**settings).fit(X, Y)
    error = ((fitted.predict(X) - Y) ** 2).mean()
    loaded = load(tmp_path / "run")
    loaded.partial_fit(X, Y)
    assert ((loaded.predict(X) - Y) ** 2).mean() < 1.02 * error
    assert not np.array_equal(loaded.predict(X), fitted.predict(X))
    twin = pickle.loads(pickle.dumps(load(tmp_path / "run"))).partial_fit(X, Y)
    assert np.array_equal(twin.predict(X), loaded.predict(X))
    same(load(tmp_path / "run"), fitted)  # which nothing has touched


def test_partial_fit_refuses_model_without_solver_state(tmp_path: Path) -> None:
    KernelRegressor(**SMALL).fit(X, Y).save(tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    predictions = loaded.predict(X)
    with pytest.raises(ConfigError, match="without the state of its solver"):
        loaded.partial_fit(X, Y)
    assert np.array_equal(loaded.predict(X), predictions)


def test_run_that_continued_can_be_loaded_again(tmp_path: Path) -> None:
    config = runs.settings(tmp_path / "run")
    runs.stopped(config, 3, source=runs.stream())
    loaded = load(tmp_path / "run")
    rows, _ = runs.arrays()
    values = loaded.decision_function(rows)
    result = runs.finished(config, source=runs.stream(), test=runs.array_source(10, 5))
    with pytest.raises(RunError, match=f"loaded at step 3, but is now at step {runs.STEPS}"):
        loaded.partial_fit(rows, loaded.classes_[:1].repeat(len(rows)))
    assert np.array_equal(loaded.decision_function(rows), values)
    reloaded = load(tmp_path / "run")
    assert reloaded.report_["samples"] == result.samples
    assert list(reloaded.classes_) == list(runs.CLASSES)
    # The estimator has its centers in the order of the choice, so its sums round differently.
    np.testing.assert_allclose(
        reloaded.decision_function(rows), result.model.values(rows), atol=1e-5
    )


def test_saved_model_serves_as_warm_start(tmp_path: Path) -> None:
    ways = {**SMALL, "kernel": "laplace", "bandwidth": 2.0, "solver": "block"}
    fitted = KernelRegressor(**ways).fit(X, Y)
    fitted.save(tmp_path / "saved")
    loaded = load(tmp_path / "saved").set_params(**SMALL, warm_start=True).fit(X, Y)
    from_disk = KernelRegressor(**ways, warm_start=str(tmp_path / "saved")).fit(X, Y)
    assert np.array_equal(from_disk.predict(X), loaded.predict(X))
    assert not np.array_equal(from_disk.predict(X), fitted.predict(X))


# --------------------------------------------------------------------------------------- commands


def test_commands_accept_saved_model(tmp_path: Path, run: Run) -> None:
    fitted = KernelClassifier(**SMALL).fit(X, LABELS)
    fitted.save(tmp_path / "saved")
    np.savez(tmp_path / "rows.npz", X=X, y=LABELS)
    output = run("predict", tmp_path / "saved", tmp_path / "rows.npz", tmp_path / "out.npy")
    assert output[0] == 0, output
    assert list(np.load(tmp_path / "out.npy")) == list(fitted.predict(X))
    _, out, _ = run("evaluate", tmp_path / "saved", tmp_path / "rows.npz", "--json")
    assert json.loads(out)["accuracy"] == fitted.score(X, LABELS)
    code, info, _ = run("info", tmp_path / "saved", "--json", "--verify")
    assert code == 0
    assert json.loads(info)["samples"] == fitted.report_["samples"]
    (tmp_path / "run.toml").write_text(
        f'[data]\ntrain = "{tmp_path}/rows.zarr"\n[run]\nrun_dir = "{tmp_path}/saved"\n'
    )
    streamkern.ingest_store(X, tmp_path / "rows.zarr", y=LABELS)
    files = contents_by_path(tmp_path / "saved")
    code, _, refused = run("train", tmp_path / "run.toml")
    assert code == 2
    assert "holds a run that differs" in refused
    assert contents_by_path(tmp_path / "saved") == files


# -------------------------------------------------------------------------------------- refusals


class Odd(Kernel):
    def profile(self, sq: Any, xp: Any) -> Any:
        return (1 + sq) ** -1


def draw_unused_numbers(X: Any, Y: Any, rng: Any) -> Any:
    """Return the same rows; a random transform, since it is not marked as deterministic."""
    return X * (1 + 0 * rng.uniform((1,))), Y


def double_rows(X: Any, Y: Any, rng: Any) -> Any:
    """Return twice the rows."""
    return 2 * X, Y


double_rows.deterministic = True  # type: ignore[attr-defined]


def contents_by_path(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_model_with_local_function_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="double_rows"):
        KernelRegressor(**SMALL, transforms=[double_rows]).fit(X, Y).save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.slow
def test_model_with_user_kernel_loads_where_its_class_exists(tmp_path: Path) -> None:
    model = KernelRegressor(**SMALL | {"kernel": Odd(2.0), "bandwidth": "auto"}).fit(X, Y)
    model.save(tmp_path / "saved")
    np.testing.assert_array_equal(load(tmp_path / "saved").predict(X), model.predict(X))
    elsewhere = f"import streamkern; streamkern.load({str(tmp_path / 'saved')!r})"
    process = subprocess.run([sys.executable, "-c", elsewhere], capture_output=True, text=True)
    assert "Odd' is a custom class that this process has not defined" in process.stderr


def test_parameters_that_are_not_saved_must_be_set(tmp_path: Path) -> None:
    fitted = KernelRegressor(**SMALL, transforms=[draw_unused_numbers], metric=METRIC).fit(X, Y)
    fitted.save(tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    same(loaded, fitted)
    with pytest.raises(ConfigError, match=r"metric was an array.*set_params\(metric=\.\.\.\)"):
        loaded.fit(X, Y)
    with pytest.raises(ConfigError, match="transforms was a list with 'draw_unused_numbers'"):
        clone(loaded).set_params(metric=METRIC).fit(X, Y)
    loaded.set_params(metric=METRIC, transforms=[draw_unused_numbers], threads=1).fit(X, Y)
    same(loaded, fitted)


def test_save_writes_only_to_new_folder(tmp_path: Path) -> None:
    fitted = KernelRegressor(**SMALL).fit(X, Y)
    with pytest.raises(NotFittedError):
        KernelRegressor().save(tmp_path / "saved")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    fitted.save(tmp_path / "mine")
    assert contents_by_path(tmp_path / "mine")["notes.txt"] == b"mine"
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    (tmp_path / "other" / "checkpoints" / "best.pt").write_bytes(b"mine")
    with pytest.raises(RunError, match=r"holds 'checkpoints/?.*' but no run of streamkern"):
        fitted.save(tmp_path / "other")
    assert contents_by_path(tmp_path / "other") == {"checkpoints/best.pt": b"mine"}
    fitted.save(tmp_path / "saved")
    files = contents_by_path(tmp_path / "saved")
    fitted.save(tmp_path / "saved")  # it is there already
    with pytest.raises(RunError, match="holds another model or run already"):
        KernelRegressor(**SMALL).fit(X, Y[:, ::-1]).save(tmp_path / "saved")
    with pytest.raises(ResumeMismatchError, match="holds a run that differs"):
        KernelRegressor(**SMALL, run_dir=tmp_path / "saved").fit(X, Y)
    run = tmp_path / "run"
    KernelRegressor(**SMALL, run_dir=run).fit(X, Y)
    with pytest.raises(RunError, match="holds another model or run already"):
        fitted.save(run)
    assert contents_by_path(tmp_path / "saved") == files


def test_load_refuses_folder_that_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="place=3 must be the path or URL"):
        load(3)  # type: ignore[arg-type]
    for location in ("nothing", "empty"):
        if location == "empty":
            (tmp_path / location).mkdir()
        with pytest.raises(RunError, match=location):
            load(tmp_path / location)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty"]
    streamkern.ingest_store(X, tmp_path / "rows.zarr", y=LABELS)
    with pytest.raises(RunError, match=r"rows\.zarr"):
        load(tmp_path / "rows.zarr")


@pytest.mark.slow
def test_load_refuses_damaged_files(tmp_path: Path) -> None:
    fitted = KernelRegressor(**SMALL).fit(X, Y)
    fitted.save(tmp_path / "saved")

    def use() -> bytes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a line of the log is not part of it
            return load(tmp_path / "saved").predict(X).tobytes()

    counts = survey(tmp_path / "saved", 60, 3, use, peak_bytes=100 * 2**20)
    assert sum(counts.values()) == 60
    assert counts["CheckpointError"] > 20


@pytest.mark.slow
def test_killed_save_is_completed_by_next_save(tmp_path: Path) -> None:
    """Kill a save at every write: its result is refused or complete, and the same call completes
    it."""
    fitted = KernelRegressor(**SMALL).fit(X, Y)
    fitted.save(tmp_path / "whole")
    files = sorted(contents_by_path(tmp_path / "whole"))
    for n_kept in range(len(files)):
        path = tmp_path / f"part-{n_kept}"
        shutil.copytree(tmp_path / "whole", path)
        for name in sorted(files, key=lambda n: (tmp_path / "whole" / n).stat().st_mtime_ns)[
            n_kept:
        ]:
            (path / name).unlink()
        for folder in sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True):
            if not any(folder.iterdir()):
                folder.rmdir()
        with contextlib.suppress(RunError, CheckpointError):
            same(load(path), fitted)
        fitted.save(path)
        same(load(path), fitted)


def test_save_and_load_remote_url(tmp_path: Path) -> None:
    fitted = KernelClassifier(**SMALL).fit(X, LABELS)
    fitted.save("memory://bucket-of-load/saved")
    same(load("memory://bucket-of-load/saved"), fitted)
    with pytest.raises(RunError, match="nothing-there"):
        load("memory://bucket-of-load/nothing-there")


def test_partial_fit_of_loaded_estimator_makes_one_pass(tmp_path: Path) -> None:
    KernelRegressor(**{**SMALL, "epochs": 1}).partial_fit(X, Y).save(tmp_path / "saved")
    loaded = load(tmp_path / "saved").set_params(epochs="auto")
    n_iter = loaded.n_iter_
    assert loaded.partial_fit(X, Y).n_iter_ == n_iter + 1


def test_loaded_model_shows_original_parameters(tmp_path: Path) -> None:
    """Check that parameters left at "auto" do not show their values, and that labels are not
    replaced by names."""
    labels = np.where(X[:, 0] > 0, 7, 3)
    original: dict[str, Any] = {
        "n_centers": 20, "bandwidth": 2.0, "class_weight": {3: 1.0, 7: 2.0}, "random_state": 1,
    }  # fmt: skip
    fitted = KernelClassifier(**original, run_dir=tmp_path / "run", threads=1).fit(X, labels)
    fitted.save(tmp_path / "saved")
    for location in ("run", "saved"):
        loaded = load(tmp_path / location)
        assert loaded.get_params() == KernelClassifier(**original).get_params()
        refitted = load(tmp_path / location).set_params(threads=1).fit(X, labels)
        np.testing.assert_array_equal(refitted.predict_values(X), fitted.predict_values(X))


# -------------------------------------------------------------------------------------- evaluate


def test_commands_accept_run_file(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(60, 2))
    streamkern.ingest_store(X, tmp_path / "s.zarr", y=X[:, 0])
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'[data]\ntrain = "{tmp_path}/s.zarr"\n[model]\nn_centers = 20\nmetric = "none"\n'
        f'[run]\nrun_dir = "{tmp_path}/run"\n'
    )
    planned = streamkern.plan(run_file, measure=False)
    assert planned["problem"]["centers"] == 20
    assert planned["seconds"] is None
    streamkern.train_model(run_file).model.backend.close()
    figures = streamkern.evaluate(tmp_path / "run", X, X[:, 0])
    assert figures["r2"] > 0.9
    assert figures == streamkern.evaluate(streamkern.load(tmp_path / "run"), X, X[:, 0])
    assert streamkern.report(tmp_path / "run", tmp_path / "r.html").read_text().startswith("<!")


def test_invalid_targets_are_refused_by_every_entry_point(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(60, 2))
    days = np.arange(60).astype("M8[D]")
    for y in (days, days - days[0], list(pd.period_range("2020", periods=60)), pd.Series(days)):
        with pytest.raises(streamkern.DataError, match="days since a date"):
            streamkern.KernelRegressor().fit(X, y)
    path = tmp_path / "values.csv"
    pd.DataFrame({"a": X[:, 0], "y": X[:, 1]}).to_csv(path, index=False)
    with pytest.raises(streamkern.DataError, match=r"numbers with fractions.* use KernelRegressor"):
        streamkern.KernelClassifier().fit(str(path), "y")
    with pytest.raises(streamkern.DataError, match="weight above 0"):
        streamkern.KernelRegressor().fit(X, X[:, 0], np.zeros(60))


def test_file_named_zip_without_compression_is_reported(tmp_path: Path) -> None:
    (tmp_path / "z.csv.zip").write_bytes(b"PK")
    with pytest.raises(streamkern.DataError, match="is not compressed, and its name says zip"):
        streamkern.ingest_store(str(tmp_path / "z.csv.zip"), tmp_path / "z.zarr", y="y")


def test_targets_are_found_by_column_name(tmp_path: Path) -> None:
    """Check data frames and files, for models that were trained on either."""
    rows = np.random.default_rng(0).normal(size=(60, 3))
    frame = pd.DataFrame(rows, columns=list("abt"))
    frame.to_csv(tmp_path / "t.csv", index=False)
    streamkern.ingest_store(frame, tmp_path / "s", y="t")
    settings: dict[str, Any] = {"n_centers": 9, "bandwidth": 2.0, "threads": 1, "solver": "block"}
    cases = [(frame, "t"), (frame[["a", "b"]], frame["t"]), (tmp_path / "t.csv", "t"),
             (tmp_path / "s", None)]  # fmt: skip
    for X, y in cases:
        model = streamkern.KernelRegressor(**settings).fit(X, y)
        expected = model.score(frame[["a", "b"]], frame["t"])
        for table in (frame, pl.DataFrame(frame), pl.LazyFrame(frame), pa.table(frame)):
            assert model.score(table) == pytest.approx(expected)
            assert streamkern.evaluate(model, table)["r2"] == pytest.approx(expected)
        with pytest.raises(streamkern.DataError, match="need targets y, but these have none"):
            model.score(frame[["a", "b"]])
