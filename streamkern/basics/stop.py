"""Stop requests by signals, which raise an exception at once, or are recorded until it is safe.

All files that streamkern writes survive a kill at any instant. The exception may therefore be
raised between any two bytecodes, and it interrupts every loop and wait, also those in libraries,
without checks in the loops. Only a training step is finished first, so that it can be saved.

The exception is raised when the interpreter runs the signal handler, and a single call of a library
may delay this by minutes. In that case `end_on_signal`, which the command line uses, ends the
process, unless it has something to save.
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
_GRACE_S = 5.0  # from the second signal until the process is ended
_OVERDUE_S, _N_CHECKS = 0.7, 7  # time in which a handler must run, and checks in this time


class Stopped(BaseException):
    """A signal ended the work. It is not an Exception, so `except Exception` does not catch it."""


class StopRequest:
    """Handle SIGTERM, SIGINT and SIGHUP by raising `Stopped` in the main thread, at once or later.

    A second SIGTERM or SIGINT has the effect that it had before; repeated SIGHUPs are one request.
    Ignored signals (nohup) stay ignored. Outside the main thread, or with install=False, no handler
    is installed.

    requested_by : name of the first signal that was handled, or "rank 0" if that rank requested the
        stop; None before a request
    """

    def __init__(self, *, install: bool) -> None:
        self.requested_by: str | None = None
        self._install = install and threading.current_thread() is threading.main_thread()
        self._old_handlers: dict[int, Any] = {}
        self._at_once, self._saves = self._install, False
        self._outcomes: list[Callable[[Stopped], BaseException]] = []
        self._request_lock = threading.RLock()

    def check(self) -> None:
        """Raise Stopped if a signal was handled."""
        if self.requested_by:
            raise Stopped(f"stopped by {self.requested_by}")

    def defer_signals(self) -> contextlib.AbstractContextManager[None]:
        """Only record signals in a `with` block; `check` or `raise_on_signal` raises Stopped."""
        return self._mode(at_once=False, saves=False)

    @contextlib.contextmanager
    def raise_on_signal(self, *, saves: bool = False) -> Iterator[None]:
        """Raise Stopped on a signal during a `with` block, or at its start if one was recorded.

        saves : whether the caller saves its work when it catches Stopped; if so, `end_on_signal`
            does not end the process after the first signal
        """
        with self._mode(at_once=True, saves=saves):
            self.check()
            yield

    @contextlib.contextmanager
    def _mode(self, *, at_once: bool, saves: bool) -> Iterator[None]:
        """Set how signals are handled during a `with` block."""
        outer = self._at_once, self._saves
        self._at_once, self._saves = at_once, saves
        try:
            yield
        finally:
            self._at_once, self._saves = outer

    @contextlib.contextmanager
    def convert_stopped(self, outcome: Callable[[Stopped], BaseException]) -> Iterator[None]:
        """Register, during a `with` block, the function by which an outer block converts Stopped.

        `claim_overdue` uses it, too, for a signal whose handler cannot raise Stopped.
        """
        self._outcomes.append(outcome)
        try:
            yield
        finally:
            self._outcomes.pop()

    @property
    def may_end(self) -> bool:
        """True if the process may end at this instant, because it has nothing to save."""
        return self._at_once and not self._saves

    def is_overdue(self) -> bool:
        """Return whether the handler of a signal, which would raise Stopped, has not run yet.

        The caller has to ensure that a signal has arrived.
        """
        return self.requested_by is None and bool(self._old_handlers) and self.may_end

    def claim_overdue(self, number: int) -> BaseException | None:
        """Return the error with which to end the process if signal `number` is overdue, else None.

        Called on another thread than the main one. If it returns an error, it keeps the lock that
        the signal handler needs, so that the main thread cannot raise Stopped as well.
        """
        self._request_lock.acquire()
        if not self.is_overdue():
            self._request_lock.release()
            return None
        stopped = Stopped(f"stopped by {signal.Signals(number).name}")
        return self._outcomes[-1](stopped) if self._outcomes else stopped

    def __enter__(self) -> StopRequest:
        if self._install:
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._old_handlers[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Record a signal, and raise Stopped for the first one if the mode says at once."""
        with self._request_lock:
            is_first = self.requested_by is None
            self.requested_by = self.requested_by or signal.Signals(number).name
        if number in _FORCING:
            self._restore(_FORCING)
        if is_first and self._at_once:
            self.check()

    def _restore(self, numbers: tuple[signal.Signals, ...]) -> None:
        """Install the handlers that these signals had before."""
        for number in numbers:
            if number in self._old_handlers:
                signal.signal(number, self._old_handlers.pop(number))

    def __exit__(self, *exc: object) -> None:
        self._restore(SIGNALS)


