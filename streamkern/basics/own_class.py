"""Classes of the user's own that a setting names by "module:Class".

Only a setting lets a module be imported. A run directory or a saved model is data, and never names
code to execute: there the class must be defined already.
"""

from __future__ import annotations

import importlib
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
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # whatever a module of the user raises
        raise ConfigError(
            f"{mention(setting, reference)}: the module {module!r} cannot be imported "
            f"({type(error).__name__}: {error})",
            "correct it, or add its folder to PYTHONPATH",
        ) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is base or not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{mention(setting, reference)} is no class that is derived from "
            f"streamkern.{base.__name__}",
            'give "module:Class" of one that is',
        )
    return found
