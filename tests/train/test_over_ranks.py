"""Test that a run over ranks equals a run of one process, and resumes with any number of ranks."""

from __future__ import annotations

import contextlib
import io
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest

from streamkern.backend.batch import Batch
from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import ConfigError, ResumeMismatchError, RunError, TrainingInterrupted
from streamkern.basics.progress import ProgressLine
from streamkern.basics.stop import StopRequest
from streamkern.cli import main
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train import over_ranks
from streamkern.train.loop import progress, rank_coordinator
from streamkern.train.loop.rank_coordinator import format_rank_figures
from streamkern.train.loop.step_loop import StepLoop
from streamkern.train.over_ranks import RankEventHandler, rank_devices, train_over, with_rank_count
from streamkern.train.rank_work import prepare_run, train_rank
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.saved_model import load_result
from streamkern.train.train import train
from tests.rank_runs import alpha, stop_rank0_after
from tests.rank_threads import on_threads

pytestmark = pytest.mark.usefixtures("one_blas_thread")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store of 2000 rows in 125 chunks, with two classes."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 5)).astype(np.float32)
    y = np.where(np.sin(2 * X[:, 0]) + X[:, 1] > 0, "yes", "no")
    path = str(tmp_path_factory.mktemp("ranks") / "store.zarr")
    ingest(X, path, y=y, chunk_mb=16 * 20 / 2**20)
    return path


def settings(store: str, run_dir: Path, **changes: Any) -> RunConfig:
    """Return the settings of a run of two epochs in batches of 150, in three blocks."""
    options = {
        "data.train": store, "data.epochs": 2, "data.test": store, "run.run_dir": str(run_dir),
        "run.threads": 1, "run.accelerator": "none", "run.ranks": 2, "run.precision": "float64",
        "model.n_centers": 120, "model.kernel": "laplace", "model.bandwidth": 2.0,
        "solver.block_size": 40, "data.batch_size": 150, "solver.ridge": 1e-5,
        "run.checkpoint_every": 5, "run.keep_checkpoints": 20, "run.calibrate": False,
    }  # fmt: skip
    return RunConfig().with_overrides(options | changes)


def train_on(size: int, config: RunConfig) -> list[Any]:
    """Train on `size` ranks, which are threads, and return the result of each."""
    prepare_run(config)
    return on_threads(size, lambda ranks: train_rank(config, ranks, StopRequest(install=False)))


