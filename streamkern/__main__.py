"""`python -m streamkern` is the command `streamkern`."""

import os
import signal
import sys
from types import FrameType

EXIT_TRY_AGAIN, EXIT_INTERRUPTED = 75, 130


def main() -> int:
    """Run the command and return its exit code; Ctrl-C is answered before it has begun."""
    stand_in()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        from streamkern.cli import main as run

        code = run()  # which reads the run file before it has handlers of its own
        if code in (EXIT_INTERRUPTED, EXIT_TRY_AGAIN):
            # Libraries clear up what a signal may have found them half-way through making.
            sys.unraisablehook = lambda failure: None
        return code
    finally:
        signal.signal(signal.SIGINT, before)


def stand_in() -> None:
    """Open what the caller closed of standard input, output and error.

    Or else files of the run would get their numbers, and what libraries write to them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _leave(number: int, frame: FrameType | None) -> None:
    """End here and now: nothing was begun, and an import would print where it was."""
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
