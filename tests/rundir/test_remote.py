"""Check that run directories on disks and on object stores behave alike."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from streamkern.basics.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RunError,
    RunLockedError,
    StorageAccessError,
    StorageError,
)
from streamkern.cli import main
from streamkern.cli.run_info import is_run_directory, run_overview
from streamkern.ingest.ingest import ingest
from streamkern.rundir import checkpoint_format, checksums, lease
from streamkern.rundir.run_directory import RunDirectory, SavedGroup
from streamkern.rundir.run_storage import LocalFolder, ObjectFolder, RunStorage, open_folder
from streamkern.rundir.saver import AsyncSaver
from streamkern.train.loop import guard
from streamkern.train.saved_model import load_model
from streamkern.train.train import train
from tests.checkpoints import assert_is_state, meta, state
from tests.runs import (
    METHODS,
    STEPS,
    Array,
    array_source,
    arrays,
    assert_same_bits,
    final,
    finished,
    newest,
    process,
    settings,
    stream,
    train_to_end,
)
from tests.s3_server import KEY, SECRET, S3Server
from tests.traced_memory import traced_memory


@dataclass
class Place:
    """A new place for a run, and its files as they are stored."""

    url: str
    options: dict[str, Any]

    @cached_property
    def folder(self) -> RunStorage:
        return open_folder(self.url, self.options)

    def run(self, **more: Any) -> RunDirectory:
        return RunDirectory(self.url, storage_options=self.options, **more)

    def with_steps(self, *steps: int, keep: int = 3) -> Place:
        with self.run(keep=keep) as run:
            for step in steps:
                run.save(step, state(step), meta(step))
        return self

    def latest(self) -> SavedGroup | None:
        return self.run(writable=False).load_latest()

    def files(self, of: str = "") -> list[str]:
        """Return the names that contain `of` of all files, including files of arrays."""
        folder = self.folder
        if isinstance(folder, ObjectFolder):
            names = [key for key, _ in folder.objects.list()]
        else:
            root = Path(self.url)
            names = [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
        return sorted(name for name in names if of in name)

    def published(self) -> list[int]:
        """Return the steps whose manifest and files agree, and check that there are no others."""
        folder, steps, known_groups = self.folder, [], set()
        for name in self.files("checkpoints/"):
            if name.endswith(".json") and name.count("/") == 1:
                body = json.loads(folder.read(name))
                for file, (size, digest) in body["files"].items():
                    data = folder.read(f"checkpoints/{body['group']}/{file}")
                    assert (len(data), hashlib.sha256(data).hexdigest()) == (size, digest)
                    known_groups.add(f"checkpoints/{body['group']}/{file}")
                known_groups.add(name)
                steps.append(body["step"])
        assert known_groups == set(self.files("checkpoints/"))
        return sorted(steps)


# Local and obstore before a merge, where a test is marked to leave out every second one.
KINDS = ["local", "memory", "obstore", "s3fs"]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "run"), {})
    if request.param == "memory":
        return Place(f"memory://{tmp_path.name}/run", {})
    server: S3Server = request.getfixturevalue("s3")
    bucket = request.getfixturevalue("bucket")
    return Place(f"s3://{bucket}/a run", server.options() | {"engine": request.param})


@pytest.fixture
def bucket_place(s3: S3Server, bucket: str) -> Place:
    return Place(f"s3://{bucket}/run", s3.options())


# -- all storages ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
def test_every_bit_is_restored(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_format, "_CHUNK_BYTES", (1000, 2000))
    rng = np.random.default_rng(0)
    nans = np.array([0x7FF8000000000001, 0xFFF0000000000002, 1 << 63], np.uint64)
    saved = {
        "many": rng.standard_normal((700, 5)),
        "fortran": np.asfortranarray(np.arange(60.0).reshape(6, 10)),
        "strided": np.arange(60.0).reshape(6, 10)[::2, ::-3],
        "nans": nans.view(np.float64),
        "half": rng.standard_normal((3, 4, 5)).astype(np.float16),
        "flags": rng.random(9) < 0.5,
        "scalar": np.array(3 + 4j),
        "none": np.empty((0, 7), np.uint8),
    }
    with place.run() as run:
        run.save(3, saved, {"text": "\u00e9", "big": 2**70})
        run.save_setup(saved, {})
    assert len(place.files("/many/c/")) == 2 * 28
    for loaded in (place.latest(), place.run(writable=False).load_setup()):
        assert loaded is not None
        assert_same_bits(
            loaded.arrays, {k: np.ascontiguousarray(x).reshape(x.shape) for k, x in saved.items()}
        )
    assert repr(place.latest().meta) == repr({"text": "\u00e9", "big": 2**70})  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
def test_newest_checkpoints_are_kept(place: Place) -> None:
    with pytest.raises(ConfigError, match="keep=0"):
        place.run(keep=0)
    place.with_steps(1, 2, 5, 9, 30)
    assert place.published() == [5, 9, 30]
    place.with_steps(31)  # another life
    assert place.published() == [9, 30, 31]
    assert place.run(writable=False).steps() == [9, 30, 31]
    assert_is_state(place.latest(), 31)


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
def test_step_may_be_saved_again_but_not_decrease(place: Place) -> None:
    with place.run() as run:
        for value in (3.0, 4.0):
            run.save(2, {"x": np.array([value])}, {})
            assert newest(run).arrays["x"] == value
        for step in (1, -1, 10**12):
            with pytest.raises(CheckpointError, match=f"step={step} must be between"):
                run.save(step, {}, {})
    assert place.published() == [2]


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
def test_setup_is_replaced_atomically(place: Place) -> None:
    assert place.run(writable=False).load_setup() is None
    for value in (1.0, 2.0, 3.0):
        with place.run(keep=1) as run:
            run.save_setup({"H": np.full((4, 4), value)}, {"mu": value})
            run.save_setup({"H": np.full((4, 4), -value)}, {"mu": value})
            run.save(int(value), state(1), meta(1))
            saved = run.load_setup()
            assert saved is not None
            assert saved.meta == {"mu": value}
            assert saved.arrays["H"][0, 0] == -value
    manifest = [name for name in place.files("setup") if name.endswith("setup.json")][-1]
    group = json.loads(place.folder.read(manifest))["group"]
    place.folder.write(f"{group}/H/c/0/0", b"\0" * 132)
    with pytest.raises(CheckpointError, match=rf"setup .* is damaged .*{group}/H/c/0/0"):
        place.run(writable=False).load_setup()


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
def test_configuration_and_log_are_read_back(place: Place) -> None:
    with place.run() as run:
        assert run.read_config() is None
        assert not is_run_directory(place.url, place.options)
        run.write_config({"seed": 2**64, "shape": (1, 2)})
        with run.open_log() as log:
            log.write(step=1, epoch=0, samples=1)
            run.save(1, {}, {})
            assert [r["step"] for r in place.run(writable=False).read_log()[0]] == [1]
            log.write(step=2, epoch=0, samples=2)
    with place.run() as run, run.open_log() as log:
        log.write(step=3, epoch=0, samples=3)
    reader = place.run(writable=False)
    assert [r["step"] for r in reader.read_log()[0]] == [1, 2, 3]
    assert reader.read_config() == {"seed": 2**64, "shape": [1, 2]}
    assert is_run_directory(place.url, place.options)
    place.folder.write("run.json", b"{")
    with pytest.raises(RunError, match=r"run\.json is damaged \(.*restore it from a copy"):
        reader.read_config()


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
def test_truncated_log_is_reported(place: Place) -> None:
    """Check that lost lines are recognised by the newest checkpoint, and gaps by the numbers of the
    lines."""
    with place.run() as run, run.open_log() as log:
        for step in (1, 2, 3):
            log.write(step=step, epoch=0, samples=0)
            run.save(step, {}, {})
        log.write(step=4, epoch=0, samples=0)  # which no checkpoint knows of
    (name,) = place.files("jsonl")
    data, reader = place.folder.read(name), place.run(writable=False)
    starts = [0, *(at + 1 for at, byte in enumerate(data) if byte == 10)]
    cuts = {min(max(0, at + k), len(data)) for at in starts for k in (-2, -1, 0, 1)}
    for cut in range(len(data) + 1) if place.options == {} else sorted(cuts):
        place.folder.write(name, data[:cut])
        records, message = reader.read_log()
        full = sum(cut >= at - 1 for at in starts[1:])
        assert [r["step"] for r in records] == [1, 2, 3, 4][:full]
        lost_text = f"{3 - full} line(s) of the run log in {reader.location} are lost"
        assert message == (None if full >= 3 else lost_text)
    # Another life does not cover it, and neither does one that keeps no log.
    place.folder.write(name, data[: starts[1]])
    with place.run() as run:
        run.save(4, {}, {})
    with place.run() as run, run.open_log() as log:
        log.write(step=5, epoch=0, samples=0)
    records, message = reader.read_log()
    assert [r["step"] for r in records] == [1, 5]
    assert str(message).startswith("2 line(s) of the run log in")
    place.folder.delete(place.files("jsonl"))
    assert reader.read_log() == ([], f"3 line(s) of the run log in {reader.location} are lost")


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
def test_remains_of_killed_save_are_deleted(place: Place) -> None:
    place.with_steps(1, 2)
    folder = place.folder
    (group, *_) = [n for n in folder.names("checkpoints/") if n.endswith("2")]
    torn = group[:-1] + "3"
    if isinstance(folder, ObjectFolder):
        folder.write(f"checkpoints/{torn}/zarr.json", b"{}")
        folder.write(f"checkpoints/{group}-1/alpha/c/0/0", b"half")
    else:
        for name in (torn, f"{group}-1"):
            Path(place.url, "checkpoints", name).mkdir()
            Path(place.url, "checkpoints", name, "zarr.json").touch()
    with place.run():
        assert place.published() == [1, 2]


@pytest.mark.full(all_but_every=2)
def test_only_acquired_directory_can_write(place: Place) -> None:
    place.with_steps(1)
    for writable in (True, False):
        run = place.run(writable=writable)
        with pytest.raises(RunError, match="was not acquired"):
            run.save(2, {}, {})
        with pytest.raises(RunError, match="was not acquired"):
            run.write_config({})
    with place.run() as writer, place.run(writable=False) as reader:
        with pytest.raises(RunLockedError, match=f"written by process {os.getpid()} on .* since"):
            place.run().acquire()
        holder = reader.holder()
        assert holder is not None
        assert holder.startswith(f"process {os.getpid()} on ")
        writer.acquire()  # twice is once
        writer.save(2, state(2), meta(2))
        assert_is_state(reader.load_latest(), 2)
    assert reader.holder() is None
    with place.run():
        pass


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
def test_urls_of_other_contents_are_refused(place: Place) -> None:
    with pytest.raises(RunError, match="there is no run in"):
        place.run(writable=False).acquire()
    assert place.latest() is None

    def store(name: str) -> Any:
        local = isinstance(place.folder, LocalFolder)
        return Path(place.url, name) if local else place.folder.store(name, read_only=False)

    group = zarr.create_group(store("setup"))
    assert group.attrs.asdict() == {}
    files_before = place.files()
    with pytest.raises(RunError, match="holds 'setup' but no run of streamkern"):
        place.run().acquire()
    zarr.create_group(store(""))
    with pytest.raises(RunError, match="is a zarr store"):
        place.run().acquire()
    assert set(place.files()) == {*files_before, "zarr.json"}


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
def test_zarr_opens_a_checkpoint(place: Place) -> None:
    if place.url.startswith("memory:"):
        pytest.skip("needs a place that zarr finds by its URL; it has memory:// URLs of its own")
    place.with_steps(12)
    (name,) = [n for n in place.folder.names("checkpoints/") if not n.endswith(".json")]
    options = {k: v for k, v in place.options.items() if k != "engine"}
    url = f"{place.url}/checkpoints/{name}"
    opened = zarr.open_group(url, mode="r", storage_options=options or None)
    for key, x in state(12).items():
        np.testing.assert_array_equal(opened[key][...], x)  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
def test_check_before_manifest_can_stop_save(place: Place) -> None:
    """Check that the error of an earlier upload is raised, and that nothing is left behind."""

    def changed() -> None:
        assert len(place.files("/c/")) > len(files_before)  # the data is there
        raise DataError("the data changed during the run")

    with place.with_steps(1).run() as run, AsyncSaver(run) as saver:
        files_before = place.files("/c/")
        saver.submit(2, state(2), meta(2), changed)
        with pytest.raises(DataError, match="the data changed during the run"):
            saver.wait()
        assert saver.has_failed
        assert place.published() == [1]
        saver.submit(2, state(2), meta(2), lambda: None)
    assert place.published() == [1, 2]


def are_equal_json(a: bytes, b: bytes) -> bool:
    """Return whether both texts are JSON with the same values."""
    try:
        return bool(json.loads(a) == json.loads(b))
    except ValueError:
        return False


@pytest.fixture(scope="module")
def saved_place() -> Place:
    """Return a run with checkpoints of the steps 1 and 2."""
    return Place("memory://damage/two-steps", {}).with_steps(1, 2)


@pytest.mark.slow
@examples(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_never_loaded(saved_place: Place, data: st.DataObject) -> None:
    """Change every object of the newest checkpoint in every way."""
    full = {name: saved_place.folder.read(name) for name in saved_place.files()}
    names = [name for name in full if re.search(r"checkpoints/\d+-0*2[./]", name)]
    assert len(names) == 9
    name = data.draw(st.sampled_from(names))
    kind = data.draw(st.sampled_from(["flip", "truncate", "append", "delete"]))
    location = Place("memory://damage/copy", {})
    location.folder.delete(location.files())
    for key, value in full.items():
        location.folder.write(key, value)
    where = data.draw(st.integers(0, len(full[name]) * 8 - 1))
    damaged = bytearray(full[name])
    if kind == "flip":
        damaged[where // 8] ^= 1 << where % 8
    elif kind == "truncate":
        del damaged[where // 8 :]
    else:
        damaged += b"}" * (1 + where % 7)
    if kind == "delete":
        location.folder.delete([name])
    else:
        location.folder.write(name, bytes(damaged))
    saved = newest(location.run(writable=False))
    step = assert_is_state(saved)
    manifest = name.count("/") == 1
    is_deleted = manifest and kind == "delete"
    # A change in the white space of a manifest is none; anything in the data is.
    assert step == (2 if manifest and not is_deleted and are_equal_json(damaged, full[name]) else 1)
    assert len(saved.skipped) == (step == 1 and not is_deleted)


# -- object stores -----------------------------------------------------------------------------


class SpyEngine:
    """An engine that writes down the requests, lets them wait for each other, or fail."""

    keys_per_delete = 1000  # as S3 has it
    attempt_s = 60.0

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.requests: list[str] = []
        self.wanted = 0  # requests for chunks that wait for each other
        self.fail: Callable[[str], bool] = lambda request: False
        self.running = self.most_running = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def _record(self, what: str, key: str, *arguments: Any) -> Any:
        self.requests.append(f"{what} {key}")
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            give_up = time.monotonic() + 30
            while "/c/" in key and self.most_running < self.wanted and time.monotonic() < give_up:
                await asyncio.sleep(0.001)
            if self.fail(f"{what} {key}"):
                raise ConnectionResetError(f"no network for {key}")
            return await getattr(self._engine, what)(*arguments)
        finally:
            self.running -= 1

    async def get(self, key: str, start: int, stop: int | None) -> Any:
        return await self._record("get", key, key, start, stop)

    async def put(self, key: str, data: Any, create: bool) -> None:
        await self._record("put", key, key, data, create)

    async def delete(self, keys: Any) -> None:
        await self._record("delete", keys[0], keys)

    async def list(self, prefix: str) -> Any:
        return await self._record("list", prefix, prefix)


@pytest.fixture
def spied_run(tmp_path: Path) -> Iterator[tuple[RunDirectory, SpyEngine]]:
    with RunDirectory(f"memory://{tmp_path.name}/spied", keep=2) as run:
        folder: Any = run._folder
        folder.objects._engine = spy = SpyEngine(folder.objects._engine)
        folder.objects.deadline_s = 0.0
        yield run, spy
        spy.fail = lambda request: False


def test_save_and_load_make_few_requests(spied_run: tuple[RunDirectory, SpyEngine]) -> None:
    """Check that besides one request for each file, a save only checks the lease, lists the
    checkpoints and deletes old ones."""
    run, spy = spied_run
    for step in (1, 2):
        run.save(step, state(step), meta(step))
    with run.open_log() as log:
        log.write(step=2, epoch=0, samples=1)
        spy.requests.clear()
        run.save(3, state(3), meta(3))
    name = "checkpoints/000000000001-00000000000"
    files = [f"{name}3{file}" for file in (
        "/zarr.json", "/alpha/zarr.json", "/t/zarr.json", "/zeros/zarr.json", "/X_tmp/zarr.json",
        "/alpha/c/0/0", "/t/c", "/zeros/c/0/0", ".json",
    )]  # fmt: skip
    assert sorted(spy.requests) == sorted([
        "list checkpoints", *(f"put {file}" for file in files),
        "put log/000000000001-000001.jsonl", "list lease", "list lease",
        f"delete {name}1.json", f"list {name}1", f"delete {name}1/X_tmp/zarr.json",
    ])  # fmt: skip
    assert spy.requests.index("list lease") == spy.requests.index(f"put {files[-1]}") - 1
    assert spy.requests.index(f"delete {name}1.json") == len(spy.requests) - 3
    spy.requests.clear()
    assert_is_state(run.load_latest(), 3)
    assert sorted(spy.requests) == sorted(["list checkpoints", *(f"get {f}" for f in files)])


@pytest.mark.slow
def test_chunks_are_sent_concurrently_within_bounds(
    spied_run: tuple[RunDirectory, SpyEngine],
) -> None:
    """Check that eight chunks of 8 MiB are sent at once, and that each is copied at most twice."""
    run, spy = spied_run
    x = {"x": np.random.default_rng(0).random((8 << 20, 1)).reshape(-1, 16)}  # 64 MiB, twice
    spy.wanted = 8
    with traced_memory() as traced:
        run.save(1, {"x": x["x"], "y": x["x"]}, {})
    saving = traced.peak
    assert spy.most_running == 8
    spy.most_running = 0
    stored_bytes = 2 * x["x"].nbytes  # by the memory file system
    assert saving < stored_bytes + 2 * (64 << 20) + (24 << 20)
    assert_same_bits(newest(run).arrays, x | {"y": x["x"]})
    assert spy.most_running == 8


def test_storage_failure_is_not_a_damaged_checkpoint(
    spied_run: tuple[RunDirectory, SpyEngine],
) -> None:
    """Check that a run does not return to an older checkpoint because of the network."""
    run, spy = spied_run
    for step in (1, 2):
        run.save(step, state(step), meta(step))
    spy.fail = lambda request: request.startswith("get") and "2/alpha/c" in request
    with pytest.raises(StorageError, match=r"reading checkpoints/.*2/alpha/c/0/0"):
        run.load_latest()
    spy.fail = lambda request: False
    saved = newest(run)
    assert_is_state(saved, 2)
    assert saved.skipped == ()


@pytest.mark.parametrize("request_kind", ["put checkpoints", "2/alpha/c", "2.json", "list lease"])
def test_failed_save_keeps_previous_checkpoint(
    request_kind: str, spied_run: tuple[RunDirectory, SpyEngine]
) -> None:
    run, spy = spied_run
    run.save(1, state(1), meta(1))
    spy.fail = lambda request: request_kind in request
    with pytest.raises(CheckpointError, match=r"step 2 could not be written to memory://.*no netw"):
        run.save(2, state(2), meta(2))
    spy.fail = lambda request: False
    assert_is_state(run.load_latest(), 1)
    run.save(3, state(3), meta(3))
    location = Place(run.location, {})
    assert location.published() == [1, 3]


def test_undeletable_objects_are_reported(
    spied_run: tuple[RunDirectory, SpyEngine], caplog: pytest.LogCaptureFixture
) -> None:
    run, spy = spied_run
    spy.fail = lambda request: request.startswith("delete")
    for step in (1, 2, 3):
        run.save(step, state(step), meta(step))
    assert "could not be deleted: deleting checkpoints/" in caplog.text
    spy.fail = lambda request: False
    run.save(4, state(4), meta(4))
    assert Place(run.location, {}).published() == [3, 4]


def test_files_of_later_writer_are_not_deleted(tmp_path: Path) -> None:
    """Check a writer that was suspended after it took the run, and does not know of its
    successor."""
    location = Place(f"memory://{tmp_path.name}/run", {})
    location.folder.write("checkpoints/000000000009-000000000001/zarr.json", b"{}")
    location.folder.write("writer.json", checksums.seal("writer", {}))
    with location.run():
        assert location.files("000000000009") != []


def test_failing_log_does_not_fail_save(spied_run: tuple[RunDirectory, SpyEngine]) -> None:
    run, spy = spied_run
    spy.fail = lambda request: "log/" in request
    log = run.open_log()
    log.write(step=1, epoch=0, samples=1)
    run.save(1, state(1), meta(1))
    with pytest.warns(UserWarning, match="the run log could not be written"):
        log.close()
    assert_is_state(run.load_latest(), 1)


def test_run_may_move_between_disk_and_object_store(bucket_place: Place, tmp_path: Path) -> None:
    """Check that disks and object stores continue each other's runs, although file names differ."""
    local = Place(str(tmp_path / "run"), {}).with_steps(1, 2)
    copy_run(local, bucket_place)
    assert_is_state(bucket_place.latest(), 2)
    bucket_place.with_steps(3)
    assert bucket_place.run().steps() == [1, 2, 3]
    back = Place(str(tmp_path / "back"), {})
    copy_run(bucket_place, back)
    back.with_steps(4)
    assert back.published() == [2, 3, 4]
    assert_is_state(back.latest(), 4)