@contextlib.contextmanager
def warning_of_ranks(before: int, then: int) -> Iterator[None]:
    """Check that a resume warns of another number of ranks, and of nothing else."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    message = f"resumed with other ranks: ranks: was {before}, now {then}; same to rounding only"
    assert {str(record.message) for record in caught} == ({message} if before != then else set())


FALKON = {"solver.name": "falkon", "solver.block_size": "auto", "data.epochs": 4}


DIRECT = {
    "solver.name": "direct", "solver.block_size": "auto", "run.evaluate_every": 5,
    "solver.ridge": "auto", "data.transforms": [{"kind": "noise", "sigma": 0.05}],
}  # fmt: skip


EIGENPRO = {
    "solver.name": "eigenpro4", "solver.block_size": "auto", "solver.ridge": "auto",
    "solver.period": 5,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.full(all_but_every=7)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("changes", [
    {},
    {"data.class_weight": "balanced"},
    {"data.class_sampling": "balanced"},
    {"solver.block_size": 120},
    {"run.early_stopping": True, "data.epochs": 4, "run.n_iter_no_change": 1},
    FALKON,
    DIRECT,
    EIGENPRO,
    {"run.calibrate": True},
    {"data.batch_size": 1999},  # and then one row, for all ranks
])  # fmt: skip
def test_run_over_ranks_equals_one_process(
    store: str, tmp_path: Path, size: int, changes: dict[str, Any]
) -> None:
    """Check that all ranks have equal bits, and compare the metrics."""
    one = settings(store, tmp_path / "one", **changes)
    result = train(one.with_overrides({"run.ranks": 1}))
    ranks_config = settings(store, tmp_path / "many", **changes)
    ended, *other_results = train_on(size, ranks_config)
    assert [(other["metrics"], other["samples"]) for other in other_results] == [
        ({}, result.samples) for _ in other_results
    ]
    figures = ended["metrics"]
    np.testing.assert_allclose(alpha(tmp_path / "many"), alpha(tmp_path / "one"), atol=1e-11)
    assert figures.keys() == result.metrics.keys()
    assert all(abs(figures[k] - v) < 1e-9 for k, v in result.metrics.items())
    assert [record["step"] for record in ended["history"]] == [e["step"] for e in result.history]
    curves = [load_result(tmp_path / name)[1].losses for name in ("many", "one")]
    np.testing.assert_allclose(curves[0], result.losses, rtol=1e-6)
    assert curves[1] == result.losses
    rerun = train(ranks_config.with_overrides({"run.ranks": 1}))  # loads the finished run
    assert rerun.samples == result.samples


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize(("before", "then", "changes"), [
    (2, 1, {}), (3, 2, {}), (2, 2, {}), (2, 3, FALKON), (2, 2, FALKON), (3, 2, EIGENPRO),
    (2, 2, DIRECT), (2, 1, DIRECT),
])  # fmt: skip
def test_run_resumes_with_any_number_of_ranks(
    store: str, tmp_path: Path, before: int, then: int, changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Resume a checkpoint of other ranks and compare with one rank; with as many ranks as before,
    the bits are equal."""
    monkeypatch.setattr(rank_coordinator, "GATHER_INTERVAL_STEPS", 3)
    reference = settings(store, tmp_path / "one", **changes)
    train(reference.with_overrides({"run.ranks": 1})) if before != then else train_on(
        then, reference
    )
    config = settings(store, tmp_path / "many", **changes)
    for steps in (3, 3):
        stop_rank0_after(steps, monkeypatch)
        with pytest.raises(TrainingInterrupted, match="saved"):
            train_on(before, config)
    assert RunDirectory(tmp_path / "many", writable=False).steps()
    stop_rank0_after(1000, monkeypatch)
    with warning_of_ranks(before, then):
        train_on(then, config)
    ended = alpha(tmp_path / "many")
    np.testing.assert_allclose(ended, alpha(tmp_path / "one"), atol=1e-11 * (before != then))


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 2])
def test_finished_run_starts_no_ranks(
    store: str, tmp_path: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the metrics are computed on the current test data, and that no bit changes."""
    config = settings(store, tmp_path / "run", **{"data.epochs": 1, "run.center_ranks": columns})
    ended, *_ = train_on(2, config)
    weights = alpha(tmp_path / "run")
    monkeypatch.setattr(over_ranks, "local_cluster", None)
    rerun = train(config)
    assert rerun.samples == 2000
    assert rerun.metrics == pytest.approx(ended["metrics"], abs=1e-9)
    assert not train(config.with_overrides({"data.test": None})).metrics
    np.testing.assert_array_equal(alpha(tmp_path / "run"), weights)
    monkeypatch.setattr("streamkern.train.train.train_over", Mock(side_effect=KeyError))
    for changes in ({"data.test": "nowhere.zarr"}, {"solver.ridge": 1e-3}):
        # The mock stands for the ranks; the comparison of the settings comes before them.
        with pytest.raises((KeyError, ResumeMismatchError)):
            train(config.with_overrides(changes))


@pytest.mark.full
def test_every_number_of_ranks_resumes_every_other(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resume 1 to 4 ranks in the middle with 1 to 4 ranks: the samples are the same, and with the
    same number also the bits."""
    ends, sizes = {}, (1, 2, 3, 4)
    small = {"data.epochs": 1, "data.batch_size": 300, "run.checkpoint_every": 10}
    for size in sizes:
        train_on(size, settings(store, tmp_path / f"{size}", **small))
        ends[size] = alpha(tmp_path / f"{size}")
    for before in sizes:
        half = settings(store, tmp_path / f"{before} half", **small)
        stop_rank0_after(2, monkeypatch)
        with pytest.raises(TrainingInterrupted):
            train_on(before, half)
        stop_rank0_after(1000, monkeypatch)
        for then in sizes:
            path = tmp_path / f"{before} {then}"
            shutil.copytree(tmp_path / f"{before} half", path)
            with warning_of_ranks(before, then):
                actual = train_on(then, settings(store, path, **small))
            assert {record["samples"] for record in actual} == {2000}
            atol = 1e-11 * (before != then)
            np.testing.assert_allclose(alpha(path), ends[then], rtol=0, atol=atol)


@pytest.mark.parametrize("changes", [
    {"solver.name": "sgd", "solver.ridge": "auto", "solver.block_size": "auto"},
    {**DIRECT, "run.center_ranks": 2},
])  # fmt: skip
def test_unsupported_solver_starts_no_ranks(
    store: str, tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_ranks, "local_cluster", None)
    config = settings(store, tmp_path / "run", **changes)
    with pytest.raises(ConfigError, match=r"cannot (share|partition)"):
        train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_lost_ranks_leave_setup_or_checkpoint(store: str, tmp_path: Path) -> None:
    """Check that nothing is kept before the setup exists, and only the setup before the first
    checkpoint."""
    config = settings(store, tmp_path / "run", **FALKON)
    events: list[dict[str, Any]] = []

    def place(*arguments: Any, on_event: Any, **more: Any) -> None:
        on_event({"event": "lost"})
        prepare_run(config)
        on_event({"event": "lost"})
        train_on(2, config)
        on_event({"event": "lost"})

    with patch.object(over_ranks, "run_ranks", place), patch.object(over_ranks, "check_versions"):
        client = Mock(dashboard_link="")
        request = StopRequest(install=False)
        train_over(config, RunInputs(client=client), request, on_event=events.append)
    assert [event["kept"] for event in events] == ["nothing", "setup", "checkpoint"]


def test_ranks_require_a_setup(store: str, tmp_path: Path) -> None:
    """Check the error of ranks whose setup was not computed beforehand."""
    (tmp_path / "run").mkdir()
    config = settings(store, tmp_path / "run", **FALKON)
    with pytest.raises(RunError, match="setup"):
        on_threads(2, lambda ranks: train_rank(config, ranks, StopRequest(install=False)))


@pytest.mark.slow
def test_ranks_with_less_memory_use_sizes_of_rank_0(store: str, tmp_path: Path) -> None:
    """Check that ranks do not choose different sizes."""
    auto = {"solver.name": "block", "solver.block_size": "auto", "model.n_centers": 1000}
    config = settings(store, tmp_path / "run", **auto)
    prepare_run(config)
    small = config.with_overrides({"run.memory": "112 MiB"})
    block_sizes = [open_run(each).sizes.block_size for each in (config, small)]
    assert block_sizes[0] > block_sizes[1]

    def one(ranks: Communicator) -> Any:
        rank_config = small if ranks.rank else config
        return train_rank(rank_config, ranks, StopRequest(install=False))

    on_threads(2, one)
    train(settings(store, tmp_path / "one", **auto).with_overrides({"run.ranks": 1}))
    np.testing.assert_allclose(alpha(tmp_path / "run"), alpha(tmp_path / "one"), atol=1e-9)


@pytest.mark.slow
def test_log_names_the_slowest_rank(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the log names the rank for which the others wait."""

    def take_slowly(self: StepLoop, batch: Batch) -> float | None:
        if self.run.inputs.ranks.rank == 1:
            time.sleep(0.02)
        return take(self, batch)

    take = StepLoop.take
    monkeypatch.setattr(StepLoop, "take", take_slowly)
    monkeypatch.setattr(rank_coordinator, "GATHER_INTERVAL_STEPS", 4)
    monkeypatch.setattr(progress, "MAX_LOG_INTERVAL_S", 0.0)
    train_on(3, settings(store, tmp_path / "run"))
    records, _ = RunDirectory(tmp_path / "run", writable=False).read_log()
    logged = [record for record in records if "slowest_rank" in record]
    slow_records = [record for record in logged if record["slowest_rank"] == 1]
    # The others wait for rank 0 where it evaluates and saves.
    assert len(slow_records) > len(logged) / 2
    means = {
        name: np.mean([record[f"rank_{name}"] for record in slow_records], axis=0)
        for name in ("wait_shares", "stall_shares", "samples_per_s")
    }
    first, slow, last = means["wait_shares"]
    assert slow + 0.1 < min(first, last)
    first, slow, last = means["samples_per_s"]
    assert slow < 0.8 * min(first, last)
    assert means["stall_shares"].shape == (3,)
    assert format_rank_figures(
        max(slow_records, key=lambda record: max(record["rank_wait_shares"]))
    ).startswith("3 ranks, slowest 1, waiting ")


def test_accumulated_sums_are_saved_on_schedule(store: str, tmp_path: Path) -> None:
    """Check a number of steps between the sums that does not divide the number of batches."""
    changes = FALKON | {"run.checkpoint_every": 5, "data.epochs": 2}
    train_on(2, settings(store, tmp_path / "run", **changes))
    steps = RunDirectory(tmp_path / "run", writable=False).steps()
    assert steps == [5, 10, 15, 20, 25, 28]  # every 5 steps, and after all 28


def test_local_ranks_share_memory(store: str, tmp_path: Path) -> None:
    """Check runs with memory "auto"."""
    budgets = []
    for changes in (
        {"run.ranks": 1},
        {"run.ranks": 2},
        {"run.ranks": 2, "run.cluster": "tcp://h:1"},
    ):
        run = open_run(settings(store, tmp_path / "run", **changes))
        run.backend.close()
        budgets.append(run.budget_bytes)
    assert budgets[1] == pytest.approx(budgets[0] / 2, rel=0.1)
    assert budgets[2] == pytest.approx(budgets[0], rel=0.1)


def rank_settings(**run: object) -> RunConfig:
    """Return settings [run], the others at their defaults."""
    return RunConfig().with_overrides({f"run.{name}": value for name, value in run.items()})


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine seem to have two GPUs."""
    monkeypatch.setattr(over_ranks, "gpu_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_each_gpu_gets_one_rank() -> None:
    actual = with_rank_count(rank_settings(ranks="gpus"))
    assert (actual.run.ranks, actual.run.device) == (2, "gpu")
    assert rank_devices(actual) == rank_devices(rank_settings(ranks=2)) == ["gpu:0", "gpu:1"]
    assert rank_devices(rank_settings(ranks=3, device="cpu")) == ()
    assert with_rank_count(actual) is actual


@pytest.mark.usefixtures("two_gpus")
def test_gpu_is_not_shared_between_ranks() -> None:
    """Check also that no GPU is taken that the settings do not name."""
    for config in (rank_settings(ranks=3), rank_settings(ranks=2, device="gpu:1")):
        with pytest.raises(ConfigError, match=r"and this machine has 2; give run\.ranks='gpus'"):
            rank_devices(config)
    with pytest.raises(ConfigError, match=r"cannot be used with .*device='cpu'"):
        with_rank_count(rank_settings(ranks="gpus", device="cpu"))
    for config, on_cluster in ((rank_settings(ranks="gpus", cluster="tcp://h:1"), False),
                             (rank_settings(ranks="gpus"), True)):  # fmt: skip
        with pytest.raises(ConfigError, match="cannot be used on a cluster"):
            with_rank_count(config, on_cluster=on_cluster)


def test_missing_gpus_give_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check the error of Python and of the command."""
    monkeypatch.setattr(over_ranks, "gpu_count", lambda: 0)
    monkeypatch.setattr(over_ranks, "gpu_problem", lambda: "no driver")
    arguments = ["train", "--train", "x.zarr", "--run-dir", "run", "--ranks", "gpus"]
    assert main.run_command(arguments) == 2
    assert (
        "--ranks gpus needs a GPU, but none was found: no driver; give a number"
        in capsys.readouterr().err
    )
    assert rank_devices(rank_settings(ranks=2)) == ()


@pytest.fixture
def without_log_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every redraw of the progress line be due."""
    monkeypatch.setattr(ProgressLine, "PERIODS_S", dict.fromkeys(ProgressLine.PERIODS_S, 0.0))


@pytest.mark.usefixtures("without_log_intervals")
def test_rank_messages_are_shown_once() -> None:
    stream, evaluations, saved = io.StringIO(), list[dict[str, Any]](), {"kept": "checkpoint"}
    handle = RankEventHandler(ProgressLine(stream), evaluations.append)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for rank in (0, 1):
            handle({"event": "message", "rank": rank, "message": {"warning": "the same"}})
        for _ in range(2):
            handle({"event": "ranks", "ranks": 1, "wanted": 2})
            handle({"event": "lost", "why": "rank 1 is gone", "stopping": False, **saved})
        handle({"event": "lost", "why": "rank 1 is silent", "stopping": True, **saved})
        for resume_point in ("setup", "nothing"):
            handle(
                {"event": "lost", "why": "rank 0 is gone", "stopping": False, "kept": resume_point}
            )
    loss_text = "rank 1 is gone; the run continues from its last checkpoint"
    few = "there are workers for 1 of 2 ranks"
    stopping = (
        "rank 1 is silent; the run continues from its last checkpoint, once the same command is "
        "run again"
    )
    restarts = [
        f"rank 0 is gone; there is no checkpoint yet, so {begins}"
        for begins in ("the run begins its first epoch again", "the setup begins again")
    ]
    expected = ["the same", few, loss_text, loss_text, stopping, *restarts]
    assert [str(warning.message) for warning in warned] == expected
    for message in ({"line": "half"}, {"line": ""}, {"evaluation": {"step": 3}}):
        handle({"event": "message", "rank": 0, "message": message})
    assert stream.getvalue() == "streamkern: half\n"
    assert evaluations == [{"step": 3}]
