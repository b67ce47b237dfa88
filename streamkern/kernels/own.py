"""User-defined kernels, which settings and records of runs name by "module:Class".

The module of a name in a setting is imported, in every process of a run. For a name in a record,
no module is imported, because the record may come from somebody else: this process must have
defined the class, see `basics.user_class`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from streamkern.basics.user_class import import_user_class, undefined_class
from streamkern.kernels.base import Kernel
from streamkern.kernels.builtin import class_reference, user_kernel_classes

CLASS_KEYS = ("kind", "kernel", "parts", "of")
"""Keys of a table or a description whose values may contain names of classes."""


def import_kernel_classes(value: object) -> object:
    """Return a kernel setting with the reference "module:Class" of each class, after importing it.

    value : a name, a table or a `Kernel`. "module:Class" may be the value itself, or the kind of a
        table or of one of its parts.

    Raises
    ------
    ConfigError
        A module cannot be imported, or has no such class.
    """

    def import_class(name: str) -> str:
        return class_reference(import_user_class(name, Kernel, "model.kernel"))

    return _map_class_names(import_class, value)


def checked_kernel_record(described: object) -> object:
    """Check the user-defined classes of a kernel in the record of a run, and return the record.

    No module is imported.

    Raises
    ------
    ConfigError
        This process has not defined a user-defined class of the kernel.
    """
    return _map_class_names(_check_defined, described)


def _map_class_names(function: Callable[[str], str], kernel: object) -> object:
    """Return a kernel in which every name "module:Class" is replaced by `function` of it.

    kernel : a name, a table or a description, or a list of them; any other object is returned
        unchanged.
    """
    if isinstance(kernel, str):
        return function(kernel) if ":" in kernel else kernel
    if isinstance(kernel, Mapping):
        return {
            key: _map_class_names(function, value) if key in CLASS_KEYS else value
            for key, value in kernel.items()
        }
    if isinstance(kernel, list | tuple):
        return [_map_class_names(function, part) for part in kernel]
    return kernel


def _check_defined(name: str) -> str:
    """Return the name of a class. ConfigError if this process has not defined the class."""
    if name not in map(class_reference, user_kernel_classes()):
        raise undefined_class("kernel", name)
    return name
