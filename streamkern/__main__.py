"""`python -m streamkern` is the command `streamkern`."""

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

_EXIT_TRY_AGAIN, _EXIT_INTERRUPTED = 75, 130
_codes: list[int] = []


def _leave_last() -> None:
    """End the process once all else at exit is done, and do not take the interpreter down, in which
    threads of native libraries abort the process now and then (obstore's runtime has no end)."""
    if _codes:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(_codes[-1])


atexit.register(_leave_last)  # before all others, which then are called before it


@contextlib.contextmanager
def nothing_begun() -> Iterator[None]:
    """Inside, Ctrl-C ends the process without a word: an import would print where it was."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(_EXIT_INTERRUPTED)


def stand_in() -> None:
    """Open what the caller closed of standard input, output and error.

    Or else files of the run would get their numbers, and what libraries write to them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def main() -> int:
    """Run the command and return its exit code."""
    with nothing_begun():  # the run file is read before there are handlers for it
        code = run()
    if code in (_EXIT_TRY_AGAIN, _EXIT_INTERRUPTED):
        # Libraries clear up what a signal may have found them half-way through making.
        sys.unraisablehook = lambda failure: None
    _codes.append(code)
    return code


stand_in()
with nothing_begun():
    from streamkern.cli.main import run_command as run

if __name__ == "__main__":
    sys.exit(main())
