"""The request to stop: signals as an exception where work can end at once, as a wish elsewhere.

All that streamkern writes survives a kill at any instant, so raising between two bytecodes is safe
too, and reaches every loop and every wait, those of libraries included, without a check in any of
them. One thing is asked to wait: a step of a run that will be saved when it is done.

Raised it is when the interpreter gets to it, and that may be after minutes in one call of a
library. The process of the command line ends without it then, if nothing is there to be saved.
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
# A closed terminal sends SIGHUP more than once, and who ends a service may send it after SIGTERM:
# only these are a wish to end without saving when they come again.
_INSISTING = tuple(number for number in SIGNALS if number.name != "SIGHUP")
_GRACE_S = 5.0
_PATIENCE_S, _LOOKS = 0.7, 7  # for the interpreter to run a handler, and looks at whether it did


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
        self._at_once, self._saves = self._install, False
        self._outcomes: list[Callable[[Stopped], BaseException]] = []
        self._deciding = threading.RLock()

    def check(self) -> None:
        """Raise Stopped if a signal came."""
        if self.requested:
            raise Stopped(f"stopped by {self.requested}")

    def later(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a signal is noted only: `check` and `at_once` grant it."""
        return self._granting(at_once=False, saves=False)

    @contextlib.contextmanager
    def at_once(self, *, saves: bool = False) -> Iterator[None]:
        """Inside, a signal is granted at once, also one that came before.

        saves : the caller saves something when Stopped gets to it, so only that ends the work.
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
        """Inside, the error that a Stopped becomes further out is told by `outcome`."""
        self._outcomes.append(outcome)
        try:
            yield
        finally:
            self._outcomes.pop()

    @property
    def at_no_loss(self) -> bool:
        """Whether the work may be ended at this instant: it has nothing to save."""
        return self._at_once and not self._saves

    def overdue(self) -> bool:
        """Whether a signal that came has not been noted where it would be granted at once."""
        return self.requested is None and bool(self._before) and self.at_no_loss

    def taken(self, number: int) -> BaseException | None:
        """What to end the process with if it is overdue, on another thread; None: nothing.

        The main thread does not get past its handlers any more.
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
    """The caller's request, or an own one, for work that the same call goes on with, if `kept`.

    What is kept ends with TrainingInterrupted, which says `where` it was; what is not, by a request
    of the caller's, with Stopped.
    """

    def outcome(stopped: Stopped) -> BaseException:
        at = f"{stopped} {where()}".rstrip()
        return TrainingInterrupted(f"{at}; run the same command again to go on")

    own = StopRequest(install=kept)
    try:
        with (
            own if stop is None else contextlib.nullcontext(stop) as request,
            request.becoming(outcome) if kept else contextlib.nullcontext(),
        ):
            yield request
    except Stopped as stopped:
        if not kept:
            raise
        raise outcome(stopped) from None


@contextlib.contextmanager
def watched(stop: StopRequest, explain: Callable[[BaseException], int]) -> Iterator[None]:
    """Inside, signals end the process even where the interpreter does not get to run a handler.

    A library's code that does not return keeps the main thread from it: factorizations take
    minutes, and OpenBLAS waits forever for address space that a limit denies. Where `stop` grants
    the first signal at once and nothing is to be saved, the process ends as it would have:
    `explain` says with what, and returns its exit code. A second SIGTERM or SIGINT ends it always.
    For a process of our own only; outside the main thread, which alone has handlers, nothing
    changes.
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
    """Inside, what fails in clearing up is not shown once a signal came.

    It found libraries half-way through making what they clear up then.
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
    """End the process once the signal has been overdue for a while without a break."""
    looks = 0
    while stop.requested is None:
        time.sleep(_PATIENCE_S / _LOOKS)
        looks = looks + 1 if stop.overdue() else 0
        if looks >= _LOOKS and (outcome := stop.taken(number)) is not None:
            code = explain(outcome)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
