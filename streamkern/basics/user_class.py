"""User-defined classes (kernels, losses), which a setting names as "module:Class".

A module is imported only if a setting, or the option --import of a command, names it. Run
directories and saved models never cause an import: a program that loads one must have defined its
classes.
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


def import_user_class(reference: str, base: type[_T], setting: str) -> type[_T]:
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
    imported: Any = import_user_module(module, mention(setting, reference))
    for part in name.split("."):
        imported = getattr(imported, part, None)
    if imported is base or not (isinstance(imported, type) and issubclass(imported, base)):
        raise ConfigError(
            f"{mention(setting, reference)} is not a subclass of streamkern.{base.__name__}",
            'give the "module:Class" of a subclass',
        )
    return imported


def import_user_module(name: str, setting: str) -> ModuleType:
    """Import a module of the user and return it.

    name : name of the module
    setting : the setting or option that names it, with its value, for the message

    Raises
    ------
    ConfigError
        The module cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"{setting}: the module {name!r} cannot be imported ({type(error).__name__}: {error})",
            "correct it, or add its folder to PYTHONPATH",
        ) from error


def user_modules(*bases: type[Any]) -> list[str]:
    """Return the names of the user's modules in which this process has subclasses of `bases`.

    Scripts are left out, because other processes cannot import them.
    """
    modules = {cls.__module__ for base in bases for cls in subclasses(base)}
    excluded_packages = ("__main__", "__mp_main__", __name__.partition(".")[0])
    return sorted(name for name in modules if name.partition(".")[0] not in excluded_packages)


def import_user_modules(names: Iterable[str]) -> None:
    """Import the modules that `user_modules` returned in another process, if this one has them.

    A run that uses a class of a missing module fails with the error of `undefined_class`.
    """
    for name in names:
        with contextlib.suppress(ConfigError):
            import_user_module(name, "")


def subclasses(base: type[_T]) -> Iterator[type[_T]]:
    """Yield all classes of this process that derive from `base`.

    Direct subclasses come in the order of their definition, each followed by its own subclasses.
    """
    for subclass in base.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def undefined_class(kind: str, name: str) -> ConfigError:
    """Return the error for a class that a saved model or run names, and this process lacks.

    kind : kind of the class, such as "kernel"
    name : name of the class, "module:Class" or "module.Class"
    """
    module = name.partition(":")[0] if ":" in name else name.rpartition(".")[0]
    remedy = "import its module first, or define the class"
    if module != "__main__":  # the module of a script, which cannot be imported
        remedy += f" (a command imports it with --import {module})"
    return ConfigError(
        f"the {kind} {name!r} is a custom class that this process has not defined", remedy
    )
