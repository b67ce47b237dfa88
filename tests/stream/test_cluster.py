"""Check reads on a Dask cluster: equal batches, lost workers and schedulers, errors, secrets."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
from dask.utils import key_split

from streamkern.basics.errors import (
    ClusterError,
    ConfigError,
    CorruptChunkError,
    DataError,
    MissingDependencyError,
)
from streamkern.basics.optional import install_command
from streamkern.config.run_config import RunConfig
from streamkern.rundir.run_log import read_log
from streamkern.store.row_block import RowBlock
from streamkern.stream import unit_readers
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.cluster import check_cluster, connect, dashboard_link
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import BaseSource, Source
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.user import GeneratorSource, as_source
from streamkern.stream.unit_readers import MAX_OPEN_SOURCES, ClusterReader, Recipe, open_recipe
from streamkern.train.train import train
from tests import clusters
from tests.clusters import Cluster, Dies, Fails, Misbehaving, Waits
from tests.conftest import MakeZarr
from tests.interruptions import eventually
from tests.runs import (
    array_source,
    assert_same_bits,
    final,
    finished,
    latest_step,
    settings,
    stream,
)
from tests.streams import Plain, assert_same, copies_of

pytest.importorskip("distributed")
pytestmark = pytest.mark.slow


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Return a cluster without workers, which the test may destroy."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    with Cluster(folder) as cluster:
        yield cluster


def read_epochs(source: Source, n: int = 2, **options: Any) -> list[RowBlock]:
    """Return the batches of n epochs."""
    with BatchReader(
        source, **{"batch_size": 23, "seed": 3, "block_bytes": 5000, **options}
    ) as loader:
        batches = copies_of(loader.epochs(0, n))
        assert loader.stats.bytes_in_flight == 0
    return batches


def n_tasks(client: Any) -> int:
    """Return the number of tasks and results that the scheduler knows."""
    return int(client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)))


# ---------------------------------------------------------------------------------- reading


@pytest.mark.slow
def test_workers_read_the_same_as_threads(client: Any, make_zarr: MakeZarr, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.integers(0, 99, (240, 8)).astype(np.uint8), rng.integers(0, 3, 240)
    path = make_zarr({"X": X, "y": y}, chunk_rows=16)
    large = ArraySource(rng.normal(size=(240, 300)).astype(np.float32), y.astype(float))
    assert len(Recipe(large).data) > unit_readers.MAX_INLINE_BYTES
    transformed_source = clusters.source(transforms=[clusters.noisy])
    for source in (ZarrSource(path), large, clusters.source(), transformed_source):
        source_epochs = read_epochs(source)
        assert_same(read_epochs(source, client=client), source_epochs)
        np.testing.assert_array_equal(
            np.sort(np.concatenate([b.row_ids for b in source_epochs[:11]])), np.arange(240)
        )
    eventually(lambda: n_tasks(client) == 0)  # nothing is left there
    (path / "X" / "c" / "7" / "0").unlink()
    with pytest.raises(CorruptChunkError, match="X/c/7/0") as caught:
        read_epochs(ZarrSource(path), client=client)
    assert "while reading unit" in caught.value.__notes__[0]


def test_result_that_arrives_at_timeout_is_used(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FutureWithTimeout(Future):  # type: ignore[type-arg]
        def result(self, timeout: float | None = None) -> Any:
            result = super().result()
            if timeout is not None:
                raise TimeoutError
            return result

    def run_on(loop: Any, coroutine: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop.asyncio_loop)
        future.__class__ = FutureWithTimeout
        return future

    source = clusters.source()
    reader = unit_readers.ClusterReader(source, client, 60.0)
    monkeypatch.setattr(unit_readers, "run_on", run_on)
    block, expected_block = reader.read(0, 3, 0, threading.Event()), source.read_unit(0, 3, 0)
    for actual, expected in zip(block, expected_block, strict=True):
        np.testing.assert_array_equal(actual, expected)
    reader.close()


@pytest.mark.parametrize("transforms", [(), (clusters.noisy,)])
def test_window_bounds_submitted_reads(client: Any, tmp_path: Path, transforms: Any) -> None:
    """Delay every read, and check that the submitted graphs do not exceed the bytes in flight."""
    source = clusters.source(Misbehaving(tmp_path, Waits(), at=0), transforms=transforms)
    unit_bytes = 10 * (4 * 4 + 8 + 8)
    with BatchReader(
        source, batch_size=10, seed=0, client=client, in_flight_bytes=3 * unit_bytes
    ) as loader:
        assert loader.threads == 3
        batches = loader.epoch(0)
        consumer = threading.Thread(target=lambda: list(batches))
        consumer.start()
        eventually((tmp_path / "waiting").exists)
        # Results are released soon after they are fetched; without a window all 24 would stay.
        eventually(lambda: 0 < n_tasks(client) <= 3 * (1 + len(transforms)))
        assert loader.stats.bytes_in_flight <= 3 * unit_bytes
        (tmp_path / "go").touch()
        consumer.join()
        assert 0 < loader.stats.bytes_in_flight_peak <= 3 * unit_bytes
        assert loader.stats.bytes_read == 24 * unit_bytes


def transformed_source() -> GeneratorSource:
    return clusters.source(transforms=[clusters.noisy])


class NegatedRows(GeneratorSource):
    """A source with transforms that overrides `read_unit`, and so is read by one task."""

    def read_unit(self, u: int, seed: int, epoch: int) -> RowBlock:
        block = super().read_unit(u, seed, epoch)
        return block._replace(X=-block.X)


def negated_source() -> GeneratorSource:
    noise, names = [clusters.noisy], ("a", "b", "c")
    return NegatedRows(clusters.rows, 240, (4,), np.float32, 3, names, 10, transforms=noise)


@pytest.mark.parametrize(
    ("source", "steps"),
    [
        (clusters.source(), ["read"]),
        (transformed_source(), ["read", "transform"]),
        (AugmentedSource(transformed_source(), 2, [clusters.noisy]), ["read", "transform"]),
        (as_source(Plain(clusters.source())), ["read"]),
    ],
)
def test_dashboard_shows_steps_of_each_unit(
    source: BaseSource, steps: list[str], client: Any
) -> None:
    """Check the names of tasks, from which Dask makes its stream, colours and bars."""
    client.get_task_stream()  # the scheduler begins to record
    start_time = time.time()
    batches = read_epochs(source, 1, client=client)
    assert_same(batches, read_epochs(source, 1))
    keys = [task["key"] for task in client.get_task_stream(start=start_time)]
    # The dashboard names and colours tasks by `key_split`.
    assert Counter(map(key_split, keys)) == dict.fromkeys(steps, source.n_units)
    groups = {group for group, *_ in keys}
    assert sorted(map(key_split, groups)) == steps
    for group in groups:
        units = sorted(key[1:3] for key in keys if key[0] == group)
        assert units == [(0, u) for u in range(source.n_units)]


def test_tries_have_distinct_keys_and_simple_reads_one_task(client: Any) -> None:
    readers = [
        ClusterReader(source, client, 9) for source in (transformed_source(), negated_source())
    ]
    keys = [reader._submit(1, 0, 0).key for reader in readers for _ in range(2)]
    assert len(set(keys)) == 4
    assert [key_split(key) for key in keys] == ["transform"] * 2 + ["read"] * 2


def test_process_keeps_few_sources_open() -> None:
    recipes = [Recipe(clusters.source()) for _ in range(MAX_OPEN_SOURCES + 2)]
    sources = [open_recipe(recipe) for recipe in recipes]
    assert open_recipe(recipes[-1]) is sources[-1]
    assert open_recipe(recipes[0]) is not sources[0]
    assert len(unit_readers._open_sources) == MAX_OPEN_SOURCES


def test_source_is_opened_once_per_process(client: Any, tmp_path: Path) -> None:
    fn = Misbehaving(tmp_path, Waits(), at=-1)
    read_epochs(clusters.source(fn), client=client)
    opened_by = fn.notes("opened")
    assert len(opened_by) == len(set(opened_by)) <= 2
    read_epochs(clusters.source(fn), client=client)  # another loader is another source
    assert len(fn.notes("opened")) > len(opened_by)


# ------------------------------------------------------------------------- workers that die


def test_killed_worker_changes_no_batch(client: Any, cluster: Cluster, tmp_path: Path) -> None:
    fn = Misbehaving(tmp_path, Dies(1), at=50)
    source = clusters.source(fn)
    loader = read_epochs(source, client=client)
    assert len(fn.notes("deaths")) == 3  # one that killed its worker, and one an epoch
    assert_same(loader, read_epochs(clusters.source()))
    cluster.worker()


def test_results_lost_with_their_worker_are_read_again(client: Any, cluster: Cluster) -> None:
    client.wait_for_workers(2)
    batches = []
    with BatchReader(
        clusters.source(), batch_size=23, seed=3, block_bytes=5000, client=client
    ) as loader:
        for batch in loader.epochs(0, 2):
            if len(batches) == 4:
                pid = next(iter(client.run(clusters.os.getpid).values()))
                psutil.Process(pid).send_signal(signal.SIGKILL)
                cluster.worker()
            batches.append(batch.copy())
    assert_same(batches, read_epochs(clusters.source()))


@pytest.mark.slow
def test_task_with_too_many_worker_deaths_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES", "0")  # no death is allowed
    fn = Misbehaving(tmp_path, Dies(1), at=50)
    with Cluster(tmp_path) as cluster:
        cluster.worker()
        cluster.worker()
        with connect(cluster.address) as client:
            client.wait_for_workers(2)
            with BatchReader(
                clusters.source(fn), batch_size=23, seed=3, block_bytes=5000, client=client
            ) as loader:
                all_row_ids = [b.row_ids.copy() for b in loader.epoch(0)]
                assert loader.stats.retries >= 1
    assert len(fn.notes("deaths")) == 2
    expected = [b.row_ids for b in read_epochs(clusters.source(), 1)]
    for a, b in zip(all_row_ids, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_read_without_workers_waits_and_then_fails(own_cluster: Cluster) -> None:
    with connect(own_cluster.address) as client:
        check_cluster(client, clusters.source())  # passes, because workers may join later
        with pytest.raises(ClusterError, match=r"tcp://127.*has had no worker for .*same command"):
            read_epochs(clusters.source(), client=client, retry_s=1)
        with BatchReader(clusters.source(), batch_size=23, seed=3, client=client) as loader:
            batches = loader.epoch(0)
            threading.Timer(0.5, own_cluster.worker).start()
            assert len(next(batches).row_ids) == 23  # read by a worker that joined meanwhile


# --------------------------------------------------------------------- a scheduler that dies


@pytest.mark.slow
def test_run_survives_loss_of_scheduler(
    own_cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that a run fails with one sentence, and resumes to the same weights."""
    own_cluster.worker()
    run_dir = tmp_path / "run"
    # An epoch is a block here, and two blocks are read ahead.
    changes = {"run.evaluate_every": 1, "data.epochs": 4}
    config = settings(run_dir, **changes, **{"data.dask": own_cluster.address})

    def kill(record: dict[str, Any]) -> None:
        if record["step"] == 4:
            own_cluster.scheduler.kill()
            own_cluster.scheduler.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(connect.__wrapped__.__kwdefaults__, "wait_s", 1.0)
        options = {"source": stream(), "test": array_source(10, 5)}
        with pytest.raises(ClusterError, match=f"{own_cluster.address} .*same command") as caught:
            train(config, on_evaluation=kill, **options)
    assert caught.value.exit_code == 3
    assert not [r for r in caplog.records if r.exc_info and r.levelno >= logging.WARNING]
    assert not [t for t in threading.enumerate() if t.name.startswith("streamkern")]
    assert 4 <= latest_step(run_dir) < 28
    (record,) = [r for r in read_log(run_dir / "log.jsonl") if r["event"] == "start"]
    assert record["dashboard"].startswith("http://127.0.0.1:")
    finished(config.with_overrides({"data.dask": None}), source=stream(), test=array_source(10, 5))
    plain = settings(tmp_path / "plain", **changes)
    finished(plain, source=stream(), test=array_source(10, 5))
    assert_same_bits(final(run_dir), final(tmp_path / "plain"))


