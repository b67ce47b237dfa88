"""Warnings that point at the line that called this package."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType

from streamkern.basics.message import Vocabulary, render_message

_PACKAGE = __name__.partition(".")[0]
_SAID: ContextVar[set[str] | None] = ContextVar("_SAID", default=None)
_COMPLETE: ContextVar[Callable[[str], str] | None] = ContextVar("_COMPLETE", default=None)

_VOCABULARY: ContextVar[Vocabulary] = ContextVar("_VOCABULARY", default=str)


_ISSUED: dict[tuple[int, int, str], CodeType] = {}
"""The code whose calls received warnings, by its id, the line in it and the key of the warning.
Holding the code keeps its id unique; a cell of a notebook that is run again is other code."""


def warn(message: str, kind: type[Warning] = UserWarning, *, once: str | None = None) -> None:
    """Issue a warning at the caller of the outermost frame of this package.

    Frames of other packages may lie between two of ours: contextlib, or a library that calls back.

    message : may mention settings (see `basics.message`); the warning keeps it as `message`, for
        places that have words of their own for settings
    once : key of the warning, of which a line of a caller receives only one in a process, unless
        the filters ask for all. Python forgets what it has shown whenever filters change, which
        scikit-learn does for every fold.
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
    if once is not None and _action(warning) not in ("ignore", "always", "all", "error"):
        place = (id(caller.f_code), caller.f_lineno, once)
        if place in _ISSUED:
            return
        _ISSUED[place] = caller.f_code
    names = caller.f_globals
    warnings.warn_explicit(
        warning, kind, caller.f_code.co_filename, caller.f_lineno,
        module=names.get("__name__"), registry=names.setdefault("__warningregistry__", {}),
    )  # fmt: skip


def _action(warning: Warning) -> str:
    """Return the action of the first filter for the message of a warning."""
    for action, message, category, _, _ in warnings.filters:
        if isinstance(warning, category) and (message is None or message.match(str(warning))):
            return action
    return "default"


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
