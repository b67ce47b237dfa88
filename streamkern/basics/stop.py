"""Requests to stop, by signals: they raise an exception at once, or are recorded until later.

All files that streamkern writes survive a kill at any instant. So an exception may be raised
between any two bytecodes; it then interrupts every loop and wait, also those in libraries, without
checks in the loops. The only work that is finished first is a step of a run that saves its steps.

The exception is raised when the interpreter runs the signal handler, and one call of a library may
delay that by minutes. In that case `watched`, which the command line uses, ends the process, unless
it has something to save.
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
# Signals whose repetition ends the process without saving. SIGHUP is not among them: a closed
# terminal sends it more than once, and a service manager may send it after SIGTERM.
_FORCING = tuple(number for number in SIGNALS if number.name != "SIGHUP")
_GRACE_S = 5.0
_OVERDUE_S, _N_CHECKS = 0.7, 7  # time that a handler has to run, and checks in this time


class Stopped(BaseException):
    """A signal ended the work. It is not an Exception, so `except Exception` does not catch it."""


class StopRequest:
    """Handle SIGTERM, SIGINT and SIGHUP by raising `Stopped` in the main thread, at once or later.

    A second SIGTERM or SIGINT has its usual effect; repeated SIGHUPs are one request. Ignored
    signals (nohup) stay ignored. Outside the main thread, or with install=False, no handler is
    installed.
    """

    def __init__(self, *, install: bool) -> None:
        self.requested: str | None = None
        self._install = install and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self._at_once, self._saves = self._install, False
        self._outcomes: list[Callable[[Stopped], BaseException]] = []
        self._request_lock = threading.RLock()

    def check(self) -> None:
        """Raise Stopped if a signal was received."""
        if self.requested:
            raise Stopped(f"stopped by {self.requested}")

    def later(self) -> contextlib.AbstractContextManager[None]:
        """Record signals during a `with` block; `check` and `at_once` raise for them later."""
        return self._mode(at_once=False, saves=False)

    @contextlib.contextmanager
    def at_once(self, *, saves: bool = False) -> Iterator[None]:
        """Raise for signals at once during a `with` block, also for one recorded before it.

        saves : whether the caller saves its work when it catches Stopped. If so, `watched` leaves
            the first signal to it.
        """
        with self._mode(at_once=True, saves=saves):
            self.check()
            yield

    @contextlib.contextmanager
    def _mode(self, *, at_once: bool, saves: bool) -> Iterator[None]:
        """Set how signals are handled during a `with` block."""
        before = self._at_once, self._saves
        self._at_once, self._saves = at_once, saves
        try:
            yield
        finally:
            self._at_once, self._saves = before

    @contextlib.contextmanager
    def becoming(self, outcome: Callable[[Stopped], BaseException]) -> Iterator[None]:
        """Register, during a `with` block, the error into which an outer block turns Stopped."""
        self._outcomes.append(outcome)
        try:
            yield
        finally:
            self._outcomes.pop()

    @property
    def at_no_loss(self) -> bool:
        """True if the work may end at this instant, with nothing to save."""
        return self._at_once and not self._saves

    def overdue(self) -> bool:
        """Return whether a signal that has arrived, and would raise at once, is not handled yet.

        The caller knows that one has arrived.
        """
        return self.requested is None and bool(self._before) and self.at_no_loss

    def taken(self, number: int) -> BaseException | None:
        """Return the error that ends the process if signal `number` is overdue; otherwise None.

        Called on another thread. After it has returned an error, the main thread cannot leave its
        signal handler, which waits for a lock that this method has taken.
        """
        self._request_lock.acquire()
        if not self.overdue():
            self._request_lock.release()
            return None
        stopped = Stopped(f"stopped by {signal.Signals(number).name}")
        return self._outcomes[-1](stopped) if self._outcomes else stopped

    def __enter__(self) -> StopRequest:
        if self._install:
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        with self._request_lock:
            first = self.requested is None
            self.requested = self.requested or signal.Signals(number).name
        if number in _FORCING:
            self._restore(_FORCING)
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
    """Yield `stop`, or a new request, for work that can be stopped.

    If the work is `kept`, the same call can resume it: a signal ends it with TrainingInterrupted,
    whose message includes `where`. Otherwise the caller's request ends it with Stopped, and without
    one no handler is installed.
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
    """End the process on signals during a `with` block even if their handlers cannot run.

    The interpreter runs no handler while the main thread is in one call of a library:
    factorizations take minutes, and OpenBLAS waits forever for address space that a limit denies.
    If the first signal should raise at once and nothing is to be saved, another thread ends the
    process in the same way: `explain` reports the error and returns the exit code. A second SIGTERM
    or SIGINT always ends the process, after `_GRACE_S` seconds.

    Only for a process that belongs to streamkern. Outside the main thread, the only one with signal
    handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        first = n_forcing = 0
        while number := os.read(reading, 1):
            n_forcing += number[0] in _FORCING
            if n_forcing == 2:
                time.sleep(_GRACE_S)
                os._exit(128 + number[0])
            if number[0] in SIGNALS and not first:
                first = number[0]
                _start_thread(_end_overdue, stop, first, explain)

    watcher = _start_thread(watch)
    try:
        with _silenced_finalizers(stop):
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        watcher.join(timeout=_GRACE_S)
        if not watcher.is_alive():
            os.close(reading)


@contextlib.contextmanager
def _silenced_finalizers(stop: StopRequest) -> Iterator[None]:
    """Hide errors of finalizers during a `with` block after a signal.

    The exception may leave an object of a library half created, which its finalizer cannot release.
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


def _start_thread(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name="streamkern-signals", daemon=True)
    thread.start()
    return thread


def _end_overdue(stop: StopRequest, number: int, explain: Callable[[BaseException], int]) -> None:
    """End the process once the signal is overdue in `_N_CHECKS` checks in a row."""
    n_overdue = 0
    while stop.requested is None:
        time.sleep(_OVERDUE_S / _N_CHECKS)
        n_overdue = n_overdue + 1 if stop.overdue() else 0
        if n_overdue >= _N_CHECKS and (error := stop.taken(number)) is not None:
            code = explain(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
