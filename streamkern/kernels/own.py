"""Kernels of the user's own that a setting names by "module:Class"."""

from __future__ import annotations

from collections.abc import Mapping

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.own_class import imported_class
from streamkern.kernels.base import Kernel, name_of


def given_kernel(value: object) -> object:
    """Return the kernel of a setting, with the modules of its classes imported.

    "module:Class", alone or as the kind of a table or of one of its parts, becomes a table whose
    kind is the name of the class in a record. All else stays as it is.

    Raises ConfigError if there is no such class.
    """
    if isinstance(value, str):
        return {"kind": _name(value)} if ":" in value else value
    if not isinstance(value, Mapping):
        return value
    table = dict(value)
    if isinstance(table.get("kind"), str) and ":" in table["kind"]:
        table["kind"] = _name(table["kind"])
    if isinstance(table.get("parts"), list | tuple):
        table["parts"] = [given_kernel(part) for part in table["parts"]]
    return table


def _name(reference: str) -> str:
    return name_of(imported_class(reference, Kernel, "model.kernel"))


def kernel_of_run(described: object) -> object:
    """Return the kernel of the recorded settings of a run, for which no module is imported.

    Raises ConfigError if a name would let `given_kernel` import one.
    """
    table = described if isinstance(described, Mapping) else {"kind": described}
    parts = table.get("parts")
    names = [table.get("kind"), *(parts if isinstance(parts, list | tuple) else ())]
    for name in names:
        if isinstance(name, Mapping):
            kernel_of_run(name)
        elif isinstance(name, str) and ":" in name:
            raise ConfigError(
                f"{mention('model.kernel', name)} of a recorded run names a module to import",
                "do not use this run directory: streamkern records no such name",
            )
    return described