def copy_run(source: Place, target: Place) -> None:
    """Copy all objects of a run but its lock."""
    for name in source.files():
        if "lock" not in name:
            if "://" not in target.url:
                Path(target.url, name).parent.mkdir(parents=True, exist_ok=True)
            target.folder.write(name, source.folder.read(name))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
def test_inaccessible_urls_are_refused(engine: str, s3: S3Server) -> None:
    options = s3.options() | {"engine": engine}
    for call in (
        lambda: RunDirectory("s3://no-such-bucket/run", storage_options=options).acquire(),
        lambda: RunDirectory("s3://no-such-bucket/run", storage_options=options).load_latest(),
        lambda: run_overview("s3://no-such-bucket/run", options),
    ):
        with pytest.raises(StorageAccessError, match="s3://no-such-bucket/run was refused") as info:
            call()
        assert SECRET not in str(info.value)
    assert not is_run_directory("s3://no-such-bucket/run", options)


# -- training ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "WINDOW", 4)


def remote_settings(location: Place, **more: Any) -> Any:
    overrides = {"run.run_dir": location.url, "data.storage_options": location.options}
    return settings(None, **METHODS["eigenpro4"], **overrides, **more)


@cache
def uninterrupted_arrays() -> dict[str, Array]:
    with tempfile.TemporaryDirectory() as folder:
        finished(settings(Path(folder), **METHODS["eigenpro4"]), source=stream())
        return final(Path(folder))


