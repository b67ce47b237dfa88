"""Test ranks in real processes, which are killed, frozen, or fail."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamkern.basics.errors import (
    ConfigError,
    DataError,
    RankLostError,
    RunError,
    TrainingInterrupted,
)
from streamkern.basics.machine import is_alive
from streamkern.basics.stop import StopRequest
from streamkern.train.placement import task
from streamkern.train.placement.launcher import RetryBudget, run_ranks
from streamkern.train.placement.rank_cluster import RankCluster, local_cluster
from streamkern.train.placement.task import Job, RankSpec, run_rank
from tests import rank_toys as toys
from tests.clusters import ROOT
from tests.interruptions import eventually

pytest.importorskip("distributed")
pytest.importorskip("xgboost")
pytestmark = pytest.mark.slow


STEPS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Return a client of two workers."""
    with local_cluster(2) as client:
        yield client


@pytest.fixture
def client(cluster: Any) -> Any:
    """Return the client once both workers are there, after a kill in an earlier test."""
    eventually(lambda: len(cluster.scheduler_info(n_workers=-1)["workers"]) == 2)
    return cluster


class Events(list[dict[str, Any]]):
    """Events of a placement with their times; `act` is called with each event."""

    def __init__(self, act: Callable[[dict[str, Any]], None] = lambda event: None) -> None:
        self.act = act

    def __call__(self, event: dict[str, Any]) -> None:
        self.append(event | {"at": time.monotonic()})
        self.act(event)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self if event["event"] == kind]


def run_toy(client: Any, folder: Path, events: Events | None = None, **more: Any) -> Any:
    """Run the toy job on two ranks, and return its result.

    more : arguments of `run_ranks`, and settings of the job
    """
    names = ("ranks", "min_ranks", "multiple", "prepare", "timeout_s", "driver_timeout_s", "stop")
    options = {"ranks": 2, "stop": StopRequest(install=False), "timeout_s": 30.0}
    options |= {name: more.pop(name) for name in names if name in more}
    settings = {"folder": str(folder), "steps": STEPS, "pause_s": 0.02, **more}
    return run_ranks(
        client,
        toys.totals,
        settings,
        read_progress=toys.reached,
        on_event=Events() if events is None else events,
        **options,
    )


@contextlib.contextmanager
def stop_once(condition: Callable[[], object]) -> Iterator[tuple[StopRequest, list[float]]]:
    """Request a stop as soon as a condition holds. Yields the request, and a list for its time."""
    stop, requested = StopRequest(install=False), list[float]()

    def request_stop() -> None:
        eventually(condition)
        requested.append(time.monotonic())
        stop.requested_by = "the test"

    thread = threading.Thread(target=request_stop)
    thread.start()
    yield stop, requested
    thread.join()


@pytest.mark.slow
def test_two_ranks_run_after_preparation(client: Any, tmp_path: Path) -> None:
    """Run two ranks in processes of their own, twice on the same workers."""
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        events = Events()
        result = run_toy(client, folder, events, prepare=toys.prepare, ranks=None)
        assert result["total"] == toys.expected(STEPS)
        assert toys.notes(folder)[0] == "prepared"
        (_, *first), (_, *second) = toys.started_ranks(folder)
        assert (first[:2], second[:2]) == ([0, 2], [1, 2])
        assert first[2] != second[2]
        reported = sorted((e["rank"], *e["message"].items()) for e in events.of_kind("message"))
        workers = events.of_kind("ranks")[-1]["workers"]
        warning = ("warning", "one that all ranks give")
        warnings = [message for message in reported if message[1] == warning]
        assert warnings == [(0, warning), (1, warning)]
        assert [message[1] for message in reported if message[1] != warning] == [
            ("line", f"rank {rank} of {workers[rank]}") for rank in (0, 1)
        ]


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_starts_next_generation(client: Any, tmp_path: Path, rank: int) -> None:
    """Check that the next one begins from the saved state, and that no old process is left."""
    events = Events()
    result = run_toy(client, tmp_path, events, acts={f"{rank} 5": "kill"})
    assert result["total"] == toys.expected(STEPS)
    started = toys.started_ranks(tmp_path)
    assert [(generation, k, size, n_done) for generation, k, size, _, n_done in started] == [
        (1, 0, 2, 0), (1, 1, 2, 0), (2, 0, 2, 5), (2, 1, 2, 5)
    ]  # fmt: skip
    assert len({pid for *_, pid, _ in started}) == 4
    assert not [pid for g, _, _, pid, _ in started if g == 1 and is_alive(pid)]
    (lost,) = events.of_kind("lost")
    killed_at = (tmp_path / f"{rank}-5").stat().st_mtime
    assert 0 < time.time() - (time.monotonic() - lost["at"]) - killed_at < 5
    assert lost["generation"] == 1


