"""Warnings that point at the line that called this package."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

_PACKAGE = __name__.partition(".")[0]
_SAID: ContextVar[set[str] | None] = ContextVar("_SAID", default=None)
_WORDING: ContextVar[Callable[[str], str]] = ContextVar("_WORDING", default=str)


def warn(text: str, kind: type[Warning] = UserWarning) -> None:
    """Issue a warning at the caller of the outermost frame of this package.

    Frames of other packages may lie between two of ours: contextlib, or a library that calls back.
    """
    text, issued = _WORDING.get()(text), _SAID.get()
    if issued is not None and text in issued:
        return
    if issued is not None:
        issued.add(text)
    frame: FrameType | None = sys._getframe()
    caller = frame
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            caller = frame.f_back or frame
        frame = frame.f_back
    assert caller is not None
    names = caller.f_globals
    warnings.warn_explicit(
        text, kind, caller.f_code.co_filename, caller.f_lineno,
        module=names.get("__name__"), registry=names.setdefault("__warningregistry__", {}),
    )  # fmt: skip


@contextmanager
def warned_once() -> Iterator[None]:
    """Issue each distinct warning once within a block, such as one that opens a file twice."""
    token = _SAID.set(set())
    try:
        yield
    finally:
        _SAID.reset(token)


@contextmanager
def warnings_worded(wording: Callable[[str], str]) -> Iterator[None]:
    """Reword the warnings of a block by `wording`."""
    token = _WORDING.set(wording)
    try:
        yield
    finally:
        _WORDING.reset(token)
