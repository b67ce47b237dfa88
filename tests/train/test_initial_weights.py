"""Test ranks that start from the weights of another run, also with partitioned centers, against a
single rank."""

from __future__ import annotations

import itertools
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import ConfigError, TrainingInterrupted
from streamkern.basics.stop import StopRequest
from streamkern.config.run_config import RunConfig
from streamkern.rundir import checkpoint_format
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.continue_run import load_warm_start
from streamkern.train.loop.step_loop import StepLoop
from streamkern.train.rank_work import prepare_run
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.restart.stored_centers import CentersTarget, StoredCenters
from streamkern.train.start_run import run_directory, start_trainer
from streamkern.train.train import open_continuation, train
from tests import rank_runs as runs
from tests.rank_runs import SMALL, grid
from tests.rank_threads import on_threads

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