def load_final(location: Place) -> dict[str, Array]:
    """Return the arrays of a finished run, of which no checkpoint was skipped."""
    saved = newest(location.run(writable=False))
    assert saved.skipped == ()
    assert saved.meta["position"]["done"]
    return saved.arrays


@pytest.mark.slow
def test_training_is_equal_on_every_storage(place: Place) -> None:
    result = finished(
        remote_settings(place, **{"run.evaluate_every": 4}),
        source=stream(),
        test=array_source(10, 5),
    )
    assert_same_bits(load_final(place), uninterrupted_arrays())
    assert [r["step"] for r in result.history] == [4, 8, 12, STEPS]
    overview = run_overview(place.url, place.options)
    assert overview["state"] == "finished"
    assert overview["evaluations"] == 4
    assert overview["run_dir"] == place.url
    model = load_model(place.url, threads=1, storage_options=place.options)
    X = arrays(7, 3)[0]
    np.testing.assert_array_equal(model.values(X), result.model.values(X))
    model.backend.close()
    for name in place.files():
        assert SECRET.encode() not in place.folder.read(name), name
    repeated = finished(remote_settings(place), source=stream(), test=array_source(10, 5))
    assert [r["step"] for r in repeated.history] == [4, 8, 12, STEPS]


def _die_when(location: Place, document: str, moment: str) -> None:
    """Train until a document is published, and kill this process before or after."""
    guard.WINDOW = 4
    write = ObjectFolder.write

    def write_and_die(self: ObjectFolder, name: str, data: bytes) -> None:
        if moment == "after" or not name.endswith(document):
            write(self, name, data)
        if name.endswith(document):
            os.kill(os.getpid(), signal.SIGKILL)

    ObjectFolder.write = write_and_die  # type: ignore[method-assign]
    train(remote_settings(location, **{"run.checkpoint_every": 4}), source=stream())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "moment"),
    [("setup.json", "before"), ("000000000008.json", "before"), ("000000000008.json", "after")],
)
def test_kill_while_publishing_leaves_consistent_run(
    document: str, moment: str, bucket_place: Place
) -> None:
    child = process(_die_when, bucket_place, document, moment)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    steps = bucket_place.run(writable=False).steps()
    assert steps == ([] if document == "setup.json" else [4] if moment == "before" else [4, 8])
    finished(remote_settings(bucket_place), source=stream())  # at once, and without a warning
    assert_same_bits(load_final(bucket_place), uninterrupted_arrays())
    assert bucket_place.published()[-1] == STEPS


