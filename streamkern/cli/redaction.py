"""The only path of text to standard output and standard error of the command.

All text (sentences, results, progress lines, warnings, tracebacks, output of libraries) passes
here: known secrets are removed, and a reader that is gone or a full disk has no consequence, so a
command's work does not depend on its reader. Text lost by a full disk is remembered, for commands
whose text is their only result.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO
from urllib.parse import unquote, unquote_plus

from streamkern.basics.text import SECRET_NAME

HIDDEN = "***"
_NOBODY = (errno.EPIPE, errno.EBADF)  # the reader is gone: `| head`, `>&-`
_SHORTEST, _LONG = 4, 8  # shorter ones occur in any text
_OPTION = "--storage-option"
# Numbers are mostly results. The others are settings that a message has to name.
_NOT_SECRET = re.compile(
    r"(?i)\d{1,11}|true|false|[a-z]{2}(-[a-z]+)+-\d|https?://[\w.:-]+/?|obstore|s3fs"
)
# An option without a secret's name, with a value unlike a key, is a setting as well.
_PLAIN = re.compile(r"[A-Za-z][a-z]*([-_. ][a-z]+)*")
_ENVIRONMENT = re.compile(r"(?i)SECRET|TOKEN|PASSW|CREDENTIAL|ACCESS_KEY")


class Outlet:
    """A text stream that omits all `secrets`, and accepts every write."""

    def __init__(self, stream: TextIO | None, secrets: Secrets) -> None:
        self._stream, self._secrets = stream, secrets
        self.lost: OSError | None = None  # the error by which wanted text was lost

    def write(self, text: str) -> int:
        """Write the text without secrets; all of it counts as written."""
        if self._stream is not None:
            try:
                self._stream.write(self._secrets.hidden_in(text))
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
        """Discard text from here on: the buffer would fail again when Python ends."""
        stream, self._stream = self._stream, None
        if isinstance(error, OSError) and error.errno not in _NOBODY:
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
        if name in ("buffer", "detach", "reconfigure"):  # would bypass the redaction
            raise AttributeError(name)
        return getattr(self._stream, name)


class Secrets:
    """Texts that were given to the command and must not be shown."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def add(self, *values: object) -> None:
        """Add secrets, as they are and with percent signs resolved."""
        for value in values:
            if isinstance(value, Mapping):
                self.add(*value.values())
            elif isinstance(value, list | tuple):
                self.add(*value)
            elif isinstance(value, str) and not _NOT_SECRET.fullmatch(value):
                plain = {value, unquote(value), unquote_plus(value)}
                # Also in the form in which an error quotes them.
                forms = {form for text in plain for form in (text, repr(text)[1:-1])}
                self._known |= {form for form in forms if len(form) >= _SHORTEST}

    def add_option(self, name: str, value: object) -> None:
        """Add the value of a storage option of this name, unless it looks like a setting."""
        if isinstance(value, Mapping):
            for inner, of_inner in value.items():
                self.add_option(f"{name}.{inner}", of_inner)
        elif isinstance(value, list | tuple):
            for each in value:
                self.add_option(name, each)
        elif isinstance(value, str):
            setting = len(value) < _LONG or _PLAIN.fullmatch(value)
            if SECRET_NAME.search(name) or not setting:
                self.add(value)

    def add_words(self, words: Sequence[str]) -> None:
        """Add the secrets of a command line: of its URLs, storage options and run file."""
        for before, word in zip(("", *words), words, strict=False):
            self.add(*of_url(word.partition("=")[2]), *of_url(word))
            if before == _OPTION or word.startswith(f"{_OPTION}="):
                name, _, value = word.removeprefix(f"{_OPTION}=").partition("=")
                self.add_option(name, value)
            if "storage_options" in word:
                self.add(*re.split(r"""[\s={},"']+""", word.partition("storage_options")[2]))
            if word.endswith(".toml"):
                self._add_run_file(word)

    def _add_run_file(self, path: str) -> None:
        with contextlib.suppress(OSError, ValueError, RecursionError, MemoryError):
            with open(path, "rb") as file:
                data = tomllib.load(file).get("data")
            for key, value in data.items() if isinstance(data, dict) else ():
                urls = value if isinstance(value, list) else [value]
                self.add(*(part for url in urls if isinstance(url, str) for part in of_url(url)))
                if key == "storage_options":
                    self.add_option("", value)

    def add_environment(self) -> None:
        """Add the secrets in the environment."""
        named = [value for name, value in os.environ.items() if _ENVIRONMENT.search(name)]
        self.add(*(value for value in named if len(value) >= _LONG))

    def hidden_in(self, text: str) -> str:
        """Return the text without secrets, the longest removed first, as one may be part of
        another.

        Short ones occur in any text: they are removed as separate words only, and not as keys of
        JSON.
        """
        for secret in sorted(self._known, key=len, reverse=True):
            if len(secret) >= _LONG:
                text = text.replace(secret, HIDDEN)
            elif secret in text:
                text = re.sub(rf'(?<!\w){re.escape(secret)}(?!\w|": )', HIDDEN, text)
        return text


def of_url(url: str) -> list[str]:
    """Return user, password, query values and fragment of a URL, or of the URLs it chains."""
    found: list[str] = []
    for part in {url, *url.split("::")}:
        scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/*", part)
        if scheme is None and "@" not in part:
            continue
        rest = part[scheme.end() :] if scheme is not None else part
        for mark in ("@", "%40"):
            user, at, _ = rest.rpartition(mark)
            if at and (":" in unquote(user) or "/" not in user):
                pieces = [*user.split(":", 1), *unquote(user).split(":", 1)]
                # Libraries end a host at a slash, whatever its author intended.
                ends = (
                    [end for k in pieces for end in re.split(r"[/?#]", k)] if "://" in url else []
                )
                found += [user, *pieces, *ends]
        for query in re.split(r"[?#]", rest)[1:]:
            found += [query, *(pair.partition("=")[2] for pair in query.split("&"))]
    return found


@contextlib.contextmanager
def guarded(words: Sequence[str]) -> Iterator[Outlet]:
    """Yield standard output as an outlet; standard error becomes one, too.

    words : of the command line, whose secrets are removed
    """
    secrets = Secrets()
    secrets.add_words(words)
    secrets.add_environment()
    out, err = Outlet(sys.stdout, secrets), Outlet(sys.stderr, secrets)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield out
        finally:
            out.flush()
            err.flush()