@pytest.mark.full
def test_several_kills_start_generations(client: Any, tmp_path: Path) -> None:
    """Kill ranks also during the preparation; each generation gets farther."""
    acts = {"0 1": "kill", "1 3": "kill", "0 5": "kill"}
    result = run_toy(client, tmp_path, acts=acts, prepare=toys.prepare, first="kill")
    assert result["total"] == toys.expected(STEPS)
    assert toys.notes(tmp_path).count("prepared") == 2
    n_done_at_start = [n_done for *_, n_done in toys.started_ranks(tmp_path)]
    assert n_done_at_start == [0, 0, 1, 1, 3, 3, 5, 5]


@pytest.mark.full
def test_frozen_rank_is_ended(client: Any, tmp_path: Path) -> None:
    events = Events()
    result = run_toy(client, tmp_path, events, acts={"1 4": "freeze"}, timeout_s=3.0)
    assert result["total"] == toys.expected(STEPS)
    (lost,) = events.of_kind("lost")
    assert "rank 1" in lost["why"]
    assert "silent for 3 s" in lost["why"]
    assert not [pid for g, _, _, pid, _ in toys.started_ranks(tmp_path) if g == 1 and is_alive(pid)]


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_stop_does_not_wait_for_a_frozen_rank(client: Any, tmp_path: Path, rank: int) -> None:
    """Check that the driver waits less than the timeout for a suspended rank, without which nothing
    can be saved."""
    events, reported = Events(), (tmp_path / f"{rank}-4").exists
    message = "stopped by the test; run the same command"
    with (
        stop_once(reported) as (stop, requested),
        pytest.raises(TrainingInterrupted, match=message),
    ):
        run_toy(client, tmp_path, events, stop=stop, acts={f"{rank} 4": "freeze"}, timeout_s=60.0)
    assert time.monotonic() - requested[0] < 27  # the driver waits 12 s for a sign of the rank
    (lost,) = events.of_kind("lost")
    assert f"rank {rank} " in lost["why"]
    assert lost["stopping"]
    assert not [pid for *_, pid, _ in toys.started_ranks(tmp_path) if is_alive(pid)]


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_error_of_a_rank_is_raised_unchanged(client: Any, tmp_path: Path, rank: int) -> None:
    """Check our errors and others, which name their rank; no process is left."""
    with pytest.raises(DataError, match=r"^the toy is broken$") as ours:
        run_toy(client, tmp_path, acts={f"{rank} 2": "data"})
    assert ours.value.exit_code == DataError.exit_code
    assert not [pid for *_, pid, _ in toys.started_ranks(tmp_path) if is_alive(pid)]
    with pytest.raises(KeyError, match="a bug") as bug:
        run_toy(client, tmp_path, acts={f"{rank} 4": "bug"})
    assert not hasattr(bug.value, "__notes__")  # a note would name a single process
    where = "".join(traceback.format_exception(bug.value))
    assert f"RankTraceback: rank {rank} of 2" in where
    assert "in _act" in where


@pytest.mark.full
def test_repeated_failure_without_progress_ends_run(client: Any, tmp_path: Path) -> None:
    events = Events()
    with pytest.raises(RunError, match=r"3 times in a row .*rank . at .* is gone.*again") as caught:
        run_toy(client, tmp_path, events, acts={"1 2": "always kill"})
    assert caught.value.exit_code == 3
    # The first generation saved progress, so three fruitless ones follow it. Only the start of the
    # fifth shows that the fourth saved nothing.
    assert [e["generation"] for e in events.of_kind("lost")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("progress", "fruitless"),
    [
        ([-1, -1, -1, -1], [0, 1, 2, 3]),
        ([None, None, None], [1, 2, 3]),
        # The second try was lost before it began, and the third one reached 120.
        ([-1, None, 120, 380], [0, 1, 0, 0]),
        ([-1, 20, None, 20, 20, 40], [0, 0, 1, 2, 3, 0]),
    ],
)
def test_only_fruitless_tries_count(progress: list[int | None], fruitless: list[int]) -> None:
    tries = RetryBudget()
    assert [tries.count_fruitless(n_done) for n_done in progress] == fruitless


