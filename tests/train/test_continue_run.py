"""Test runs that continue another run or start from the weights of a model."""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import ConfigError, ResumeMismatchError, RunError, TrainingInterrupted
from streamkern.basics.stop import StopRequest
from streamkern.cli.main import run_command
from streamkern.cli.run_info import run_overview, run_text
from streamkern.config.run_config import RunConfig
from streamkern.rundir import checkpoint_format
from streamkern.rundir.checkpoint_format import SavedGroup
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.feed import Feed
from streamkern.train import start_run
from streamkern.train.continue_run import load_warm_start
from streamkern.train.loop.step_loop import StepLoop
from streamkern.train.rank_work import prepare_run
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.restart.stored_centers import CentersTarget, StoredCenters
from streamkern.train.saved_model import load_model
from streamkern.train.start_run import run_directory, start_trainer
from streamkern.train.train import open_continuation, train
from tests import rank_runs as runs
from tests.rank_runs import SMALL, grid
from tests.rank_threads import on_threads
from tests.runs import (
    FOURIER,
    Array,
    array_source,
    arrays,
    final,
    finished,
    newest,
    settings,
    stopped,
)

NAMES = np.array(["ant", "bee", "cat"])


def rows(n: int, seed: int, offset: float = 0.0) -> tuple[Array, Array]:
    """Return rows of a table, whose columns have different scales, and labels."""
    X, y = arrays(n, seed)
    return X * np.float32([1, 10, 100, 1, 0.1]) + np.float32(offset), NAMES[y]


def write_store(folder: Path) -> Path:
    """Write a store of 90 rows, and return its path."""
    X, y = rows(90, 0)
    sk.ingest_store(X, folder / "s.zarr", y=y, chunk_mb=16 * 20 / 2**20)
    return folder / "s.zarr"


def config(folder: Path, name: str, **changes: Any) -> RunConfig:
    """Return the settings of a run over the store, with everything "auto" that may be."""
    actual = settings(folder / name).with_overrides(
        {
            "data.train": str(folder / "s.zarr"), "data.scale": "auto", "data.epochs": 1,
            "model.bandwidth": "median", "model.n_centers": 30,
        }
    )  # fmt: skip
    return actual.with_overrides(changes) if changes else actual


def saved(run_dir: Path, step: int | None = None) -> tuple[SavedGroup, SavedGroup]:
    """Return the setup, and the checkpoint of a step, by default the newest."""
    if step is not None:
        run_dir = Path(shutil.copytree(run_dir, run_dir.with_name(f"{run_dir.name}-{step}")))
        for manifest in (run_dir / "checkpoints").glob("*.json"):
            if int(manifest.stem.rpartition("-")[2]) > step:
                manifest.unlink()
    setup = RunDirectory(run_dir, writable=False).load_setup()
    assert setup is not None
    return setup, newest(run_dir)


def weights(checkpoint: SavedGroup) -> Array:
    """Return the weights that a checkpoint evaluates."""
    return checkpoint.arrays[checkpoint.meta["evaluated"]]


