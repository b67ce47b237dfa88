"""A progress line on a terminal, in a notebook, in a pipe, or relayed to another process."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final, Self, TextIO

Progress = Callable[[str, int, int | None], None]
"""Called with the action ("read", "write"), the rows done, and their total number, if known."""

ERASE_LINE = "\r\x1b[K"  # terminal escape: to the start of the line, and erase it
TERMINAL: Final = "terminal"
NOTEBOOK: Final = "notebook"
PIPE: Final = "pipe"
RELAYED: Final = "relayed"


class Relay:
    """Replacement for a stream, for a line that another process draws.

    send : called with the text of the line about once a second, and with "" to erase it
    """

    def __init__(self, send: Callable[[str], Any]) -> None:
        self.write = send

    def flush(self) -> None:
        """Do nothing: no text is buffered."""


ProgressSetting = bool | str | Relay
"""True or False: draw a line or not; "auto": draw one if the work takes more than 3 s; a `Relay`:
send the line to it."""


class ProgressLine:
    """One line, redrawn on a terminal or in a notebook; in a pipe, a new line from time to time.

    Calls of its methods draw the line; only `redraw_periodically` uses a thread. If the stream
    fails, nothing is drawn any more, and the work continues. In a notebook the line is a single
    output that is updated, and a program that runs the notebook saves only its last text.

    PERIODS_S : seconds between two drawings, by kind of the stream; in a pipe at least so many, and
        a tenth of the time since the start
    SHORT_WORK_S : seconds of work below which the setting "auto" draws nothing
    has_shown : whether `show` was called
    """

    PERIODS_S: ClassVar = {TERMINAL: 0.1, NOTEBOOK: 1.0, PIPE: 30.0, RELAYED: 1.0}
    SHORT_WORK_S = 3.0

    def __init__(self, stream: TextIO | None = None, *, setting: ProgressSetting = True) -> None:
        """Create a line without drawing it. In a pipe, the first text comes after a full period.

        stream : where to draw; default: standard error
        """
        target = setting if isinstance(setting, Relay) else sys.stderr if stream is None else stream
        self._stream: TextIO | Relay | None = None  # None: nothing is drawn
        self._width = 0  # of the text drawn last
        self._began = time.monotonic()
        self.has_shown = False
        self._drawn = False
        self._display: Any = None
        with contextlib.suppress(Exception):
            if setting:
                self._setting = setting
                self._kind = _stream_kind(target)
                delay_s = self.SHORT_WORK_S if setting == "auto" else 0.0
                if self._kind == PIPE:
                    delay_s = max(delay_s, self.PERIODS_S[PIPE])
                self._due = time.monotonic() + delay_s
                self._stream = target

    def show(self, action: str, n_done: int, total: int | None) -> None:
        """Draw the number of rows done. This method is a `Progress`."""
        self.has_shown = True
        total_text = "" if total is None else f" of {total:,}"
        self.draw(f"{action} {n_done:,}{total_text} rows")

    @property
    def is_due(self) -> bool:
        """True if `draw` would draw now."""
        return self._stream is not None and time.monotonic() >= self._due

    def draw(self, text: str) -> None:
        """Replace the drawn text by `text`, or write it on a new line, if a period has passed."""
        if not self.is_due:
            return
        now, period = time.monotonic(), self.PERIODS_S[self._kind]
        if self._kind == PIPE:  # to keep the log of hours of work short
            period = max(period, (now - self._began) / 10)
        self._due = now + period
        self._drawn = True
        if self._kind == TERMINAL:
            text = fitting_text(text, _columns(self._stream) - 1)
            self._write(f"{ERASE_LINE}{text}", len(text))
        elif self._kind in (RELAYED, NOTEBOOK):
            self._write(text, len(text))
        else:
            self._write(f"streamkern: {text}\n", 0)

    def finish(self, text: str, *, always: bool = True) -> None:
        """Write `text` as the last line, which stays; nothing is drawn later.

        It is written only if a line was drawn before, or the work took more than 3 s.

        always : whether to write it also after shorter work if the setting is True
        """
        if self._stream is None or self._kind == RELAYED:
            return
        took_long = time.monotonic() - self._began >= self.SHORT_WORK_S
        if not (self._drawn or took_long or (always and self._setting is True)):
            return
        if self._kind == NOTEBOOK:
            self._write(f"streamkern: {text}", 0)
        else:
            self.close()
            self._write(f"streamkern: {text}\n", 0)
        self._stream = None

    def close(self) -> None:
        """Erase the line; the next call of `draw` draws it again."""
        if self._width:
            self._write(ERASE_LINE if self._kind == TERMINAL else "", 0)

    @contextlib.contextmanager
    def redraw_periodically(self, text: Callable[[], str]) -> Iterator[None]:
        """Draw the result of `text` every period during a `with` block, for work in a single call.

        A thread draws; the block must not call the other methods.
        """
        finished = threading.Event()
        thread = threading.Thread(
            target=self._tick, args=(text, finished), name="streamkern-line", daemon=True
        )
        if self._stream is not None:
            with contextlib.suppress(RuntimeError):  # no thread can be started: the work goes on
                thread.start()
        try:
            yield
        finally:
            finished.set()
            if thread.ident is not None:
                thread.join()
            self.close()

    def _tick(self, text: Callable[[], str], finished: threading.Event) -> None:
        """Draw until the event is set, or the stream has failed."""
        while self._stream is not None:
            if finished.wait(max(0.0, self._due - time.monotonic())):
                return
            self.draw(text())

    def _write(self, text: str, width: int) -> None:
        """Write text to the stream. width : number of characters that a later text must replace"""
        self._width = width
        if self._stream is not None:
            try:
                if self._kind == NOTEBOOK:
                    self._show(text)
                else:
                    self._stream.write(text)
                    self._stream.flush()
            except Exception:  # a closed or broken terminal
                self._stream = None

    def _show(self, text: str) -> None:
        """Show the text in one output of the notebook's cell, which is updated."""
        bundle = {"text/plain": text}
        if self._display is None:
            display = sys.modules["IPython.display"].display
            self._display = display(bundle, raw=True, display_id=True)
        else:
            self._display.update(bundle, raw=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _stream_kind(stream: TextIO | Relay) -> str:
    """Return the kind of `stream`, on which the way of drawing depends."""
    if isinstance(stream, Relay):
        return RELAYED
    if stream.isatty():
        return TERMINAL
    in_notebook = any(base.__module__.startswith("ipykernel") for base in type(stream).__mro__)
    return NOTEBOOK if in_notebook and "IPython.display" in sys.modules else PIPE


def _columns(stream: TextIO | Relay | None) -> int:
    """Return the width of the terminal of `stream`, which need not be standard output."""
    with contextlib.suppress(Exception):
        if "COLUMNS" not in os.environ and stream is not None and not isinstance(stream, Relay):
            return os.get_terminal_size(stream.fileno()).columns or 80
    return shutil.get_terminal_size().columns


def fitting_text(text: str, width: int) -> str:
    """Return the first parts of `text`, separated by two spaces, that fit into a width."""
    parts = text.split("  ")
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)[: max(0, width)]