@pytest.mark.slow
def test_stop_waits_for_rank_0_to_save(client: Any, tmp_path: Path) -> None:
    """Check that the driver waits for rank 0 to save and to report."""
    message = "stopped by the test, says rank 0"
    with (
        stop_once(lambda: toys.saved(tmp_path)[0] >= 3) as (stop, _),
        pytest.raises(TrainingInterrupted, match=message),
    ):
        run_toy(client, tmp_path, stop=stop, steps=10**6)
    assert toys.notes(tmp_path)[-1] == "saved"


@pytest.mark.full
def test_stop_waits_for_a_slow_rank(client: Any, tmp_path: Path) -> None:
    """Check that a rank that saves may be silent as long as any rank may."""
    message = "stopped by the test, says rank 0"
    with (
        stop_once((tmp_path / "0-4").exists) as (stop, requested),
        pytest.raises(TrainingInterrupted, match=message),
    ):
        run_toy(client, tmp_path, stop=stop, steps=10**6, acts={"0 4": "late"}, timeout_s=60.0)
    assert time.monotonic() - requested[0] > task._REPLY_TIMEOUT_S
    assert toys.notes(tmp_path)[-1] == "saved"


@pytest.mark.slow
def test_task_without_checkpoint_is_ended_at_once(client: Any, tmp_path: Path) -> None:
    """Stop a setup, which may take long."""
    with (
        stop_once(lambda: len(toys.notes(tmp_path)) == 2) as (stop, requested),
        pytest.raises(TrainingInterrupted, match="stopped by the test"),
    ):
        run_ranks(client, toys.takes_long, {"folder": str(tmp_path)}, ranks=2, stop=stop)
    assert time.monotonic() - requested[0] < 30


@pytest.mark.full
def test_workers_join_and_leave_between_generations(tmp_path: Path) -> None:
    """Check that a new worker is used from the next generation on, and that too few workers end the
    run."""
    with local_cluster(1) as client:
        cluster = client.cluster
        adding = threading.Thread(target=lambda: cluster.scale(2))

        def add(event: dict[str, Any]) -> None:
            if event["event"] == "ranks" and event["generation"] == 1:
                adding.start()

        acts = {"0 5": "kill"}
        events = Events(add)
        run_toy(client, tmp_path, events, acts=acts, ranks=None, pause_s=1.5)
        assert [size for _, _, size, *_ in toys.started_ranks(tmp_path)] == [1, 2, 2]
        with pytest.raises(RunError, match=r"2 of at least 3 workers are there at .*; start more"):
            run_toy(client, tmp_path, ranks=3, multiple=3, timeout_s=1.0)

        def end(event: dict[str, Any]) -> None:
            if event["event"] == "lost":
                cluster.sync(cluster.workers[0].close)  # with its nanny

        with pytest.raises(TrainingInterrupted, match=r"1 of at least 2 workers are left") as left:
            run_toy(
                client, tmp_path, Events(end), steps=50, acts={"1 20": "kill"}, min_ranks=2,
                timeout_s=3.0,
            )  # fmt: skip
        assert left.value.exit_code == 75


def test_task_of_older_generation_does_nothing(client: Any, tmp_path: Path) -> None:
    """Check a task of an older generation, which Dask may repeat."""
    cluster = RankCluster(client, "stale", 10.0, 10.0)
    (spot, _) = cluster.workers().values()
    job = pickle.dumps(Job(toys.totals, {"folder": str(tmp_path), "steps": 1}))
    for newest, address in ((None, spot.address), (2, spot.address), (1, "tcp://x:1")):
        if newest is not None:
            cluster.message_ranks(newest, None)
        spec = RankSpec("stale", 1, 0, (address,), 1, 10.0, 10.0, 0.0, job)
        future = client.submit(run_rank, spec, {}, workers=[spot.address], pure=False)
        with pytest.raises(RunError, match="has been replaced"):
            future.result(10)
    assert toys.notes(tmp_path) == []