@pytest.mark.slow
def test_hung_scheduler_raises_after_timeout(own_cluster: Cluster, tmp_path: Path) -> None:
    worker = own_cluster.worker()
    fn = Misbehaving(tmp_path, Waits(), at=100)
    with connect(own_cluster.address, wait_s=2) as client:
        client.wait_for_workers(1)
        with BatchReader(
            clusters.source(fn), batch_size=23, seed=3, client=client, retry_s=1
        ) as loader:
            threading.Thread(
                target=lambda: (
                    eventually(lambda: fn.notes("waiting")),
                    own_cluster.scheduler.send_signal(signal.SIGSTOP),
                )
            ).start()
            with pytest.raises(ClusterError, match="has not answered for"):
                next(loader.epoch(0))
    assert worker.poll() is None


def test_close_does_not_wait_for_workers(client: Any, tmp_path: Path) -> None:
    fn = Misbehaving(tmp_path, Waits(), at=0)
    loader = BatchReader(clusters.source(fn), batch_size=240, seed=0, client=client)
    ended: list[BaseException] = []

    def consume() -> None:
        try:
            next(loader.epoch(0))
        except BaseException as error:
            ended.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    eventually(lambda: fn.notes("waiting"))
    loader.close()  # the read is still held up
    consumer.join()
    assert len(ended) == 1
    assert loader.stats.bytes_in_flight == 0
    (tmp_path / "go").touch()
    eventually(lambda: n_tasks(client) == 0)


