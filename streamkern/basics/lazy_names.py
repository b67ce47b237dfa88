"""Public names of a module, loaded from their modules when they are first used.

Such a module imports its names for type checking only, one a line, each `as` its public name: so
type checkers, editors and tools that look for imports know them, and the list exists only once.
"""

from __future__ import annotations

import importlib
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLDERS = ("ingest", "predict", "train")
"""Folders of the package that are named like functions; see `basics.room`."""


class Package(ModuleType):
    """A package whose `FOLDERS` become `Room` modules, which handle calls, on import."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FOLDERS and isinstance(value, ModuleType):
            value.__class__ = load_name(("streamkern.basics.room", "Room"))
        super().__setattr__(name, value)


def homes(spec: ModuleSpec | None) -> dict[str, tuple[str, str]]:
    """Return a map of public name -> module and name there.

    spec : `__spec__` of the module with the public names. Its source, in lines that are never
    executed, has `from module import name as offered`, and `other = offered` for a name that is
    `other` instead.
    """
    given: Any = spec
    text, found = given.loader.get_data(given.origin).decode(), {}
    for line in text.splitlines():
        match line.split():
            case ["from", module, "import", name, "as", offered]:
                found[offered] = module, name
            case [other, "=", offered] if offered in found:
                found[other] = found.pop(offered)
    return found


def load_name(home: tuple[str, str]) -> Any:
    """Load the object with the given module and name."""
    module, name = home
    return getattr(importlib.import_module(module), name)
