"""Train with ranks in real processes, while machines and networks fail."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import (
    ClusterError,
    ConfigError,
    DataError,
    ResumeMismatchError,
    TrainingInterrupted,
)
from streamkern.basics.machine import is_alive
from streamkern.basics.stop import StopRequest
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train import over_ranks
from streamkern.train.placement import rank_cluster
from streamkern.train.placement.rank_cluster import local_cluster
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.train import train
from tests import rank_runs as runs
from tests.clusters import Cluster
from tests.interruptions import eventually

pytest.importorskip("distributed")
pytest.importorskip("xgboost")
pytestmark = [pytest.mark.slow, pytest.mark.full]

from distributed import Client  # noqa: E402

from tests.network_partition import Link, Remote, free_port  # noqa: E402

# Dask leaves sockets to lost processes open, which warn when they are collected.
LEFT_OPEN = "ignore::pytest.PytestUnraisableExceptionWarning"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of a store of training rows."""
    return runs.write_store(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def expected(store: str, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray[Any, Any]:
    """Return the final weights of two ranks without faults."""
    run = tmp_path_factory.mktemp("expected") / "run"
    runs.on_ranks(2, runs.settings(store, run))
    return runs.alpha(run)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Yield the client of a local cluster of two workers."""
    with local_cluster(2, 1) as client:
        yield client


@pytest.fixture
def client(cluster: Any) -> Any:
    """Return the client once both workers are there, after a kill in an earlier test."""
    eventually(lambda: len(cluster.scheduler_info(n_workers=-1)["workers"]) == 2)
    return cluster


@pytest.mark.parametrize("changes", [
    {},
    {
        "solver.name": "eigenpro4", "solver.block_size": "auto", "solver.ridge": "auto",
        "solver.n_nystrom": 80, "solver.level": 8, "solver.period": 5, "data.batch_size": 16,
    },
])  # fmt: skip
def test_kill_between_shard_and_manifest_resumes(
    client: Any, store: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Check that a part without a manifest is ignored and deleted, with centers and temporary
    centers partitioned over two ranks."""
    calm, config = (
        runs.settings(store, tmp_path / name, **changes | {"run.center_ranks": 2})
        for name in ("calm", "run")
    )
    runs.on_ranks(2, calm)
    events: list[dict[str, Any]] = []
    acts = {"0 9": "kill before the manifest"}
    runs.trained(client, config, tmp_path, acts=acts, reported=events.append)
    assert [event["event"] for event in events].count("lost") == 1
    np.testing.assert_array_equal(runs.alpha(tmp_path / "run"), runs.alpha(tmp_path / "calm"))
    checkpoints = tmp_path / "run" / "checkpoints"
    named = {json.loads(path.read_text())["group"] for path in checkpoints.glob("*.json")}
    assert {path.name for path in checkpoints.iterdir() if path.is_dir()} == named


@pytest.mark.parametrize("case", ["kill", "freeze"])
def test_run_on_s3_survives_lost_rank(
    client: Any, store: str, tmp_path: Path, expected: Any, s3: Any, bucket: str, case: str
) -> None:
    """Kill or suspend the rank that holds the run directory; a suspended rank is ended after a
    while."""
    options = s3.options()
    url = f"s3://{bucket}/run"
    config = runs.settings(store, url, **{"data.storage_options": options})
    events: list[dict[str, Any]] = []
    acts = {"0 9": case}
    runs.trained(client, config, tmp_path, acts=acts, reported=events.append, timeout_s=5.0)
    (lost,) = (event for event in events if event["event"] == "lost")
    assert ("silent for 5 s" in lost["why"]) == (case == "freeze")
    assert not is_alive(int((tmp_path / "0-9").read_text()))
    np.testing.assert_array_equal(runs.alpha(url, storage_options=options), expected)


def test_ranks_with_center_partition_continue_a_run(
    client: Any, store: str, tmp_path: Path
) -> None:
    """Check that a run whose ranks are killed twice ends with the weights of a single rank."""
    grid = {"run.center_ranks": 2, "data.epochs": 1}
    runs.trained(client, runs.settings(store, tmp_path / "old", **grid), tmp_path)
    automatic = {"model.n_centers": "auto", "model.kernel": "auto", "model.bandwidth": "auto"}
    continues = str(tmp_path / "old")
    config = runs.settings(store, tmp_path / "new", **grid | automatic)
    reported: list[dict[str, Any]] = []
    acts = {"1 0": "kill", "0 6": "kill"}
    runs.trained(client, config, tmp_path, acts=acts, reported=reported.append, continues=continues)
    assert [event["event"] for event in reported].count("lost") == 2
    one = {"run.ranks": 1, "run.center_ranks": 1, "run.run_dir": str(tmp_path / "one")}
    train(config.with_overrides(one), continues=continues)
    actual, expected = runs.alpha(tmp_path / "new"), runs.alpha(tmp_path / "one")
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def test_workers_survive_invalid_settings(
    client: Any, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the workers of a user's cluster are not ended, and that they are not contacted if
    the run directory holds another run."""
    config = runs.settings(store, tmp_path / "run", **{"data.epochs": 1})
    runs.trained(client, config, tmp_path)
    processes = client.run(os.getpid)
    new = {"run.run_dir": str(tmp_path / "new")}
    for changes, error in (
        ({"data.train": str(tmp_path / "s.zarr")}, DataError),
        ({"solver.block_size": 999}, ConfigError),
    ):
        with pytest.raises(error):
            runs.trained(client, config.with_overrides(new | changes), tmp_path)
    monkeypatch.setattr(over_ranks, "run_ranks", None)
    for changes in (
        {"solver.ridge": 1e-3},
        {"model.n_centers": 999},
        {"data.train": other_store(tmp_path)},
    ):
        with pytest.raises(ResumeMismatchError, match="holds a run that differs"):
            over_ranks.train_over(
                config.with_overrides(changes), RunInputs(client=client), StopRequest(install=False)
            )
    assert client.run(os.getpid) == processes


def other_store(folder: Path) -> str:
    """Write a store of other rows, and return its path."""
    ingest(np.ones((99, 4), np.float32), str(folder / "other.zarr"), y=np.arange(99.0))
    return str(folder / "other.zarr")


@pytest.fixture
def remote_cluster(tmp_path: Path) -> Iterator[Any]:
    """Return a client of two workers, and the links through which one of them is connected."""
    with ExitStack() as stack:
        client = stack.enter_context(local_cluster(1, 1))
        port = int(client.cluster.scheduler_address.rpartition(":")[2])
        links = [stack.enter_context(Link(p)) for p in (port, free_port(), free_port())]

        async def begin() -> Any:
            folder = str(tmp_path / "far")
            return await Remote(links[0].address, *links[1:], local_directory=folder)

        nanny = client.cluster.sync(begin)
        stack.callback(lambda: client.cluster.sync(nanny.close, timeout=2))
        stack.callback(lambda: [link.heal() for link in links])
        yield client, links


@pytest.mark.filterwarnings(LEFT_OPEN)
def test_machine_without_network_ends_and_others_continue(
    remote_cluster: Any, store: str, tmp_path: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the rank with the run directory ends by itself, and that the other one continues
    only then."""
    monkeypatch.setattr(rank_cluster, "_NANNY_TIMEOUT_S", 1.0)
    client, links = remote_cluster
    events: list[dict[str, Any]] = []
    config = runs.settings(store, tmp_path / "run")

    def on_event(event: dict[str, Any]) -> None:
        events.append(event | {"steps": RunDirectory(tmp_path / "run", writable=False).steps()})

    def cut_links() -> None:
        eventually((tmp_path / "0-10").exists)
        for link in links:
            link.cut()
        (tmp_path / "cut-2").touch()  # the first generation computed the setup

    cutting = threading.Thread(target=cut_links)
    cutting.start()
    runs.trained(
        client, config, tmp_path, acts={"0 10": "cut", "1 10": "cut"}, reported=on_event,
        timeout_s=4.0, driver_timeout_s=3.0,
    )  # fmt: skip
    cutting.join()
    gc.collect()
    *_, lost, restarted = (event for event in events if event["event"] != "message")
    assert "rank 0" in lost["why"]
    assert "silent for 4 s" in lost["why"]
    assert (restarted["ranks"], restarted["wanted"]) == (1, 2)
    assert lost["steps"] == restarted["steps"] == [4, 8]
    assert not is_alive(int((tmp_path / "0-10").read_text()))
    np.testing.assert_allclose(runs.alpha(tmp_path / "run"), expected, atol=1e-11)


@pytest.mark.filterwarnings(LEFT_OPEN)
def test_killed_scheduler_ends_run_after_saving(store: str, tmp_path: Path, expected: Any) -> None:
    """Check that the ranks save and end, and that the driver ends, too."""
    config = runs.settings(store, tmp_path / "run")
    acts = {"0 slow": "0.3", "0 9": "wait", "1 9": "note"}
    notes = [tmp_path / "0-9", tmp_path / "1-9"]
    second: list[BaseException] = []
    with Cluster(tmp_path) as cluster, Client(cluster.address, set_as_default=False) as client:
        for _ in range(2):
            cluster.nanny()
        client.wait_for_workers(2)

        def start_second_driver_and_kill() -> None:
            eventually(lambda: all(note.exists() for note in notes))
            with Client(cluster.address, set_as_default=False) as other:
                try:
                    runs.trained(other, config, tmp_path)
                except TrainingInterrupted as error:
                    second.append(error)
            cluster.scheduler.kill()
            (tmp_path / "go").touch()

        thread = threading.Thread(target=start_second_driver_and_kill)
        thread.start()
        with pytest.raises(ClusterError, match="is gone"):
            runs.trained(client, config, tmp_path, acts=acts, timeout_s=3.0)
        thread.join()
        eventually(lambda: not any(is_alive(int(note.read_text())) for note in notes))
    assert "is a rank of another run" in str(second[0])
    gc.collect()
    saved = RunDirectory(tmp_path / "run", writable=False).steps()
    assert 8 < saved[-1] < runs.STEPS
    runs.on_ranks(2, config)
    np.testing.assert_array_equal(runs.alpha(tmp_path / "run"), expected)


def test_workers_leave_and_join_between_generations(
    store: str, tmp_path: Path, expected: Any
) -> None:
    """Check that the run ends with exit code 75 with too few workers, resumes with the remaining
    ones, and uses a new worker when ranks are started the next time."""
    config, sizes = runs.settings(store, tmp_path / "run", **{"run.min_ranks": 2}), list[int]()
    with local_cluster(2, 1) as client:
        cluster = client.cluster

        def remove_worker(event: dict[str, Any]) -> None:
            if event["event"] == "lost":
                cluster.sync(cluster.workers[0].close)  # with its nanny

        def add_worker_once(event: dict[str, Any]) -> None:
            if event["event"] == "ranks":
                sizes.append(event["ranks"])
                if len(sizes) == 2:  # the first generation prepared the run
                    adding.start()

        def add() -> None:
            cluster.scale(3)  # including the one that has left
            client.wait_for_workers(2)
            (tmp_path / "go").touch()

        adding = threading.Thread(target=add)
        with pytest.raises(
            TrainingInterrupted, match=r"1 of at least 2 workers are left"
        ) as caught:
            runs.trained(
                client,
                config,
                tmp_path,
                acts={"1 9": "kill"},
                reported=remove_worker,
                timeout_s=3.0,
            )
        assert caught.value.exit_code == 75
        few = config.with_overrides({"run.min_ranks": 1})
        acts = {"0 20": "wait", "0 21": "kill"}
        runs.trained(client, few, tmp_path, acts=acts, reported=add_worker_once, timeout_s=3.0)
        adding.join()
    assert sizes == [1, 1, 2]
    np.testing.assert_allclose(runs.alpha(tmp_path / "run"), expected, atol=1e-11)