@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.kernel": "auto", "model.bandwidth": "auto"},
        {"model.centers": "kmeans"},
        {"model.centers": "all", "model.n_centers": "auto"},
        {"model.metric": "learn-diagonal"},
        {"data.transforms": [{"kind": "scale", "mode": "global"}, {"kind": "noise", "sigma": 0.1}]},
        FOURIER,
        {"model.features": "nystrom"},
    ],
    ids=lambda changes: ", ".join(f"{k}={v}" for k, v in changes.items())[:40] or "plain",
)
def test_continued_run_starts_with_old_function_on_appended_rows(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Check rows whose means, deviations and distances differ from those of the first run."""
    location, test = write_store(tmp_path), rows(40, 8)[0]
    finished(config(tmp_path, "a", **changes))
    X, y = rows(70, 1, offset=3.0)
    sk.append_store(X, location, y=y)
    run_changes = {k: v for k, v in changes.items() if not k.startswith("model.")}
    left_out = {f"model.{k}": v for k, v in RunConfig().model}
    finished(config(tmp_path, "b", **left_out | run_changes), continues=tmp_path / "a")
    (parent, last), (new, first) = saved(tmp_path / "a"), saved(tmp_path / "b", step=0)
    for name in ("Z", "order", "metric", *(k for k in parent.arrays if k.startswith("scaling"))):
        assert (name in parent.arrays) == (name in new.arrays)
        if name in parent.arrays:
            np.testing.assert_array_equal(new.arrays[name], parent.arrays[name])
    assert new.meta["kernel"] == parent.meta["kernel"]
    np.testing.assert_array_equal(weights(first), weights(last))
    answers = []
    for run_dir in ("a", "b-0"):
        model = load_model(tmp_path / run_dir, device="cpu", threads=1)
        answers.append(model.predict(array_of(test)))
        model.backend.close()
    np.testing.assert_array_equal(*answers)
    assert new.meta["sizes"] != parent.meta["sizes"] or new.meta["setup"] != parent.meta["setup"]
    data = run_overview(tmp_path / "b")["data"]
    assert data["n_rows"] == 160


def array_of(X: Array) -> Any:
    """Return a source of rows that are all of the first class."""
    return sk.ArraySource(X, np.zeros(len(X), np.int64), classes=tuple(NAMES))


def test_additional_epochs_draw_new_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that epochs of an augmented run do not draw the same noise again."""
    write_store(tmp_path)
    requested: list[tuple[int, int]] = []
    epochs = Feed.epochs

    def record_epochs(self: Feed, first: int, stop: int, start: int = 0) -> Any:
        requested.append((first, stop))
        return epochs(self, first, stop, start)

    monkeypatch.setattr(Feed, "epochs", record_epochs)
    for name, parent in (("a", None), ("b", "a"), ("c", "b")):
        finished(
            config(tmp_path, name, **{"data.epochs": 2, "run.calibrate": False}),
            continues=None if parent is None else tmp_path / parent,
        )
    assert requested == [(0, 2), (2, 4), (4, 6)]


def test_killed_continuation_resumes_without_old_run(tmp_path: Path) -> None:
    write_store(tmp_path)
    finished(config(tmp_path, "a"))
    parent = tmp_path / "a"
    twice = {"data.epochs": 2}
    finished(config(tmp_path, "b", **twice), continues=parent)
    for step in (1, 4):
        test = array_of(rows(10, 5)[0])
        stopped(config(tmp_path, f"c{step}", **twice), step, continues=parent, test=test)
    shutil.rmtree(parent)
    for step in (1, 4):
        run_dir = tmp_path / f"c{step}"
        finished(config(tmp_path, run_dir.name, **twice), continues=parent)
        for name, array in final(tmp_path / "b").items():
            np.testing.assert_array_equal(final(run_dir)[name], array, err_msg=name)


def test_run_still_training_is_continued_at_recorded_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the weights are those of the recorded step."""
    write_store(tmp_path)
    stopped(config(tmp_path, "a"), 2)
    open_run = start_run.open_run

    def finish_parent_and_open(*args: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(start_run, "open_run", open_run)
            finished(config(tmp_path, "a"))
        return open_run(*args, **options)

    monkeypatch.setattr(start_run, "open_run", finish_parent_and_open)
    with pytest.raises(ConfigError, match="has been trained on, from step 2 to 5, since this run"):
        finished(config(tmp_path, "b"), continues=tmp_path / "a")
    monkeypatch.undo()
    finished(config(tmp_path, "b"), continues=tmp_path / "a")


def test_parent_runs_are_recorded_and_shown(tmp_path: Path) -> None:
    write_store(tmp_path)
    for name, parent in (("a", None), ("b", "a"), ("c", "b")):
        result = finished(
            config(tmp_path, name), continues=None if parent is None else tmp_path / parent
        )
    actual = run_overview(tmp_path / "c")
    ancestors = [actual["continues"], *actual["continues"]["before"]]
    assert [(k["run"], k["step"], k["samples"], k["epochs"]) for k in ancestors] == [
        (str(tmp_path / "b"), 5, 90, 2), (str(tmp_path / "a"), 5, 90, 1),
    ]  # fmt: skip
    model = load_model(tmp_path / "b", device="cpu", threads=1)
    assert ancestors[0]["model"] == model.digest()
    model.backend.close()
    assert f"{tmp_path / 'b'} at step 5, which continued {tmp_path / 'a'}" in run_text(actual)
    assert json.loads((tmp_path / "c/run.json").read_text()) is not None
    assert result.samples == 90


def test_run_of_estimator_is_continued_with_labels(tmp_path: Path) -> None:
    X, y = arrays(90)
    fitted = sk.KernelClassifier(
        n_centers=30, bandwidth=3.0, run_dir=str(tmp_path / "a"), solver="block", epochs=1
    ).fit(X, y)
    sk.ingest_store(X, tmp_path / "s.zarr", y=y)
    plain = RunConfig.from_tables(
        {"data": {"train": str(tmp_path / "s.zarr")}, "run": {"run_dir": str(tmp_path / "b")}}
    )
    finished(plain, continues=tmp_path / "a")
    loaded = sk.load(tmp_path / "b")
    assert isinstance(loaded, sk.KernelClassifier)
    np.testing.assert_array_equal(loaded.classes_, fitted.classes_)
    assert loaded.classes_.dtype == fitted.classes_.dtype
    np.testing.assert_array_equal(loaded.centers_, fitted.centers_)
    assert loaded.score(X, y) >= fitted.score(X, y) - 0.05


def test_columns_in_another_order_are_reordered(tmp_path: Path) -> None:
    X, y = rows(90, 0)
    for name, order in (("s", "abcde"), ("t", "edcba")):
        table = {"label": y, **{c: X[:, "abcde".index(c)] for c in order}}
        lines = [",".join(table), *(",".join(map(str, row)) for row in zip(*table.values()))]  # noqa: B905
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
        sk.ingest_store(tmp_path / f"{name}.csv", tmp_path / f"{name}.zarr", y="label")
    finished(config(tmp_path, "a"))
    answers = []
    for name in "st":
        changes = {"data.train": str(tmp_path / f"{name}.zarr")}
        result = finished(config(tmp_path, f"b{name}", **changes), continues=tmp_path / "a")
        answers.append(result.model.backend.to_host(result.model.weights))
    np.testing.assert_allclose(*answers, rtol=1e-3, atol=1e-5)  # float32, sums in another order


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "kernel": ("keeps the model of that run.*model.kernel: was 'laplace', now 'gau",
               {"model.kernel": "gaussian"}),
    "centers": ("model.n_centers: was 30, now 31", {"model.n_centers": 31}),
    "scale": ("data.scale='none' contradicts", {"data.scale": "none"}),
    "transform": ("data.transforms scales rows differently",
                  {"data.transforms": [{"kind": "scale", "mode": "global"}]}),
    "direct": ("solver.name='direct' cannot start from", {"solver.name": "direct"}),
    "precision": ("run.precision gives float64", {"run.precision": "float64"}),
    "another start": ("warm_start=.*differs from the run", {"solver.warm_start": "elsewhere"}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_contradicting_settings_are_refused(name: str, tmp_path: Path) -> None:
    text, changes = REFUSED[name]
    write_store(tmp_path)
    finished(config(tmp_path, "a"))
    with pytest.raises(ConfigError, match=text):
        finished(config(tmp_path, "b", **changes), continues=tmp_path / "a")


def test_invalid_run_directories_are_refused(tmp_path: Path) -> None:
    write_store(tmp_path)
    a, b = tmp_path / "a", tmp_path / "b"
    finished(config(tmp_path, "a"))
    with pytest.raises(ConfigError, match=r"is the run that is continued.*such as run_dir=.*a-2"):
        finished(config(tmp_path, "a"), continues=a)
    finished(config(tmp_path, "other"))
    with pytest.raises(ResumeMismatchError, match="continues no other run, not"):
        finished(config(tmp_path, "other"), continues=a)
    finished(config(tmp_path, "b"), continues=a)
    with pytest.raises(ResumeMismatchError, match=r"holds a run that continues .*a; repeat"):
        finished(config(tmp_path, "b"))
    with pytest.raises(ResumeMismatchError, match=r"continues .*a, not .*other"):
        finished(config(tmp_path, "b"), continues=tmp_path / "other")
    with pytest.raises(RunError, match="there is no run in"):
        finished(config(tmp_path, "c"), continues=tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    for place in ("folder", "s.zarr"):
        for changes in ({"continues": tmp_path / place}, {}):
            warm = {} if changes else {"solver.warm_start": str(tmp_path / place)}
            with pytest.raises(RunError, match=rf"there is no run in .*{place}.*; give the run"):
                finished(config(tmp_path, "c", **warm), **changes)
    for manifest in b.glob("*setup.json"):
        manifest.unlink()
    with pytest.raises(RunError, match=r"the setup in .* is missing"):
        finished(config(tmp_path, "b"), continues=a)


def test_given_arrays_without_run_directory_are_sufficient(tmp_path: Path) -> None:
    """Check arrays in Python; given centers and a new transform of the rows are refused."""
    finished(settings(tmp_path / "a"), source=array_source())
    result = finished(settings(), source=array_source(60, 3), continues=tmp_path / "a")
    np.testing.assert_array_equal(result.Z, saved(tmp_path / "a")[0].arrays["Z"])
    with pytest.raises(ConfigError, match="because the run that is continued determines them"):
        finished(settings(), source=array_source(), centers=arrays(5)[0], continues=tmp_path / "a")


def test_commands_suggest_and_perform_continuation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check the commands of a user: more epochs are refused, with the remedy."""
    monkeypatch.chdir(tmp_path)
    X, y = rows(90, 0)
    more = rows(40, 1)
    np.savez("a.npz", X=X, y=y)
    np.savez("b.npz", X=more[0], y=more[1])
    run = ["train", "--train", "s.zarr", "--set", "model.n_centers=20", "--run-dir"]
    assert run_command(["ingest", "a.npz", "s.zarr"]) == 0
    assert run_command([*run, "a", "--epochs", "1"]) == 0
    assert "was already finished" not in capsys.readouterr().err
    assert run_command([*run, "a", "--epochs", "1"]) == 0
    assert "was already finished; --continue starts" in capsys.readouterr().err
    assert run_command([*run, "a", "--epochs", "2"]) == 2
    assert "streamkern train --continue" in capsys.readouterr().err
    assert run_command(["append", "s.zarr", "b.npz"]) == 0
    assert "130 rows" in capsys.readouterr().out
    assert run_command(["append", "s.zarr", "b.npz"]) == 0
    assert "already ends with these rows; nothing was appended" in capsys.readouterr().err
    assert run_command([*run, "a", "--epochs", "1", "--continue", "a"]) == 2
    assert "such as --run-dir" in capsys.readouterr().err
    assert run_command([*run, "b", "--epochs", "1", "--continue", "a"]) == 0
    assert run_command(["info", "b"]) == 0
    assert "a at step" in capsys.readouterr().out


@pytest.mark.parametrize("n_centers", [1000, "all"])
def test_run_with_all_rows_as_centers_is_continued(n_centers: Any, tmp_path: Path) -> None:
    """Check a run whose n_centers is not the number of its centers."""
    X = np.random.default_rng(0).normal(size=(60, 2))
    sk.ingest_store(X, tmp_path / "a", y=X[:, 0])
    base_config = RunConfig().with_overrides({"data.train": str(tmp_path / "a"), "data.epochs": 1})
    first = {"model.n_centers": n_centers, "run.run_dir": str(tmp_path / "first")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*n_centers=1000 is more than the 60 training rows")
        sk.train_model(base_config.with_overrides(first)).model.backend.close()
    second = base_config.with_overrides({"run.run_dir": str(tmp_path / "second")})
    for _ in range(2):  # the second call resumes
        sk.train_model(second, continues=tmp_path / "first").model.backend.close()


pytestmark = pytest.mark.usefixtures("one_blas_thread")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of a store of training rows."""
    return runs.write_store(tmp_path_factory.mktemp("grids"))


@pytest.fixture(scope="module")
def parents(store: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return runs of one rank and of a grid with the same final weights, and one over other
    rows."""
    folder, changes = (
        tmp_path_factory.mktemp("old"),
        settings_with_center_file(tmp_path_factory.mktemp("Z")),
    )
    train(runs.settings(store, folder / "one", **changes | grid(1, 1)))
    runs.on_ranks(4, runs.settings(store, folder / "many", **changes | grid(2, 2)))
    return {"file": changes["model.centers"], **{k: str(folder / k) for k in ("one", "many")}}


def settings_with_center_file(folder: Path) -> dict[str, Any]:
    """Return settings whose centers are in a file in this folder."""
    np.save(folder / "Z.npy", np.random.default_rng(3).normal(size=(60, 4)))
    return SMALL | {"model.centers": str(folder / "Z.npy"), "model.n_centers": "auto"}


STARTS = ("warm", "continued")


def continuation(
    parents: dict[str, str], start: str, location: str
) -> tuple[dict[str, Any], str | None]:
    """Return the settings, and the run that is continued. Its centers are in another order."""
    if start == "continued":
        automatic = {"model.n_centers": "auto", "model.bandwidth": "auto", "model.kernel": "auto"}
        return SMALL | automatic, parents[location]
    changes = {"model.centers": parents["file"], "model.n_centers": "auto", "run.random_state": 1}
    return SMALL | changes | {"solver.warm_start": parents[location]}, None


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("rows", "columns", "changes"), [
    (1, 3, {"solver.block_size": 60}), (2, 2, {}), (1, 2, {"solver.ridge": 0.0}),
    (1, 4, {"solver.ridge": "auto"}),
])  # fmt: skip
def test_warm_started_ranks_equal_one_process(
    store: str, parents: dict[str, str], tmp_path: Path, start: str, rows: int, columns: int,
    changes: dict[str, Any],
) -> None:  # fmt: skip
    """Check weights of any grid; one rank continues the result as an ordinary model."""
    options, continues = continuation(parents, start, "one")
    options |= changes
    train(runs.settings(store, tmp_path / "one", **options | grid(1, 1)), continues=continues)
    ends = {}
    for location in ("one", "many"):
        options, continues = continuation(parents, start, location)
        config = runs.settings(store, tmp_path / f"by {location}", **options | changes)
        grid_config = config.with_overrides(grid(rows, columns))
        runs.on_ranks(rows * columns, grid_config, continues)
        ends[location] = runs.alpha(grid_config.run.run_dir)
        one_rank_result = train(grid_config.with_overrides(grid(1, 1)), continues=continues)
        assert one_rank_result.samples == 600
        np.testing.assert_allclose(ends[location], runs.alpha(tmp_path / "one"), rtol=0, atol=1e-12)
    initial = runs.alpha(Path(parents["one"]))
    assert np.abs(np.sort(ends["one"], 0) - np.sort(initial, 0)).max() > 1e-6


FALKON = {"solver.name": "falkon", "solver.block_size": "auto", "data.epochs": 3}
EIGENPRO = {"solver.name": "eigenpro4", "solver.block_size": "auto", "solver.ridge": "auto"}


@pytest.mark.full(all_but_every=3)
@pytest.mark.filterwarnings("ignore:resumed with other ranks")
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("changes", [{}, FALKON, EIGENPRO])
def test_rank_0_broadcasts_initial_weights(
    store: str, parents: dict[str, str], tmp_path: Path, start: str, changes: dict[str, Any]
) -> None:
    """Check that rank 0, which alone reads the weights, sends them."""
    options, continues = continuation(parents, start, "many")
    train(
        runs.settings(store, tmp_path / "one", **options | changes | grid(1, 1)),
        continues=continues,
    )
    runs.on_ranks(
        2, runs.settings(store, tmp_path / "two", **options | changes | grid(2, 1)), continues
    )
    actual = runs.alpha(tmp_path / "two")
    np.testing.assert_allclose(actual, runs.alpha(tmp_path / "one"), rtol=1e-11, atol=1e-11)


FOURIER = {
    "model.features": "fourier", "model.n_features": 60, "model.n_centers": "auto",
    "model.kernel": "gaussian", "solver.ridge": "auto",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("changes", [
    FOURIER, {"model.metric": "learn", "model.bandwidth": "auto"},
])  # fmt: skip
def test_continued_run_keeps_kernel_and_metric(
    store: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Check that kernel and metric are kept over ranks, in two continued runs on different
    grids."""
    train(runs.settings(store, tmp_path / "a", **SMALL | changes | grid(1, 1)))
    defaults = {f"model.{k}": v for k, v in RunConfig().model} | {"solver.ridge": "auto"}
    for names, rows, columns in (("abc", 1, 1), ("aBC", 2, 2)):
        for before, now in itertools.pairwise(names):
            rows, columns = (1, 3) if now == "C" else (rows, columns)
            config = runs.settings(store, tmp_path / now, **SMALL | defaults | grid(rows, columns))
            continues = str(tmp_path / before)
            if rows == columns == 1:
                train(config, continues=continues)
            else:
                runs.on_ranks(rows * columns, config, continues)
    np.testing.assert_allclose(
        runs.alpha(tmp_path / "C"), runs.alpha(tmp_path / "c"), rtol=1e-11, atol=1e-11
    )


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.filterwarnings("ignore:resumed with other ranks")
@pytest.mark.parametrize("start", STARTS)
def test_warm_started_run_resumes_on_any_grid(
    store: str, parents: dict[str, str], tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a resume from the setup alone, and from the middle, when the earlier run is gone."""
    copied_run = shutil.copytree(parents["many"], tmp_path / "old")
    options, continues = continuation(parents | {"many": str(copied_run)}, start, "many")
    options["data.epochs"] = 2

    def train_on_grid(path: Path, rows: int, columns: int) -> Any:
        config = runs.settings(store, path, **options | grid(rows, columns))
        return runs.on_ranks(rows * columns, config, continues)

    train_on_grid(tmp_path / "calm", 2, 2)
    end, after_setup = runs.alpha(tmp_path / "calm"), tmp_path / "setup"
    with monkeypatch.context() as patch:
        patch.setattr(StepLoop, "begin", raise_lost_rank)
        with pytest.raises(ValueError, match="the rank is gone"):
            train_on_grid(after_setup, 1, 2)
    with monkeypatch.context() as patch:
        runs.stop_rank0_after(4, patch)
        with pytest.raises(TrainingInterrupted, match="and saved"):
            train_on_grid(tmp_path / "half", 1, 2)
    assert RunDirectory(after_setup, writable=False).steps() == []
    for rows, columns in ((2, 2), (1, 3), (1, 1)):
        for before in ("setup", "half"):
            if before == "half" and copied_run.exists() and columns == 3:
                shutil.rmtree(copied_run)
            if before == "setup" and not copied_run.exists():
                continue
            path = Path(shutil.copytree(tmp_path / before, tmp_path / f"{before} {columns}"))
            train_on_grid(path, rows, columns)
            np.testing.assert_allclose(runs.alpha(path), end, rtol=0, atol=1e-12)


def raise_lost_rank(*args: Any) -> None:
    """Raise an error in place of `StepLoop.begin`."""
    raise ValueError("the rank is gone")


@pytest.mark.parametrize("start", STARTS)
def test_no_rank_holds_all_initial_weights(
    store: str, parents: dict[str, str], tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that only rank 0 has them, until the steps begin, and that no rank has all centers."""
    options, continues = continuation(parents, start, "many")
    config = runs.settings(store, tmp_path / "run", **options | grid(1, 2))
    prepare_run(config, inputs=RunInputs(continues=continues))
    read_shapes: list[tuple[int, ...]] = []
    references: list[weakref.ref[Any]] = []
    original_read, load = StoredCenters.read, ParentRun.weights_for

    def record_read(self: StoredCenters, rows: slice) -> Any:
        actual = original_read(self, rows)
        read_shapes.append(actual.shape)
        return actual

    def record_load(self: ParentRun, *arguments: Any) -> Any:
        references.extend(map(weakref.ref, (self, self.alpha, self.centers)))
        return load(self, *arguments)

    monkeypatch.setattr(StoredCenters, "read", record_read)
    monkeypatch.setattr(ParentRun, "weights_for", record_load)

    def array_lengths(ranks: Communicator) -> Any:
        directory = run_directory(config, writable=ranks.rank == 0)
        request = StopRequest(install=False)
        with start_trainer(
            config, RunInputs(ranks=ranks, continues=continues), directory, request, False, None
        ) as trainer:
            state: Any = trainer.loop.state
            ranks.broadcast_scalars([0])
            assert [reference() for reference in references] == [None] * 3
            n_centers = len(trainer.loop.assembled.arrays["Z"])
            return n_centers, len(state.alpha), len(trainer.loop.watch.good_weights)

    assert on_threads(2, array_lengths) == [(30, 30, 30)] * 2
    assert read_shapes == ([(30, 4)] * 2 if start == "continued" else [])
    kept = load_warm_start(config.with_overrides({"solver.warm_start": parents["one"]})).centers
    assert isinstance(kept, StoredCenters)


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize(("start", "columns", "read_shapes"), [
    ("continued", 1, [7] * 8 + [4]), ("continued", 2, [7] * 9 + [4]),
    ("warm", 1, [7] * 8 + [4]), ("warm", 2, ([7] * 8 + [4]) * 2),
])  # fmt: skip
def test_centers_are_read_once(
    store: str, tmp_path: Path, start: str, columns: int, read_shapes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Check chunks of seven rows, one of which two ranks share; the preparation of rank 0 reads
    none. Centers in another order are compared with the new ones, all of which one rank holds."""
    monkeypatch.setattr(checkpoint_format, "_CHUNK_BYTES", (7 * 32, 7 * 32))
    changes = settings_with_center_file(tmp_path)
    train(runs.settings(store, tmp_path / "old", **changes | grid(1, 1)))
    names = {"many": str(tmp_path / "old"), "file": changes["model.centers"]}
    options, continues = continuation(names, start, "many")
    config = runs.settings(store, tmp_path / "run", **options | grid(1, columns))
    n_read: list[int] = []
    original_set = CentersTarget.__setitem__

    def record_length(self: CentersTarget, part: Any, host: Any) -> None:
        n_read.append(len(host))
        original_set(self, part, host)

    monkeypatch.setattr(CentersTarget, "__setitem__", record_length)
    if columns == 1:
        train(config, continues=continues)
    else:
        prepare_run(config, inputs=RunInputs(continues=continues))
        runs.on_ranks(columns, config, continues)
    assert sorted(n_read) == sorted(read_shapes)


@pytest.mark.slow
def test_chunks_in_another_order_are_searched(
    store: str, parents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a run that another version has written: the weights are those of the same centers."""
    options, continues = continuation(parents, "continued", "many")
    ends = []
    for name, size in (("a", 8 << 20), ("b", 7 * 32)):
        monkeypatch.setattr(checkpoint_format, "_CHUNK_BYTES", (size, size))
        config = runs.settings(store, tmp_path / name, **options | grid(1, 2))
        runs.on_ranks(2, config, continues)
        ends.append(runs.alpha(tmp_path / name))
    np.testing.assert_array_equal(*ends)


def test_plan_counts_initial_weights(store: str, parents: dict[str, str], tmp_path: Path) -> None:
    """Check that the weights that rank 0 reads are counted, and only the centers of each rank."""
    lines = {}
    for start in STARTS:
        options, continues = continuation(parents, start, "many")
        config = runs.settings(store, tmp_path / "run", **options | grid(1, 2))
        run = open_continuation(config, continues) if continues else open_run(config)
        run.backend.close()
        lines[start] = {
            (phase, buffer_name): size for phase, buffer_name, size in run.buffers.lines
        }
    for actual in lines.values():
        assert actual["centers", "initial weights being read, on rank 0"] == 3 * 60 * 8
        assert actual["setup", "initial weights, on rank 0"] == 60 * (8 + 8)
        assert actual["train", "order of the initial weights"] == 60 * 88
    everywhere = "centers", "all raw centers, on rank 0"
    assert everywhere in lines["warm"]
    assert everywhere not in lines["continued"]
    assert lines["continued"]["centers", "chunk of centers being read"] == 2 * 60 * 4 * 8


@pytest.mark.parametrize(("start", "changes", "message"), [
    ("warm", {"model.centers": "random", "model.n_centers": 60}, "has other centers than this run"),
    ("warm", {"data.scale": "none"}, "has other centers than this run"),
    ("warm", {"model.fit_intercept": False}, "was trained with model.fit_intercept=true"),
    ("continued", {"run.precision": "exact"}, "run.precision gives float32 numbers"),
])  # fmt: skip
def test_incompatible_initial_weights_are_refused(
    store: str, parents: dict[str, str], tmp_path: Path, start: str, changes: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    options, continues = continuation(parents, start, "many")
    config = runs.settings(store, tmp_path / "run", **options | grid(1, 2) | changes)
    with pytest.raises(ConfigError, match=message):
        runs.on_ranks(2, config, continues)