@contextlib.contextmanager
def handle_stop(
    stop: StopRequest | None, *, saves_work: bool, position: Callable[[], str] = lambda: ""
) -> Iterator[StopRequest]:
    """Yield `stop`, or a new request if it is None, for work that a signal may stop.

    saves_work : whether the work is saved, so that the same call resumes it. If so, a signal ends
        it with TrainingInterrupted. Otherwise a signal ends it with Stopped if `stop` is given, and
        no handler is installed if it is not.
    position : returns the position at the interruption, for the message
    """

    def outcome(stopped: Stopped) -> BaseException:
        sentence = f"{stopped} {position()}".rstrip()
        return TrainingInterrupted(f"{sentence}", "run the same command again to continue")

    new_request = StopRequest(install=saves_work)
    try:
        with (
            new_request if stop is None else contextlib.nullcontext(stop) as request,
            request.convert_stopped(outcome) if saves_work else contextlib.nullcontext(),
        ):
            yield request
    except Stopped as stopped:
        if not saves_work:
            raise
        raise outcome(stopped) from None


@contextlib.contextmanager
def end_on_signal(stop: StopRequest, explain: Callable[[BaseException], int]) -> Iterator[None]:
    """End the process on a signal during a `with` block even if the handler cannot run.

    The interpreter runs no handler while the main thread is in a call of a library: factorizations
    take minutes, and OpenBLAS waits forever for address space that a limit denies. If the first
    signal would raise Stopped and nothing is to be saved, another thread ends the process instead.
    A second SIGTERM or SIGINT always ends the process, after `_GRACE_S` seconds.

    Only for the process of a command. Outside the main thread, the only one with signal handlers,
    the block runs unchanged.

    explain : reports an error to the user and returns the exit code
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    old_descriptor = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        first_number = n_forcing = 0
        while number := os.read(reading, 1):  # the interpreter writes the number of each signal
            n_forcing += number[0] in _FORCING
            if n_forcing == 2:
                time.sleep(_GRACE_S)
                os._exit(128 + number[0])
            if number[0] in SIGNALS and not first_number:
                first_number = number[0]
                _start_thread(_end_overdue, stop, first_number, explain)

    watcher = _start_thread(watch)
    try:
        with _silenced_finalizers(stop):
            yield
    finally:
        signal.set_wakeup_fd(old_descriptor)
        os.close(writing)
        watcher.join(timeout=_GRACE_S)
        if not watcher.is_alive():
            os.close(reading)


@contextlib.contextmanager
def _silenced_finalizers(stop: StopRequest) -> Iterator[None]:
    """Hide errors of finalizers that follow a signal during a `with` block.

    Stopped may leave an object of a library half created, which its finalizer cannot release.
    """
    old_hook = sys.unraisablehook

    def report(failure: Any) -> None:
        if stop.requested_by is None:
            old_hook(failure)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = old_hook


def _start_thread(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name="streamkern-signals", daemon=True)
    thread.start()
    return thread


def _end_overdue(stop: StopRequest, number: int, explain: Callable[[BaseException], int]) -> None:
    """End the process once the signal is overdue in `_N_CHECKS` checks in a row."""
    n_overdue = 0
    while stop.requested_by is None:
        time.sleep(_OVERDUE_S / _N_CHECKS)
        n_overdue = n_overdue + 1 if stop.is_overdue() else 0
        if n_overdue >= _N_CHECKS and (error := stop.claim_overdue(number)) is not None:
            code = explain(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
