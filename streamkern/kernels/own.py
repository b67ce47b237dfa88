"""User-defined kernels that a setting names by "module:Class".

The name stays in the settings, so that other processes of a run import the module, too. In the
record of a run it is data, and the class must be defined already (`basics.own_class`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from streamkern.basics.own_class import imported_class, undefined_class
from streamkern.kernels.base import Kernel
from streamkern.kernels.builtin import own_classes, reference_of

NAMING = ("kind", "kernel", "parts", "of")
"""Keys of a table or a description whose values are names of classes, or hold such."""


def given_kernel(value: object) -> object:
    """Return the kernel of a setting, with the modules of its classes imported.

    A class is named by "module:Class", alone or as the kind of a table or of one of its parts.
    Raises ConfigError if there is no such class.
    """
    return _named(value, lambda name: reference_of(imported_class(name, Kernel, "model.kernel")))


def kernel_of_run(described: object) -> object:
    """Return the kernel of a record, for which no module is imported.

    Raises ConfigError if it has a user-defined class that the process has not defined.
    """
    return _named(described, _defined)


def _named(value: object, named: Callable[[str], str]) -> object:
    """Return a kernel with the names of classes in it, which hold a colon, replaced by `named`."""
    if isinstance(value, str):
        return named(value) if ":" in value else value
    if isinstance(value, Mapping):
        return {key: _named(each, named) if key in NAMING else each for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_named(each, named) for each in value]
    return value


def _defined(name: str) -> str:
    if name not in map(reference_of, own_classes()):
        raise undefined_class("kernel", name)
    return name
