"""The one way out for text: standard output and standard error of the command.

Here, behind whoever writes (sentences, results, progress lines, warnings, tracebacks, libraries),
known secrets are taken out, and a reader that is gone or a disk that is full is of no consequence:
what a command did does not depend on who listens. What was lost on a disk is remembered, for
commands that have nothing else to show for their work.
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
_NOBODY = (errno.EPIPE, errno.EBADF)  # nobody reads any more: `| head`, `>&-`
_SHORTEST, _LONG = 4, 8  # shorter ones are parts of everything
_OPTION = "--storage-option"
# Numbers are results, more often than not. The others are settings that a message has to name.
_NOT_SECRET = re.compile(
    r"(?i)\d{1,11}|true|false|[a-z]{2}(-[a-z]+)+-\d|https?://[\w.:-]+/?|obstore|s3fs"
)
# An option that says it is none, with a value that a key would not be, is a setting as well.
_PLAIN = re.compile(r"[A-Za-z][a-z]*([-_. ][a-z]+)*")
_ENVIRONMENT = re.compile(r"(?i)SECRET|TOKEN|PASSW|CREDENTIAL|ACCESS_KEY")


class Outlet:
    """A text stream that says nothing of what is `secret`, and takes every write."""

    def __init__(self, stream: TextIO | None, secrets: Secrets) -> None:
        self._stream, self._secrets = stream, secrets
        self.lost: OSError | None = None  # why text did not arrive where somebody wants it

    def write(self, text: str) -> int:
        """Write what may be shown; all of it counts as written."""
        if self._stream is not None:
            try:
                self._stream.write(self._secrets.hidden_in(text))
            except (OSError, ValueError) as error:
                self._mute(error)
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._mute(error)

    def _mute(self, error: OSError | ValueError) -> None:
        """To nowhere from here on: what is buffered would fail again when Python ends."""
        stream, self._stream = self._stream, None
        if isinstance(error, OSError) and error.errno not in _NOBODY:
            self.lost = error
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno() if stream is not None else nowhere)
            os.close(nowhere)

    def isatty(self) -> bool:
        """Whether somebody looks at it."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "detach", "reconfigure"):  # ways around
            raise AttributeError(name)
        return getattr(self._stream, name)


class Secrets:
    """Texts that were given to the command and are not for any reader."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def add(self, *values: object) -> None:
        """What is never to be shown, as it is and with percent signs resolved."""
        for value in values:
            if isinstance(value, Mapping):
                self.add(*value.values())
            elif isinstance(value, list | tuple):
                self.add(*value)
            elif isinstance(value, str) and not _NOT_SECRET.fullmatch(value):
                plain = {value, unquote(value), unquote_plus(value)}
                # As they are written in the words of an error, too.
                forms = {form for text in plain for form in (text, repr(text)[1:-1])}
                self._known |= {form for form in forms if len(form) >= _SHORTEST}

    def add_option(self, name: str, value: object) -> None:
        """What was given for a storage option of this name, unless it looks like a setting."""
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
        """Those of a command line: in its URLs, its storage options, and those of its run file."""
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
        """Those in the environment."""
        named = [value for name, value in os.environ.items() if _ENVIRONMENT.search(name)]
        self.add(*(value for value in named if len(value) >= _LONG))

    def hidden_in(self, text: str) -> str:
        """The text without them; the longest first, one may be a part of another.

        Short ones are parts of everything: as words of their own only, and not as JSON's keys.
        """
        for secret in sorted(self._known, key=len, reverse=True):
            if len(secret) >= _LONG:
                text = text.replace(secret, HIDDEN)
            elif secret in text:
                text = re.sub(rf'(?<!\w){re.escape(secret)}(?!\w|": )', HIDDEN, text)
        return text


def of_url(url: str) -> list[str]:
    """User, password, values of the query and the fragment of a URL, or of those it chains."""
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
                # Libraries end a host at a slash, whatever its author meant.
                ends = (
                    [end for k in pieces for end in re.split(r"[/?#]", k)] if "://" in url else []
                )
                found += [user, *pieces, *ends]
        for query in re.split(r"[?#]", rest)[1:]:
            found += [query, *(pair.partition("=")[2] for pair in query.split("&"))]
    return found


@contextlib.contextmanager
def guarded(words: Sequence[str]) -> Iterator[Outlet]:
    """Standard output, which is given, and error as outlets, for a command of these words."""
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
