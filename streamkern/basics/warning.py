"""Warnings that point at the line of whoever called this package."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_PACKAGE = __name__.partition(".")[0]


def warn(text: str) -> None:
    """A UserWarning at the caller of the outermost frame of ours.

    Between two of ours others may lie: of contextlib, or of a library that calls back.
    """
    frame: FrameType | None = sys._getframe()
    caller = frame
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            caller = frame.f_back or frame
        frame = frame.f_back
    assert caller is not None
    names = caller.f_globals
    warnings.warn_explicit(
        text, UserWarning, caller.f_code.co_filename, caller.f_lineno,
        module=names.get("__name__"), registry=names.setdefault("__warningregistry__", {}),
    )  # fmt: skip
