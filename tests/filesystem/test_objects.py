"""Check remote objects with both engines: equal bytes, errors, retries and secrets."""

from __future__ import annotations

import gzip
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr

from streamkern import RunConfig, ZarrSource, ingest_store, open_store, train_model
from streamkern.basics.errors import (
    ConfigError,
    CorruptChunkError,
    DataError,
    MissingDependencyError,
    StorageAccessError,
    StorageError,
    StoreNotFoundError,
)
from streamkern.filesystem import waiting
from streamkern.filesystem.cache import Cache
from streamkern.filesystem.engines import FsspecEngine, ObstoreEngine
from streamkern.filesystem.objects import Objects
from streamkern.filesystem.urls import open_objects, zarr_store
from streamkern.filesystem.zarr_store import ObjectsStore
from streamkern.rundir.run_directory import RunDirectory
from tests.fault_proxy import FaultProxy
from tests.s3_server import KEY, SECRET, S3Server

ENGINES = ("obstore", "s3fs")
PLACES = (*ENGINES, "memory")


class Place:
    """A remote URL with its options; `raw` reads its objects without streamkern."""

    def __init__(self, kind: str, s3: S3Server, bucket: str, name: str) -> None:
        self.kind, self._s3, self.bucket, self.name = kind, s3, bucket, name
        remote = kind != "memory"
        self.url = f"s3://{bucket}/{name}" if remote else f"memory://{bucket}-{name}"
        self.options = {"engine": kind, **s3.options()} if remote else {}

    def open(self, **options: Any) -> Objects:
        return open_objects(self.url, storage_options={**self.options, **options})

    def raw(self, key: str) -> bytes:
        if self.kind == "memory":
            return bytes(fsspec.filesystem("memory").cat_file(f"/{self.bucket}-{self.name}/{key}"))
        answer = self._s3.client().get_object(Bucket=self.bucket, Key=f"{self.name}/{key}")
        with answer["Body"] as body:
            return bytes(body.read())


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, s3: S3Server, bucket: str) -> Place:
    """Return each kind of remote place."""
    return Place(request.param, s3, bucket, "some/where")


def test_put_objects_can_be_read(place: Place) -> None:
    objects = place.open()
    data = np.random.default_rng(0).bytes(100_000)
    objects.put("a/b", data)
    objects.put("a/c", b"")
    assert place.raw("a/b") == data
    assert [bytes(x) for x in objects.get_many(["a/b", "a/c", "a/b"])] == [data, b"", data]
    for start, stop in [(0, 10), (5, 99_999), (99_990, None), (-7, None), (0, None)]:
        assert bytes(objects.get("a/b", start, stop)) == data[start:stop]
    objects.put("a/b", b"new")
    assert place.raw("a/b") == b"new"


def test_list_returns_keys_below_a_folder(place: Place) -> None:
    objects = place.open()
    for key in ("a/b/1", "a/b/2", "a/bb", "ab", "z"):
        objects.put(key, key.encode())
    everything = [("a/b/1", 5), ("a/b/2", 5), ("a/bb", 4), ("ab", 2), ("z", 1)]
    assert objects.list() == everything
    assert objects.list("a/b") == everything[:2]
    assert objects.list("a") == everything[:3]
    assert objects.list("nothing") == []
    assert (objects.entries(), objects.children()) == (["a/", "ab", "z"], ["a", "ab", "z"])
    assert (objects.entries("a"), objects.entries("a/b")) == (["b/", "bb"], ["1", "2"])
    assert objects.entries("nothing") == objects.entries("z") == []  # nothing is below a file
    with pytest.raises(FileNotFoundError):
        objects.stat("a/b")
    objects.delete(["a/bb", "never there", "z"])
    assert objects.list() == [*everything[:2], ("ab", 2)]


