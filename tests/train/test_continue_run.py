"""Test runs that continue another run."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.basics.errors import ConfigError, ResumeMismatchError, RunError
from streamkern.cli.main import run_command
from streamkern.cli.run_info import run_overview, run_text
from streamkern.config.run_config import RunConfig
from streamkern.rundir.checkpoint_format import SavedGroup
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.feed import Feed
from streamkern.train import start_run
from streamkern.train.saved_model import load_model
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
