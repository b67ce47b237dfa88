"""Answer a call of a folder of the package that is named like a function."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

from streamkern.basics.errors import ConfigError


class RoomCallError(ConfigError, TypeError):
    """A folder of the package was called as a function."""


class Room(ModuleType):
    """A folder whose `instead` says which function to call."""

    instead: str

    def __call__(self, *_args: Any, **_values: Any) -> NoReturn:
        raise RoomCallError(f"{self.__name__} is a folder of the package; call {self.instead}")


def name_the_function(folder: str, instead: str) -> None:
    """Have calls of `folder` refused in a sentence that says `instead`."""
    module = sys.modules[folder]
    module.__class__ = Room
    module.instead = instead  # type: ignore[attr-defined]
