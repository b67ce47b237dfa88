"""Check the run log, in a file and in objects."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.errors import RunError
from streamkern.filesystem.objects import Objects
from streamkern.filesystem.urls import open_objects
from streamkern.rundir import run_log
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_log import (
    FileLines,
    ObjectLines,
    RunLog,
    part_keys,
    read_lines,
    read_log,
    read_parts,
)

# -- in a file ---------------------------------------------------------------------------------


def write_steps(path: Path, *steps: int) -> None:
    """Write one record for each step to a log in a file."""
    with RunLog(FileLines(path)) as log:
        for step in steps:
            log.write(step=step, epoch=0, samples=10 * step, loss=1 / step)


def test_log_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    start = datetime.now(UTC)
    write_steps(path, 1, 2)
    write_steps(path, 3)
    records = read_log(path)
    assert [r["step"] for r in records] == [1, 2, 3]
    assert records[1] | {"time": None} == {
        "time": None, "step": 2, "epoch": 0, "samples": 20, "loss": 0.5,
    }  # fmt: skip
    times = [datetime.fromisoformat(r["time"]) for r in records]
    assert all(t.tzinfo is not None for t in times)
    assert times == sorted(times)
    assert (times[0] - start).total_seconds() > -0.002
    assert read_log(tmp_path / "missing") == []


def test_any_value_is_written_as_strict_json(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    path = tmp_path / "log"
    with RunLog(FileLines(path)) as log:
        log.write(
            step=1, epoch=0, samples=2**60, loss=float("nan"), eta=np.float32(0.5),
            acc=np.array([1.0, np.inf]), store=Path("/x"), n=np.int64(3), ok=True, none=None,
            nested={"a": ({"b": -np.inf},)}, text="two\nlines",
        )  # fmt: skip
    (line,) = path.read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    del record["time"], record["crc32c"]
    assert record == {
        "line": 1, "step": 1, "epoch": 0, "samples": 2**60, "loss": "nan", "eta": 0.5,
        "acc": [1.0, "inf"], "store": "/x", "n": 3, "ok": True, "none": None,
        "nested": {"a": [{"b": "-inf"}]}, "text": "two\nlines",
    }  # fmt: skip


def test_secrets_are_not_logged(tmp_path: Path) -> None:
    with RunLog(FileLines(tmp_path / "log")) as log:
        log.write(
            step=0, epoch=0, samples=0, n_tokens=5, store="s3://K:HIDDEN@b/x?y=HIDDEN",
            options={"aws_secret_access_key": "HIDDEN", "credentials": {"a": "HIDDEN"}},
            places={"username": "HIDDEN", "pwd": "HIDDEN", "sas": "HIDDEN", "key": "HIDDEN"},
            error=f"{OSError('cannot read https://HIDDEN@h/x')}",
        )  # fmt: skip
    text = (tmp_path / "log").read_text()
    assert "HIDDEN" not in text
    assert json.loads(text)["n_tokens"] == 5


@given(cut=st.integers(0, 200), junk=st.sampled_from([b"", b"\0" * 9, b"\xff{", b"3"]))
def test_torn_last_line_is_repaired(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    write_steps(path, 1, 2)
    full = path.read_bytes()
    torn = full[: len(full) - cut % len(full)] + junk
    path.write_bytes(torn)
    lines = {line for line in full.split(b"\n") if line}
    *complete, tail = torn.split(b"\n")
    # The last character may be the remainder of a newline.
    complete += [line for line in (tail, tail[:-1]) if line in lines][:1]
    complete = [line for line in complete if line in lines]
    expected = [json.loads(line) for line in complete]
    assert read_log(path) == [
        {k: v for k, v in r.items() if k not in ("line", "crc32c")} for r in expected
    ]
    write_steps(path, 7)
    assert [r["step"] for r in read_log(path)] == [*(json.loads(r)["step"] for r in complete), 7]
    *rest, tail = path.read_bytes().split(b"\n")
    assert tail == b""
    assert all(isinstance(json.loads(line), dict) for line in rest)


def test_long_torn_last_line_is_repaired(tmp_path: Path) -> None:
    write_steps(tmp_path / "log", 1)
    with (tmp_path / "log").open("ab") as file:
        file.write(b'{"x": "' + b"y" * 200_000)
    write_steps(tmp_path / "log", 2)
    assert [r["step"] for r in read_log(tmp_path / "log")] == [1, 2]


def test_log_without_path_writes_nothing_and_invalid_path_raises(tmp_path: Path) -> None:
    with RunLog(None) as log:
        log.write(step=1, epoch=0, samples=1)
    log.close()
    with pytest.raises(RunError, match="cannot be opened: Is a directory"):
        RunLog(FileLines(tmp_path))
    with pytest.raises(RunError, match="cannot be read: Is a directory"):
        read_log(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_reported() -> None:
    with (
        RunLog(FileLines("/dev/full")) as log,
        pytest.raises(RunError, match="/dev/full: No space left on device"),
    ):
        log.write(step=1, epoch=0, samples=1)


def test_partially_written_line_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with RunLog(FileLines(tmp_path / "log")) as log:
        log.write(step=1, epoch=0, samples=1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
            with pytest.raises(RunError, match="only a part"):
                log.write(step=2, epoch=0, samples=1)
        log.write(step=3, epoch=0, samples=1)
    assert (tmp_path / "log").read_bytes().count(b"\n") == 2
    assert [r["step"] for r in read_log(tmp_path / "log")] == [1, 3]


def test_threads_share_a_log(tmp_path: Path) -> None:
    with RunLog(FileLines(tmp_path / "log")) as log:

        def write_many() -> None:
            for i in range(50):
                log.write(step=i, epoch=0, samples=0)

        threads = [threading.Thread(target=write_many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(r["step"] for r in read_log(tmp_path / "log")) == sorted([*range(50)] * 4)


# -- in objects --------------------------------------------------------------------------------


class Engine:
    """The engine of a store, which can be made to fail or to stop."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.puts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def put(self, key: str, data: Any, create: bool) -> None:
        await asyncio.to_thread(self.gate.wait, 30)
        if self.error is not None:
            raise self.error
        self.puts.append(key)
        await self._engine.put(key, data, create)


