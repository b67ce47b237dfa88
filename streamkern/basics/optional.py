"""Imports packages that only some users need, or that take long to import."""

from __future__ import annotations

import importlib
from typing import Any

from streamkern.basics.errors import MissingDependencyError


def need(module: str, what: str = "reading this format", extra: str = "files") -> Any:
    """The module, or an error that says how to install its package.

    what : it is for, as in "`what` needs numpy". extra : of streamkern, that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f'{what} needs {module.partition(".")[0]}: pip install "streamkern[{extra}]"'
        ) from error


def on_demand(module: str) -> Any:
    """A module that takes long to import, loaded where it is first used. Raises as its import."""
    return importlib.import_module(module)