def test_create_in_memory_is_exclusive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check threads that would all find the object missing before any of them creates it."""
    filesystem = fsspec.filesystem("memory")
    original_exists = type(filesystem).exists

    def exists(self: Any, path: str, **options: Any) -> bool:
        found = original_exists(self, path, **options)
        time.sleep(0.02)
        return found

    monkeypatch.setattr(type(filesystem), "exists", exists)
    objects = open_objects(f"memory://{tmp_path.name}/shared")
    created: list[bool] = []
    threads = [
        threading.Thread(target=lambda k=k: created.append(objects.create("one", b"%d" % k)))
        for k in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(created) == [False] * 5 + [True]


def test_create_succeeds_for_one_of_many_writers(place: Place) -> None:
    objects = place.open()
    winners: list[int] = []

    def create(i: int) -> None:
        if objects.create("lock", f"writer {i}".encode()):
            winners.append(i)

    threads = [threading.Thread(target=create, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert place.raw("lock") == f"writer {winners[0]}".encode()


def test_missing_object_error_names_key_and_url(place: Place) -> None:
    with pytest.raises(FileNotFoundError, match=r"a/b is missing from (s3|memory)://"):
        place.open().get("a/b")


def test_objects_store_is_readable_by_zarr(place: Place) -> None:
    store = ObjectsStore(place.open(), "group")
    data = np.random.default_rng(0).standard_normal((50, 3))
    group = zarr.create_group(store, attributes={"a": 1})
    group.create_array("x", data=data, chunks=(8, 3), shards=(16, 3))
    group.create_array("deep/y", data=np.arange(5))
    if place.kind != "memory":
        remote = zarr.storage.FsspecStore.from_url(
            f"{place.url}/group",
            storage_options={k: v for k, v in place.options.items() if k != "engine"},
        )
        np.testing.assert_array_equal(zarr.open_array(remote, path="x", mode="r")[:], data)
    reopened = zarr.open_group(ObjectsStore(place.open(), "group", read_only=True), mode="r")
    np.testing.assert_array_equal(reopened["x"][3:40], data[3:40])
    np.testing.assert_array_equal(reopened["deep/y"][:], np.arange(5))
    assert sorted(reopened.keys()) == ["deep", "x"]
    assert reopened["x"].nbytes_stored() > 0
    del group["x"]
    assert sorted(zarr.open_group(store, mode="r").keys()) == ["deep"]
    zarr.create_group(store, overwrite=True)
    assert [key for key, _ in store.objects.list("group")] == ["group/zarr.json"]
    with pytest.raises(ValueError, match=r"read-only|read only"):
        zarr.create_group(ObjectsStore(place.open(), "g2", read_only=True))


@pytest.mark.slow
@pytest.mark.parametrize("writer", PLACES)
def test_store_has_equal_bytes_through_every_engine(
    writer: str, s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    X, y = rng.integers(0, 255, (700, 40)).astype(np.uint8), rng.integers(0, 3, 700)
    target = Place(writer, s3, bucket, "train.zarr")
    spec = ingest_store(X, target.url, y=y, storage_options=target.options, chunk_mb=0.005)
    local = ingest_store(X, tmp_path / "t.zarr", y=y, chunk_mb=0.005)
    assert spec.fingerprint == local.fingerprint
    chunk_files = {
        p.relative_to(tmp_path / "t.zarr").as_posix(): p for p in tmp_path.rglob("*/c/*")
    }
    for key, path in chunk_files.items():
        if path.is_file():
            assert target.raw(key) == path.read_bytes()
    for engine in (writer,) if writer == "memory" else ENGINES:
        location = Place(engine, s3, bucket, "train.zarr")
        store = open_store(location.url, storage_options=location.options)
        store.verify()
        for i in range(store.n_chunks):
            for ours, theirs in zip(
                store.read_chunk(i), open_store(tmp_path / "t.zarr").read_chunk(i), strict=True
            ):
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_raw_files_are_ingested_despite_faults(
    engine: str, s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(2)
    X, y = rng.integers(0, 255, (300, 12)).astype(np.uint8), rng.integers(0, 4, 300)
    np.save(tmp_path / "X.npy", X)
    np.savez_compressed(tmp_path / "both.npz", X=X, y=y)
    text = "\n".join(",".join(map(str, [*row, label])) for row, label in zip(X, y, strict=True))
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    client = s3.client()
    for path in tmp_path.iterdir():
        client.put_object(Bucket=bucket, Key=f"raw/{path.name}", Body=path.read_bytes())
    faults = {"reset": 0.2, "truncate": 0.2, "error503": 0.2}
    with FaultProxy(s3.endpoint, seed=4, faults=faults) as proxy:
        options = {"engine": engine, **s3.options(proxy.endpoint)}
        places = [("X.npy", y), ("both.npz", None), ("t.csv.gz", -1)]
        for i, (name, target) in enumerate(places):
            url, out = f"s3://{bucket}/raw/{name}", tmp_path / f"{i}.zarr"
            ingest_store(url, out, y=target, input_options=options, dtype=np.uint8, shuffle=False)
            ours = open_store(out).read_chunk(0)
            np.testing.assert_array_equal(ours[0], X)
            np.testing.assert_array_equal(ours[1], y)
        assert proxy.stats()["faults"]
    with pytest.raises(StoreNotFoundError, match=r"no file s3://.*/none\.npz"):
        ingest_store(
            f"s3://{bucket}/none.npz",
            tmp_path / "n.zarr",
            input_options={"engine": engine, **s3.options()},
        )


# ------------------------------------------------------------------------------- requests counted


def make_store(s3: S3Server, bucket: str, rows: int = 300, **options: Any) -> str:
    """Write a store of three classes to the bucket; return its URL."""
    rng = np.random.default_rng(0)
    url = f"s3://{bucket}/train.zarr"
    ingest_store(
        rng.standard_normal((rows, 16)).astype(np.float32),
        url,
        y=rng.integers(0, 3, rows),
        storage_options=s3.options(),
        chunk_mb=16 * 4 * 32 / 2**20,
        **options,
    )
    return url


@pytest.mark.parametrize("engine", ENGINES)
def test_chunk_needs_one_get_per_array(engine: str, s3: S3Server, bucket: str) -> None:
    url = make_store(s3, bucket)
    with FaultProxy(s3.endpoint) as proxy:
        options = {"engine": engine, **s3.options(proxy.endpoint)}
        store = open_store(url, storage_options=options)
        assert proxy.stats()["requests"] == {"GET": 6}  # the group, X, y, row, digests and crc
        proxy.log()
        for i in range(store.n_chunks):
            store.read_chunk(i)
        assert len(proxy.log()) == 2 * store.n_chunks + 1  # one for the checksums
        assert proxy.stats()["requests"] == {"GET": 7 + 2 * store.n_chunks}
        store.check_unchanged()
        assert len(proxy.log()) == 1


# ---------------------------------------------------------------------------------------- faults

TRANSIENT = {
    "refuse": 0.1,
    "reset": 0.05,
    "truncate": 0.05,
    "shorten": 0.05,
    "badbytes": 0.1,
    "error500": 0.05,
    "error503": 0.05,
    "slowdown": 0.05,
    "badupload": 0.1,
    "lostreply": 0.1,
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_transient_faults_change_no_byte(engine: str, s3: S3Server, bucket: str) -> None:
    rng = np.random.default_rng(3)
    X, y = rng.standard_normal((400, 16)).astype(np.float32), rng.standard_normal((400, 2))
    with FaultProxy(s3.endpoint, seed=5, faults=TRANSIENT, refuse_s=0.001) as proxy:
        options = {"engine": engine, **s3.options(proxy.endpoint)}
        url = f"s3://{bucket}/{engine}.zarr"
        ingest_store(X, url, y=y, storage_options=options, chunk_mb=0.002, shuffle=False)
        store = open_store(url, storage_options=options)
        for _ in range(2):
            parts = [store.read_chunk(i) for i in range(store.n_chunks)]
            np.testing.assert_array_equal(np.concatenate([a for a, _ in parts]), X)
            np.testing.assert_array_equal(np.concatenate([b for _, b in parts]), y)
        store.verify()
        faults = proxy.stats()["faults"]
    assert sum(faults.values()) > 100
    assert set(faults) == set(TRANSIENT)
    assert store.stored_chunks.traffic.retries > 0
    open_store(url, storage_options=s3.options()).verify()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_unavailable_storage_is_named(engine: str, s3: S3Server, bucket: str) -> None:
    url = make_store(s3, bucket)
    with FaultProxy(s3.endpoint) as proxy:
        options = {"engine": engine, "deadline_s": 0.5, **s3.options(proxy.endpoint)}
        store = open_store(url, storage_options=options)
        proxy.set(faults={"slowdown": 1.0}, max_consecutive=1000)
        with pytest.raises(
            StorageError, match=r"reading crc/c/0/0 of s3://.* failed \d+ times"
        ) as e:
            store.read_chunk(2)
        assert e.value.exit_code == 3
        assert not isinstance(e.value, StorageAccessError)


@pytest.mark.parametrize("engine", ENGINES)
def test_persistent_wrong_bytes_raise_corrupt_chunk(engine: str, s3: S3Server, bucket: str) -> None:
    url = make_store(s3, bucket)
    options = {"engine": engine, **s3.options()}
    store = open_store(url, storage_options=options)
    client = s3.client()
    with client.get_object(Bucket=bucket, Key="train.zarr/X/c/1/0")["Body"] as body:
        intact_body = bytearray(body.read())
    intact_body[100] ^= 4
    client.put_object(Bucket=bucket, Key="train.zarr/X/c/1/0", Body=bytes(intact_body))
    with pytest.raises(CorruptChunkError, match=r"chunk X/c/1/0 of s3://.*does not decode"):
        store.read_chunk(1)
    client.delete_object(Bucket=bucket, Key="train.zarr/y/c/2")
    with pytest.raises(CorruptChunkError, match="chunk y/c/2 is missing from s3://"):
        store.read_chunk(2)
    store.read_chunk(0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_altered_metadata_is_read_again_and_then_refused(
    engine: str, s3: S3Server, bucket: str
) -> None:
    url = make_store(s3, bucket)
    client, options = s3.client(), {"engine": engine, **s3.options()}
    fingerprint = open_store(url, storage_options=options).spec.fingerprint
    with FaultProxy(s3.endpoint, seed=2, faults={"badbytes": 0.4, "shorten": 0.3}) as proxy:
        for _ in range(5):
            proxy_options = {"engine": engine, **s3.options(proxy.endpoint)}
            assert open_store(url, storage_options=proxy_options).spec.fingerprint == fingerprint
        assert sum(proxy.stats()["faults"].values()) > 5
    with client.get_object(Bucket=bucket, Key="train.zarr/zarr.json")["Body"] as body:
        text = body.read().decode()
    changed = re.sub(r'"global_mean": [^,]+', '"global_mean": 5.0', text)
    assert changed != text
    client.put_object(Bucket=bucket, Key="train.zarr/zarr.json", Body=changed.encode())
    with pytest.raises(CorruptChunkError, match=r"zarr.json of s3://.*does not match its digest"):
        open_store(url, storage_options=options)


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("engine", ENGINES)
def test_missing_bucket_or_store_gives_one_sentence(
    engine: str, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"engine": engine, **s3.options()}
    with pytest.raises(StorageAccessError, match="refused: there is no such bucket"):
        open_store("s3://no-such-bucket-here/x", storage_options=options)
    with pytest.raises(StoreNotFoundError, match=f"no zarr store at s3://{bucket}/x"):
        open_store(f"s3://{bucket}/x", storage_options=options)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StorageAccessError, match="no S3 credentials were found"):
        open_store(
            f"s3://{bucket}/x", storage_options={"engine": engine, "endpoint_url": s3.endpoint}
        )
    dead_server_options = {**options, "endpoint_url": "http://127.0.0.1:9", "deadline_s": 0}
    with pytest.raises(StorageError, match=r"nothing listens at .*tries: 1"):
        open_store(f"s3://{bucket}/x", storage_options=dead_server_options)


@pytest.mark.parametrize(
    ("url", "options", "error", "message"),
    [
        ("gs://bucket/x", {"project": "p"}, MissingDependencyError, "install gcsfs"),
        ("gs://bucket/x", {"engine": "s3fs"}, ConfigError, 'use "obstore"'),
        ("az://container/x", {}, ConfigError, "Account must be specified"),
        ("abfs:///x", {}, ConfigError, "names no bucket; write abfs://"),
        ("s3://b/x", {"deadline_s": -1}, ConfigError, "must be seconds"),
    ],
)
def test_invalid_storage_options_are_refused(
    url: str, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_objects(url, storage_options=options)
    with pytest.raises(error, match=message):
        zarr_store(url, storage_options=options)


def test_s3fs_options_select_fsspec_engine(s3: S3Server, bucket: str) -> None:
    url = make_store(s3, bucket)
    plain = s3.options()
    for options, engine in (
        (plain, ObstoreEngine),
        ({**plain, "requester_pays": False, "region": "us-east-1"}, FsspecEngine),
    ):
        assert isinstance(open_objects(url, storage_options=options)._engine, engine)
        X, _ = open_store(url, storage_options=options).read_chunk(0)
        np.testing.assert_array_equal(X, open_store(url, storage_options=plain).read_chunk(0)[0])


@pytest.mark.slow
def test_obstore_reads_other_clouds(s3: S3Server) -> None:
    """Check Google's storage, which answers requests of S3 if they have no credentials."""
    s3.client().create_bucket(Bucket="plain")
    expected = open_store(make_store(s3, "plain"), storage_options=s3.options())
    for key, _ in open_objects("s3://plain", storage_options=s3.options()).list():
        s3.client().put_object_acl(Bucket="plain", Key=key, ACL="public-read")
    options = {"endpoint_url": s3.endpoint, "anon": True}
    objects = open_objects("gs://plain/train.zarr", storage_options=options)
    assert isinstance(objects._engine, ObstoreEngine)
    store = open_store("gs://plain/train.zarr", storage_options=options)
    assert store.spec.fingerprint == expected.spec.fingerprint
    np.testing.assert_array_equal(store.read_chunk(1)[0], expected.read_chunk(1)[0])
    with pytest.raises(FileNotFoundError, match="x is missing from gs://plain"):
        objects.get("x")
    with pytest.raises(StorageAccessError, match="no credentials were found"):
        open_objects("az://container/x", storage_options={"account_name": "a"}).get("y")


