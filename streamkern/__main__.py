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
    """End the process after all other exit handlers, without shutting down the interpreter.

    During a shutdown, threads of native libraries may abort the process (obstore's runtime has no
    end).
    """
    if _codes:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(_codes[-1])


atexit.register(_leave_last)  # registered first, so it is called last


@contextlib.contextmanager
def nothing_begun() -> Iterator[None]:
    """Let Ctrl-C end the process with a sentence within the block, where imports would print a
    traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # of a pipe that nobody reads
        os.write(2, b"streamkern: interrupted before anything was begun\n")
    os._exit(_EXIT_INTERRUPTED)


def stand_in() -> None:
    """Open standard input, output and error if the caller closed them.

    Otherwise files of the run would get their numbers, and with them the output of libraries.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def main() -> int:
    """Run the command and return its exit code."""
    with nothing_begun():  # the run file is read before handlers are installed
        code = run()
    if code in (_EXIT_TRY_AGAIN, _EXIT_INTERRUPTED):
        # Libraries clean up objects that a signal may have interrupted half-way.
        sys.unraisablehook = lambda failure: None
    _codes.append(code)
    return code


stand_in()
with nothing_begun():
    from streamkern.cli.main import run_command as run

if __name__ == "__main__":
    sys.exit(main())
