"""Warnings that are reported at the line of the user's code that called this package."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any

from streamkern.basics.message import Vocabulary, render_message

_PACKAGE = __name__.partition(".")[0]
# Set by `warn_each_once`, `append_to_warnings` and `use_vocabulary` during their blocks.
_BLOCK_MESSAGES: ContextVar[set[str] | None] = ContextVar("_BLOCK_MESSAGES", default=None)
_APPENDED_TEXT: ContextVar[Callable[[str], str] | None] = ContextVar("_APPENDED_TEXT", default=None)
_VOCABULARY: ContextVar[Vocabulary] = ContextVar("_VOCABULARY", default=str)

_WARNED_CALLERS: dict[tuple[int, int, str], CodeType] = {}
"""Code that has received a warning: (id of the code object, line, key of the warning) -> the code.
A reference to the code object keeps its id unique. A notebook cell that is run again is a new code
object, and is warned again."""


def warn(message: str, kind: type[Warning] = UserWarning, *, once: str | None = None) -> None:
    """Issue a warning at the caller of the outermost frame of this package.

    message : text that may mention settings (see `basics.message`). It is kept as the attribute
        `message` of the warning, so that interfaces can render it with their own names.
    kind : class of the warning
    once : key of the warning. In a process, each line of a caller receives only one warning of a
        key, unless the warning filters demand all. Python's own "default" action does not ensure
        this: it starts anew whenever the filters change, which scikit-learn does for every fold.
    """
    appended_text, block_messages = _APPENDED_TEXT.get(), _BLOCK_MESSAGES.get()
    message += "" if appended_text is None else appended_text(message)
    if block_messages is not None and message in block_messages:
        return
    if block_messages is not None:
        block_messages.add(message)
    warning = kind(render_message(message, _VOCABULARY.get()))
    warning.message = message  # type: ignore[attr-defined]
    frame: FrameType | None = sys._getframe()
    caller = frame
    # Frames of contextlib, or of a library that calls back, may lie between two of this package.
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            caller = frame.f_back or frame
        frame = frame.f_back
    assert caller is not None
    if once is not None and _action(warning) not in ("ignore", "always", "all", "error"):
        key = (id(caller.f_code), caller.f_lineno, once)
        if key in _WARNED_CALLERS:
            return
        _WARNED_CALLERS[key] = caller.f_code
    module = caller.f_globals
    warnings.warn_explicit(
        warning, kind, caller.f_code.co_filename, caller.f_lineno,
        module=module.get("__name__"), registry=module.setdefault("__warningregistry__", {}),
    )  # fmt: skip


def renamed_attribute(old_name: str, new_name: str) -> property:
    """Return a property for the old name of an attribute or method, which warns of the new name."""

    def read(owner: object) -> Any:
        text = f"{type(owner).__name__}.{old_name} was renamed to {new_name}; the old name will be "
        warn(text + "removed in 0.3.0", FutureWarning)
        return getattr(owner, new_name)

    return property(read)


def _action(warning: Warning) -> str:
    """Return the action of the first filter that matches the class and the text of a warning.

    The module and the line of a filter are ignored. A filter that sets them can therefore decide
    wrongly whether a warning with a key is repeated for a line, but not whether it is shown at all.
    """
    for action, message, category, _, _ in warnings.filters:
        if isinstance(warning, category) and (message is None or message.match(str(warning))):
            return action
    return "default"


@contextmanager
def warn_each_once() -> Iterator[None]:
    """Issue each distinct warning once within a block, such as one that opens a file twice."""
    token = _BLOCK_MESSAGES.set(set())
    try:
        yield
    finally:
        _BLOCK_MESSAGES.reset(token)


@contextmanager
def use_vocabulary(vocabulary: Vocabulary) -> Iterator[None]:
    """Use the names of `vocabulary` for settings in the warnings of a block."""
    token = _VOCABULARY.set(vocabulary)
    try:
        yield
    finally:
        _VOCABULARY.reset(token)


@contextmanager
def append_to_warnings(text: Callable[[str], str]) -> Iterator[None]:
    """Append `text(message)` to the message of each warning in a block."""
    token = _APPENDED_TEXT.set(text)
    try:
        yield
    finally:
        _APPENDED_TEXT.reset(token)
