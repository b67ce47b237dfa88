"""Run workloads on object storage that fails permanently or often."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import streamkern as sk
from benchmarks import chaos, chaos_workloads
from streamkern.basics.errors import (
    CorruptChunkError,
    DataError,
    StorageAccessError,
    StreamkernError,
)
from streamkern.cli.console import explain
from streamkern.cli.main import run_command as cli
from streamkern.cli.run_info import run_overview
from streamkern.filesystem.urls import open_objects
from tests.fault_proxy import FAULTS, FaultProxy
from tests.s3_server import KEY, SECRET, S3Server

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/status")


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "only"),
    [("obstore", ["read", "list", "train"]), ("s3fs", ["ingest", "checkpoint", "predict"])],
)
def test_workloads_survive_storage_faults(
    engine: str, only: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run every workload by one engine or the other; killed ones have two processes."""
    monkeypatch.setattr(chaos_workloads, "KILLS", 1)
    report = chaos.chaos(1, engines=[engine], only=only, seed=5, mixes=chaos.MIXES[1:])
    assert report["wrong"] == []
    assert report["workloads"] == len(only)
    assert report["faults_total"] > 150
    assert report["connections_left"] == 0


@pytest.mark.full
@linux
def test_ten_thousand_faults_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    assert chaos.main(["--faults", "10000", "--json", str(path)]) == 0
    output = json.loads(path.read_text())
    assert output["faults_total"] >= 10_000
    assert output["faults"].keys() == set(FAULTS)


# -- single requests -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("engine", chaos.ENGINES)
def test_many_keys_are_deleted_despite_partial_failures(
    engine: str, s3: S3Server, bucket: str
) -> None:
    keys = [f"{i:03d}" for i in range(40)]
    with FaultProxy(s3.endpoint, seed=1, faults={"error503": 0.3}) as proxy:
        options = {"engine": engine, "deadline_s": 20, **s3.options(proxy.endpoint)}
        objects = open_objects(f"s3://{bucket}/x", storage_options=options)
        for key in keys:
            objects.put(key, b"1")
        objects.delete(keys)
        assert objects.list() == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", chaos.ENGINES)
def test_expired_credentials_are_detected_without_a_body(
    engine: str, s3: S3Server, bucket: str
) -> None:
    """Check the answer to HEAD, which has no body and so no error code."""
    with FaultProxy(s3.endpoint, faults={"expired": 1.0}, max_consecutive=1) as proxy:
        options = {"engine": engine, **s3.options(proxy.endpoint)}
        objects = open_objects(f"s3://{bucket}/x", storage_options=options)
        objects.put("a", b"123")
        for _ in range(3):
            assert objects.stat("a")[0] == 3
        proxy.set(max_consecutive=1000)
        with pytest.raises(StorageAccessError, match=r"looking up a of .* have expired"):
            objects.stat("a")


@pytest.mark.slow
@pytest.mark.parametrize("engine", chaos.ENGINES)
def test_create_succeeds_although_reply_is_altered(engine: str, s3: S3Server, bucket: str) -> None:
    faults = {"lostreply": 0.5, "badbytes": 0.3, "shorten": 0.1}
    with FaultProxy(s3.endpoint, seed=1, faults=faults) as proxy:
        options = {"engine": engine, **s3.options(proxy.endpoint)}
        objects = open_objects(f"s3://{bucket}/x", storage_options=options)
        for i in range(8):
            assert objects.create(f"{i}", b"ours %d" % i)
            assert not objects.create(f"{i}", b"theirs %d" % i)
        assert Counter(proxy.stats()["faults"])["badbytes"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("engine", chaos.ENGINES)
def test_concurrent_expired_credentials_are_reloaded_once(
    engine: str, s3: S3Server, bucket: str
) -> None:
    keys = [f"{i}" for i in range(32)]
    with FaultProxy(s3.endpoint) as proxy:
        options = {"engine": engine, **s3.options(proxy.endpoint)}
        objects = open_objects(f"s3://{bucket}/x", storage_options=options)
        for key in keys:
            objects.put(key, key.encode())
        proxy.set(faults={"expired": 1.0}, max_consecutive=1)
        assert [bytes(data) for data in objects.get_many(keys)] == [k.encode() for k in keys]
        # A request that was slow to start may see the old ones expire a second time.
        assert 1 <= objects._renewals.count < len(keys) / 2


# -- permanent faults ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> chaos_workloads.Truth:
    return chaos_workloads.make_truth(tmp_path_factory.mktemp("truth"))


@dataclass
class Scene:
    """A run on S3 through a proxy, and the data it reads, in a bucket of its own."""

    s3: S3Server
    proxy: FaultProxy
    truth: chaos_workloads.Truth
    bucket: str
    data: str
    options: dict[str, Any]

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/run"

    def tables(self) -> dict[str, dict[str, Any]]:
        return chaos_workloads.run_tables({"train": f"s3://{self.data}/train.zarr"}, self.url)

    def config(self, **more: Any) -> sk.RunConfig:
        overrides = {"data.storage_options": self.options, **more}
        return sk.RunConfig.from_tables(self.tables()).with_overrides(overrides)

    def upload(self, key: str) -> None:
        """Upload one object of the data, or all objects below a key."""
        path = self.truth.folder / key
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                name = file.relative_to(self.truth.folder).as_posix()
                self.s3.client().put_object(Bucket=self.data, Key=name, Body=file.read_bytes())

    def assert_finished(self) -> None:
        arrays = chaos_workloads.last_arrays(self.url, self.options)
        assert arrays.keys() == self.truth.weights.keys()
        assert [k for k in arrays if arrays[k].tobytes() != self.truth.weights[k].tobytes()] == []


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, s3: S3Server, bucket: str, truth: chaos_workloads.Truth
) -> Iterator[Scene]:
    with FaultProxy(s3.endpoint) as proxy:
        options = {"engine": request.param, "deadline_s": 2, **s3.options(proxy.endpoint)}
        new_scene = Scene(s3, proxy, truth, bucket, s3.make_bucket(), options)
        new_scene.upload("train.zarr")
        yield new_scene


