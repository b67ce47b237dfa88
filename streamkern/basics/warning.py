"""Warnings that point at the line that called this package."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

from streamkern.basics.message import Vocabulary, render_message

_PACKAGE = __name__.partition(".")[0]
_SAID: ContextVar[set[str] | None] = ContextVar("_SAID", default=None)
_COMPLETE: ContextVar[Callable[[str], str] | None] = ContextVar("_COMPLETE", default=None)

_VOCABULARY: ContextVar[Vocabulary] = ContextVar("_VOCABULARY", default=str)


_ISSUED: set[tuple[str, int, str]] = set()


def warn(message: str, kind: type[Warning] = UserWarning, *, once: bool = False) -> None:
    """Issue a warning at the caller of the outermost frame of this package.

    Frames of other packages may lie between two of ours: contextlib, or a library that calls back.

    message : may mention settings (see `basics.message`); the warning keeps it as `message`, for
        places that have words of their own for settings
    once : whether a line of a caller receives this text only once in a process. Python forgets what
        it has shown whenever filters change, which scikit-learn does for every fold. Texts should
        round their figures, so that those of similar data are equal.
    """
    complete, said = _COMPLETE.get(), _SAID.get()
    message += "" if complete is None else complete(message)
    if said is not None and message in said:
        return
    if said is not None:
        said.add(message)
    warning = kind(render_message(message, _VOCABULARY.get()))
    warning.message = message  # type: ignore[attr-defined]
    frame: FrameType | None = sys._getframe()
    caller = frame
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            caller = frame.f_back or frame
        frame = frame.f_back
    assert caller is not None
    if once and not _is_ignored(warning):
        place = (caller.f_code.co_filename, caller.f_lineno, str(warning))
        if place in _ISSUED:
            return
        _ISSUED.add(place)
    names = caller.f_globals
    warnings.warn_explicit(
        warning, kind, caller.f_code.co_filename, caller.f_lineno,
        module=names.get("__name__"), registry=names.setdefault("__warningregistry__", {}),
    )  # fmt: skip


def _is_ignored(warning: Warning) -> bool:
    """Return whether the first filter for the message of a warning ignores it."""
    for action, message, category, _, _ in warnings.filters:
        if isinstance(warning, category) and (message is None or message.match(str(warning))):
            return action == "ignore"
    return False


@contextmanager
def warned_once() -> Iterator[None]:
    """Issue each distinct warning once within a block, such as one that opens a file twice."""
    token = _SAID.set(set())
    try:
        yield
    finally:
        _SAID.reset(token)


@contextmanager
def warnings_worded(vocabulary: Vocabulary) -> Iterator[None]:
    """Name the settings in the warnings of a block by the words of `vocabulary`."""
    token = _VOCABULARY.set(vocabulary)
    try:
        yield
    finally:
        _VOCABULARY.reset(token)


@contextmanager
def warnings_completed(complete: Callable[[str], str]) -> Iterator[None]:
    """Append to each warning of a block what `complete` returns for its message."""
    token = _COMPLETE.set(complete)
    try:
        yield
    finally:
        _COMPLETE.reset(token)