def test_process_serves_one_driver_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a second driver is refused and asked to come again, and that the first one's rank
    counts as lost."""
    worker = SimpleNamespace(address="tcp://h:1")
    dask = SimpleNamespace(get_worker=lambda: worker)
    monkeypatch.setattr(task, "on_demand", lambda name: dask)
    monkeypatch.setattr(task, "_runs", ["one"])
    spec = RankSpec("other", 1, 0, (worker.address,), 1, 10.0, 10.0, 0.0, b"")
    with pytest.raises(task.RankFailed) as refused:
        run_rank(spec, {})
    error = refused.value.error()
    assert isinstance(error, TrainingInterrupted)
    assert error.exit_code == 75
    assert "tcp://h:1 is a rank of another run" in str(error)
    with pytest.raises(RankLostError, match="has not ended yet"):
        run_rank(replace(spec, name="one"), {})


@pytest.mark.slow
def test_settings_are_not_shown(client: Any, tmp_path: Path) -> None:
    result = run_toy(client, tmp_path, secret="hunter2")
    assert result["secret"] == 7
    scheduler_state = client.run_on_scheduler(
        lambda dask_scheduler: repr(list(dask_scheduler.transition_log))
    )
    spec = RankSpec("name", 1, 0, ("a",), 1, 1.0, 1.0, 0.0, b"hunter2")
    assert "hunter2" not in scheduler_state + repr(spec)


def test_workers_with_a_memory_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that workers whose nannies would kill ranks at the limit are refused, and workers
    without nannies too."""
    scheduler = SimpleNamespace(identity=lambda: None, address="tcp://s:1")
    cluster = RankCluster(SimpleNamespace(scheduler=scheduler), "a", 1.0, 1.0)
    worker = {"nanny": "tcp://n:1", "host": "h", "status": "running", "memory_limit": 0}
    scheduler_state = {"workers": {"tcp://w:1": worker}}
    monkeypatch.setattr(RankCluster, "_wait_for", lambda self, question: scheduler_state)
    assert list(cluster.workers()) == ["tcp://w:1"]
    worker["memory_limit"] = 3 << 30
    with pytest.raises(ConfigError, match=r"tcp://w:1 of .* limit of 3 GiB, .*--memory-limit 0"):
        cluster.workers()
    worker["nanny"] = ""
    with pytest.raises(ConfigError, match="has no nanny"):
        cluster.workers()


def test_number_of_ranks_is_validated(client: Any, tmp_path: Path) -> None:
    for min_ranks in (0, 3):
        with pytest.raises(ConfigError, match=f"min_ranks={min_ranks} must be at least 1"):
            run_toy(client, tmp_path, ranks=2, min_ranks=min_ranks)


DRIVER = """
import sys
from pathlib import Path
from distributed import Client
from streamkern.basics.stop import StopRequest
from streamkern.train.placement.launcher import RetryBudget, run_ranks
from tests import rank_toys as toys

if __name__ == "__main__":
    address, folder = sys.argv[1:]
    settings = {"folder": folder, "steps": 10**6, "pause_s": 0.05}
    with Client(address, set_as_default=False) as client:
        run_ranks(client, toys.totals, settings, ranks=2, timeout_s=10.0, driver_timeout_s=2.0,
              stop=StopRequest(install=False))
"""


@pytest.mark.slow
def test_ranks_save_and_end_without_their_driver(client: Any, tmp_path: Path) -> None:
    """Check that they end after a while, and that the cluster is unchanged."""
    (tmp_path / "drive.py").write_text(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, str(tmp_path / "drive.py"), client.scheduler.address, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    eventually(lambda: toys.saved(tmp_path)[0] >= 3)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    killed_at = time.monotonic()
    eventually(lambda: toys.notes(tmp_path)[-1] == "saved")
    assert time.monotonic() - killed_at < 10
    n_done = int(toys.saved(tmp_path)[0])
    second_result = run_toy(client, tmp_path, steps=n_done + 2)
    assert second_result["total"] == toys.expected(n_done + 2)
