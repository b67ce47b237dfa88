"""A progress line: on a terminal, in a notebook, or into a pipe."""

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

WIPE = "\r\x1b[K"
TERMINAL: Final = "terminal"
NOTEBOOK: Final = "notebook"
PIPE: Final = "pipe"
RELAYED: Final = "told"


class Relay:
    """Replacement for a stream, for a line that another process draws.

    `tell` is called with the text of the line about once a second, and with "" to wipe it.
    """

    def __init__(self, tell: Callable[[str], Any]) -> None:
        self.write = tell

    def flush(self) -> None:
        """Do nothing: no text is buffered."""


ProgressSetting = bool | str | Relay
"""True and False: draw a line or not; "auto": draw one if the work takes more than 3 s; a relay:
draw there."""


class Line:
    """One line, redrawn on a terminal or in a notebook; into a pipe, a new line now and then.

    It draws when it is called, and has a thread in `ticking` only. A failing stream disables it
    instead of ending the work. In a notebook it is one output that is updated, which a program that
    runs the notebook keeps as one output, too.
    """

    PERIODS_S: ClassVar = {TERMINAL: 0.1, NOTEBOOK: 1.0, PIPE: 30.0, RELAYED: 1.0}
    PATIENCE_S = 3.0

    def __init__(self, stream: TextIO | None = None, *, asked: ProgressSetting = True) -> None:
        """Begin a line, not drawn yet. Into a pipe the first line comes after its period.

        asked : see `ProgressSetting`.
        """
        into = asked if isinstance(asked, Relay) else sys.stderr if stream is None else stream
        self._stream: TextIO | Relay | None = None
        self._width = 0  # of the text drawn last
        self._began = time.monotonic()
        self.shown = False  # whether there was any work
        self._drawn = False
        self._display: Any = None
        with contextlib.suppress(Exception):
            if asked:
                self._asked = asked
                self._kind = _kind(into)
                patience = self.PATIENCE_S if asked == "auto" else 0.0
                period = self.PERIODS_S[self._kind]
                self._due = time.monotonic() + max(patience, period * (self._kind == PIPE))
                self._stream = into

    def show(self, what: str, done: int, total: int | None) -> None:
        """Draw that `done` of `total` rows were read or written."""
        self.shown = True
        of = "" if total is None else f" of {total:,}"
        self.draw(f"{what} {done:,}{of} rows")

    @property
    def due(self) -> bool:
        """True if `draw` would draw now."""
        return self._stream is not None and time.monotonic() >= self._due

    def draw(self, text: str) -> None:
        """Replace the drawn text by `text`, or write it on a new line, if a period has passed."""
        if not self.due:
            return
        now, period = time.monotonic(), self.PERIODS_S[self._kind]
        if self._kind == PIPE:  # to keep the log of hours of work short
            period = max(period, (now - self._began) / 10)
        self._due = now + period
        self._drawn = True
        if self._kind == TERMINAL:
            text = fitting_text(text, _columns(self._stream) - 1)
            self._write(f"{WIPE}{text}", len(text))
        elif self._kind in (RELAYED, NOTEBOOK):
            self._write(text, len(text))
        else:
            self._write(f"streamkern: {text}\n", 0)

    def finish(self, text: str, *, always: bool = True) -> None:
        """Leave `text` as the last line after work of more than 3 s; nothing is drawn later.

        A pipe has seen no other line by then. After shorter work it is left if anything was drawn.

        always : leave it also after short work if a line was requested by True.
        """
        if self._stream is None or self._kind == RELAYED:
            return
        long = time.monotonic() - self._began >= self.PATIENCE_S
        if not (self._drawn or long or (always and self._asked is True)):
            return
        if self._kind == NOTEBOOK:
            self._write(f"streamkern: {text}", 0)
        else:
            self.close()
            self._write(f"streamkern: {text}\n", 0)
        self._stream = None

    def close(self) -> None:
        """Wipe the line; the next call of `draw` draws it again."""
        if self._width:
            self._write(WIPE if self._kind == TERMINAL else "", 0)

    @contextlib.contextmanager
    def ticking(self, text: Callable[[], str]) -> Iterator[None]:
        """Draw the result of `text` once a period during a `with` block, for work in a single call.

        A thread draws, and nothing else may draw meanwhile.
        """
        over = threading.Event()
        thread = threading.Thread(
            target=self._tick, args=(text, over), name="streamkern-line", daemon=True
        )
        if self._stream is not None:
            with contextlib.suppress(RuntimeError):  # no thread can be started: the work goes on
                thread.start()
        try:
            yield
        finally:
            over.set()
            if thread.ident is not None:
                thread.join()
            self.close()

    def _tick(self, text: Callable[[], str], over: threading.Event) -> None:
        while not over.wait(max(0.0, self._due - time.monotonic())) and self._stream is not None:
            self.draw(text())

    def _write(self, text: str, width: int) -> None:
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
        shown = {"text/plain": text}
        if self._display is None:
            display = sys.modules["IPython.display"].display
            self._display = display(shown, raw=True, display_id=True)
        else:
            self._display.update(shown, raw=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _kind(stream: TextIO | Relay) -> str:
    """Return the kind of `stream`, which decides how a line is drawn."""
    if isinstance(stream, Relay):
        return RELAYED
    if stream.isatty():
        return TERMINAL
    of_kernel = any(each.__module__.startswith("ipykernel") for each in type(stream).__mro__)
    return NOTEBOOK if of_kernel and "IPython.display" in sys.modules else PIPE


def _columns(stream: TextIO | Relay | None) -> int:
    """Return the width of the terminal that `stream` is; standard output may be another file."""
    with contextlib.suppress(Exception):
        if "COLUMNS" not in os.environ and stream is not None and not isinstance(stream, Relay):
            return os.get_terminal_size(stream.fileno()).columns or 80
    return shutil.get_terminal_size().columns


def fitting_text(text: str, width: int) -> str:
    """Return as many parts of `text`, separated by two spaces, as fit into a width."""
    parts = text.split("  ")
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)[: max(0, width)]