@pytest.fixture
def objects(request: pytest.FixtureRequest) -> Objects:
    store = open_objects(f"memory://runlog/{request.node.name}")
    store._engine, store.deadline_s = Engine(store._engine), 0.0
    return store


def read_steps(objects: Objects) -> list[int]:
    """Return the steps of the records of a log in objects."""
    records, damage = read_lines(read_parts(objects), "the log")
    assert damage is None
    return [record["step"] for record in records]


def add_steps(log: RunLog, *numbers: int, **fields: object) -> None:
    """Add one record for each step to a log."""
    for step in numbers:
        log.write(step=step, epoch=0, samples=0, **fields)


def test_object_log_keeps_order_of_writers_and_parts(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "PART_BYTES", 500)
    with RunLog(ObjectLines(objects, 2)) as log:
        add_steps(log, *range(10, 30))
    with RunLog(ObjectLines(objects, 10)) as log:
        add_steps(log, 30, text="x" * 2000)
        add_steps(log, 31)
    assert read_steps(objects) == [*range(10, 32)]
    keys = part_keys(objects)
    assert keys[0] == "log/000000000002-000001.jsonl"
    assert keys[-1] == "log/000000000010-000002.jsonl"
    assert all(size <= 500 + 24 for key, size in objects.list("log") if key < "log/000000000010")
    assert len(keys) > 4


def test_altered_log_objects_are_read_again(objects: Objects) -> None:
    with RunLog(ObjectLines(objects, 1)) as log:
        add_steps(log, *range(5))
    engine, gets = objects._engine, []
    get = engine.get

    async def altered(key: str, start: int, stop: int | None) -> bytes:
        data = bytearray(await get(key, start, stop))
        if not gets:  # a digit becomes another: the line would still be a record
            data[data.index(b'"step": 3') + 8] ^= 1
        gets.append(key)
        return bytes(data)

    engine.get = altered  # type: ignore[method-assign]
    assert read_steps(objects) == [*range(5)]
    assert len(gets) == 2


