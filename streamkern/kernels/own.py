"""User-defined kernels, which settings and records name by "module:Class".

A setting imports the module, in every process of a run. The record of a run imports nothing,
because it may come from somebody else: its class must already be defined, see `basics.own_class`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from streamkern.basics.own_class import imported_class, undefined_class
from streamkern.kernels.base import Kernel
from streamkern.kernels.builtin import own_classes, reference_of

CLASS_KEYS = ("kind", "kernel", "parts", "of")
"""Keys of a table or a description whose values may contain names of classes."""


def given_kernel(value: object) -> object:
    """Return the kernel of a setting, after importing the modules of its classes.

    value : a name, a table or a `Kernel`. "module:Class" may be the value itself, or the kind of a
        table or of one of its parts.

    Raises
    ------
    ConfigError
        A module has no such class.
    """

    def imported(name: str) -> str:
        return reference_of(imported_class(name, Kernel, "model.kernel"))

    return _with_names(value, imported)


def kernel_of_run(described: object) -> object:
    """Return the kernel that the record of a run describes. No module is imported.

    Raises
    ------
    ConfigError
        This process has not defined a user-defined class of the kernel.
    """
    return _with_names(described, _check_defined)


def _with_names(value: object, rename: Callable[[str], str]) -> object:
    """Return a kernel in which `rename` has replaced every name "module:Class"."""
    if isinstance(value, str):
        return rename(value) if ":" in value else value
    if isinstance(value, Mapping):
        return {k: _with_names(v, rename) if k in CLASS_KEYS else v for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_with_names(item, rename) for item in value]
    return value


def _check_defined(name: str) -> str:
    """Return the name of a class. ConfigError if this process has not defined the class."""
    if name not in map(reference_of, own_classes()):
        raise undefined_class("kernel", name)
    return name
