from __future__ import annotations

import io
import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.errors import RunError
from streamkern.report import Progress, RunLog, Timers, read_log, redact, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# -- redact ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/a?b@c", "/data/a?b@c"),
        ("s3://bucket/train.zarr", "s3://bucket/train.zarr"),
        ("s3://bucket/user@home/x", "s3://bucket/user@home/x"),
        ("s3://KEY:SECRET@bucket/x", "s3://bucket/x"),
        ("s3://KEY:SEC/RET+@bucket/x", "s3://bucket/x"),
        ("https://SECRET@host:9000/x", "https://host:9000/x"),
        ("https://host/x?X-Amz-Signature=SECRET#SECRET", "https://host/x"),
        ("https://host/x#SECRET", "https://host/x"),
        ("simplecache::s3://K:SECRET@bucket/x", "simplecache::s3://bucket/x"),
        ("could not open s3://K:SECRET@b/x, retried", "could not open s3://b/x, retried"),
    ],
)
def test_redact(text: str, shown: str) -> None:
    assert redact(text) == shown


SECRETS = st.text(st.characters(codec="ascii", categories=("L", "N"), include_characters="/+=?#"))


@given(key=SECRETS, secret=SECRETS)
def test_no_secret_passes(key: str, secret: str) -> None:
    marked = f"<{secret}>"
    for url in (f"s3://{key}:{marked}@bucket/path", f"https://host/path?{key}={marked}"):
        assert marked not in redact(url)
        assert marked not in redact(f"failed at {url} and {url}")


# -- the run log -------------------------------------------------------------------------------


def write(path: Path, *steps: int) -> None:
    with RunLog(path) as log:
        for step in steps:
            log.write(step=step, epoch=0, samples=10 * step, loss=1 / step)