CHUNK = "train.zarr/X/c/17/0"


def lose_chunk(scene: Scene) -> None:
    scene.s3.client().delete_object(Bucket=scene.data, Key=CHUNK)


def alter_chunk(scene: Scene) -> None:
    data = bytearray((scene.truth.folder / CHUNK).read_bytes())
    data[1000] ^= 1
    scene.s3.client().put_object(Bucket=scene.data, Key=CHUNK, Body=bytes(data))


def lose_bucket(scene: Scene) -> None:
    client = scene.s3.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=scene.data):
        keys = [{"Key": entry["Key"]} for entry in page["Contents"]]
        client.delete_objects(Bucket=scene.data, Delete={"Objects": keys})
    client.delete_bucket(Bucket=scene.data)


def fail(scene: Scene) -> None:
    scene.proxy.set(faults={"slowdown": 1.0}, keys=f"/{scene.data}/", max_consecutive=10**9)


def repair(scene: Scene) -> None:
    scene.proxy.set(faults={})
    names = [bucket["Name"] for bucket in scene.s3.client().list_buckets()["Buckets"]]
    if scene.data not in names:
        scene.s3.client().create_bucket(Bucket=scene.data)
        scene.upload("train.zarr")
    scene.upload(CHUNK)


@pytest.mark.full
@pytest.mark.parametrize(
    ("scene", "failure", "pattern"),
    [
        ("obstore", lose_chunk, r"chunk X/c/17/0 is missing from s3://\S+/train\.zarr"),
        ("s3fs", alter_chunk, r"chunk X/c/17/0 of s3://\S+/train\.zarr does not decode"),
        ("s3fs", lose_bucket, r"was refused: .*no such bucket|was deleted while it was in use"),
        ("obstore", fail, r"reading \S+ of s3://\S+\.zarr failed \d+ times in \d+ s: .*SlowDown"),
    ],
    indirect=["scene"],
)
def test_data_lost_during_a_run_are_reported_and_run_resumes(
    scene: Scene, failure: Callable[[Scene], None], pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check the message, that the run can be resumed, and that it ends with the same bits after a
    repair."""

    def on_evaluation(record: dict[str, Any]) -> None:
        if record["step"] == 20:  # two epochs are read ahead, the third is not
            failure(scene)

    data = {"data.epochs": 3, "run.checkpoint_every": 8}
    test = sk.ZarrSource(scene.truth.folder / "train.zarr")
    config = scene.config(**data)
    with pytest.raises(StreamkernError) as caught:
        sk.train_model(config, test=test, on_evaluation=on_evaluation)
    # What is gone is noticed by a read or before a checkpoint, whichever comes first.
    expected_errors = (OSError, DataError) if "deleted" in pattern else OSError
    assert isinstance(caught.value, CorruptChunkError if "chunk" in pattern else expected_errors)
    assert explain(caught.value, str) == 3
    message = capsys.readouterr().err
    assert re.search(pattern, message)
    assert KEY not in message
    assert SECRET not in message
    overview = run_overview(scene.url, scene.options)
    assert overview["state"] == "stopped; the same command again resumes it"
    assert overview["step"] >= 8
    repair(scene)
    sk.train_model(config, test=test).model.backend.close()
    local = scene.truth.folder / "three"
    if not local.exists():
        local_data = {
            "data.train": str(scene.truth.folder / "train.zarr"),
            "data.storage_options": {},
        }
        local_data = {**data, **local_data, "run.run_dir": str(local)}
        sk.train_model(scene.config(**local_data)).model.backend.close()
    expected = chaos_workloads.last_arrays(str(local), None)
    arrays = chaos_workloads.last_arrays(scene.url, scene.options)
    assert [k for k in expected if arrays[k].tobytes() != expected[k].tobytes()] == []


@pytest.mark.full
@pytest.mark.parametrize("scene", chaos.ENGINES, indirect=True)
def test_refused_checkpoint_write_exits_3_and_run_resumes(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the command ends with exit code 3, and that the same command then reaches the
    end."""
    command = ["train", f"--train=s3://{scene.data}/train.zarr"]
    for name, table in scene.tables().items():
        command += [f"--set={name}.{key}={toml(value)}" for key, value in table.items()]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", scene.options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", scene.options["secret"])
    plain = {k: v for k, v in scene.options.items() if k not in ("key", "secret")}
    command += [f"--storage-option={k}={v}" for k, v in plain.items()]
    scene.proxy.set(faults={"expired": 1.0}, keys=r"checkpoints/[\d-]+-0*12[./]")
    scene.proxy.set(max_consecutive=10**9)
    assert cli(command) == 3
    message = capsys.readouterr().err
    assert "the checkpoint of step 12 could not be written to s3://" in message
    assert re.search(
        r"writing checkpoints/\S+12/\S+ of s3://\S+/run: the credentials have ", message
    )
    assert SECRET not in message
    scene.proxy.set(faults={})
    assert cli(command) == 0
    scene.assert_finished()


def toml(value: Any) -> str:
    """Return a value in the notation of a run file."""
    return json.dumps(value).replace('":', '" =')
