"""The request to stop: signals as an exception where work can end at once, as a wish elsewhere.

All that streamkern writes survives a kill at any instant, so raising between two bytecodes is safe
too, and reaches every loop and every wait, those of libraries included, without a check in any of
them. One thing is asked to wait: a step of a run that will be saved when it is done.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from streamkern.errors import TrainingInterrupted

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)
# A closed terminal sends SIGHUP more than once, and who ends a service may send it after SIGTERM:
# only these are a wish to end without saving when they come again.
_INSISTING = tuple(number for number in SIGNALS if number.name != "SIGHUP")
_GRACE_S = 5.0


class Stopped(BaseException):
    """A signal ended what was going on. No Exception, so that nothing takes it for a failure."""


class StopRequest:
    """SIGTERM, SIGINT and SIGHUP: `Stopped` in the main thread at once, or when it is asked for.

    A second SIGTERM or SIGINT acts as it always does; SIGHUP, however often, is one request.
    Signals that are ignored (nohup) stay so. Outside the main thread, or with install=False, all
    keep their meaning.
    """

    def __init__(self, *, install: bool) -> None:
        self.requested: str | None = None
        self._install = install and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self._at_once = True

    def check(self) -> None:
        """Raise Stopped if a signal came."""
        if self.requested:
            raise Stopped(f"stopped by {self.requested}")

    def later(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a signal is noted only: `check` and `at_once` grant it."""
        return self._granting(at_once=False)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal is granted at once, also one that came before."""
        with self._granting(at_once=True):
            self.check()
            yield

    @contextlib.contextmanager
    def _granting(self, *, at_once: bool) -> Iterator[None]:
        before, self._at_once = self._at_once, at_once
        try:
            yield
        finally:
            self._at_once = before

    def __enter__(self) -> StopRequest:
        if self._install:
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
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
    stop: StopRequest | None, *, kept: bool, where: Callable[[], str]
) -> Iterator[StopRequest]:
    """The caller's request, or an own one, for work that the same call goes on with, if `kept`.

    What is kept ends with TrainingInterrupted, which says `where` it was; what is not, by a request
    of the caller's, with Stopped.
    """
    own = StopRequest(install=kept)
    try:
        with own if stop is None else contextlib.nullcontext(stop) as request:
            yield request
    except Stopped as stopped:
        if not kept:
            raise
        raise TrainingInterrupted(
            f"{stopped} {where()}; run the same command again to go on"
        ) from None


@contextlib.contextmanager
def second_signal_ends() -> Iterator[None]:
    """Inside, a second SIGTERM or SIGINT ends the process even if Python never saw the first.

    A library's code that does not return keeps the main thread from running any handler: OpenBLAS
    waits forever for address space that a limit denies. For a process of our own only; outside the
    main thread, which alone has handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        seen = 0
        while number := os.read(reading, 1):
            seen += number[0] in _INSISTING
            if seen == 2:
                time.sleep(_GRACE_S)
                os._exit(128 + number[0])

    watcher = threading.Thread(target=watch, name="streamkern-signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        watcher.join(timeout=_GRACE_S)
        if not watcher.is_alive():
            os.close(reading)
