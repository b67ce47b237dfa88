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


def _exit_without_shutdown() -> None:
    """End the process after all other exit handlers, without shutting down the interpreter.

    During a shutdown, threads of native libraries may abort the process; the runtime of obstore,
    for example, cannot be stopped.
    """
    if _codes:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(_codes[-1])


atexit.register(_exit_without_shutdown)  # registered first, so it is called last


@contextlib.contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process with a sentence during a `with` block.

    Otherwise an interrupted import would print a traceback.
    """
    old_handler = signal.getsignal(signal.SIGINT)
    if old_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old_handler)


def _exit_interrupted(number: int, frame: FrameType | None) -> None:
    """Report the interruption and end the process; a signal handler."""
    with contextlib.suppress(OSError):  # standard error may be a pipe that nobody reads
        os.write(2, b"streamkern: interrupted before anything was begun\n")
    os._exit(_EXIT_INTERRUPTED)


def open_standard_streams() -> None:
    """Open standard input, output and error if the caller closed them.

    Otherwise files of the run would get the descriptors 0 to 2, and libraries, which print to these
    descriptors, would write into the files.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def main() -> int:
    """Run the command and return its exit code."""
    with exit_on_interrupt():  # the run file is read before handlers are installed
        code = run()
    if code in (_EXIT_TRY_AGAIN, _EXIT_INTERRUPTED):
        # Libraries clean up objects that a signal may have interrupted half-way.
        sys.unraisablehook = lambda failure: None
    _codes.append(code)
    return code


open_standard_streams()
with exit_on_interrupt():
    from streamkern.cli.main import run_command as run

if __name__ == "__main__":
    sys.exit(main())
