from __future__ import annotations

import io
import threading

import pytest

from streamkern.basics.progress import WIPE, Line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "PERIOD_S", 0.0)


def test_a_line_is_drawn_in_its_place_and_wiped_without_a_thread() -> None:
    before, terminal = threading.active_count(), Terminal()
    with Line(terminal) as line:
        assert not line.shown
        line.show("read", 1000, None)
        line.show("write", 1000, 2000)
        assert line.shown
        assert threading.active_count() == before
    assert terminal.getvalue().split(WIPE) == [
        "",
        "read 1,000 rows",
        "write 1,000 of 2,000 rows",
        "",
    ]


def test_a_long_line_stays_on_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    Line(terminal).draw("x" * 300)
    assert terminal.getvalue() == WIPE + "x" * 99


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_nothing_is_drawn_off_a_terminal_or_unasked(stream: io.StringIO) -> None:
    with Line(stream, enabled=not stream.isatty()) as line:
        line.draw("loss 1")
    assert stream.getvalue() == ""


def test_a_broken_terminal_ends_nothing() -> None:
    terminal = Terminal()
    line = Line(terminal)
    terminal.close()
    line.draw("loss 1")
    line.close()
    Line(terminal).draw("loss 1")
