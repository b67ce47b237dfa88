"""Check the destination of progress output: a real terminal, a real pipe, and a notebook."""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamkern import KernelRegressor
from streamkern.basics.progress import (
    ERASE_LINE,
    NOTEBOOK,
    PIPE,
    RELAYED,
    TERMINAL,
    ProgressLine,
    Relay,
)

NO_PERIODS = dict.fromkeys((TERMINAL, NOTEBOOK, PIPE, RELAYED), 0.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgressLine, "PERIODS_S", NO_PERIODS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    now = SimpleNamespace(s=100.0)
    monkeypatch.undo()
    monkeypatch.setattr("streamkern.basics.progress.time.monotonic", lambda: now.s)
    yield now
    monkeypatch.undo()


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the output of a Jupyter kernel, whose streams are no terminals: one line for each
    change."""
    shown = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()

    def show(data: dict[str, str], **how: object) -> SimpleNamespace:
        shown.write(data["text/plain"] + "\n")
        return SimpleNamespace(update=show)

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=show))
    return shown


def test_line_is_redrawn_in_place_and_wiped_without_a_thread() -> None:
    n_threads_before, terminal = threading.active_count(), Terminal()
    with ProgressLine(terminal) as line:
        assert not line.has_shown
        line.show("read", 1000, None)
        line.show("write", 1000, 2000)
        assert line.has_shown
        assert threading.active_count() == n_threads_before
    assert terminal.getvalue().split(ERASE_LINE) == [
        "",
        "read 1,000 rows",
        "write 1,000 of 2,000 rows",
        "",
    ]


def test_long_line_is_cut_to_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    ProgressLine(terminal).draw("x" * 300)
    assert terminal.getvalue() == ERASE_LINE + "x" * 99


def test_pipe_gets_a_line_every_30_s(clock: SimpleNamespace) -> None:
    pipe = io.StringIO()
    with ProgressLine(pipe) as line:
        for clock.s in range(100, 200):
            line.draw(f"{clock.s - 100} %")
    assert pipe.getvalue() == "".join(f"streamkern: {k} %\n" for k in (30, 60, 90))


def test_notebook_shows_one_updated_line(notebook: io.StringIO) -> None:
    with ProgressLine(notebook) as line:
        for text in ("9 of 10", "10 of 10", "11"):
            line.draw(text)
    assert notebook.getvalue().split("\n") == ["9 of 10", "10 of 10", "11", "", ""]


def test_last_line_stays_if_drawn_or_requested(notebook: io.StringIO) -> None:
    for stream in (notebook, io.StringIO(), Terminal()):
        for requested, is_drawn in ((True, True), (True, False), ("auto", False), (False, False)):
            stream.seek(0)
            stream.truncate()
            with ProgressLine(stream, setting=requested) as line:
                if is_drawn:
                    line.draw("half")
                line.finish("trained")
                line.draw("later")
            last_line = stream.getvalue().replace(ERASE_LINE, "\n")
            assert last_line.splitlines()[-1:] == ["streamkern: trained"][: requested is True], (
                requested,
                last_line,
            )


@pytest.mark.parametrize(
    ("took", "requested", "always", "is_shown"),
    [
        (4, "auto", True, True),
        (2, "auto", True, False),
        (4, True, False, True),
        (2, True, False, False),
        (4, False, True, False),
    ],
)
def test_pipe_gets_last_line_after_3_s_of_work(
    took: int, requested: Any, always: bool, is_shown: bool, clock: SimpleNamespace
) -> None:
    pipe = io.StringIO()
    clock.s = 100
    with ProgressLine(pipe, setting=requested) as line:
        clock.s += took
        line.draw("half")
        line.finish("trained", always=always)
    assert pipe.getvalue() == "streamkern: trained\n" * is_shown, (took, requested)


def test_narrow_terminal_drops_last_parts_of_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "40%, epoch 2 of 3  3:00 min left  train mse 0.125  100 samples/s  waits for data 25%"
    for columns in range(3, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        terminal = Terminal()
        ProgressLine(terminal).draw(text)
        shown = terminal.getvalue().removeprefix(ERASE_LINE)
        assert len(shown) < columns
        assert shown in text[: len(shown)]
        if columns > 20:  # no part of it is cut
            assert text[len(shown) :].startswith("  ") or shown == text


def test_line_uses_width_of_its_own_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        ProgressLine(stream).draw("x" * 300)
        assert os.read(ours, 1000).decode() == ERASE_LINE + "x" * 49
    os.close(ours)


def test_stream_outside_kernel_is_not_a_notebook(notebook: io.StringIO) -> None:
    """Check IPython on a terminal, and a cell that redirects standard error."""
    pipe = io.StringIO()
    ProgressLine(pipe).draw("half")
    assert pipe.getvalue() == "streamkern: half\n"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_auto_progress_waits_until_work_takes_long(
    stream: io.StringIO, clock: SimpleNamespace
) -> None:
    first_s = 3.0 if stream.isatty() else 30.0
    with ProgressLine(stream, setting="auto") as line:
        for clock.s in (100.0, 100.0 + first_s - 0.1):
            line.draw("early")
        assert stream.getvalue() == ""
        clock.s = 100.0 + first_s
        line.draw("late")
    assert "late" in stream.getvalue()
    assert "early" not in stream.getvalue()


@pytest.mark.parametrize("requested", [False, "auto"])
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_progress_off_or_short_work_writes_nothing(
    kind: type[io.StringIO], requested: bool | str
) -> None:
    stream = kind()
    with ProgressLine(stream, setting=requested) as line, line.redraw_periodically(lambda: "setup"):
        line.draw("loss 1")
        line.close()
    assert stream.getvalue() == ""


def test_broken_terminal_raises_no_error() -> None:
    """Check that nothing more is written after the first failure, nor to a terminal that was closed
    before."""
    written: list[str] = []

    class Broken(Terminal):
        def write(self, text: str) -> int:
            written.append(text)
            raise BrokenPipeError

    line = ProgressLine(Broken())
    for text in ("loss 1", "loss 2"):
        line.draw(text)
    line.close()
    line.finish("done")
    assert written == [f"{ERASE_LINE}loss 1"]
    terminal, n_threads_before = Terminal(), threading.active_count()
    terminal.close()
    line = ProgressLine(terminal)
    line.draw("loss 1")
    with ProgressLine(terminal).redraw_periodically(lambda: "setup"):
        assert not line.is_due
    assert threading.active_count() == n_threads_before


def test_long_call_is_drawn_by_temporary_thread() -> None:
    n_threads_before, terminal, was_drawn = threading.active_count(), Terminal(), threading.Event()
    numbers = itertools.count()

    def text() -> str:
        number = next(numbers)
        if number == 2:
            was_drawn.set()
        return f"block {number}"

    with ProgressLine(terminal).redraw_periodically(text):
        assert was_drawn.wait(30)
    assert threading.active_count() == n_threads_before
    assert terminal.getvalue().split(ERASE_LINE)[1:3] == ["block 0", "block 1"]
    assert terminal.getvalue().endswith(ERASE_LINE)


def test_work_continues_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    is_done = False
    with ProgressLine(Terminal()).redraw_periodically(lambda: "setup"):
        is_done = True
    assert is_done


# ----------------------------------------------------------------------------------------- fits


def terminal_output(ends: tuple[int, int], patch: pytest.MonkeyPatch, verbose: Any) -> str:
    """Return the text at the first of two ends of a terminal or pipe; the other end is the standard
    error of a fit."""
    ours, theirs = ends
    parts: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # as Linux says that the last writer on a terminal left
            while part := os.read(ours, 1 << 16):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    rows = np.random.default_rng(0).normal(size=(640, 3))
    model = KernelRegressor(
        "laplace", bandwidth=1.0, solver="block", n_centers=20, batch_size=10, epochs=2,
        threads=1, verbose=verbose,
    )  # fmt: skip
    with os.fdopen(theirs, "w") as stream, patch.context() as within:
        within.setattr(sys, "stderr", stream)
        within.setenv("COLUMNS", "200")
        model.fit(rows, rows[:, 0] ** 2)
    reader.join()
    os.close(ours)
    return b"".join(parts).decode()


STEP_LINE = (
    r"\d+%, epoch [12] of 2  [\d:]+ (s|min) left  (train mse \S+  )?\S+ samples/s"
    r"(  waits for data \d+%)?(  reads \S+ MB/s)?"
)
LAST_LINE = (
    r"streamkern: trained Laplace\(bandwidth=1\) with 20 centers, solver block(, ridge \S+)?  "
    r"2 epochs in [\d.]+ s  train mse \S+"
)
SETUP_LINE = r"setup: .+  \(\d+ s so far\)"


def test_terminal_shows_setup_and_steps_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_line, *drawn, last_line = terminal_output(pty.openpty(), monkeypatch, 1).split(ERASE_LINE)
    assert first_line == ""
    assert re.fullmatch(LAST_LINE, last_line.strip())
    kinds = [
        "setup"
        if re.fullmatch(SETUP_LINE, text)
        else "step"
        if re.fullmatch(STEP_LINE, text)
        else text
        for text in drawn
        if text
    ]
    assert set(kinds) == {"setup", "step"}
    assert kinds == sorted(kinds)
    assert drawn[-1].startswith("100%, epoch 2 of 2  0 s left")


def test_terminal_shows_nothing_for_a_short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgressLine, "SHORT_WORK_S", 1000.0)
    assert terminal_output(pty.openpty(), monkeypatch, "auto") == ""


def test_pipe_shows_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    *lines, end = terminal_output(os.pipe(), monkeypatch, 1).split("\n")
    assert end == ""
    *lines, last_line = lines
    assert all(re.fullmatch(f"streamkern: ({SETUP_LINE}|{STEP_LINE})", line) for line in lines), (
        lines
    )
    assert "epoch 2 of 2  0 s left" in lines[-1]
    assert re.fullmatch(LAST_LINE, last_line)


def test_relayed_line_is_sent_once_a_second(clock: SimpleNamespace) -> None:
    """Check that the line is sent about once a second, and when it must be wiped."""
    reported: list[str] = []
    with ProgressLine(setting=Relay(reported.append)) as line:
        for text in ("one", "two"):
            line.draw(text)
        clock.s += 1.0
        line.draw("three")
    assert reported == ["one", "three", ""]