def test_flush_and_period_write_changed_parts(objects: Objects) -> None:
    engine: Any = objects._engine
    with RunLog(ObjectLines(objects, 1)) as log:
        add_steps(log, 1, 2)
        assert read_steps(objects) == []
        log.flush()
        log.flush()
        assert read_steps(objects) == [1, 2]
        assert len(engine.puts) == 1
        add_steps(log, 3)
    assert read_steps(objects) == [1, 2, 3]
    assert len(engine.puts) == 2
    with RunLog(ObjectLines(objects, 2, period_s=0.01)) as log:
        add_steps(log, 4)
        give_up = time.monotonic() + 30
        while len(engine.puts) == 2:  # files in memory cannot be listed while one is written
            assert time.monotonic() < give_up
            time.sleep(0.005)
    assert read_steps(objects) == [1, 2, 3, 4]


def test_full_log_object_is_not_rewritten(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "PART_BYTES", 300)
    engine: Any = objects._engine
    with RunLog(ObjectLines(objects, 1)) as log:
        for step in range(9):
            add_steps(log, step)
            log.flush()
    assert read_steps(objects) == [*range(9)]
    assert sorted(set(engine.puts)) == part_keys(objects)
    last_of_first = max(i for i, key in enumerate(engine.puts) if key == engine.puts[0])
    assert last_of_first < 5


def test_logging_never_waits_for_the_network(objects: Objects) -> None:
    engine: Any = objects._engine
    engine.gate.clear()
    with RunLog(ObjectLines(objects, 1, period_s=0.01)) as log:
        flushing = threading.Thread(target=log.flush)
        add_steps(log, 0)
        flushing.start()
        add_steps(log, *range(1, 50))  # would hang here
        assert engine.puts == []
        engine.gate.set()
        flushing.join(30)
    assert read_steps(objects) == [*range(50)]


def test_unwritable_log_gives_warning_and_is_retried(objects: Objects) -> None:
    engine: Any = objects._engine
    log = RunLog(ObjectLines(objects, 1))
    engine.error = PermissionError("forbidden")
    add_steps(log, 1)
    assert log.flush() == 0  # lines are stored, as a checkpoint will say
    with pytest.warns(UserWarning, match="the run log could not be written .*; the run goes on"):
        add_steps(log, 2)
    assert log.flush() == 0
    add_steps(log, 3)  # said once
    engine.error = None
    assert log.flush() == 3
    log.close()
    log.close()
    assert read_steps(objects) == [1, 2, 3]


def test_log_lost_at_close_gives_warning(objects: Objects) -> None:
    engine: Any = objects._engine
    log = RunLog(ObjectLines(objects, 1))
    add_steps(log, 1)
    engine.error = PermissionError("forbidden")
    with pytest.warns(UserWarning, match="could not be written"):
        log.close()


def test_log_is_copied_with_run(tmp_path: Path) -> None:
    """Copy a run from a disk to an object store and back; both continue."""
    objects = open_objects(f"memory://copied/{tmp_path.name}")

    def logged(location: str | Path, step: int) -> None:
        with RunDirectory(location) as run, run.open_log() as log:
            run.write_config({"name": "copied"})
            log.write(step=step, epoch=0, samples=0)
        records, damage = RunDirectory(location, writable=False).read_log()
        assert damage is None
        assert [record["step"] for record in records] == list(range(step + 1))

    logged(tmp_path / "one", 0)
    for name in ("run.json", "log.jsonl"):
        objects.put(name, (tmp_path / "one" / name).read_bytes())
    logged(f"memory://copied/{tmp_path.name}", 1)
    objects.delete(["log.jsonl"])
    objects.put("log/000000000000-000000.jsonl", (tmp_path / "one" / "log.jsonl").read_bytes())
    for key in [key for key, _ in objects.list() if key == "run.json" or key.startswith("log/")]:
        (tmp_path / "two" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "two" / key).write_bytes(bytes(objects.get(key)))
    logged(tmp_path / "two", 2)