def test_records_come_back(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    before = datetime.now(UTC)
    write(path, 1, 2)
    write(path, 3)
    records = read_log(path)
    assert [r["step"] for r in records] == [1, 2, 3]
    assert records[1] | {"time": None} == {
        "time": None, "step": 2, "epoch": 0, "samples": 20, "loss": 0.5,
    }  # fmt: skip
    times = [datetime.fromisoformat(r["time"]) for r in records]
    assert all(t.tzinfo is not None for t in times)
    assert times == sorted(times)
    assert (times[0] - before).total_seconds() > -0.002
    assert read_log(tmp_path / "missing") == []


def test_any_value_makes_a_strict_line(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    path = tmp_path / "log"
    with RunLog(path) as log:
        log.write(
            step=1, epoch=0, samples=2**60, loss=float("nan"), eta=np.float32(0.5),
            acc=np.array([1.0, np.inf]), store=Path("/x"), n=np.int64(3), ok=True, none=None,
            nested={"a": ({"b": -np.inf},)}, text="two\nlines",
        )  # fmt: skip
    (line,) = path.read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    del record["time"]
    assert record == {
        "step": 1, "epoch": 0, "samples": 2**60, "loss": "nan", "eta": 0.5,
        "acc": [1.0, "inf"], "store": "/x", "n": 3, "ok": True, "none": None,
        "nested": {"a": [{"b": "-inf"}]}, "text": "two\nlines",
    }  # fmt: skip


def test_secrets_do_not_reach_the_log(tmp_path: Path) -> None:
    with RunLog(tmp_path / "log") as log:
        log.write(
            step=0, epoch=0, samples=0, n_tokens=5, store="s3://K:HIDDEN@b/x?y=HIDDEN",
            options={"aws_secret_access_key": "HIDDEN", "credentials": {"a": "HIDDEN"}},
            error=f"{OSError('cannot read https://HIDDEN@h/x')}",
        )  # fmt: skip
    text = (tmp_path / "log").read_text()
    assert "HIDDEN" not in text
    assert json.loads(text)["n_tokens"] == 5


@given(cut=st.integers(0, 200), junk=st.sampled_from([b"", b"\0" * 9, b"\xff{", b"3"]))
def test_a_torn_tail_is_repaired(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    write(path, 1, 2)
    whole = path.read_bytes()
    torn = whole[: len(whole) - cut % len(whole)] + junk
    path.write_bytes(torn)
    complete = [r for r in torn.split(b"\n") if r in whole.split(b"\n") and r]
    assert read_log(path) == [json.loads(r) for r in complete]
    write(path, 7)
    assert [r["step"] for r in read_log(path)] == [*(json.loads(r)["step"] for r in complete), 7]
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert all(isinstance(json.loads(line), dict) for line in lines)


def test_a_long_torn_tail(tmp_path: Path) -> None:
    write(tmp_path / "log", 1)
    with (tmp_path / "log").open("ab") as file:
        file.write(b'{"x": "' + b"y" * 200_000)
    write(tmp_path / "log", 2)
    assert [r["step"] for r in read_log(tmp_path / "log")] == [1, 2]


def test_no_path_logs_nothing_and_a_bad_one_says_so(tmp_path: Path) -> None:
    with RunLog(None) as log:
        log.write(step=1, epoch=0, samples=1)
    log.close()
    with pytest.raises(RunError, match="can not be opened: Is a directory"):
        RunLog(tmp_path)
    with pytest.raises(RunError, match="can not be read: Is a directory"):
        read_log(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_says_so() -> None:
    with (
        RunLog("/dev/full") as log,
        pytest.raises(RunError, match="/dev/full: No space left on device"),
    ):
        log.write(step=1, epoch=0, samples=1)


def test_a_half_written_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with RunLog(tmp_path / "log") as log:
        log.write(step=1, epoch=0, samples=1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
            with pytest.raises(RunError, match="only a part"):
                log.write(step=2, epoch=0, samples=1)
        log.write(step=3, epoch=0, samples=1)
    assert (tmp_path / "log").read_bytes().count(b"\n") == 2
    assert [r["step"] for r in read_log(tmp_path / "log")] == [1, 3]


def test_threads_share_a_log(tmp_path: Path) -> None:
    with RunLog(tmp_path / "log") as log:

        def write_many() -> None:
            for i in range(50):
                log.write(step=i, epoch=0, samples=0)

        threads = [threading.Thread(target=write_many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(r["step"] for r in read_log(tmp_path / "log")) == sorted([*range(50)] * 4)


# -- timers, progress, tables ------------------------------------------------------------------


def test_timers_add_up_also_when_the_body_raises() -> None:
    ticks = iter([0.0, 1.0, 10.0, 12.5, 20.0, 21.0])
    timers = Timers(clock=lambda: next(ticks))
    with timers("kernel"):
        pass
    with pytest.raises(KeyError), timers("kernel"):
        raise KeyError
    with timers("save"):
        pass
    timers.add("save", 4.0)
    assert timers.seconds == {"kernel": 3.5, "save": 5.0}
    assert timers.entries == {"kernel": 2, "save": 2}


def test_progress_draws_on_a_terminal_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(Progress, "_PERIOD_S", 0.0)
    before = threading.active_count()
    terminal = Terminal()
    with Progress(1000, start=100, stream=terminal) as progress:
        assert progress.enabled
        for done in range(100, 600, 50):
            progress.update(done, loss=0.123456, stall_share=0.02)
        assert threading.active_count() == before
    text = terminal.getvalue()
    assert "samples/s" in text
    assert "loss 0.1235" in text
    assert "stall 2%" in text
    assert "55%" in text
    progress.update(1000)
    progress.close()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_stays_off(stream: io.StringIO) -> None:
    with Progress(10, enabled=not stream.isatty(), stream=stream) as progress:
        assert not progress.enabled
        progress.update(5, loss=1.0)
    assert stream.getvalue() == ""


def test_progress_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "_PERIOD_S", 0.0)
    terminal = Terminal()
    progress = Progress(10, stream=terminal)
    terminal.close()
    progress.update(5)
    progress.update(6)
    progress.close()
    assert not Progress(10, stream=terminal).enabled


def test_table() -> None:
    rows = [
        {"stage": "kernel", "seconds": 12.34567, "n": 3},
        {"stage": "save s3://k:s@b/x", "seconds": np.float64(0.5)},
    ]
    assert table(rows, ["stage", "seconds", "n"]).split("\n") == [
        "stage          seconds  n",
        "-------------  -------  -",
        "kernel           12.35  3",
        "save s3://b/x      0.5",
    ]
    assert table([], ["a"]) == "a\n-"