def test_repr_and_errors_hide_secrets(s3: S3Server, bucket: str) -> None:
    for engine in ENGINES:
        objects = open_objects(
            f"s3://{bucket}/x",
            storage_options={
                "engine": engine,
                "key": KEY,
                "secret": SECRET,
                "endpoint_url": "http://127.0.0.1:9",
                "deadline_s": 0,
            },
        )
        with pytest.raises(StorageError) as error:
            objects.get("a")
        store = ObjectsStore(objects)
        for text in (repr(objects), repr(store), str(store), str(error.value)):
            assert SECRET not in text
            assert KEY not in text


# ------------------------------------------------------------------------------------ a whole run


@pytest.mark.slow
def test_checkpoint_never_mixes_two_stores(s3: S3Server, bucket: str) -> None:
    config = RunConfig.from_tables(
        {
            "data": {
                "train": make_store(s3, bucket, rows=2000),
                "epochs": 3,
                "batch_size": 100,
                "storage_options": s3.options(),
            },
            "model": {"n_centers": 100, "bandwidth": 4.0},
            "solver": {"name": "block"},
            "run": {"run_dir": f"s3://{bucket}/run", "checkpoint_every": 5, "device": "cpu"},
        }
    )
    train_model(config.with_overrides({"data.epochs": 1, "run.run_dir": None}))
    steps: list[int] = []
    replaced = False

    def replace(record: dict[str, Any]) -> None:
        nonlocal replaced
        steps.append(record["step"])
        if not replaced:
            make_store(s3, bucket, rows=2000, overwrite=True, seed=1)
            replaced = True

    test = open_store(f"s3://{bucket}/train.zarr", storage_options=s3.options())
    with pytest.raises(DataError, match="was changed while it was in use") as error:
        train_model(config, test=ZarrSource(test), on_evaluation=replace)
    assert error.value.exit_code == 3
    location = RunDirectory(f"s3://{bucket}/run", storage_options=s3.options(), writable=False)
    with location:
        saved = location.load_latest()
    assert saved is not None
    assert 0 < saved.step <= steps[0]