# ---------------------------------------------------------------------------------- failures


def test_worker_errors_are_raised_unchanged(client: Any, tmp_path: Path) -> None:
    fn = Misbehaving(tmp_path, Fails(KeyError("a bug")), at=30)
    with pytest.raises(DataError, match=r"unit 3 of generator rows.*KeyError: 'a bug'"):
        read_epochs(clusters.source(fn), client=client)
    assert len(fn.notes("failures")) == 1
    (tmp_path / "again").mkdir()
    fn = Misbehaving(tmp_path / "again", Fails(TimeoutError("slow"), times=2), at=30)
    digests = read_epochs(clusters.source(fn), 1, client=client)  # not mistaken for our own waiting
    assert_same(digests, read_epochs(clusters.source(), 1))
    assert len(fn.notes("failures")) == 3
    fn.act.times = 10**9  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError, match="slow"):
        read_epochs(clusters.source(fn), client=client, retry_s=0.01)


class OnlyHere:
    """A class that no worker can import when it claims to be from a module of this process."""

    def __call__(self, *arguments: int) -> Any:
        return clusters.rows(*arguments)


def test_missing_import_on_worker_is_named(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnlyHere, "__module__", "known_here_only")
    module = ModuleType("known_here_only")
    vars(module)["OnlyHere"] = OnlyHere
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(
        ClusterError, match=r"cannot import a package of the source .*install it on"
    ):
        read_epochs(clusters.source(OnlyHere()), client=client)


