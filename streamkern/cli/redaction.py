"""Keep credentials out of command lines and messages, and protect commands from output errors.

A command line is visible to other users of the machine and stays in the shell's history, so
credentials in it are refused. Secrets in the environment and in URLs are removed from messages. If
the reader of the output has closed it, or a disk is full, the command continues its work; a full
disk is reported by commands whose text is their only result.
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
_URLS_MODULE = "streamkern.filesystem.urls"  # imported on demand: slow to load
_CLOSED_READER_ERRORS = (errno.EPIPE, errno.EBADF)  # as after `| head` or `>&-`
_MIN_SECRET_LENGTH = 8  # shorter values occur in any text
_SECRET_VARIABLE = re.compile(r"(?i)SECRET|TOKEN|PASSW|CREDENTIAL|ACCESS_KEY")
# A scheme or several ("simplecache::s3:"), and all up to a space, a quote or a bracket.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*:/[^\s'\",\[\]{}]*")
_TABLE_KEYS = re.compile(r"[\"']?([\w-]+)[\"']?\s*[=:]")  # names in a table, as JSON or TOML
_CREDENTIAL_REMEDY = (
    "put credentials into the environment, a profile "
    f"(--storage-option profile=NAME) or {mention('data.storage_options')} of a run file"
)


class SafeStream:
    """A text stream whose writes never fail; after an error, further text is discarded.

    stream : the stream to write to; None discards all text
    clean : function that is applied to all text
    write_error : the first error of a write; None without one, or if the reader closed the stream
    """

    def __init__(self, stream: TextIO | None, clean: Callable[[str], str] | None = None) -> None:
        self._stream, self._clean = stream, clean
        self.write_error: OSError | None = None

    def write(self, text: str) -> int:
        """Write the text; all of it counts as written."""
        if self._stream is not None:
            try:
                self._stream.write(text if self._clean is None else self._clean(text))
            except (OSError, ValueError) as error:
                self._discard_rest(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._discard_rest(error)

    def _discard_rest(self, error: OSError | ValueError) -> None:
        """Discard all further text, because flushing the stream would fail again at exit."""
        stream, self._stream = self._stream, None
        if isinstance(error, OSError) and error.errno not in _CLOSED_READER_ERRORS:
            self.write_error = error
        with contextlib.suppress(OSError, ValueError, AttributeError):
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, stream.fileno() if stream is not None else null_device)
            os.close(null_device)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "detach", "reconfigure"):  # these would bypass `write`
            raise AttributeError(name)
        return getattr(self._stream, name)


@contextlib.contextmanager
def protect_output() -> Iterator[SafeStream]:
    """Redirect standard output and standard error to safe streams; yield the first.

    The stream of standard error removes secrets.
    """
    out, err = (
        SafeStream(sys.stdout),
        SafeStream(sys.stderr, lambda text: remove_secrets(redact(text))),
    )
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield out
        finally:
            out.flush()
            err.flush()


def remove_secrets(text: str) -> str:
    """Return the text with the secrets of the environment replaced, the longest first."""
    secrets = (
        value
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name)
        and len(value) >= _MIN_SECRET_LENGTH
        and not value.isdigit()
    )
    for secret in sorted(secrets, key=len, reverse=True):
        # An error may quote the secret by repr.
        text = text.replace(secret, HIDDEN).replace(repr(secret)[1:-1], HIDDEN)
    return text


# -- the command line ----------------------------------------------------------------------------


def refuse_credentials(words: Sequence[str]) -> None:
    """Raise ConfigError, without the secret, if a word of the command line holds credentials."""
    for previous, word in zip(("", *words), words, strict=False):
        # "--option=value" is one word, "--option value" are two.
        option, _, value = word.partition("=") if word.startswith("--") else (previous, "", word)
        if any(map(_holds_credentials, _URL.findall(word))):
            raise ConfigError(
                f"{redact(word)} holds credentials, which other users can see in a command line",
                _CREDENTIAL_REMEDY,
            )
        name, _, text = value.partition("=")
        name = name.strip()
        if option == "--set" and name.startswith("data.storage_options"):
            name = name.removeprefix("data.storage_options").strip(".")
        elif option != "--storage-option":
            continue
        table = _TABLE_KEYS.findall(text) if text.strip()[:1] in ("{", "[") else ()
        secret_names = [key for key in (name, *table) if SECRET_NAME.search(key)]
        if secret_names and text:
            shown = f"{option} {secret_names[0]}={HIDDEN}"
            raise ConfigError(
                f"{shown} is a credential, which other users can see in a command line",
                _CREDENTIAL_REMEDY,
            )


def _holds_credentials(url: str) -> bool:
    """Return whether a URL has a password, a signature or options with credentials."""
    for part in url.split("::"):  # simplecache::s3://bucket
        location = re.split(r"[?#]", part, maxsplit=1)[0]
        if redact(location) != location or SIGNED_QUERY.search(part):
            return True
    try:
        on_demand(_URLS_MODULE).check_no_credentials(url)
    except ConfigError:
        return True
    return False
