"""List the arrays of a group of Zarr or HDF5, for the message that an array is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CSR_MEMBERS = ("data", "indices", "indptr")
"""Members of a group that is a sparse matrix."""
_OTHERS = (("codes", "categories"), ("values", "mask"))
_SHOWN = 12  # names in a message
_LISTED, _DEPTH = 200, 4  # members read for a message, and depth of groups


def no_member(name: str, group: Any, where: str) -> str:
    """Return the message that no array has this name, with the arrays of the group."""
    held = []
    try:
        member = group.get(name)
        held = [f"{name}/{path}" for path in _paths(member)] if is_group(member) else []
        if not held:
            held = list(_paths(group))
    except Exception:  # plain HTTP cannot list, and a file may be damaged
        return f"{where} has no array {name!r}: name the arrays with x= and y="
    more = ", ..." if len(held) > _SHOWN else ""
    names = f"it has {', '.join(held[:_SHOWN]) or 'none'}{more}: name them with x= and y="
    if is_group(member):
        return f"{name!r} of {where} is a group and no array; {names}"
    return f"{where} has no array {name!r}; {names}"


def _paths(group: Any) -> Iterator[str]:
    """Yield the paths of the arrays of a group, and of groups that stand for one."""
    waiting, looked = [("", group, 0)], 0
    while waiting and looked < _LISTED:
        path, held, depth = waiting.pop(0)
        for name in sorted(held.keys()):
            member, looked = held.get(name), looked + 1
            below = f"{path}/{name}".lstrip("/")
            if hasattr(member, "shape") or stands_for_array(member):
                yield below
            elif is_group(member) and depth < _DEPTH:
                waiting.append((below, member, depth + 1))


def stands_for_array(member: Any) -> bool:
    """Return whether a group is a sparse matrix, codes and categories, or values and a mask."""
    if not is_group(member):
        return False
    return any(all(part in member for part in parts) for parts in (CSR_MEMBERS, *_OTHERS))


def is_group(member: Any) -> bool:
    """Return whether `member` is a group of zarr or h5py."""
    return hasattr(member, "keys") and hasattr(member, "attrs")