@pytest.mark.slow
def test_secrets_are_sent_with_the_source_only(own_cluster: Cluster, tmp_path: Path) -> None:
    own_cluster.worker()
    fn = Misbehaving(tmp_path, Fails(OSError("refused")), at=30, storage_options="hunter2")
    source = clusters.source(fn)
    with connect(own_cluster.address) as client:
        client.wait_for_workers(1)
        with pytest.raises(OSError, match="refused") as caught:
            read_epochs(source, client=client, retry_s=0.1)
        scheduler_state = client.run_on_scheduler(
            lambda dask_scheduler: repr(
                [(t, t.run_spec, t.annotations) for t in dask_scheduler.tasks.values()]
                + list(dask_scheduler.transition_log)
            )
        )
        logs = repr((client.get_worker_logs(), client.get_scheduler_logs()))
    assert b"hunter2" in Recipe(source).data
    assert "read-" in scheduler_state
    for text in (
        scheduler_state,
        logs,
        own_cluster.log(),
        repr(Recipe(source)),
        repr(caught.value),
    ):
        assert "hunter2" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('__version__ = "0.0.1"', "has streamkern 0.0.1; install streamkern"),
        ("raise ImportError('none here')", "lacks streamkern .*none here.*install streamkern"),
    ],
)
def test_different_code_on_worker_is_refused(
    content: str, message: str, own_cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "streamkern").mkdir()
    (tmp_path / "streamkern" / "__init__.py").write_text(content)
    run_dir = tmp_path / "run"
    config = settings(run_dir, **{"data.dask": own_cluster.address})
    own_cluster.worker(tmp_path)
    with connect(own_cluster.address) as client:
        client.wait_for_workers(1)
    with pytest.raises(ConfigError, match=message) as caught:
        train(config, source=stream())
    assert "\n" not in str(caught.value)
    assert not run_dir.exists()


