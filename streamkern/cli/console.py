"""Output of the command line: results to stdout, messages and progress to stderr.

It also turns an error into its message and its exit code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import typer

from streamkern.basics.errors import EXIT_FAILED, EXIT_USAGE, StreamkernError
from streamkern.basics.message import Vocabulary, render_message
from streamkern.basics.progress import ERASE_LINE
from streamkern.basics.stop import Stopped
from streamkern.basics.text import redact
from streamkern.cli.mistakes import usage_text

EXIT_INTERRUPTED = 130


def write_stderr(text: str) -> None:
    """Write messages, one per line of `text`, to stderr."""
    wipe = ERASE_LINE if sys.stderr.isatty() else ""
    for line in redact(text).splitlines():
        typer.echo(f"{wipe}streamkern: {line}", err=True)


def json_text(value: Mapping[str, Any]) -> str:
    """Return JSON with a line for each entry."""
    return json.dumps(value, indent=1)


def explain(error: BaseException, vocabulary: Vocabulary, words: Sequence[str] = ()) -> int:
    """Write the message of an error to stderr, and return its exit code.

    vocabulary : names of the settings in messages of the command
    words : words of the command line
    """
    if isinstance(error, KeyboardInterrupt | typer.Abort | Stopped):
        write_stderr(str(error) or "interrupted")
        return EXIT_INTERRUPTED
    if hasattr(error, "format_message"):  # click's usage errors; typer may carry its own click
        write_stderr(usage_text(error, words))
        return EXIT_USAGE
    notes = getattr(error, "__notes__", ())
    if isinstance(error, StreamkernError):
        error.vocabulary = vocabulary
        rendered = [render_message(note, vocabulary) for note in notes]
        write_stderr("; ".join([str(error) or type(error).__name__, *rendered]))
        return error.exit_code
    text = "; ".join([str(error) or type(error).__name__, *notes])
    if isinstance(error, OSError | MemoryError):
        write_stderr(text)
    else:
        write_stderr(f"{type(error).__name__}: {text} (this is a bug; --debug shows where)")
    return EXIT_FAILED


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
    *,
    vocabulary: Vocabulary,
) -> None:
    """Write a warning as one line; replaces `warnings.showwarning`."""
    text = render_message(getattr(message, "message", str(message)), vocabulary)
    write_stderr(f"warning: {' '.join(text.split())}")
