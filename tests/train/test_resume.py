"""Test that a run which is stopped or killed at any point resumes with the same bits."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.backend.batch import Batch
from streamkern.backend.numba_backend import numba_problem
from streamkern.basics.errors import ConfigError, ResumeMismatchError, RunLockedError
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.kernels.builtin import get_kernel
from streamkern.rundir import checkpoint_format
from streamkern.rundir.checkpoint_format import load_checkpoint
from streamkern.rundir.file_names import CheckpointRetention
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_log import read_log
from streamkern.rundir.run_storage import open_folder
from streamkern.solver.block import BlockMethod
from streamkern.solver.block_sizes import BlockSizes
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import GaussianNoise, MixUp
from streamkern.train import trainer as train_module
from streamkern.train.train import train
from tests.conftest import MakeZarr
from tests.runs import (
    CLASSES,
    METHODS,
    STEPS,
    Array,
    Checkpoint,
    array_source,
    arrays,
    assert_same_bits,
    checkpoint,
    final,
    finished,
    latest_step,
    newest,
    process,
    settings,
    shorten_windows,
    stopped,
    stream,
    train_to_end,
)
from tests.store_damage import tree


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge losses after fewer steps, so that short runs have several windows."""
    shorten_windows(monkeypatch.setattr)


@cache
def uninterrupted_run(method: str) -> tuple[dict[str, Array], Checkpoint]:
    """Return the final arrays of a run of `method`, and the checkpoint of the step before."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config = settings(run_dir, **METHODS[method], **{"run.checkpoint_every": STEPS - 1})
        finished(config, source=stream(method))
        return final(run_dir), checkpoint(run_dir, STEPS - 1)


def uninterrupted(method: str) -> dict[str, Array]:
    """Return the final arrays of a run of `method`."""
    return uninterrupted_run(method)[0]


# -- stopped between two steps ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("method", METHODS)
def test_stops_at_chosen_steps_change_no_bit(method: str, tmp_path: Path) -> None:
    """Stop twice in an epoch, inside a period, between epochs, and before the last step."""
    config = settings(tmp_path / "run", **METHODS[method])
    for step in (1, 2, 7, 11, STEPS - 1):
        stopped(config, step, source=stream(method))
        assert latest_step(tmp_path / "run") == step
    finished(config, source=stream(method))
    assert_same_bits(final(tmp_path / "run"), uninterrupted(method))
    # A checkpoint before the end contains more state, such as an open window of losses.
    arrays, scalars = checkpoint(tmp_path / "run", STEPS - 1)
    expected, expected_scalars = uninterrupted_run(method)[1]
    assert len(expected["window"]) == (STEPS - 1) % 4
    assert_same_bits(arrays, expected)
    assert scalars == expected_scalars


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("method", ["eigenpro4", "blocks"])
def test_stop_after_any_step_changes_no_bit(method: str, tmp_path: Path) -> None:
    for step in range(1, STEPS):
        config = settings(tmp_path / str(step), **METHODS[method])
        stopped(config, step, source=stream(method))
        finished(config, source=stream(method))
        assert_same_bits(final(tmp_path / str(step)), uninterrupted(method))


def test_checkpoint_contains_temporary_centers(tmp_path: Path) -> None:
    """Step 11 of periods of 3 is inside one: two batches wait for their projection."""
    stopped(settings(tmp_path, **METHODS["eigenpro4"]), 11, source=stream())
    saved = newest(tmp_path)
    assert saved.meta["state"]["n_pending"] > 0
    assert len(saved.arrays["points"]) == len(saved.arrays["delta"])
    assert len(saved.arrays["points"]) == saved.meta["state"]["n_pending"]


def test_recomputed_kernel_blocks_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check keep=False, which follows from a small memory."""
    candidates = BlockMethod.candidates

    def without_keeping(*arguments: Any) -> list[BlockSizes]:
        return [replace(sizes, keep=False) for sizes in candidates(*arguments)]

    monkeypatch.setattr(BlockMethod, "candidates", without_keeping)
    method = METHODS["blocks"]
    finished(settings(tmp_path / "plain", **method), source=stream())
    config = settings(tmp_path / "run", **method)
    stopped(config, 3, source=stream())
    monkeypatch.undo()
    shorten_windows(monkeypatch.setattr)
    finished(config, source=stream())  # `keep` is among the recorded sizes
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "plain"))