# -------------------------------------------------------------------------------- connecting


def resources() -> tuple[set[threading.Thread], set[Any], set[int]]:
    """Return threads, sockets and child processes of this process."""
    gc.collect()
    me = psutil.Process()
    sockets = {(c.laddr, c.raddr) for c in me.net_connections() if c.status != "CLOSE_WAIT"}
    return set(threading.enumerate()), sockets, {child.pid for child in me.children()}


def test_connection_leaves_no_resources(cluster: Cluster) -> None:
    read_epochs(clusters.source())
    resources_before = resources()
    with connect(cluster.address) as client:
        read_epochs(clusters.source(), client=client)
        assert resources()[1] != resources_before[1]
    resources_after = resources()
    assert {t.name for t in resources_after[0] - resources_before[0]} <= {
        "Profile",
        "Dask-Offload_0",
    }
    assert resources_after[1:] == resources_before[1:]


@pytest.mark.parametrize("listening", [False, True])
def test_missing_scheduler_is_refused(listening: bool, tmp_path: Path) -> None:
    resources_before = resources()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if listening:
            listener.listen()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with (
            pytest.raises(ConfigError, match=f"no scheduler answers at {address}"),
            connect(address, wait_s=0.5),
        ):
            pass
    assert resources() == resources_before


@pytest.mark.parametrize("address", ["here", "tcp://host", "http://host:1", "tcp://u:pw@host:1"])
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="tcp://host:8786") as caught, connect(address):
        pass
    assert "pw" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"data\.dask=.* must be the address of a Dask"):
        RunConfig.from_tables({"data": {"train": "a", "dask": address}})


def test_missing_distributed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with (
        pytest.raises(MissingDependencyError, match=re.escape(install_command("cluster"))),
        connect("tcp://127.0.0.1:1"),
    ):
        pass


def test_given_client_stays_open(client: Any, tmp_path: Path) -> None:
    finished(settings(tmp_path / "cluster"), source=stream(), client=client)
    assert client.status == "running"
    finished(settings(tmp_path / "plain"), source=stream())
    assert_same_bits(final(tmp_path / "cluster"), final(tmp_path / "plain"))


@pytest.mark.full
def test_dashboard_link_is_found(cluster: Cluster) -> None:
    with connect(cluster.address) as client:
        link = dashboard_link(client)
    assert link is not None
    assert link.startswith("http://127.0.0.1:")
    assert dashboard_link(client) is None  # which is closed by now
