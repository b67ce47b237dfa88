"""Times on a device, by marks on its stream, and parts of a check that may fail or run out of time.

Everything takes any backend, so that it can be tested without a GPU.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

Figures = dict[str, Any]

WARM, LEAST, MOST, SECONDS = 2, 5, 50, 2.0
_MISSING = object()


def guarded(check: Callable[[], Figures]) -> Figures:
    """Return the result of a check, or its error: one broken check must not hide the others."""
    try:
        return check()
    except Exception as error:  # whatever it is, it belongs into the report
        return {"passed": False, "error": f"{type(error).__name__}: {error}"}


def write_report(report: Figures, out: Path | None) -> None:
    """Write a report as JSON, whole or not at all, if there is a path."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    part_file = out.with_name(out.name + ".part")
    part_file.write_text(json.dumps(report, indent=1, default=float) + "\n")
    part_file.replace(out)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a `with` block after so many seconds; on the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*of: object) -> None:
        raise TimeoutError(f"the time of this part, {seconds:.0f} s, was over")

    old_handler = signal.signal(signal.SIGALRM, over)
    earlier = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)
        signal.setitimer(signal.ITIMER_REAL, *earlier)  # of a test with a limit of its own


@contextmanager
def replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object, a class or a module for a `with` block."""
    own = vars(owner).get(attribute, _MISSING)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, own)


class Clock:
    """Marks on the compute stream: events of the GPU, or, on the CPU, the time."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self._cuda = backend.xp.cuda if backend.name.startswith("gpu") else None

    def mark(self) -> Any:
        """Return the present place in the stream; nothing waits."""
        if self._cuda is None:
            return time.perf_counter()
        event = self._cuda.Event()
        event.record(self.backend.stream)
        return event

    def between(self, start: Any, end: Any) -> float:
        """Return the milliseconds between marks that have been reached."""
        if self._cuda is None:
            return float(end - start) * 1e3
        return float(self._cuda.get_elapsed_time(start, end))

    def median_ms(self, work: Callable[[], Any]) -> float:
        """Return the median time of 5 to 50 runs back to back.

        Two runs before them compile and fill buffers.
        """
        for _ in range(WARM):
            work()
        self.backend.synchronize()
        began = time.perf_counter()
        work()
        self.backend.synchronize()
        once = max(time.perf_counter() - began, 1e-6)
        marks = [self.mark()]
        for _ in range(min(MOST, max(LEAST, int(SECONDS / once)))):
            work()
            marks.append(self.mark())
        self.backend.synchronize()
        return median(self.between(a, b) for a, b in pairwise(marks))


class Place(NamedTuple):
    """A function whose calls are timed.

    owner, attribute : where the function is looked up when it is called.
    name : name of its time, or a function of the arguments that returns it.
    flops : function of the arguments that returns the operations of a call.
    """

    owner: Any
    attribute: str
    name: str | Callable[..., str]
    flops: Callable[..., float] | None = None


@dataclass
class _Span:
    name: str
    inside: _Span | None
    flops: float
    start: Any
    end: Any = None


class Spans:
    """Times of calls, by marks on the compute stream before and after each.

    On a GPU a time includes that in which the stream had nothing to do.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._spans: list[_Span] = []
        self._open: _Span | None = None

    @contextmanager
    def around(self, places: Sequence[Place]) -> Iterator[None]:
        """Time the calls of these functions in a `with` block."""
        with ExitStack() as stack:
            for place in places:
                timed = self._timed(place, getattr(place.owner, place.attribute))
                stack.enter_context(replaced(place.owner, place.attribute, timed))
            yield

    def _timed(self, place: Place, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            name = place.name if isinstance(place.name, str) else place.name(*given)
            flops = place.flops(*given) if place.flops else 0.0
            span = _Span(name, self._open, flops, self.clock.mark())
            self._spans.append(span)
            self._open = span
            try:
                return call(*given, **named)
            finally:
                span.end, self._open = self.clock.mark(), span.inside

        return timed

    def times(self) -> dict[str, Figures]:
        """Return the calls, their time, that without calls inside them, and their FLOPs, by name.

        Waits for the device.
        """
        self.clock.backend.synchronize()
        found: dict[str, Figures] = {}

        def of(name: str) -> Figures:
            return found.setdefault(name, {"calls": 0, "ms": 0.0, "own_ms": 0.0, "flops": 0.0})

        for span in self._spans:
            ms, figures = self.clock.between(span.start, span.end), of(span.name)
            figures["calls"] += 1
            figures["ms"] += ms
            figures["own_ms"] += ms
            figures["flops"] += span.flops
            if span.inside is not None:
                of(span.inside.name)["own_ms"] -= ms
        return found