@pytest.mark.parametrize(
    "changes",
    [
        {"data.prefetch_threads": 1},
        {"data.prefetch_threads": 3, "run.checkpoint_every": 2, "run.keep_checkpoints": 1},
        {"run.evaluate_every": 3, "run.log": False},
        {"run.memory": "200 MiB", "run.checkpoint_every": "1 s"},
        {"run.threads": 2},
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_settings_free_at_resume_change_no_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    config = settings(tmp_path, **METHODS["blocks"])
    stopped(config, 5, source=stream())
    finished(config.with_overrides(changes), source=stream(), test=array_source(10, 5))
    assert_same_bits(final(tmp_path), uninterrupted("blocks"))


def test_resume_keeps_sizes_of_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that batches and blocks stay the same with less memory, for memory "auto"."""
    auto = {"run.memory": "auto", "data.batch_size": "auto"}
    finished(settings(tmp_path / "plain", **auto), source=stream())
    config = settings(tmp_path / "run", **auto)
    resume = train_module.Trainer._resume

    def fail_after_setup(*args: object) -> None:
        raise ConfigError("stopped after setup")

    monkeypatch.setattr(train_module.Trainer, "_resume", fail_after_setup)
    with pytest.raises(ConfigError, match="stopped after setup"):
        train(config, source=stream())
    monkeypatch.setattr(train_module.Trainer, "_resume", resume)
    monkeypatch.setattr(Backend, "memory_available", lambda self: 100 << 20)
    finished(config, source=stream())
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "plain"))


def test_resume_from_older_checkpoint_gives_same_bits(tmp_path: Path) -> None:
    """Damage the newest checkpoint; the resume uses the checkpoint before it."""
    config = settings(tmp_path, **METHODS["eigenpro4"], **{"run.checkpoint_every": 2})
    stopped(config, 7, source=stream())
    next((tmp_path / "checkpoints").glob("*07/alpha/c/*/*")).unlink()
    with pytest.warns(
        UserWarning, match="step 7 .* was skipped, and the checkpoint of step 6 is used"
    ):
        finished(config, source=stream())
    assert_same_bits(newest(tmp_path).arrays, uninterrupted("eigenpro4"))


def test_moved_resumes(tmp_path: Path) -> None:
    X, y = arrays()
    ingest(X, tmp_path / "a.zarr", y=y, chunk_mb=0.001)
    scaled = {
        "data.transforms": [{"kind": "scale", "mode": "feature"}, {"kind": "noise", "sigma": 0.1}],
        "data.scale": "auto",
        "data.copies": 2,
        "data.epochs": 1,
    }
    finished(settings(tmp_path / "plain", **{"data.train": str(tmp_path / "a.zarr")}, **scaled))
    config = settings(tmp_path / "run", **{"data.train": str(tmp_path / "a.zarr")}, **scaled)
    stopped(config, 6, test=ArraySource(*arrays(10, 5), classes="012"))
    shutil.move(tmp_path / "a.zarr", tmp_path / "b.zarr")
    finished(config.with_overrides({"data.train": str(tmp_path / "b.zarr")}))
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "plain"))


# -- processes that get signals --------------------------------------------------------------------


def _run_and_wait(run_dir: Path, at: int, conn: Any) -> None:
    """Train in a process that sends a message at step `at`, and waits for an answer."""
    shorten_windows()

    def on_evaluation(record: dict[str, Any]) -> None:
        if record["step"] == at:
            conn.send("here")
            conn.recv()

    config = settings(run_dir, **METHODS["blocks"], **{"run.evaluate_every": 1})
    train(config, source=stream(), test=array_source(10, 5), on_evaluation=on_evaluation)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "exit_code", "steps"),
    [
        ([signal.SIGTERM], 75, 5),
        ([signal.SIGINT], 75, 5),
        ([signal.SIGTERM, signal.SIGTERM], -signal.SIGTERM, 0),
    ],
    ids=["TERM", "INT", "second TERM ends at once"],
)
def test_signals_save_and_exit(
    signals: list[signal.Signals], exit_code: int, steps: int, tmp_path: Path
) -> None:
    ours, theirs = multiprocessing.Pipe()
    child = process(_run_and_wait, tmp_path, 5, theirs)
    assert ours.poll(60)
    for number in signals:
        os.kill(child.pid, number)
        time.sleep(0.05)  # two at once would be delivered as one
    ours.send("go on")
    child.join(60)
    assert child.exitcode == exit_code
    assert latest_step(tmp_path) == steps
    finished(settings(tmp_path, **METHODS["blocks"]), source=stream())
    assert_same_bits(final(tmp_path), uninterrupted("blocks"))


class PausingSource(ArraySource):
    """Test rows that send a message during the evaluation `waits_in`, and wait for an answer."""

    conn: Any = None
    waits_in = 0
    reads_of_unit_1 = 0  # threads read the units of an evaluation in any order

    def _read(self, u: int, seed: int, epoch: int) -> tuple[Array, Array]:
        PausingSource.reads_of_unit_1 += u == 1
        if self.conn is not None and u == 1 and PausingSource.reads_of_unit_1 == self.waits_in:
            self.conn.send("here")
            self.conn.recv()
        return super()._read(u, seed, epoch)


def _evaluate_and_wait(run_dir: Path, waits_in: int, conn: Any) -> None:
    shorten_windows()
    test = PausingSource(*arrays(40, 5), classes=CLASSES, unit_rows=16)
    test.conn, test.waits_in = conn, waits_in
    train(settings_with_evaluations(run_dir), source=stream(), test=test)


def settings_with_evaluations(run_dir: Path) -> RunConfig:
    """Return settings with evaluations after 5, 10 and all 14 steps."""
    return settings(run_dir, **METHODS["blocks"], **{"run.evaluate_every": 5})


def test_losses_do_not_depend_on_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check windows of 4 steps, in a run of 14 steps with 7 in an epoch."""
    for module in ("guard", "progress"):
        monkeypatch.setattr(f"streamkern.train.loop.{module}.WINDOW", 4)
    full = finished(settings(), source=stream())
    assert (len(full.losses), full.epochs) == (2, 2)
    config = settings(tmp_path / "run")
    for step in (3, 8):
        stopped(config, step, source=stream())
    for _ in range(2):
        result = finished(config, source=stream())
        assert (result.losses, result.epochs) == (full.losses, 2)
    # The losses do not depend on the log either.
    config = settings(tmp_path / "mute", **{"run.log": False})
    stopped(config, 6, source=stream())
    assert finished(config, source=stream()).losses == full.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waits_in", "steps"),
    [((1, 1), [5, 5]), ((2, 1, 2), [10, 10, 14]), ((3, 1, 1), [14, 14, 14])],
)
def test_interrupted_evaluation_is_repeated_after_resume(
    waits_in: tuple[int, ...], steps: list[int], tmp_path: Path
) -> None:
    """Send a signal to each of several processes, during its evaluation with this number."""
    full = finished(
        settings_with_evaluations(tmp_path / "w"), source=stream(), test=array_source(40, 5)
    )
    saved_steps = []
    for count in waits_in:
        ours, theirs = multiprocessing.Pipe()
        child = process(_evaluate_and_wait, tmp_path / "run", count, theirs)
        assert ours.poll(60)
        os.kill(child.pid, signal.SIGTERM)
        ours.send("go on")
        child.join(60)
        assert child.exitcode == 75
        saved_steps.append(latest_step(tmp_path / "run"))
    assert saved_steps == steps
    result = finished(
        settings_with_evaluations(tmp_path / "run"), source=stream(), test=array_source(40, 5)
    )
    assert (result.metrics, result.history) == (full.metrics, full.history)
    key = f"checkpoints/{STEPS:012d}.json"
    resumed, at_once = (load_checkpoint(open_folder(tmp_path / name), key) for name in ("run", "w"))
    assert_same_bits(resumed.arrays, at_once.arrays)
    assert resumed.meta == at_once.meta


def _before_step(at: int, prepare: Callable[[Any], None]) -> None:
    """Let trainers call `prepare` with their solver before step `at`, when no save is running."""
    stoppable_reads = train_module.Trainer._stoppable_reads

    def reads_with_preparation(
        trainer: train_module.Trainer, batches: Iterator[Batch]
    ) -> Iterator[Batch]:
        for batch in stoppable_reads(trainer, batches):
            if trainer.position.step == at:
                trainer.checkpoints.wait()  # so that the last checkpoint is the same in every trial
                prepare(trainer.loop.solver)
            yield batch

    train_module.Trainer._stoppable_reads = reads_with_preparation  # type: ignore[method-assign]


def _die_in_step(run_dir: Path, method: str, at: int) -> None:
    """Train in a process that kills itself in step `at`, after products with the kernel matrix."""
    shorten_windows()

    def kill_in_step(solver: Any) -> None:
        vars(solver)["_measure"] = lambda *args: os.kill(os.getpid(), signal.SIGKILL)

    _before_step(at, kill_in_step)
    train(uncompiled(run_dir, method, **{"run.checkpoint_every": 2}), source=stream(method))


def uncompiled(run_dir: Path, method: str, **overrides: Any) -> RunConfig:
    """Return settings without compiled tiles, which every process would compile again."""
    return settings(run_dir, **METHODS[method] | {"run.accelerator": "none"} | overrides)


@pytest.mark.slow
@pytest.mark.full(all_but_every=5)
@pytest.mark.parametrize("method", METHODS)
def test_kill_within_epoch_changes_no_bit(method: str, tmp_path: Path) -> None:
    """Kill in the first epoch and, after a resume, in the second, both times inside a period."""
    assert_kill_changes_no_bit(tmp_path, method, _die_in_step, method)


def assert_kill_changes_no_bit(
    folder: Path, method: str, die: Any, given: Any, **settings: Any
) -> None:
    """Kill a run twice by `die(run_dir, given, step)`, and compare it with an undisturbed one."""
    for at, published in ((5, 4), (11, 10)):
        child = process(die, folder / "run", given, at)
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        assert latest_step(folder / "run") == published
    for name in ("run", "plain"):
        finished(uncompiled(folder / name, method, **settings), source=stream(method))
    assert_same_bits(final(folder / "run"), final(folder / "plain"))


def _die_in_projection(run_dir: Path, settings: dict[str, Any], at: int) -> None:
    """Train in a process that kills itself in the projection of step `at`, in its second pass."""
    shorten_windows()

    def kill_in_projection(solver: Any) -> None:
        projection, n_evaluations = solver.projection, 0
        evaluate = projection._evaluate

        def count(*arguments: Any) -> None:
            nonlocal n_evaluations
            evaluate(*arguments)
            n_evaluations += 1
            if n_evaluations > len(projection.Z) // projection.batch + 2:
                os.kill(os.getpid(), signal.SIGKILL)

        vars(projection)["_evaluate"] = count

    _before_step(at, kill_in_projection)
    settings = settings | {"run.checkpoint_every": 2}
    train(uncompiled(run_dir, INEXACT, **settings), source=stream(INEXACT))


INEXACT = "eigenpro3, inexact"


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("batch", ["auto", 1, 7, 60])
def test_kill_within_inexact_projection_changes_no_bit(batch: str | int, tmp_path: Path) -> None:
    settings = {"solver.projection_batch": batch}
    assert_kill_changes_no_bit(tmp_path, INEXACT, _die_in_projection, settings, **settings)


def _die_while_saving(run_dir: Path, method: str, document: str, moment: str) -> None:
    """Train in a process that kills itself before or after the rename that publishes `document`, or
    while it writes the arrays of the document."""
    shorten_windows()
    rename, write_arrays = os.replace, checkpoint_format._write_arrays

    def replace_and_die(source: Any, target: Any) -> None:
        if Path(target).name != document:
            rename(source, target)
            return
        if moment == "after":
            rename(source, target)
        os.kill(os.getpid(), signal.SIGKILL)

    def write_half_and_die(folder: Any, group: str, checked: Any) -> dict[str, list[Any]]:
        if document.startswith(group.rpartition("/")[2]):
            names = sorted(checked)
            write_arrays(folder, group, {name: checked[name] for name in names[: len(names) // 2]})
            os.kill(os.getpid(), signal.SIGKILL)
        return write_arrays(folder, group, checked)

    if moment == "inside":
        checkpoint_format._write_arrays = write_half_and_die
    else:
        os.replace = replace_and_die  # type: ignore[assignment]
    config = settings(run_dir, **METHODS[method], **{"run.checkpoint_every": 4})
    train(config, source=stream(method))


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("moment", ["inside", "before", "after"])
@pytest.mark.parametrize("document", ["setup.json", "000000000008.json"])
def test_kill_while_saving_changes_no_bit(document: str, moment: str, tmp_path: Path) -> None:
    method = "eigenpro4"
    child = process(_die_while_saving, tmp_path, method, document, moment)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    published = {"inside": 4, "before": 4, "after": 8}[moment]
    assert latest_step(tmp_path) == (0 if document == "setup.json" else published)
    assert (tmp_path / "setup.json").exists() == (document != "setup.json" or moment == "after")
    finished(settings(tmp_path, **METHODS[method]), source=stream(method))
    assert_same_bits(final(tmp_path), uninterrupted(method))
    leftovers = [p.name for p in (tmp_path / "checkpoints").iterdir() if "tmp" in p.name]
    assert leftovers == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["blocks", "eigenpro4", "eigenpro3, inexact", "direct", "falkon"]
)
def test_random_kills_change_no_bit(method: str, tmp_path: Path) -> None:
    rng = random.Random(method)
    codes = []
    for _ in range(3):
        config = settings(tmp_path, **METHODS[method], **{"run.checkpoint_every": 1})
        child = process(train_to_end, config, method)
        time.sleep(rng.uniform(0.05, 1.0))
        child.kill()
        child.join(60)
        codes.append(child.exitcode)
    assert set(codes) <= {0, -signal.SIGKILL}
    finished(settings(tmp_path, **METHODS[method]), source=stream(method))
    assert_same_bits(final(tmp_path), uninterrupted(method))


def test_second_writer_is_refused(tmp_path: Path) -> None:
    def on_evaluation(record: dict[str, Any]) -> None:
        with pytest.raises(RunLockedError, match=f"process {os.getpid()}"):
            finished(config, source=stream())

    config = settings(tmp_path, **METHODS["block"])
    finished(config, source=stream(), test=array_source(10, 5), on_evaluation=on_evaluation)
    assert_same_bits(final(tmp_path), uninterrupted("block"))


# -- changes that are refused, and changes that are accepted ---------------------------------------


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory at step 5, with given centers."""
    run_dir = tmp_path_factory.mktemp("half") / "run"
    stopped(settings(run_dir, **KERNEL), 5, source=stream(), centers=CENTERS)
    return run_dir


CENTERS = arrays(40, 1)[0]
KERNEL = {
    "model.kernel": get_kernel("laplace", 3.0), "model.bandwidth": "auto",
    "model.n_centers": "auto",
}  # fmt: skip


def source_with_changed_row() -> Source:
    """Return the training rows with one number changed."""
    X, y = arrays()
    X[-1, 0] += 1
    return AugmentedSource(
        ArraySource(X, y, classes=CLASSES, unit_rows=16), 1, [GaussianNoise(0.1)]
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"source": source_with_changed_row()}, "data: other rows or targets"),
        ({"source": AugmentedSource(array_source(), 1, [GaussianNoise(0.2)])}, "transforms"),
        ({"source": AugmentedSource(array_source(), 1, [MixUp(1.0)])}, "transforms"),
        ({"source": AugmentedSource(array_source(), 2, [GaussianNoise(0.1)])}, "copies"),
        ({"source": array_source(134)}, "n_rows"),
        ({"data.batch_size": 10}, r"data\.batch_size: was 20, now 10"),
        ({"data.epochs": 3}, r"data\.epochs: was 2, now 3"),
        ({"run.random_state": 1}, r"run\.random_state: was 0, now 1"),
        ({"run.precision": "float64"}, r"run\.precision"),
        ({"model.fit_intercept": False}, "fit_intercept: was True, now False"),
        ({"solver.name": "eigenpro3"}, r"solver\.name: was 'block', now 'eigenpro3'"),
        (
            {"model.kernel": get_kernel("laplace", 2.0)},
            r"laplace\(bandwidth 3\), now laplace\(bandwidth 2\)",
        ),
        ({"model.kernel": get_kernel("gaussian", 3.0)}, r"kernel: was laplace\(.*, now gaussian"),
        ({"model.kernel": "laplace"}, r"kernel: was laplace\(.*, now 'laplace'"),
        ({"centers": CENTERS[::-1]}, r"centers: other contents"),
        ({"centers": CENTERS[:-1]}, r"centers: was an array of shape \[40, 5\], now .*39, 5"),
        ({"centers": None}, r"centers: was an array of shape \[40, 5\], now 'random'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_changed_run_is_refused_without_writing(
    change: dict[str, Any], named: str, half_trained: Path
) -> None:
    before = tree(half_trained)
    overrides = KERNEL | {key: value for key, value in change.items() if "." in key}
    options = {"source": stream(), "centers": CENTERS}
    options |= {key: value for key, value in change.items() if "." not in key}
    with pytest.raises(ResumeMismatchError, match=named) as caught:
        finished(settings(half_trained, **overrides), **options)
    assert caught.value.exit_code == 2
    assert tree(half_trained) == before


def test_other_units_are_another_order(tmp_path: Path) -> None:
    """Check that the same arrays in other units are refused, because the rows would come in other
    batches."""
    stopped(settings(tmp_path), 5, source=array_source())
    with pytest.raises(ResumeMismatchError, match=r"another order: .*n_units: was 9, now 14"):
        finished(settings(tmp_path), source=array_source(unit_rows=10))
    finished(settings(tmp_path), source=array_source())


class Shift:
    """Transform whose description contains a tuple, which becomes a list in JSON."""

    deterministic = True

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, X: Array, Y: Array, rng: Any) -> tuple[Array, Array]:
        return X + X.dtype.type(self.by), Y

    def describe(self) -> dict[str, object]:
        return {"kind": "shift", "by": (self.by, np.float64(self.by))}


def test_tuples_in_descriptions_equal_lists(tmp_path: Path) -> None:
    stopped(settings(tmp_path), 5, source=array_source(transforms=[Shift(2.0)]))
    with pytest.raises(ResumeMismatchError, match="transforms"):
        finished(settings(tmp_path), source=array_source(transforms=[Shift(1.0)]))
    finished(settings(tmp_path), source=array_source(transforms=[Shift(2.0)]))


def test_foreign_store_may_be_moved(make_zarr: MakeZarr, tmp_path: Path) -> None:
    X, y = arrays()
    path = make_zarr({"X": X, "y": y}, chunk_rows=16)
    stopped(settings(tmp_path / "run"), 5, source=ZarrSource(path), test=ZarrSource(path))
    moved = path.rename(tmp_path / "moved.zarr")
    finished(settings(tmp_path / "run"), source=ZarrSource(moved))
    finished(settings(tmp_path / "plain"), source=ZarrSource(moved))
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "plain"))


class CountingSource(ArraySource):
    """A source that counts how often its rows are read."""

    reads = 0

    def _read(self, u: int, seed: int, epoch: int) -> tuple[Array, Array]:
        CountingSource.reads += 1
        return super()._read(u, seed, epoch)


def test_finished_run_returns_its_result_at_once(tmp_path: Path) -> None:
    def source() -> Source:
        return CountingSource(*arrays(), classes=CLASSES, unit_rows=16)

    config, test = settings(tmp_path, **{"run.evaluate_every": 4}), array_source(40, 5)
    first = finished(config, source=source(), test=test)
    saved, reads = final(tmp_path), CountingSource.reads
    second = finished(config, source=source(), test=test)
    assert CountingSource.reads == reads
    assert_same_bits(final(tmp_path), saved)
    assert second.metrics == first.metrics
    assert [r["step"] for r in second.history] == [4, 8, 12, 14]
    assert second.history == first.history
    assert second.samples == first.samples == 2 * len(arrays()[0])
    np.testing.assert_array_equal(second.model.weights, first.model.weights)
    np.testing.assert_array_equal(second.Z, first.Z)
    np.testing.assert_array_equal(second.order, first.order)


def test_failed_setup_does_not_bind_settings(tmp_path: Path) -> None:
    """Check a bandwidth that is too small for the setup; its remedy must work in the same run
    directory."""
    config = settings(tmp_path, **METHODS["block"])
    with pytest.raises(ConfigError, match="bandwidth is too small"):
        finished(config.with_overrides({"model.bandwidth": 1e-6}), source=stream())
    finished(config, source=stream())
    assert_same_bits(final(tmp_path), uninterrupted("block"))


@pytest.mark.slow
@pytest.mark.full(all_but_every=5)
@pytest.mark.skipif(numba_problem() is not None, reason=str(numba_problem()))
@pytest.mark.parametrize("method", sorted(set(METHODS) - {"sgd", "eigenpro1", "eigenpro2"}))
@pytest.mark.parametrize("order", [("none", "numba"), ("numba", "none")])
def test_run_resumes_with_another_accelerator(
    order: tuple[str, str], method: str, tmp_path: Path
) -> None:
    """Check also a resume between two projections; the results are equal up to rounding."""
    first, second = (
        settings(tmp_path, **METHODS[method], **{"run.accelerator": name}) for name in order
    )
    stopped(first, 5, source=stream(method))
    with pytest.warns(UserWarning, match="accelerator: was"):
        finished(second, source=stream(method))
    expected, _ = uninterrupted_run(method)
    for name in ("alpha", "average"):
        actual = final(tmp_path)[name]
        np.testing.assert_allclose(actual, expected[name], rtol=0, atol=2e-3, err_msg=name)


def test_changed_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tmp_path)
    stopped(config, 3, source=stream())
    stopped(config, 4, source=stream())  # the same libraries; a warning would be an error
    describe = Backend.describe
    monkeypatch.setattr(Backend, "describe", lambda self: {**describe(self), "numpy": "9.9"})
    monkeypatch.setattr("streamkern.train.differences.__version__", "99.0")
    with pytest.warns(UserWarning, match=r"streamkern: was '.*', now '99\.0'") as caught:
        stopped(config, latest_step(tmp_path) + 1, source=stream())
    assert "numpy: was" in str(caught[0].message)
    assert "same to rounding only" in str(caught[0].message)
    assert Path(caught[0].filename).name == "runs.py"  # the caller of train
    stopped(
        config, latest_step(tmp_path) + 1, source=stream()
    )  # with the same libraries as the previous process
    monkeypatch.setattr("streamkern.train.differences.__version__", "98.0")
    with pytest.warns(UserWarning, match=r"libraries: streamkern: was '99\.0', now '98\.0'; same"):
        stopped(config, latest_step(tmp_path) + 1, source=stream())
    events = [record["event"] for record in read_log(tmp_path / "log.jsonl")]
    assert events.count("changed") == 2


def test_next_command_deletes_remains_of_killed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill a process after its last checkpoint, before it deleted the oldest ones."""
    config = settings(tmp_path, **{"run.checkpoint_every": 3, "run.keep_checkpoints": 2})
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointRetention, "delete_old", lambda *arguments: None)
        finished(config, source=array_source())
    names = tree(tmp_path / "checkpoints").keys()
    finished(config, source=array_source())
    remaining = tree(tmp_path / "checkpoints").keys()
    assert remaining < names
    with RunDirectory(tmp_path, writable=False) as run:
        assert len(run.steps()) == 2
