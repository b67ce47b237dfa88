from __future__ import annotations

import io
import re
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.text import Progress, redact, size_text, table


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


# -- progress, tables --------------------------------------------------------------------------


def test_progress_draws_on_a_terminal_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(Progress, "_PERIOD_S", 0.0)
    before = threading.active_count()
    terminal, note = Terminal(), "loss 0.1235  [all] " + "x" * 50 + " end"
    with Progress(1000, start=100, stream=terminal) as progress:
        assert progress.enabled
        for done in range(100, 600, 50):
            progress.update(done, note)
        assert threading.active_count() == before
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()).replace("\r", "\n")
    drawn = [line for line in lines.split("\n") if note in line]
    assert [line for line in drawn if "55%" in line]
    assert max(map(len, drawn)) <= 100
    progress.update(1000)
    progress.close()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_stays_off(stream: io.StringIO) -> None:
    with Progress(10, enabled=not stream.isatty(), stream=stream) as progress:
        assert not progress.enabled
        progress.update(5, "loss 1")
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


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(90 * 2**10, "90 KiB"), (2**23, "8 MiB"), (2**70, "1.07e+09 TiB")]
)
def test_sizes_are_short(n_bytes: int, text: str) -> None:
    assert size_text(n_bytes) == text


def test_a_size_of_a_damaged_header_has_a_text() -> None:
    assert size_text(2**8000) == size_text(2**1000)
