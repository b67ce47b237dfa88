"""Classes of the user's own that a setting names by "module:Class".

Only a setting, or the option --import of a command, lets a module be imported. A run directory or a
saved model is data, and never names code to execute: there the class must be defined already.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, TypeVar

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention

_T = TypeVar("_T")


def imported_class(reference: str, base: type[_T], setting: str) -> type[_T]:
    """Import the module of "module:Class" and return the class.

    Raises
    ------
    ConfigError
        The module cannot be imported, or has no such class that is derived from `base`.
    """
    module, _, name = reference.partition(":")
    found: Any = imported_module(module, mention(setting, reference))
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is base or not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{mention(setting, reference)} is no class that is derived from "
            f"streamkern.{base.__name__}",
            'give "module:Class" of one that is',
        )
    return found


def imported_module(name: str, given: str) -> ModuleType:
    """Import a module of the user's own and return it.

    given : the setting or the option that names it, as the message shows it

    Raises
    ------
    ConfigError
        It cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a module of the user raises
        raise ConfigError(
            f"{given}: the module {name!r} cannot be imported ({type(error).__name__}: {error})",
            "correct it, or add its folder to PYTHONPATH",
        ) from error


def undefined_class(what: str, name: str) -> ConfigError:
    """Return the error for a class of a record that the process has not defined.

    what : the object that is of this class, "kernel"
    name : "module:Class" or "module.Class"
    """
    module = name.partition(":")[0] if ":" in name else name.rpartition(".")[0]
    remedy = "import its module before, or define the class"
    if module != "__main__":  # a script, which cannot be imported
        remedy += f" (a command imports it with --import {module})"
    return ConfigError(
        f"the {what} {name!r} is a class of the user's own that this process has not defined",
        remedy,
    )