@pytest.mark.slow
def test_random_kills_leave_resumable_run(bucket_place: Place) -> None:
    draw = random.Random(3)
    for _ in range(4):
        child = process(train_to_end, remote_settings(bucket_place, **{"run.checkpoint_every": 1}))
        time.sleep(draw.uniform(0.1, 1.2))
        child.kill()
        child.join(60)
        assert child.exitcode in (0, -signal.SIGKILL)
    finished(remote_settings(bucket_place), source=stream())
    assert_same_bits(load_final(bucket_place), uninterrupted_arrays())
    bucket_place.published()


def test_run_taken_over_by_another_process_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = Place(f"memory://{tmp_path.name}/run", {})
    other_runs: list[RunDirectory] = []

    def on_evaluation(record: dict[str, Any]) -> None:
        if record["step"] == 4:
            give_up = time.monotonic() + 30
            while location.run(writable=False).steps() != [3]:  # it is saved in the background
                assert time.monotonic() < give_up
            monkeypatch.setattr(lease, "_runs_here", lambda holder: False)
            other_runs.append(location.run())
            other_runs[0].acquire()

    config = remote_settings(location, **{"run.evaluate_every": 4, "run.checkpoint_every": 3})
    with pytest.raises(RunLockedError, match="was taken over by process") as caught:
        finished(config, source=stream(), test=array_source(10, 5), on_evaluation=on_evaluation)
    assert caught.value.exit_code == 3
    assert location.published() == [3]
    other_runs[0].close()
    finished(config, source=stream(), test=array_source(10, 5))
    assert_same_bits(load_final(location), uninterrupted_arrays())


@pytest.mark.slow
def test_commands_work_on_object_store(
    s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Check the commands with credentials from the environment."""
    for name, value in zip(("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"), (KEY, SECRET), strict=True):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    X, y = arrays()
    ingest(X, tmp_path / "train.zarr", y=y)
    url, store = f"s3://{bucket}/runs/first", str(tmp_path / "train.zarr")
    fast = "model.n_centers=20 model.bandwidth=3.0 data.batch_size=20 run.device=cpu run.threads=1"
    sets = [word for setting in fast.split() for word in ("--set", setting)]
    assert (
        main.run_command(["train", "--train", store, "--run-dir", url, "--memory", "1 GiB", *sets])
        == 0
    )
    assert f"the model is in {url}" in capsys.readouterr().out
    assert main.run_command(["info", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    assert main.run_command(["evaluate", url, store, "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == len(X)
    out = f"s3://{bucket}/predictions"
    assert main.run_command(["predict", url, store, out, "--device", "cpu"]) == 0
    assert f"{len(X)} rows predicted into {out}" in capsys.readouterr().out
