"""Imports packages that only some users need."""

from __future__ import annotations

import importlib
from typing import Any

from streamkern.errors import MissingDependencyError


def need(module: str) -> Any:
    """The module, or an error that says how to install its package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"reading this format needs {module.partition('.')[0]}: pip install streamkern[files]"
        ) from error
