"""Requests to stop: signals that raise at once where work can end, and are only noted elsewhere.

All files that streamkern writes survive a kill at any instant, so raising between two bytecodes is
safe too, and reaches every loop and every wait, those of libraries included, without a check in any
of them. The only work that is finished first is a step of a run that will be saved afterwards.

The exception is raised when the interpreter runs the handler, which may be after minutes in one
call of a library. The process of the command line then ends without it, if nothing is to be saved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from streamkern.basics.errors import TrainingInterrupted

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)
# A closed terminal sends SIGHUP more than once, and a service manager may send it after SIGTERM:
# only these signals, when repeated, request an end without saving.
_INSISTING = tuple(number for number in SIGNALS if number.name != "SIGHUP")
_GRACE_S = 5.0
_PATIENCE_S, _LOOKS = 0.7, 7  # time for a handler to run, and number of checks


class Stopped(BaseException):
    """A signal ended the work. Not an Exception, so that no handler takes it for a failure."""


class StopRequest:
    """Requests by SIGTERM, SIGINT and SIGHUP: raise `Stopped` in the main thread at once, or later.

    A second SIGTERM or SIGINT has its usual effect; SIGHUP, however often, is one request. Signals
    that are ignored (nohup) stay ignored. Outside the main thread, or with install=False, no
    handler is installed.
    """

    def __init__(self, *, install: bool) -> None:
        self.requested: str | None = None
        self._install = install and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self._at_once, self._saves = self._install, False
        self._outcomes: list[Callable[[Stopped], BaseException]] = []
        self._deciding = threading.RLock()

    def check(self) -> None:
        """Raise Stopped if a signal was received."""
        if self.requested:
            raise Stopped(f"stopped by {self.requested}")

    def later(self) -> contextlib.AbstractContextManager[None]:
        """Only note signals during a `with` block; `check` and `at_once` raise for them."""
        return self._granting(at_once=False, saves=False)

    @contextlib.contextmanager
    def at_once(self, *, saves: bool = False) -> Iterator[None]:
        """Raise for signals at once during a `with` block, also for one received before.

        saves : the caller saves something when it catches Stopped, so only Stopped may end the
            work.
        """
        with self._granting(at_once=True, saves=saves):
            self.check()
            yield

    @contextlib.contextmanager
    def _granting(self, *, at_once: bool, saves: bool) -> Iterator[None]:
        before = self._at_once, self._saves
        self._at_once, self._saves = at_once, saves
        try:
            yield
        finally:
            self._at_once, self._saves = before

    @contextlib.contextmanager
    def becoming(self, outcome: Callable[[Stopped], BaseException]) -> Iterator[None]:
        """Use `outcome` in a `with` block, for the error that an outer block makes of Stopped."""
        self._outcomes.append(outcome)
        try:
            yield
        finally:
            self._outcomes.pop()

    @property
    def at_no_loss(self) -> bool:
        """True if the work may be ended at this instant: it has nothing to save."""
        return self._at_once and not self._saves

    def overdue(self) -> bool:
        """Return whether a signal has not been handled yet, although it would be raised at once."""
        return self.requested is None and bool(self._before) and self.at_no_loss

    def taken(self, number: int) -> BaseException | None:
        """Return the error to end the process with if a signal is overdue; otherwise None.

        Called on another thread. After an error is returned, the main thread cannot leave its
        handlers.
        """
        self._deciding.acquire()
        if not self.overdue():
            self._deciding.release()
            return None
        stopped = Stopped(f"stopped by {signal.Signals(number).name}")
        return self._outcomes[-1](stopped) if self._outcomes else stopped

    def __enter__(self) -> StopRequest:
        if self._install:
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        with self._deciding:
            first = self.requested is None
            self.requested = self.requested or signal.Signals(number).name
        if number in _INSISTING:
            self._restore(_INSISTING)
        if first and self._at_once:
            self.check()

    def _restore(self, numbers: tuple[signal.Signals, ...]) -> None:
        for number in numbers:
            if number in self._before:
                signal.signal(number, self._before.pop(number))

    def __exit__(self, *exc: object) -> None:
        self._restore(SIGNALS)


@contextlib.contextmanager
def resumable(
    stop: StopRequest | None, *, kept: bool, where: Callable[[], str] = lambda: ""
) -> Iterator[StopRequest]:
    """Yield the caller's request or a new one, for work that the same call continues if `kept`.

    Kept work ends with TrainingInterrupted, whose message includes `where`; other work, stopped by
    the caller's request, ends with Stopped.
    """

    def outcome(stopped: Stopped) -> BaseException:
        at = f"{stopped} {where()}".rstrip()
        return TrainingInterrupted(f"{at}", "run the same command again to go on")

    new_request = StopRequest(install=kept)
    try:
        with (
            new_request if stop is None else contextlib.nullcontext(stop) as request,
            request.becoming(outcome) if kept else contextlib.nullcontext(),
        ):
            yield request
    except Stopped as stopped:
        if not kept:
            raise
        raise outcome(stopped) from None


@contextlib.contextmanager
def watched(stop: StopRequest, explain: Callable[[BaseException], int]) -> Iterator[None]:
    """End the process on signals during a `with` block even if no handler gets to run.

    A library's code that does not return blocks the main thread: factorizations take minutes, and
    OpenBLAS waits forever for address space that a limit denies. If `stop` raises the first signal
    at once and nothing is to be saved, the process ends as it would have: `explain` reports the
    error and returns the exit code. A second SIGTERM or SIGINT always ends it. Only for a process
    of our own; outside the main thread, which alone has handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        seen = insisted = 0
        while number := os.read(reading, 1):
            insisted += number[0] in _INSISTING
            if insisted == 2:
                time.sleep(_GRACE_S)
                os._exit(128 + number[0])
            if number[0] in SIGNALS and not seen:
                seen = number[0]
                _on_a_thread(_end_overdue, stop, seen, explain)

    watcher = _on_a_thread(watch)
    try:
        with _unheard(stop):
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        watcher.join(timeout=_GRACE_S)
        if not watcher.is_alive():
            os.close(reading)


@contextlib.contextmanager
def _unheard(stop: StopRequest) -> Iterator[None]:
    """Hide errors of finalizers during a `with` block once a signal was received.

    The signal interrupts libraries while they create the objects that their finalizers then
    release.
    """
    before = sys.unraisablehook

    def show(failure: Any) -> None:
        if stop.requested is None:
            before(failure)

    sys.unraisablehook = show
    try:
        yield
    finally:
        sys.unraisablehook = before


def _on_a_thread(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name="streamkern-signals", daemon=True)
    thread.start()
    return thread


def _end_overdue(stop: StopRequest, number: int, explain: Callable[[BaseException], int]) -> None:
    """End the process once the signal has been overdue for a while without interruption."""
    looks = 0
    while stop.requested is None:
        time.sleep(_PATIENCE_S / _LOOKS)
        looks = looks + 1 if stop.overdue() else 0
        if looks >= _LOOKS and (outcome := stop.taken(number)) is not None:
            code = explain(outcome)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
