"""Keep credentials out of command lines and messages, and commands independent of their reader.

A command line is visible to other users of the machine and stays in the shell's history, so
credentials in it are refused. Messages are written without the secrets of the environment, and
without those that URLs may hold. A reader that is gone or a full disk has no consequence for a
command's work; text lost by a full disk is remembered, for commands whose text is their only
result.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.optional import on_demand
from streamkern.basics.text import SECRET_NAME, SIGNED_QUERY, redact

HIDDEN = "***"
_URLS = "streamkern.filesystem.urls"  # slow to load
_NO_READER = (errno.EPIPE, errno.EBADF)  # the reader is gone: `| head`, `>&-`
_SHORTEST_SECRET = 8  # shorter values occur in any text
_ENVIRONMENT = re.compile(r"(?i)SECRET|TOKEN|PASSW|CREDENTIAL|ACCESS_KEY")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*:/[^\s'\",\[\]{}]*")
_ENTRIES = re.compile(r"[\"']?([\w-]+)[\"']?\s*[=:]")  # names in a table, as JSON or TOML
_REMEDY = (
    "and other users can see a command line; put credentials into the environment, a profile "
    f"(--storage-option profile=NAME) or {mention('data.storage_options')} of a run file"
)


class Outlet:
    """A text stream whose writes never fail.

    stream : the stream to write to; None discards all text
    clean : function that is applied to all text
    lost : the error that stopped the writes, unless the reader had closed the stream; else None
    """

    def __init__(self, stream: TextIO | None, clean: Callable[[str], str] | None = None) -> None:
        self._stream, self._clean = stream, clean
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        """Write the text; all of it counts as written."""
        if self._stream is not None:
            try:
                self._stream.write(text if self._clean is None else self._clean(text))
            except (OSError, ValueError) as error:
                self._mute(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._mute(error)

    def _mute(self, error: OSError | ValueError) -> None:
        """Discard all further text, because flushing the stream would fail again at exit."""
        stream, self._stream = self._stream, None
        if isinstance(error, OSError) and error.errno not in _NO_READER:
            self.lost = error
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno() if stream is not None else nowhere)
            os.close(nowhere)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "detach", "reconfigure"):  # would bypass `write`
            raise AttributeError(name)
        return getattr(self._stream, name)


@contextlib.contextmanager
def guarded() -> Iterator[Outlet]:
    """Yield standard output as an outlet; standard error becomes one that hides secrets."""
    out, err = Outlet(sys.stdout), Outlet(sys.stderr, lambda text: hidden_in(redact(text)))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield out
        finally:
            out.flush()
            err.flush()


def hidden_in(text: str) -> str:
    """Return the text without the secrets of the environment, the longest removed first."""
    secrets = (
        value
        for name, value in os.environ.items()
        if _ENVIRONMENT.search(name) and len(value) >= _SHORTEST_SECRET and not value.isdigit()
    )
    for secret in sorted(secrets, key=len, reverse=True):
        # An error may quote the secret by repr.
        text = text.replace(secret, HIDDEN).replace(repr(secret)[1:-1], HIDDEN)
    return text


# -- the command line ----------------------------------------------------------------------------


def refuse_credentials(words: Sequence[str]) -> None:
    """Raise ConfigError if a word of the command line holds credentials, which it does not show."""
    for before, word in zip(("", *words), words, strict=False):
        option, _, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if any(map(_holds_credentials, _URL.findall(word))):
            raise ConfigError(f"{redact(word)} holds credentials, {_REMEDY}")
        name, _, text = value.partition("=")
        name = name.strip()
        if option == "--set" and name.startswith("data.storage_options"):
            name = name.removeprefix("data.storage_options").strip(".")
        elif option != "--storage-option":
            continue
        table = _ENTRIES.findall(text) if text.strip()[:1] in ("{", "[") else ()
        secrets = [each for each in (name, *table) if SECRET_NAME.search(each)]
        if secrets and text:
            raise ConfigError(f"{option} {secrets[0]}={HIDDEN} is a credential, {_REMEDY}")


def _holds_credentials(url: str) -> bool:
    for part in url.split("::"):  # simplecache::s3://bucket
        named = re.split(r"[?#]", part, maxsplit=1)[0]
        if redact(named) != named or SIGNED_QUERY.search(part):
            return True
    try:
        on_demand(_URLS).check_open(url)
    except ConfigError:
        return True
    return False
