"""User-defined classes (kernels, losses), which a setting names as "module:Class".

A module is imported only if a setting, or the option --import of a command, names it. Run
directories and saved models are data and never cause an import: to load one, define its classes
first.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, TypeVar

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention

_T = TypeVar("_T")


def imported_class(reference: str, base: type[_T], setting: str) -> type[_T]:
    """Import the module of a class and return the class.

    reference : "module:Class"
    base : class from which it must be derived
    setting : name of the setting, for messages, such as "model.kernel"

    Raises
    ------
    ConfigError
        The module cannot be imported, or does not define such a subclass of `base`.
    """
    module, _, name = reference.partition(":")
    found: Any = imported_module(module, mention(setting, reference))
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is base or not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{mention(setting, reference)} is not a subclass of streamkern.{base.__name__}",
            'give the "module:Class" of a subclass',
        )
    return found


def imported_module(name: str, given: str) -> ModuleType:
    """Import a module of the user and return it.

    name : name of the module
    given : the setting or option that names it, in the words of the message

    Raises
    ------
    ConfigError
        The module cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"{given}: the module {name!r} cannot be imported ({type(error).__name__}: {error})",
            "correct it, or add its folder to PYTHONPATH",
        ) from error


def own_modules(*bases: type[Any]) -> list[str]:
    """Return the names of the modules in which this process has defined subclasses of `bases`.

    Scripts and this package are left out: other processes cannot import a script.
    """
    modules = {kind.__module__ for base in bases for kind in subclasses(base)}
    left_out = ("__main__", "__mp_main__", __name__.partition(".")[0])
    return sorted(name for name in modules if name.partition(".")[0] not in left_out)


def import_own_modules(names: Iterable[str]) -> None:
    """Import the modules of `own_modules` of another process, except those that are not here.

    A run that uses a class of a missing module fails with the error of `undefined_class`.
    """
    for name in names:
        with contextlib.suppress(ConfigError):
            imported_module(name, "")


def subclasses(kind: type[_T]) -> Iterator[type[_T]]:
    """Yield the classes derived from one that this process has defined, the newest last."""
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def undefined_class(what: str, name: str) -> ConfigError:
    """Return the error for a class that a saved model or run names and this process lacks.

    what : kind of object, such as "kernel"
    name : name of the class, "module:Class" or "module.Class"
    """
    module = name.partition(":")[0] if ":" in name else name.rpartition(".")[0]
    remedy = "import its module first, or define the class"
    if module != "__main__":  # a script, which cannot be imported
        remedy += f" (a command imports it with --import {module})"
    return ConfigError(
        f"the {what} {name!r} is a custom class that this process has not defined",
        remedy,
    )
