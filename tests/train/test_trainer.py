"""Check the work between steps: evaluations, log and checkpoints, also when a step fails."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import CheckpointError, CorruptChunkError, DataError, StreamkernError
from streamkern.ingest.ingest import ingest
from streamkern.rundir import checkpoint_format
from streamkern.rundir.run_log import read_log
from streamkern.solver.block_step import BlockSolver
from streamkern.stream.sources.arrays import ArraySource
from tests.runs import (
    CLASSES,
    METHODS,
    STEPS,
    Array,
    N,
    array_source,
    arrays,
    assert_same_bits,
    final,
    finished,
    latest_step,
    newest,
    settings,
    stream,
)
from tests.store_damage import flip_bit


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