# ---------------------------------------------------------------------- stopping, forks, caches


class SilentServer:
    """A server that accepts connections and never responds."""

    def __enter__(self) -> str:
        self._socket = socket.create_server(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *error: object) -> None:
        self._socket.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_stopped_reader_does_not_wait_for_silent_server(engine: str) -> None:
    stopped = threading.Event()
    with SilentServer() as endpoint:
        options = {"engine": engine, "key": KEY, "secret": SECRET, "endpoint_url": endpoint}
        objects = open_objects("s3://b/x", storage_options=options)
        threading.Timer(0.3, stopped.set).start()
        with pytest.raises(StorageError, match="was cancelled because its reader was closed"):
            objects.with_stop_event(stopped).get("a")
    assert not waiting._pending_requests


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_interrupted_request_is_not_completed_later(engine: str, s3: S3Server, bucket: str) -> None:
    code = f"""
import sys, time
from streamkern.filesystem.urls import open_objects
objects = open_objects("s3://{bucket}/x", storage_options={{**{s3.options()!r},
    "endpoint_url": sys.argv[1], "engine": "{engine}"}})
try:
    objects.put("late", b"1")
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.readline()
    time.sleep(3.0)  # longer than any pause between two attempts by then
"""
    with FaultProxy(s3.endpoint, faults={"error503": 1.0}, max_consecutive=1000) as proxy:
        child = subprocess.Popen(
            [sys.executable, "-c", code, proxy.endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            while not proxy.log():  # until a first attempt has failed
                assert child.poll() is None
                time.sleep(0.05)
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "interrupted\n"
            time.sleep(1.0)  # a request may have been on the wire before
            proxy.set(faults={})
            proxy.log()
            child.communicate("go on\n", timeout=60)
        finally:
            child.kill()
            child.communicate()
        assert proxy.log() == []
    assert open_objects(f"s3://{bucket}/x", storage_options=s3.options()).list() == []


@pytest.mark.parametrize("engine", ENGINES)
def test_forked_process_is_refused(engine: str, s3: S3Server, bucket: str) -> None:
    code = f"""
import multiprocessing, sys
from streamkern.filesystem.urls import open_objects
options = {{**{s3.options()!r}, "engine": "{engine}"}}
objects = open_objects("s3://{bucket}/x", storage_options=options)
objects.put("a", b"1")

def child(new, pipe):
    try:
        mine = open_objects("s3://{bucket}/x", storage_options=options) if new else objects
        pipe.send(bytes(mine.get("a")))
    except Exception as error:
        pipe.send(f"{{type(error).__name__}}: {{error}}")

for new in (False, True):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(new, theirs))
    process.start()
    print(ours.recv() if ours.poll(30) else "nothing")
    process.kill()
"""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=90
    )
    old, new = process.stdout.splitlines()
    assert old.startswith("StorageAccessError:")
    assert "spawn" in old
    if engine == "obstore":
        assert new.startswith("StorageAccessError:")
        assert "s3fs" in new
    else:
        assert new == "b'1'"


@pytest.mark.slow
def test_cache_drops_entries_of_replaced_store(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    url, cache = make_store(s3, bucket), Cache(tmp_path / "cache", 1 << 30)
    store = open_store(url, storage_options=s3.options(), cache=cache)
    chunk_before = store.read_chunk(0)
    original = {
        key: bytes(open_objects(url, storage_options=s3.options()).get(key))
        for key, _ in open_objects(url, storage_options=s3.options()).list()
    }
    make_store(s3, bucket, overwrite=True, seed=7)
    with pytest.raises(CorruptChunkError, match="not the chunk that was written there"):
        store.read_chunk(1)
    client = s3.client()
    for key, data in original.items():
        client.put_object(Bucket=bucket, Key=f"train.zarr/{key}", Body=data)
    restored = open_store(url, storage_options=s3.options()).read_chunk(1)
    cached = open_store(url, storage_options=s3.options(), cache=cache)
    for i, expected in ((0, chunk_before), (1, restored)):
        np.testing.assert_array_equal(cached.read_chunk(i)[0], expected[0])
        np.testing.assert_array_equal(cached.read_chunk(i)[1], expected[1])


def test_altered_checkpoint_is_read_again(s3: S3Server, bucket: str) -> None:
    arrays = {"a": np.random.default_rng(0).standard_normal((5000, 4))}
    with RunDirectory(f"s3://{bucket}/run", storage_options=s3.options()) as run:
        run.save(1, arrays, {"x": 1})
    with FaultProxy(s3.endpoint, seed=3, faults={"badbytes": 0.4, "shorten": 0.2}) as proxy:
        location = RunDirectory(
            f"s3://{bucket}/run", storage_options=s3.options(proxy.endpoint), writable=False
        )
        for _ in range(5):
            with location:
                saved = location.load_latest()
            assert saved is not None
            assert saved.skipped == ()
            np.testing.assert_array_equal(saved.arrays["a"], arrays["a"])
        assert sum(proxy.stats()["faults"].values()) > 3
