"""Names that a module offers, and loads from where they are when they are first asked for.

Such a module imports them for types only, one a line, each `as` itself or what it is called here:
so type checkers, editors and whoever looks for imports see them, and the list stands once.
"""

from __future__ import annotations

import importlib
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLDERS = ("ingest", "predict", "train")
"""Folders of the package that are named like functions; see `basics.room`."""


class Package(ModuleType):
    """A package of which `FOLDERS` become rooms, which answer calls, when they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FOLDERS and isinstance(value, ModuleType):
            value.__class__ = load_name(("streamkern.basics.room", "Room"))
        super().__setattr__(name, value)


def homes(spec: ModuleSpec | None) -> dict[str, tuple[str, str]]:
    """Name -> its module and its name there. spec : the `__spec__` of the module that offers it.

    From the lines of its source, which no one runs: `from module import name as offered`, and
    `other = offered` for one that is called `other` instead.
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
    """What is at home there."""
    module, name = home
    return getattr(importlib.import_module(module), name)
